"""What a tracker is to the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from seerl.types import Generation


class Tracker(Protocol):
    """One destination for metrics and validation answers. Only the driver logs."""

    run_id: str | None
    """Names the tracked run to the tracker, so that a resumed training continues it; None where there is
    none."""

    def stage(self, name: str) -> None:
        """Shows what the run is doing now; most trackers have no place for it."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records one step's metrics."""
        ...

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Records validation answers, with images where the tracker can show them."""
        ...

    def finish(self, exit_code: int) -> None:
        """Flushes and ends the tracked run; 0 means success."""
        ...
