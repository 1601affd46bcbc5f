"""All trackers as one: none stops a training, and none is shown a secret."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from seerl.errors import UserError
from seerl.secrets import carries_secret, is_secret_name, masked, redacted
from seerl.tracking import Trackers
from seerl.tracking.fanout import TRACKERS
from seerl.types import Generation
from tests.tracker_programs import SERVICES, opened, trackers


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


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_library_names_the_extra(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tracker_without_library.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TRACKERS, name, ("tracker_without_library", "Any"))
    with pytest.raises(UserError, match=rf"a_library_that_is_not_there.*pip install 'seerl\[{name}\]'"):
        opened([name], tmp_path)


def test_a_library_that_cannot_start_is_the_users_to_mend_and_the_others_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tracker_offline.py").write_text(
        "class T:\n def __init__(self, info):\n  raise ConnectionError('no route to service')\n"
    )
    first = Recorder()
    (tmp_path / "tracker_first.py").write_text("made = None\ndef first(info):\n    return made\n")
    monkeypatch.syspath_prepend(tmp_path)
    import tracker_first  # type: ignore[import-not-found]

    tracker_first.made = first
    monkeypatch.setitem(TRACKERS, "file", ("tracker_first", "first"))
    monkeypatch.setitem(TRACKERS, "wandb", ("tracker_offline", "T"))
    with pytest.raises(
        UserError, match=r"wandb, which could not start: ConnectionError: no route to service"
    ):
        opened(["file", "wandb"], tmp_path)
    assert first.ended == [2]


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


@pytest.mark.parametrize(
    "name", ["api_key", "apikey", "key", "WANDB_API_KEY", "hf_token", "secret", "db_password", "credentials"]
)
def test_values_named_as_secrets_are_masked(name: str) -> None:
    config = {"worker": {"reward": {name: "hunter2"}}, "list": [{name: "hunter2"}]}
    assert "hunter2" not in str(masked(config))
    assert "hunter2" not in str(masked({name: {"user": "me", "word": "hunter2"}}))
    assert "hunter2" not in str(masked({name: ["hunter2"]}))


@pytest.mark.parametrize("name", ["prompt_key", "answer_key", "image_key", "video_key", "filter_key"])
def test_names_of_columns_and_counts_are_not_masked(name: str) -> None:
    config = {"data": {name: "problem"}, "max_tokens_per_device": 8, "skip_special_tokens": True}
    assert masked(config) == config


def test_an_unset_secret_stays_unset() -> None:
    assert masked({"api_key": None, "token": ""}) == {"api_key": None, "token": ""}


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
