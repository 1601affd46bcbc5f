"""What each service's library stores: every step once, the answers, no secret; and its own faults."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from seerl.errors import UserError
from tests.tracker_programs import PRELUDE, SERVICES, TWICE, Ran, Tracked, environment, generation, trackers


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """One program that tracks with every service at once, as a run may."""
    folder = tmp_path_factory.mktemp("tracked")
    home = tmp_path_factory.mktemp("home")
    program = home / "program.py"
    program.write_text(PRELUDE + TWICE)
    ran = subprocess.run(
        [sys.executable, str(program), json.dumps(SERVICES), str(folder), "worker.reward.api_key=hunter2"],
        env=environment(HOME=str(home), TRACKIO_DIR=str(folder / "trackio")),
        capture_output=True,
        timeout=120,
        preexec_fn=lambda: os.close(0),
    )
    done = Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode())
    assert done.code == 0, done.err
    assert "left out" not in done.err
    found = re.search(r"^IDS (.*)$", done.out, re.MULTILINE)
    assert found, done.out
    return Tracked(folder, *json.loads(found[1]))


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "tensorboard"])
def test_a_resumed_tracker_continues_the_same_run(tracked: Tracked, name: str) -> None:
    assert tracked.ids[name]
    assert tracked.resumed[name] == tracked.ids[name]


def test_tensorboard_holds_each_step_once_and_the_answers(tracked: Tracked) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked.folder / "tensorboard"))
    events.Reload()
    rewards = [(e.step, e.value) for e in events.Scalars("reward/overall")]
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert {"config/text_summary", "generations/0/text_summary"} <= set(events.Tags()["tensors"])


def test_wandb_offline_run_holds_every_step_and_the_table(tracked: Tracked) -> None:
    records = [r for path in _wandb_files(tracked) for r in _wandb_records(path)]
    runs = {r.run.run_id for r in records if r.WhichOneof("record_type") == "run"}
    assert runs == {tracked.ids["wandb"]}
    history = [
        {(i.key or "/".join(i.nested_key)): i.value_json for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    logged = [(row["training_step"], row["reward/overall"]) for row in history if "reward/overall" in row]
    assert logged == [("1", "0.25"), ("2", "0.5"), ("2", "0.5"), ("3", "0.75")]
    tables = list(tracked.folder.glob("wandb/offline-run-*/files/media/table/val/*.table.json"))
    assert [json.loads(t.read_text())["data"][0][3] for t in tables] == ["four\n\nis it"]
    [artifact] = [r.artifact for r in records if r.WhichOneof("record_type") == "artifact"]
    [picture] = [Path(c.local_path) for c in artifact.manifest.contents if c.path.endswith(".png")]
    assert picture.is_relative_to(tracked.folder), "what is still to be uploaded lies in the run's folder"
    with Image.open(picture) as image:
        assert image.size == (8, 6)


def test_swanlab_offline_folder_holds_the_run_and_its_answers(tracked: Tracked) -> None:
    folders = sorted(tracked.folder.glob("swanlog/run-*"))
    assert [f.name.rsplit("-", 1)[1] for f in folders] == [tracked.ids["swanlab"]] * 2
    for folder in folders:
        assert b"reward/overall" in (folder / f"run-{tracked.ids['swanlab']}.swanlab").read_bytes()
    texts = [p.read_text() for p in folders[0].glob("media/text/*.txt")]
    assert len(texts) == 1
    assert "four\n\nis it" in texts[0]
    assert list(folders[0].glob("media/image/*.png"))


def test_mlflow_run_holds_metrics_parameters_and_answers(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tracked.folder / "mlruns").as_uri())
    found = client.get_run(tracked.ids["mlflow"])
    assert found.info.status == "FINISHED"
    assert found.data.params["algorithm.name"] == "grpo"
    assert found.data.metrics["val/pass_4"] == 0.5
    assert math.isnan(found.data.metrics["actor/kl_loss"])
    points = client.get_metric_history(tracked.ids["mlflow"], "reward/overall")
    assert [(p.step, p.value) for p in points] == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    artifacts = [a.path for a in client.list_artifacts(tracked.ids["mlflow"], "generations")]
    assert sorted(artifacts) == ["generations/step2-0-0.png", "generations/step2.json"]


def test_trackio_database_holds_one_run_with_every_step(tracked: Tracked) -> None:
    with sqlite3.connect(tracked.folder / "trackio" / "proj.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    assert len({row[0] for row in rows}) == 1
    assert {row[1] for row in rows} == {tracked.ids["trackio"]}
    metrics = [(row[2], json.loads(row[3])) for row in rows]
    rewards = [(step, m["reward/overall"]) for step, m in metrics if "reward/overall" in m]
    assert rewards == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    [table] = [m["val/generations"] for _, m in metrics if "val/generations" in m]
    [image] = table["_value"][0]["images"]
    with Image.open(tracked.folder / "trackio" / "media" / image["file_path"]) as picture:
        assert picture.size == (8, 6)


def test_no_service_writes_a_secret_anywhere(tracked: Tracked) -> None:
    written: dict[Path, bytes] = {}
    for path in tracked.folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # SQLite's log, merged meanwhile
            written[path] = path.read_bytes()
    assert len(written) > 20
    assert [path for path, content in written.items() if b"hunter2" in content] == []
    assert any(b"problem" in content for content in written.values())


def _wandb_files(tracked: Tracked) -> list[Path]:
    files = sorted(tracked.folder.glob(f"wandb/offline-run-*/run-{tracked.ids['wandb']}.wandb"))
    assert len(files) == 2, "one transaction log per session, of one run"
    return files


def _wandb_records(path: Path) -> list[Any]:
    """The records of a transaction log: LevelDB's format, 7 bytes of header in front."""
    from wandb.proto import wandb_internal_pb2

    data, place, records, body = path.read_bytes(), 7, [], b""
    while place < len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        body += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(wandb_internal_pb2.Record.FromString(body))
            body = b""
    return records


