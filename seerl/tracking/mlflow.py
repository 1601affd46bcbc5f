"""`mlflow`: MLFLOW_TRACKING_URI, else a folder of files in the run's own.

The files need no server and no database: `mlflow ui --backend-store-uri FOLDER` shows them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence

import mlflow
from mlflow.tracking import MlflowClient

from seerl.tracking.fanout import RunInfo
from seerl.tracking.text import COLUMNS, as_row
from seerl.types import Generation

REFUSED = re.compile(r"[^\w\-. :/]")
"""What mlflow does not take in the name of a metric or a parameter."""
LONGEST_VALUE = 500


class MlflowTracker:
    """One run of the experiment named after the project."""

    run_id: str | None
    _id: str

    def __init__(self, info: RunInfo) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (info.run_dir / "mlruns").resolve().as_uri()
        mlflow.set_tracking_uri(uri)
        self._client = MlflowClient(tracking_uri=uri)
        if info.run_id:
            self._client.update_run(info.run_id, status="RUNNING")
            self._id = self.run_id = info.run_id
            return
        experiment = self._client.get_experiment_by_name(info.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(info.project)
        self._id = self.run_id = self._client.create_run(number, run_name=info.experiment).info.run_id
        for key, value in _flat(info.config):
            self._client.log_param(self._id, REFUSED.sub("_", key), str(value)[:LONGEST_VALUE])

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point per figure; characters that mlflow refuses become underscores."""
        for name, value in metrics.items():
            self._client.log_metric(self._id, REFUSED.sub("_", name), value, step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """A JSON table a step, and the images as artifacts."""
        rows = [dict(zip(COLUMNS, as_row(g, step), strict=True)) for g in generations]
        self._client.log_text(
            self._id, json.dumps(rows, ensure_ascii=False, indent=1), f"generations/step{step}.json"
        )
        for number, generation in enumerate(generations):
            for place, image in enumerate(generation.images[:1]):
                self._client.log_image(self._id, image, f"generations/step{step}-{number}-{place}.png")

    def finish(self, exit_code: int) -> None:
        """Ends the run as finished or failed."""
        self._client.set_terminated(self._id, status="FAILED" if exit_code else "FINISHED")


def _flat(value: object, prefix: str = "") -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{prefix}{key}.")]
    return [(prefix.removesuffix("."), value)]
