"""Online filtering: which groups a step keeps (DAPO's dynamic sampling, 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence


def keep_group(values: Sequence[float], low: float, high: float) -> tuple[bool, str]:
    """Whether a group of these values is kept, and otherwise why not: kept where low < mean < high."""
    mean = sum(values) / len(values)
    if mean <= low:
        return False, "too_low"
    if mean >= high:
        return False, "too_high"
    return True, ""
