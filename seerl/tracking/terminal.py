"""Whether a person is there to answer a question."""

from __future__ import annotations

import sys


def can_ask() -> bool:
    """Whether standard input is a terminal; it may also be closed, or not be there at all."""
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # closed
        return False
