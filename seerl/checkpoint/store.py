"""Checkpoints in a folder: `global_step_N/`, each whole or not there at all.

    global_step_N/state/            weights, optimizer and schedule (torch.distributed.checkpoint: loads on
    any
                                    number of ranks)
    global_step_N/huggingface/      configuration, tokenizer and processor, for `seerl export`
    global_step_N/trainer_state.json  step, place in the data, controllers, tracked runs
    global_step_N/config.yaml       the run's configuration
    checkpoint_tracker.json         the last and the best step

A checkpoint is written beside its place and renamed into it; older ones are removed only after that, and the
best one never.
"""

from __future__ import annotations

import errno
import json
import logging
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
    """The parts of the policy that a checkpoint holds."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


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

    def save(
        self,
        step: int,
        trained: Trained,
        trainer_state: dict[str, Any],
        *,
        model_only: bool = False,
        best: bool = False,
    ) -> Path:
        """Writes `global_step_{step}`, then removes what `limit` no longer keeps. Returns its folder.

        Raises:
            UserError: when the disk is full or not writable; what was there before is untouched.
        """
        final = self.folder / f"global_step_{step}"
        partial = self.folder / f".global_step_{step}.partial"
        with _written_whole(partial, final):
            (partial / HUGGINGFACE).mkdir(parents=True)
            save_tensors(_tensors(trained, model_only), partial / STATE)
            self._write_model_files(partial / HUGGINGFACE)
            (partial / "config.yaml").write_text(self._config_yaml, encoding="utf-8")
            state = {**trainer_state, "step": step, "model_only": model_only}
            (partial / TRAINER_STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
            self._update_tracker(step, best)
        self._prune(step)
        return final

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        steps = self._steps()
        return self.folder / f"global_step_{max(steps)}" if steps else None

    def best_step(self) -> int | None:
        return _read_tracker(self.folder).get("best_global_step")

    def _steps(self) -> list[int]:
        return checkpoint_steps(self.folder)

    def _update_tracker(self, step: int, best: bool) -> None:
        tracker = _read_tracker(self.folder)
        tracker["last_global_step"] = step
        if best:
            tracker["best_global_step"] = step
        partial = self.folder / f".{TRACKER}.partial"
        partial.write_text(json.dumps(tracker, indent=1), encoding="utf-8")
        partial.replace(self.folder / TRACKER)

    def _prune(self, newest: int) -> None:
        if self.limit < 1:
            return
        keep = set(sorted(self._steps())[-self.limit :]) | {newest, self.best_step()}
        for step in set(self._steps()) - keep:
            shutil.rmtree(self.folder / f"global_step_{step}")


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder."""
    if not folder.is_dir():
        return []
    names = (STEP_FOLDER.fullmatch(p.name) for p in folder.iterdir() if (p / TRAINER_STATE).exists())
    return sorted(int(m.group(1)) for m in names if m)


def load(path: Path, trained: Trained) -> dict[str, Any]:
    """Puts a checkpoint's weights, optimizer and schedule in place; returns its trainer state.

    A model-only checkpoint gives weights alone, and says so; `model_only` in the result tells.

    Raises:
        UserError: for a folder that is no checkpoint, or one of another model.
    """
    trainer_state = read_trainer_state(path)
    model_only = bool(trainer_state["model_only"])
    tensors = _tensors(trained, model_only)
    load_tensors(tensors, path)
    set_model_state_dict(trained.module, tensors["model"])
    if model_only:
        log.warning("%s holds weights only: optimizer, schedule and the place in the data start afresh", path)
    else:
        set_optimizer_state_dict(trained.module, trained.optimizer, tensors["optimizer"])
        trained.scheduler.load_state_dict(trainer_state["scheduler"])
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
        raise UserError(
            f"checkpoint {path} does not fit this model or is damaged: {_cause(error)}. "
            "Earlier ones can be named by trainer.load_checkpoint_path"
        ) from error


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
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({_cause(error)}): the checkpoint is damaged") from error
    wanted = {"step", "model_only", "data", "kl", "best_score", "scheduler"}
    if not isinstance(state, dict) or (lost := wanted - state.keys()):
        missing = ", ".join(sorted(lost)) if isinstance(state, dict) else "everything"
        raise UserError(f"{file} lacks {missing}: the checkpoint is damaged")
    return state


def _tensors(trained: Trained, model_only: bool) -> dict[str, Any]:
    tensors: dict[str, Any] = {"model": get_model_state_dict(trained.module)}
    if not model_only:
        tensors["optimizer"] = get_optimizer_state_dict(trained.module, trained.optimizer)
    return tensors


def _read_tracker(folder: Path) -> dict[str, Any]:
    file = folder / TRACKER
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:  # never worth a checkpoint
        log.warning("%s cannot be read (%s): which step was the best is not known", file, _cause(error))
        return {}


@contextmanager
def _written_whole(partial: Path, final: Path) -> Iterator[None]:
    """Runs the block that fills `partial`, then makes it `final`; on a failure leaves neither half behind."""
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield
        if final.exists():  # the same step again, after a resume from an earlier one
            shutil.rmtree(final)
        partial.rename(final)
        _sync_folder(final.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = _os_error(error)
        if cause is None:
            raise
        raise UserError(_disk_message(cause, final)) from error


def _disk_message(error: OSError, final: Path) -> str:
    folder = final.parent if final.parent.exists() else Path()
    free = shutil.disk_usage(folder).free / 2**30
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    what = "the disk is full" if full else os.strerror(error.errno or 0)
    return (
        f"checkpoint {final} could not be written: {what} ({free:.2f} GiB free). Earlier ones are intact. "
        "Free space, lower trainer.save_limit, set trainer.save_model_only=true or another "
        "trainer.save_checkpoint_path, then run the same command again to resume"
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
        wrapped = [f[0] if isinstance(f, tuple) else f for f in getattr(one, "failures", {}).values()]
        waiting += [one.__cause__, one.__context__, *wrapped]
        if "inline_container" in str(one) or "PytorchStreamWriter" in str(one):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # torch's zip writer keeps no errno
    return None


def _cause(error: BaseException) -> str:
    inner = [f[0] if isinstance(f, tuple) else f for f in getattr(error, "failures", {}).values()]
    cause = inner[0] if inner else error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
