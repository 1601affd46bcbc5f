"""What a tracker is to the trainer, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from seerl.types import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a tracker must know of the run to open it."""

    project: str
    experiment: str
    run_dir: Path
    config: Mapping[str, Any]
    """The configuration as plain nested dicts and lists, secrets masked."""
    total_steps: int
    start_step: int = 0
    """The step of the checkpoint that the run continues from; 0 for one that starts."""
    run_id: str | None = None
    """The tracked run to continue, as `Tracker.run_id` gave it before; None starts a new one."""


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
