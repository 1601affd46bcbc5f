"""`tensorboard`: event files under TENSORBOARD_DIR/PROJECT/EXPERIMENT, else in the run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from seerl.tracking.text import as_text, rgb_images
from seerl.tracking.tracker import RunInfo
from seerl.types import Generation


class TensorboardTracker:
    """Scalars, and answers as text with their images. Each start adds an event file to the same folder;
    TensorBoard then hides the points of steps behind the one that was resumed (purge_step)."""

    def __init__(self, info: RunInfo) -> None:
        self.run_id: str | None = None
        base = os.environ.get("TENSORBOARD_DIR")
        folder = Path(base) / info.project / info.experiment if base else info.run_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=info.start_step + 1)
        if info.start_step == 0:
            text = json.dumps(info.config, indent=2, ensure_ascii=False, default=str)
            self._writer.add_text("config", f"```json\n{text}\n```", 0)

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar per figure."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Answers as text, their images beside them."""
        for number, generation in enumerate(generations):
            self._writer.add_text(f"generations/{number}", as_text(generation), step)
            for place, image in enumerate(rgb_images(generation)):
                self._writer.add_image(
                    f"generations/{number}/image{place}", np.asarray(image), step, dataformats="HWC"
                )
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        """Closes the event file."""
        del exit_code
        self._writer.close()
