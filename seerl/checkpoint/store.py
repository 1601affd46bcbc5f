"""Checkpoints in a folder: `global_step_N/`, each whole or not there at all.

    global_step_N/state/              weights and optimizer (torch.distributed.checkpoint: loads on any number
                                      of ranks)
    global_step_N/huggingface/        configuration, tokenizer and processor, for `seerl export`
    global_step_N/trainer_state.json  step, place in the data and the schedule, controllers, tracked runs
    global_step_N/config.yaml         the run's configuration
    checkpoint_tracker.json           the last step, the best one and its validation score

A checkpoint is written beside its place and renamed into it; older ones are removed only after that, and the
best one never.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from seerl.errors import UserError

log = logging.getLogger(__name__)

STEP_FOLDER = re.compile(r"global_step_(\d+)")
TRACKER = "checkpoint_tracker.json"
DAMAGE = (
    dcp.api.CheckpointException,
    RuntimeError,
    ValueError,
    OSError,
    EOFError,
    LookupError,
    pickle.UnpicklingError,
)
"""What reading a checkpoint raises where its files are cut off, missing or not its own."""
STATE, HUGGINGFACE, TRAINER_STATE = "state", "huggingface", "trainer_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The parts of the policy that a checkpoint holds; without `optimizer` the weights alone."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: `trainer.save_checkpoint_path`.
        limit: how many of the latest are kept, beside the best; -1 keeps all.
        write_model_files: writes configuration, tokenizer and processor into a folder.
        config_yaml: the run's configuration.
    """

    def __init__(
        self, folder: Path, *, limit: int, write_model_files: Callable[[Path], None], config_yaml: str
    ) -> None:
        self.folder = folder
        self.limit = limit
        self._write_model_files = write_model_files
        self._config_yaml = config_yaml

    def save(self, step: int, trained: Trained, trainer_state: dict[str, Any]) -> Path:
        """Writes `global_step_{step}`, then removes what `limit` no longer keeps. Returns its folder.

        Raises:
            UserError: when the disk is full or not writable; what was there before is untouched.
        """
        final = self.folder / f"global_step_{step}"
        try:
            with _written_whole(final) as partial:
                (partial / HUGGINGFACE).mkdir()
                save_tensors(_tensors(trained), partial / STATE)
                self._write_model_files(partial / HUGGINGFACE)
                (partial / "config.yaml").write_text(self._config_yaml, encoding="utf-8")
                state = {**trainer_state, "step": step, "model_only": trained.optimizer is None}
                (partial / TRAINER_STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        except (Exception, dcp.api.CheckpointException) as error:  # the latter is no Exception
            cause = _os_error(error)
            if cause is None:
                raise
            raise UserError(_disk_message(cause, final)) from error
        tracker = {**_read_tracker(self.folder), "last_global_step": step}
        if tracker.get("best_global_step") == step:  # other weights now, with no score yet
            del tracker["best_global_step"], tracker["best_score"]
        self._write_tracker(tracker)
        self._prune(step)
        return final

    def note_score(self, step: int, score: float) -> None:
        """Takes note of what a saved step reached in validation; the first of the highest is the best."""
        tracker, best = _read_tracker(self.folder), self.best()
        tracker["last_validated_step"] = step
        if better := best is None or score > best[1]:
            tracker |= {"best_global_step": step, "best_score": float(score)}
        self._write_tracker(tracker)
        if better:
            self._prune(step)

    def validated_step(self) -> int | None:
        """The saved step that was validated last."""
        step = _read_tracker(self.folder).get("last_validated_step")
        return step if isinstance(step, int) else None

    def best(self) -> tuple[int, float] | None:
        """The step that reached the highest validation score of those saved here, and the score."""
        tracker = _read_tracker(self.folder)
        step, score = tracker.get("best_global_step"), tracker.get("best_score")
        if type(score) is float and math.isfinite(score) and step in self._steps():
            return int(step), score
        return None

    def _steps(self) -> list[int]:
        return checkpoint_steps(self.folder)

    def _write_tracker(self, tracker: dict[str, Any]) -> None:
        partial = self.folder / f".{TRACKER}.partial"
        try:
            partial.write_text(json.dumps(tracker, indent=1), encoding="utf-8")
            partial.replace(self.folder / TRACKER)
        except OSError as error:  # never worth a checkpoint or the training
            log.warning("%s could not be written: %s", self.folder / TRACKER, error.strerror)

    def _prune(self, newest: int) -> None:
        if self.limit < 1:
            return
        best = self.best()
        keep = {*sorted(self._steps())[-self.limit :], newest, *(best[:1] if best else ())}
        for step in set(self._steps()) - keep:
            try:
                shutil.rmtree(self.folder / f"global_step_{step}")
            except OSError as error:
                log.warning("an old checkpoint could not be removed: %s", error)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint saved last in a folder; where that is not known, the one of the highest step."""
    steps = checkpoint_steps(folder)
    last = _read_tracker(folder).get("last_global_step")
    return folder / f"global_step_{last if last in steps else steps[-1]}" if steps else None


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    for old in folder.glob(".global_step_*.old"):  # killed while it was being replaced
        final = folder / old.stem.removeprefix(".")
        if not final.exists():
            old.rename(final)
    names = ((STEP_FOLDER.fullmatch(p.name), p) for p in folder.iterdir())
    return sorted(int(match.group(1)) for match, p in names if match and _is_whole(p))


def _is_whole(checkpoint: Path) -> bool:
    try:
        return (checkpoint / TRAINER_STATE).exists()
    except PermissionError:
        log.warning("%s cannot be read by this user and is passed over", checkpoint)
        return False


def load(path: Path, trained: Trained) -> dict[str, Any]:
    """Puts a checkpoint's weights and its optimizer's moments in place; returns its trainer state.

    Learning rate, betas and weight decay stay those that the optimizer was made with. A model-only checkpoint
    gives weights alone, and says so; `model_only` in the result tells.

    Raises:
        UserError: for a folder that is no checkpoint, or one of another model.
    """
    trainer_state = read_trainer_state(path)
    optimizer = trained.optimizer
    if trainer_state["model_only"] and optimizer is not None:
        log.warning("%s holds weights only: optimizer, schedule and the place in the data start afresh", path)
        optimizer = None
    tensors = _tensors(Trained(module=trained.module, optimizer=optimizer))
    load_tensors(tensors, path)
    set_model_state_dict(trained.module, tensors["model"])
    if optimizer is not None:
        configured = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        set_optimizer_state_dict(trained.module, optimizer, tensors["optimizer"])
        for group, settings in zip(optimizer.param_groups, configured, strict=True):
            group.update(settings)
    return trainer_state


def save_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Writes a tree of tensors from this one process."""
    with _one_process():
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)


