"""All trackers as one, what they may never see, and the files of `file`."""

from __future__ import annotations

import json
import logging
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from seerl.errors import UserError
from seerl.secrets import carries_secret, is_secret_name, masked, redacted
from seerl.tracking import Trackers, make_trackers
from seerl.tracking.file import read_history
from seerl.types import Generation


def trackers(names: Sequence[str], run_dir: Path, **changes: Any) -> Trackers:
    settings: dict[str, Any] = {
        "project": "shapes",
        "experiment": "geo",
        "run_dir": run_dir,
        "config": {"trainer": {"max_steps": 4}},
        "total_steps": 4,
        **changes,
    }
    return make_trackers(names, **settings)


def generation(**changes: Any) -> Generation:
    values: dict[str, Any] = {
        "row_id": "val.parquet:0",
        "prompt": "<image>How many?",
        "response": "three 三",
        "ground_truth": "3",
        "score": 1.0,
        "parts": {"accuracy": 1.0},
        "images": (Image.new("RGB", (6, 4), "red"),),
        **changes,
    }
    return Generation(**values)


class Recorder:
    """A tracker that keeps what it is given, and whose library fails when told to."""

    def __init__(self, run_id: str | None = None) -> None:
        self.run_id = run_id
        self.fails = False
        self.takes_s = 0.0
        self.steps: list[int] = []
        self.ended: list[int] = []

    def stage(self, name: str) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        time.sleep(self.takes_s)
        if self.fails:
            raise ConnectionError("https://me:pa55word@tracking.example is away")
        self.steps.append(step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None: ...

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


# --- the fan-out


def test_a_tracker_whose_library_raises_in_mid_run_is_said_once_and_the_rest_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = Recorder(), Recorder("abc")
    both = Trackers({"bad": bad, "good": good})
    both.log({"x": 1.0}, 1)
    bad.fails = True
    for step in (2, 3):
        both.log({"x": 1.0}, step)
    bad.fails = False
    both.log({"x": 1.0}, 4)
    both.finish(0)
    assert good.steps == [1, 2, 3, 4]
    assert bad.steps == [1, 4], "a fault that passes costs no more than its own steps"
    assert (good.ended, bad.ended) == ([0], [0])
    [warning] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "bad" in warning
    assert "training goes on" in warning
    assert "pa55word" not in caplog.text
    assert both.state_dict() == {"bad": "abc"}, "a tracker that failed keeps its run for the next time"


def test_a_tracker_that_takes_long_to_fail_does_not_hold_up_every_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("seerl.tracking.fanout.SLOW_S", 0.05)
    slow = Recorder("abc")
    slow.fails, slow.takes_s = True, 0.1
    one = Trackers({"slow": slow})
    one.log({}, 1)
    started = time.monotonic()
    one.log({}, 2)
    assert time.monotonic() - started < 0.1
    assert "left out" in caplog.text
    assert one.state_dict() == {"slow": "abc"}


def test_an_interrupt_is_no_fault_of_the_tracker() -> None:
    class Interrupted(Recorder):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers({"x": Interrupted()}).log({}, 1)


def test_unknown_names_are_listed_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.logger: wanb, tb .* console, file, .* trackio"):
        trackers(["console", "wanb", "tb"], tmp_path)


def test_a_library_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "seerl.tracking.wandb", raising=False)
    with pytest.raises(UserError, match=r"wandb.*pip install 'seerl\[wandb\]'"):
        trackers(["wandb"], tmp_path)


def test_a_tracker_that_cannot_start_is_a_users_message_and_ends_those_that_have(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(UserError, match=r"tensorboard, which could not start: .*docs/trackers\.md"):
        trackers(["file", "tensorboard"], tmp_path)


def test_run_ids_survive_a_session_without_their_tracker(tmp_path: Path) -> None:
    ids = {"wandb": "w1", "mlflow": "m1"}
    assert trackers(["file"], tmp_path, run_ids=ids).state_dict() == ids


def test_no_tracker_library_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, seerl.tracking; "
        "print(sorted({'wandb', 'swanlab', 'mlflow', 'trackio', 'tensorboard', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# --- secrets


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "API-KEY",
        "apikey",
        "key",
        "hf_token",
        "HF_TOKEN",
        "db.password",
        "passwd",
        "client_secret",
        "Authorization",
        "aws_secret_access_key",
        "credentials",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "prompt_key",
        "data.answer_key",
        "filter_key",
        "max_tokens",
        "api_key_env",
        "tokenizer_path",
        "max_num_batched_tokens",
        "skip_special_tokens",
        "monkey",
        "keys_per_row",
        "author",
    ],
)
def test_names_that_only_look_like_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_what_is_secret_is_masked_at_any_depth_and_nothing_else_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-very-secret-1")
    config = {
        "reward": {
            "kwargs": {"api_key": "abc", "url": "https://u:p@host/v1?token=t0k&n=3", "max_tokens": 5},
            "list": [{"password": "x", "n": 1}, "as sk-very-secret-1 says"],
            "credentials": {"user": "me", "pin": 1},
            "headers": {"Authorization": "Bearer abc"},
        },
        "data": {"prompt_key": "problem"},
        "use_token": True,
    }
    assert masked(config) == {
        "reward": {
            "kwargs": {"api_key": "***", "url": "https://***@host/v1?token=***&n=3", "max_tokens": 5},
            "list": [{"password": "***", "n": 1}, "as *** says"],
            "credentials": "***",
            "headers": {"Authorization": "***"},
        },
        "data": {"prompt_key": "problem"},
        "use_token": True,
    }
    assert redacted("prompt_key=problem is no column") == "prompt_key=problem is no column"


