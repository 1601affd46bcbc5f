"""All of a run's trackers as one. A tracker that fails later never stops the training."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from seerl.errors import UserError
from seerl.secrets import masked, redacted
from seerl.tracking.tracker import RunInfo, Tracker
from seerl.types import Generation

log = logging.getLogger(__name__)

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
SLOW_S = 5.0
"""A call that takes longer than this before it fails would hold up every step: the tracker is left out."""


class Trackers:
    """Sends everything to every tracker, and goes on when one fails.

    A failure is logged once per tracker and kind of call; the tracker gets the next figures all the same, for
    the fault may pass (a full disk, a server that restarts), unless failing took it more than SLOW_S.
    """

    def __init__(self, trackers: Mapping[str, Tracker], run_ids: Mapping[str, str] | None = None) -> None:
        self._trackers = dict(trackers)
        # A tracker that is not used this time, or fails, keeps its run for the next time.
        self._run_ids = dict(run_ids or {}) | {n: t.run_id for n, t in trackers.items() if t.run_id}
        self._reported: set[tuple[str, str]] = set()

    def stage(self, name: str) -> None:
        """What the run is doing now, for trackers that show it."""
        self._each("stage", lambda t: t.stage(name))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker.log`."""
        self._each("log", lambda t: t.log(metrics, step))

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """See `Tracker.log_generations`."""
        if generations:
            self._each("log_generations", lambda t: t.log_generations(generations, step))

    def finish(self, exit_code: int) -> None:
        """Ends every tracked run, the live display first so that the others' last words stand below it."""
        self._each("finish", lambda t: t.finish(exit_code))

    def state_dict(self) -> dict[str, str]:
        """The ids of the tracked runs by tracker, for `make_trackers` to continue them."""
        return dict(self._run_ids)

    def _each(self, kind: str, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            started = time.monotonic()
            try:
                call(tracker)
            except Exception as error:  # whatever a tracking library raises, the training is worth more
                left_out = kind != "finish" and time.monotonic() - started > SLOW_S
                if left_out:
                    del self._trackers[name]
                self._report(name, kind, error, left_out)

    def _report(self, name: str, kind: str, error: Exception, left_out: bool) -> None:
        if (name, kind) in self._reported and not left_out:
            return
        self._reported.add((name, kind))
        then = "it is left out from here on" if left_out else "it is tried again with the next figures"
        log.warning(
            "tracker %s failed (%s: %s)%s",
            name,
            kind,
            described(error),
            "" if kind == "finish" else f"; training goes on, {then}",
        )
        log.debug("%s", redacted("".join(traceback.format_exception(error))))


def make_trackers(
    names: Sequence[str],
    *,
    project: str,
    experiment: str,
    run_dir: Path,
    config: Mapping[str, Any],
    total_steps: int,
    start_step: int = 0,
    run_ids: Mapping[str, str] | None = None,
) -> Trackers:
    """Opens the named trackers; keys and passwords in `config` are masked before any tracker sees it.

    Args:
        start_step: the step of the checkpoint that the run continues from.
        run_ids: what `Trackers.state_dict` gave to that checkpoint; None starts new tracked runs.

    Raises:
        UserError: for an unknown name, or a library that is not installed or cannot start.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise UserError(f"trainer.logger: {', '.join(unknown)} is unknown; there are {', '.join(TRACKERS)}")
    opened: dict[str, Tracker] = {}
    # The console comes last, for a library may still ask for a key, and a live display would be in the way.
    for name in sorted(dict.fromkeys(names), key=lambda n: n == "console"):
        info = RunInfo(
            project=project,
            experiment=experiment,
            run_dir=run_dir,
            config=masked(config),
            total_steps=total_steps,
            start_step=start_step,
            run_id=(run_ids or {}).get(name),
        )
        try:
            opened[name] = _open(name, info)
        except UserError:
            Trackers(opened).finish(exit_code=2)
            raise
    return Trackers(dict(reversed(opened.items())), run_ids)


def _open(name: str, info: RunInfo) -> Tracker:
    module, cls = TRACKERS[name]
    try:
        tracker: Tracker = getattr(import_module(module), cls)(info)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(
            f"trainer.logger has {name}, but the package {error.name} is not installed: "
            f"pip install 'seerl[{name}]' (or {error.name} itself, if that is there already)"
        ) from error
    except Exception as error:  # libraries raise what they like: no network, a refused key, a folder's rights
        raise UserError(
            f"trainer.logger has {name}, which could not start: {described(error)}. Mend that, or take "
            f"{name} out of trainer.logger; docs/trackers.md has its settings and its offline mode"
        ) from error
    return tracker


def described(error: BaseException) -> str:
    """The error in one line without secrets."""
    text = " ".join(redacted(str(error)).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