def load_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Fills a tree of tensors, the model's under `model`, in place from a checkpoint.

    Raises:
        UserError: for a damaged checkpoint, or one of another model.
    """
    try:
        with _one_process():
            _require_same_model(tensors["model"], path)
            dcp.load(tensors, checkpoint_id=path / STATE, no_dist=True)
    except DAMAGE as error:
        if any(isinstance(inner, KeyboardInterrupt) for inner in _failures(error)):
            raise KeyboardInterrupt from error
        raise UserError(
            f"checkpoint {path} does not fit this model or is damaged: {_cause(error)}. "
            f"Checkpoints beside it: {_beside(path)}"
        ) from error


def _beside(path: Path) -> str:
    others = [s for s in checkpoint_steps(path.parent) if path.name != f"global_step_{s}"]
    return ", ".join(f"global_step_{s}" for s in others) or "none"


def _require_same_model(wanted: dict[str, torch.Tensor], path: Path) -> None:
    stored = {
        name.removeprefix("model."): getattr(metadata, "size", None)
        for name, metadata in dcp.FileSystemReader(path / STATE).read_metadata().state_dict_metadata.items()
        if name.startswith("model.")
    }
    for names, where in ((stored.keys() - wanted.keys(), "it"), (wanted.keys() - stored.keys(), "the model")):
        if names:
            raise UserError(
                f"checkpoint {path} is of another model: {where} alone has {min(names)}"
                + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
                + "; set worker.actor.model.model_path to the model it was trained from, or another "
                "trainer.save_checkpoint_path"
            )
    for name, tensor in wanted.items():
        size = stored[name]
        if size is not None and tuple(size) != tuple(tensor.shape):
            raise UserError(
                f"checkpoint {path} is of another model: {name} is {tuple(size)} there and "
                f"{tuple(tensor.shape)} in the model of worker.actor.model.model_path"
            )


@contextmanager
def _one_process() -> Iterator[None]:
    """torch warns that no process group is there; here none is meant to be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_trainer_state(path: Path) -> dict[str, Any]:
    """The JSON half of a checkpoint.

    Raises:
        UserError: for a folder that is no whole checkpoint; names those that are beside or below it.
    """
    file = path / TRAINER_STATE
    if not file.exists():
        steps = checkpoint_steps(path) or checkpoint_steps(path.parent)
        there = ", ".join(f"global_step_{s}" for s in steps) or "none"
        raise UserError(f"{path} is not a checkpoint (no {TRAINER_STATE}); checkpoints there: {there}")
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({_cause(error)}): the checkpoint is damaged") from error
    wanted = {
        "step": int,
        "model_only": bool,
        "data": dict,
        "kl": dict,
        "optimizer_steps": int,
        "trackers": dict,
    }
    lost = [name for name, kind in wanted.items() if type(_entry(state, name)) is not kind]
    if lost:
        raise UserError(f"{file} lacks {', '.join(lost)}: the checkpoint is damaged")
    return dict(state)


