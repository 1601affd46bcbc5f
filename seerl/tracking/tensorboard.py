"""`tensorboard`: event files under TENSORBOARD_DIR, else in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from seerl.tracking.fanout import RunInfo
from seerl.tracking.text import as_text
from seerl.types import Generation


class TensorboardTracker:
    """Scalars, and answers as text with their images. A resumed run hides the steps it repeats
    (purge_step)."""

    def __init__(self, info: RunInfo) -> None:
        base = os.environ.get("TENSORBOARD_DIR")
        folder = Path(base) / info.project / info.experiment if base else info.run_dir / "tensorboard"
        self.run_id: str | None = str(folder)
        self._folder = str(folder)
        self._writer: SummaryWriter | None = None

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar per figure."""
        writer = self._writing(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Answers as text, their first image beside them."""
        writer = self._writing(step)
        for number, generation in enumerate(generations):
            writer.add_text(f"generations/{number}", as_text(generation), step)
            for place, image in enumerate(generation.images):
                writer.add_image(
                    f"generations/{number}/image{place}", np.asarray(image), step, dataformats="HWC"
                )
        writer.flush()

    def finish(self, exit_code: int) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()

    def _writing(self, step: int) -> SummaryWriter:
        if self._writer is None:
            self._writer = SummaryWriter(self._folder, purge_step=step)
        return self._writer