def test_a_command_line_with_a_secret_is_known_as_one() -> None:
    assert carries_secret(["seerl", 'worker.reward.reward_function_kwargs={"api_key": "abc"}'])
    assert carries_secret(["x.password=abc"])
    assert not carries_secret(
        ["seerl", "train", "config=a.yaml", "data.prompt_key=problem", "n.max_tokens=4"]
    )


# --- file


def test_figures_are_on_disk_after_every_step_and_are_valid_json(tmp_path: Path) -> None:
    files = trackers(["file"], tmp_path)
    files.log({"val/mean@3/accuracy": 0.5, "actor/pg_loss": math.nan, "b": math.inf}, 1)
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "actor/pg_loss": None, "b": None, "val/mean@3/accuracy": 0.5}
    ]
    files.finish(0)


def test_answers_of_any_text_stay_one_line_each_with_their_pictures_beside_them(tmp_path: Path) -> None:
    files = trackers(["file"], tmp_path)
    hostile = 'a\u2028b\x85c\nd\x00e\x1b[2J 三 \ud800 "quoted"'
    modes = ("RGB", "RGBA", "L", "P", "CMYK", "F", "I;16", "1")
    pictures = tuple(Image.new(mode, (3, 2)) for mode in modes)
    files.log_generations([generation(response=hostile, score=math.nan, images=pictures)], 5)
    files.log_generations([generation()], 6)
    files.log_generations([generation()], 7)
    files.finish(0)
    text = (tmp_path / "generations.jsonl").read_text(encoding="utf-8")
    assert len(text.splitlines()) == 3, "even readers that split at every Unicode line end get whole objects"
    first, second, third = lines(tmp_path / "generations.jsonl")
    assert first["response"] == hostile
    assert first["score"] is None
    assert "三" in text
    for path in first["images"]:
        with Image.open(tmp_path / path) as stored:
            assert (stored.format, stored.size) == ("PNG", (3, 2))
    assert second["images"] == third["images"], "the same picture is stored once"


def test_a_resumed_run_appends_and_readers_get_the_history_that_counts(tmp_path: Path) -> None:
    first = trackers(["file"], tmp_path)
    for step in range(1, 6):
        first.log({"a": float(step)}, step)
        first.log({"val": step / 10}, step)
    first.finish(1)
    before = (tmp_path / "metrics.jsonl").read_text()
    again = trackers(["file"], tmp_path, start_step=3)
    again.log({"a": 40.0}, 4)
    again.finish(0)
    after = (tmp_path / "metrics.jsonl").read_text()
    assert after.startswith(before), "history is never erased"
    assert '{"resumed_from": 3}' in after
    history = read_history(tmp_path / "metrics.jsonl")
    assert history[3] == {"a": 3.0, "val": 0.3}
    assert history[4] == {"a": 40.0}
    assert list(history) == [1, 2, 3, 4], "step 5 was not continued"


@pytest.mark.parametrize("tail", ['{"step": 3, "a"', '{"step": 3, "a": 1.0', "\x00\x00\x00", '{"step": 3} x'])
def test_a_line_that_a_killed_run_left_unfinished_stops_no_reader(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + tail)
    files = trackers(["file"], tmp_path, start_step=2)
    files.log({"a": 1.0}, 3)
    files.finish(0)
    assert lines(path) == [{"step": 1}, {"step": 2}, {"resumed_from": 2}, {"step": 3, "a": 1.0}]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    files = trackers(["file"], tmp_path, start_step=2)
    files.finish(0)
    assert lines(path) == [{"step": 1}, {"step": 2}, {"resumed_from": 2}]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of this process cannot grow beyond 300 bytes: writing further fails as a full disk does."""
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_is_said_clearly_and_nothing_is_lost_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = trackers(["file"], tmp_path)
    for step in range(1, 21):
        files.log({"some/metric": float(step)}, step)
    files.log_generations([generation(response="long " * 200)], 20)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 300
    metrics_fault, generations_fault = (r.getMessage() for r in caplog.records)
    assert "metrics.jsonl" in metrics_fault
    assert "once there is room" in metrics_fault
    assert "training goes on" in metrics_fault
    assert "generations.jsonl" in generations_fault
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    files.log({"some/metric": 21.0}, 21)
    files.finish(0)
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == list(range(1, 22))
    assert len(lines(tmp_path / "generations.jsonl")) == 1
    for path in (tmp_path / "images").iterdir():
        Image.open(path).load()


@pytest.mark.usefixtures("small_disk")
def test_lines_still_unwritten_at_the_end_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = trackers(["file"], tmp_path)
    for step in range(1, 21):
        files.log({"some/metric": float(step)}, step)
    files.finish(0)
    assert any("finish" in r.getMessage() and "line(s)" in r.getMessage() for r in caplog.records)


# --- tensorboard, mlflow


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