def _entry(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, dict) else None


def _tensors(trained: Trained) -> dict[str, Any]:
    tensors: dict[str, Any] = {"model": get_model_state_dict(trained.module)}
    if trained.optimizer is not None:
        tensors["optimizer"] = get_optimizer_state_dict(trained.module, trained.optimizer)
    return tensors


def _read_tracker(folder: Path) -> dict[str, Any]:
    file = folder / TRACKER
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:  # never worth a checkpoint
        log.warning("%s cannot be read (%s): which step was the best is not known", file, _cause(error))
        return {}


@contextmanager
def _written_whole(final: Path) -> Iterator[Path]:
    """Gives a folder to fill, then makes it `final`; on a failure `final` is as it was.

    What killed runs left half-written in the folder is removed. The same step again, after a resume from an
    earlier one, replaces the one there.
    """
    partial, old = (final.with_name(f".{final.name}.{state}") for state in ("partial", "old"))
    try:
        for left in (*final.parent.glob(".global_step_*.partial"), *final.parent.glob(".global_step_*.old")):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
        yield partial
        if final.exists():
            final.rename(old)
        partial.rename(final)
        _sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not final.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _disk_message(error: OSError, final: Path) -> str:
    folder = final.parent if final.parent.exists() else Path()
    free = shutil.disk_usage(folder).free / 2**30
    newest = newest_checkpoint(folder)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    what = "the disk is full" if full else os.strerror(error.errno or 0)
    return (
        f"checkpoint {final} could not be written: {what} ({free:.2f} GiB free). The last whole one: "
        f"{newest or 'none'}. Free space, lower trainer.save_limit, set trainer.save_model_only=true or "
        "another trainer.save_checkpoint_path"
    )


def _os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error behind an exception of torch.distributed.checkpoint, which wraps it."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, OSError):
            return one
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__, *_failures(one)]
        if "inline_container" in str(one) or "PytorchStreamWriter" in str(one):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # torch's zip writer keeps no errno
    return None


def _failures(error: BaseException) -> list[BaseException]:
    """What a CheckpointException of torch wraps; empty for any other."""
    return [f[0] if isinstance(f, tuple) else f for f in getattr(error, "failures", {}).values()]


def _cause(error: BaseException) -> str:
    cause = next(iter(_failures(error)), error)
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
