"""`trackio`: a local database (TRACKIO_DIR), shown by `trackio show`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from seerl.tracking.fanout import RunInfo
from seerl.tracking.text import COLUMNS, as_row
from seerl.types import Generation


class TrackioTracker:
    """One run, named after the experiment."""

    def __init__(self, info: RunInfo) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((info.run_dir / "trackio").resolve()))
        import trackio  # reads TRACKIO_DIR when imported

        self._trackio = trackio
        self._run = trackio.init(
            project=info.project,
            name=info.run_id or info.experiment,
            config=dict(info.config),
            resume="allow" if info.run_id else "never",
            embed=False,
        )
        self.run_id: str | None = self._run.name

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row."""
        self._trackio.log(dict(metrics), step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """A table."""
        import pandas

        rows = [as_row(generation, step) for generation in generations]
        table = self._trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(COLUMNS)))
        self._trackio.log({"val/generations": table}, step=step)

    def finish(self, exit_code: int) -> None:
        """Flushes and ends the run."""
        self._trackio.finish()
