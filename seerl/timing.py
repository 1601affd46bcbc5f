"""Wall-clock time of the stages of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StageTimer:
    """Seconds per stage; a stage entered twice adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds so far by stage; starts again from nothing."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
