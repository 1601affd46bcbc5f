"""`trackio`: trackio's local database (TRACKIO_DIR, else its own place), shown by `trackio show`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pandas
import trackio

from seerl.tracking.text import COLUMNS, as_row, rgb_images
from seerl.tracking.tracker import RunInfo
from seerl.types import Generation


class TrackioTracker:
    """One run, named after the experiment and the time: trackio finds a run to continue by its name alone."""

    def __init__(self, info: RunInfo) -> None:
        self._run = trackio.init(
            project=info.project,
            name=info.run_id or f"{info.experiment} {time.strftime('%Y%m%d-%H%M%S')}",
            config=dict(info.config),
            resume="allow" if info.run_id else "never",
            embed=False,
        )
        self.run_id: str | None = self._run.name

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """A table with the images in it."""
        rows = [[*as_row(g, step), [trackio.Image(i) for i in rgb_images(g)]] for g in generations]
        table = trackio.Table(dataframe=pandas.DataFrame(rows, columns=[*COLUMNS, "images"]))
        self._run.log({"val/generations": table}, step=step)

    def finish(self, exit_code: int) -> None:
        """Flushes and ends the run."""
        del exit_code
        trackio.finish()
