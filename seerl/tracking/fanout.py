"""All of a run's trackers as one. A tracker that fails later never stops the training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from seerl.errors import UserError
from seerl.tracking.secrets import masked
from seerl.tracking.tracker import Tracker
from seerl.types import Generation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a tracker must know of the run to open it."""

    project: str
    experiment: str
    run_dir: Path
    config: Mapping[str, Any]
    total_steps: int
    run_id: str | None
    """The tracked run to continue, as `Tracker.run_id` gave it before; None starts a new one."""


TRACKERS: dict[str, tuple[str, str]] = {
    "console": ("seerl.tracking.console", "ConsoleTracker"),
    "file": ("seerl.tracking.file", "FileTracker"),
    "tensorboard": ("seerl.tracking.tensorboard", "TensorboardTracker"),
    "wandb": ("seerl.tracking.wandb", "WandbTracker"),
    "swanlab": ("seerl.tracking.swanlab", "SwanlabTracker"),
    "mlflow": ("seerl.tracking.mlflow", "MlflowTracker"),
    "trackio": ("seerl.tracking.trackio", "TrackioTracker"),
}
"""Name to module and class; a module is imported when its tracker is asked for."""


class Trackers:
    """Sends everything to every tracker; drops one whose library raises, and says so once."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._failed: list[Tracker] = []

    def stage(self, name: str) -> None:
        """What the run is doing now, for trackers that show it."""
        self._each(lambda t: t.stage(name))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker.log`."""
        self._each(lambda t: t.log(metrics, step))

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """See `Tracker.log_generations`."""
        if generations:
            self._each(lambda t: t.log_generations(generations, step))

    def finish(self, exit_code: int) -> None:
        """See `Tracker.finish`."""
        self._each(lambda t: t.finish(exit_code))
        for tracker in self._failed:  # it may still hold the terminal, a file or a connection
            with suppress(Exception):
                tracker.finish(exit_code)
        self._failed.clear()

    def state_dict(self) -> dict[str, str]:
        """The ids of the tracked runs by tracker, for `make_trackers` to continue them."""
        return {name: t.run_id for name, t in self._trackers.items() if t.run_id}

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception:  # whatever a tracking library raises, the training is worth more
                self._failed.append(self._trackers.pop(name))
                log.warning(
                    "tracker %s failed and is left out from here on; training goes on", name, exc_info=True
                )


def make_trackers(
    names: Sequence[str],
    *,
    project: str,
    experiment: str,
    run_dir: Path,
    config: Mapping[str, Any],
    total_steps: int,
    run_ids: Mapping[str, str] | None = None,
) -> Trackers:
    """Opens the named trackers; keys and passwords in `config` are masked before any tracker sees it.

    Raises:
        UserError: for an unknown name, or a library that is not installed or cannot start.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise UserError(f"trainer.logger: {', '.join(unknown)} is unknown; there are {', '.join(TRACKERS)}")
    trackers: dict[str, Tracker] = {}
    for name in dict.fromkeys(names):
        info = RunInfo(
            project=project,
            experiment=experiment,
            run_dir=run_dir,
            config=masked(config),
            total_steps=total_steps,
            run_id=(run_ids or {}).get(name),
        )
        try:
            trackers[name] = _open(name, info)
        except BaseException:
            Trackers(trackers).finish(1)
            raise
    return Trackers(trackers)


def _open(name: str, info: RunInfo) -> Tracker:
    module, cls = TRACKERS[name]
    try:
        tracker: Tracker = getattr(import_module(module), cls)(info)
    except ModuleNotFoundError as error:
        raise UserError(
            f"trainer.logger has {name}, but the package {error.name} is not installed: "
            f"pip install 'seerl[{name}]'"
        ) from error
    except Exception as error:  # each library raises its own kinds: no network, a wrong key, a bad name
        raise UserError(
            f"trainer.logger has {name}, which cannot start: {type(error).__name__}: {error}"
        ) from error
    return tracker
