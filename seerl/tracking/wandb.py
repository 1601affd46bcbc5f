"""`wandb`: Weights & Biases, online with a key, else offline."""

from __future__ import annotations

import logging
import netrc
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import wandb

from seerl.tracking.fanout import RunInfo
from seerl.tracking.secrets import masked_arguments
from seerl.tracking.terminal import can_ask
from seerl.tracking.text import COLUMNS, as_row
from seerl.types import Generation

log = logging.getLogger(__name__)


class WandbTracker:
    """One run; WANDB_MODE and the other WANDB_* variables are wandb's own and are honoured."""

    def __init__(self, info: RunInfo) -> None:
        info.run_dir.mkdir(parents=True, exist_ok=True)
        given, sys.argv = sys.argv, masked_arguments(sys.argv)  # wandb records the command line
        try:
            self._run = wandb.init(
                project=info.project,
                name=info.experiment,
                config=dict(info.config),
                dir=os.environ.get("WANDB_DIR", str(info.run_dir)),
                id=info.run_id,
                resume="allow" if info.run_id else None,
                mode=_mode(),
                settings=wandb.Settings(console="off", silent=True),
            )
        finally:
            sys.argv = given
        # Steps are a metric of their own: a resumed run may repeat some, which wandb's own counter refuses.
        self._run.define_metric("training_step")
        self._run.define_metric("*", step_metric="training_step")
        self.run_id: str | None = self._run.id

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One history row."""
        self._run.log({**metrics, "training_step": step})

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """A table with the first image of each answer in it."""
        table = wandb.Table(columns=[*COLUMNS, "image"])
        for generation in generations:
            images = [wandb.Image(image) for image in generation.images[:1]]
            table.add_data(*as_row(generation, step), images[0] if images else None)
        self._run.log({"val/generations": table, "training_step": step})

    def finish(self, exit_code: int) -> None:
        """Ends the run with the training's exit code."""
        self._run.finish(exit_code=exit_code)


def _mode() -> Literal["offline"] | None:
    """None leaves the choice to wandb; offline where it would have to ask for a key and nobody is there."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return None
    if _stored_key() or can_ask():
        return None
    log.warning("wandb: no WANDB_API_KEY and nobody to ask, so it is offline; upload with `wandb sync`")
    return "offline"


def _stored_key() -> bool:
    """Whether `wandb login` has left a key on this machine."""
    try:
        hosts = netrc.netrc(os.environ.get("NETRC", str(Path.home() / ".netrc"))).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)
