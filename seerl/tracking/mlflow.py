"""`mlflow`: MLFLOW_TRACKING_URI, else a folder of files in the run's own.

The files need no server and no database: `mlflow ui --backend-store-uri FOLDER` shows them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from seerl.config.keys import dotted
from seerl.errors import UserError
from seerl.secrets import redacted
from seerl.tracking.text import COLUMNS, as_row, rgb_images
from seerl.tracking.tracker import RunInfo
from seerl.types import Generation

log = logging.getLogger(__name__)

REFUSED = re.compile(r"[^\w\-. :]", re.ASCII)
"""What mlflow does not take in a part of a name."""
DATABASES = {"sqlite", "postgresql", "mysql", "mssql"}
LONGEST_NAME = 250
LONGEST_VALUE = 6000
PARAMS_AT_A_TIME = 100


class MlflowTracker:
    """One run of the experiment named after the project."""

    def __init__(self, info: RunInfo) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # The store of plain files is out of favour with mlflow since 3.7, but needs no database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (info.run_dir / "mlruns").resolve().as_uri()
        if uri.partition(":")[0].partition("+")[0] in DATABASES and find_spec("sqlalchemy") is None:
            raise UserError(
                f"MLFLOW_TRACKING_URI is a database ({redacted(uri)}), which needs the whole of mlflow: "
                "pip install mlflow; or give a server (http://...) or a folder (file:///...), or unset it "
                "for a folder in the run's own"
            )
        self._client = MlflowClient(tracking_uri=uri)
        self._id = _continued(self._client, info.run_id) or self._started(info)
        self.run_id: str | None = self._id

    def _started(self, info: RunInfo) -> str:
        experiment = self._client.get_experiment_by_name(info.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(info.project)
        run_id: str = self._client.create_run(number, run_name=info.experiment).info.run_id
        params = [Param(_name(k)[:LONGEST_NAME], str(v)[:LONGEST_VALUE]) for k, v in dotted(info.config)]
        for start in range(0, len(params), PARAMS_AT_A_TIME):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_AT_A_TIME])
        return run_id

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point per figure, in one call."""
        now = int(time.time() * 1000)
        points = [Metric(metric_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=points)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """A JSON table a step, and the images as artifacts."""
        rows: list[dict[str, Any]] = []
        for number, generation in enumerate(generations):
            names = []
            for place, image in enumerate(rgb_images(generation)):
                names.append(f"step{step}-{number}-{place}.png")
                self._client.log_image(self._id, image, f"generations/{names[-1]}")
            score = generation.score if math.isfinite(generation.score) else None
            row = dict(zip(COLUMNS, as_row(generation, step), strict=True))
            rows.append({**row, "score": score, "images": names})
        table = json.dumps(rows, ensure_ascii=False, indent=1)
        self._client.log_text(self._id, table, f"generations/step{step}.json")

    def finish(self, exit_code: int) -> None:
        """Ends the run as finished, failed, or, ended by a signal, killed."""
        status = "FINISHED" if exit_code == 0 else "KILLED" if exit_code > 128 else "FAILED"
        self._client.set_terminated(self._id, status=status)


def _continued(client: MlflowClient, run_id: str | None) -> str | None:
    """The run of an earlier training, running again; None where there is none, or it is gone."""
    if run_id is None:
        return None
    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        log.warning("mlflow: the run %s is not in this store, so a new one is started", run_id)
        return None
    return run_id


def metric_name(name: str) -> str:
    """The name as mlflow takes it: refused characters become `_`, and only the first `/` stays one, for the
    store of files cannot hold both `reward/errors` and `reward/errors/timeout`."""
    section, slash, rest = (name.strip("/.") or "_").partition("/")
    return (_name(section) + slash + _name(rest.replace("/", ".")))[:LONGEST_NAME]


def _name(part: str) -> str:
    return REFUSED.sub("_", part)