def test_tensorboard_shows_images_of_any_mode_and_a_validation_after_the_end_hides_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "boards"))
    first = trackers(["tensorboard"], tmp_path)
    first.log({"a": 1.0}, 1)
    first.log_generations([generation(images=(Image.new("L", (5, 7)), Image.new("RGBA", (2, 3))))], 1)
    first.finish(0)
    again = trackers(["tensorboard"], tmp_path, start_step=1)
    again.log({"val/reward_score": 0.5}, 1)
    again.finish(0)
    events = EventAccumulator(str(tmp_path / "boards" / "shapes" / "geo"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1.0)]
    sizes = [(i.width, i.height) for n in (0, 1) for i in events.Images(f"generations/0/image{n}")]
    assert sizes == [(5, 7), (2, 3)]


def test_mlflow_files_hold_a_name_that_goes_on_from_another_and_names_it_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.tracking import MlflowClient

    tracked = trackers(["mlflow"], tmp_path, config={"a b": {"键": 1}, "empty": {}})
    metrics = {"reward/errors": 1.0, "reward/errors/timeout": 2.0, "val/精 度/mean@3": 3.0, "/../x": 4.0}
    tracked.log(metrics, 1)
    run_id = tracked.state_dict()["mlflow"]
    tracked.finish(130)
    assert not caplog.records
    run = MlflowClient((tmp_path / "mlruns").as_uri()).get_run(run_id)
    assert run.data.metrics["reward/errors"] == 1.0
    assert run.data.metrics["reward/errors.timeout"] == 2.0
    assert sorted(run.data.metrics.values()) == [1.0, 2.0, 3.0, 4.0]
    assert run.info.status == "KILLED"


def test_a_run_that_mlflows_store_does_not_have_is_started_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracked = trackers(["mlflow"], tmp_path, run_ids={"mlflow": "0" * 32})
    assert tracked.state_dict()["mlflow"] != "0" * 32
    assert "new one is started" in caplog.text
    tracked.finish(0)


def test_a_key_that_cannot_be_one_is_said_before_training_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "short-and-wrong")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(UserError, match="wandb, which could not start") as caught:
        trackers(["wandb"], tmp_path)
    assert "short-and-wrong" not in str(caught.value)


def test_a_database_for_mlflow_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:pa55word@db/mlflow")
    monkeypatch.setattr("seerl.tracking.mlflow.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_URI .*pip install mlflow") as caught:
        trackers(["mlflow"], tmp_path)
    assert "pa55word" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "mode"),
    [("cloud", ("online", False)), ("cloud-only", ("online", True)), ("offline", ("offline", False))],
)
def test_swanlabs_modes_by_all_their_names(
    monkeypatch: pytest.MonkeyPatch, variable: str, mode: tuple[str, bool]
) -> None:
    from seerl.tracking.swanlab import _mode

    monkeypatch.setenv("SWANLAB_API_KEY", "k" * 20)
    monkeypatch.setenv("SWANLAB_MODE", variable)
    assert _mode() == mode
