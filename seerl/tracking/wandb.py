"""`wandb`: Weights & Biases, online with a key, else offline."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import wandb

from seerl.secrets import carries_secret
from seerl.tracking.text import COLUMNS, accepted, as_row, rgb_images
from seerl.tracking.tracker import RunInfo
from seerl.types import Generation

log = logging.getLogger(__name__)

REFUSED_IN_PROJECT = re.compile(r"[/\\#?%:]")


class WandbTracker:
    """One run; WANDB_MODE and the other WANDB_* variables are wandb's own and are honoured."""

    def __init__(self, info: RunInfo) -> None:
        folder = Path(os.environ.get("WANDB_DIR") or info.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # Pictures wait there for their upload: beside the run, not in the home folder.
        os.environ.setdefault("WANDB_DATA_DIR", str((folder / "wandb" / "data").resolve()))
        self._run = _started(info, folder)
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
        """A table with as many image columns as an answer has images at most."""
        most = max(len(g.images) for g in generations)
        table = wandb.Table(columns=[*COLUMNS, *(f"image{i}" for i in range(most))], allow_mixed_types=True)
        for generation in generations:
            images = [wandb.Image(image) for image in rgb_images(generation)]
            table.add_data(*as_row(generation, step), *images, *[None] * (most - len(images)))
        self._run.log({"val/generations": table, "training_step": step})

    def finish(self, exit_code: int) -> None:
        """Ends the run with the training's exit code."""
        self._run.finish(exit_code=exit_code)


def _started(info: RunInfo, folder: Path) -> wandb.Run:
    """The run, offline where wandb would have to ask for a key and nobody is there."""

    project = accepted(info.project, REFUSED_IN_PROJECT, longest=128, tracker="wandb")

    def start(mode: Literal["offline"] | None) -> wandb.Run:
        offline = "offline" in (mode, os.environ.get("WANDB_MODE"))
        return wandb.init(
            project=project,
            name=info.experiment[:128],
            config=dict(info.config),
            dir=str(folder),
            id=info.run_id,
            # Offline there is nothing to resume from; the same id lets `wandb sync --append` join the parts.
            resume="allow" if info.run_id and not offline else None,
            mode=mode,
            settings=wandb.Settings(
                console="off",
                quiet=True,
                x_disable_meta=carries_secret(sys.argv),  # which holds the command line
            ),
        )

    try:
        return start(None)
    except wandb.errors.UsageError as error:
        if "No API key" not in str(error):
            raise
    log.warning(
        "wandb: no key (WANDB_API_KEY or `wandb login`) and nobody to ask, so it tracks offline; "
        "`wandb sync` uploads the run"
    )
    return start("offline")
