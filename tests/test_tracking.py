"""Trackers record what they are given, continue the run they began, and never stop a training."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import pty
import re
import sqlite3
import struct
import subprocess
import sys
import termios
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import pytest
from PIL import Image

from seerl.errors import UserError
from seerl.secrets import masked
from seerl.tracking import Trackers, make_trackers
from seerl.tracking.fanout import TRACKERS
from seerl.types import Generation

ROOT = Path(__file__).parents[1]
SERVICES = ["tensorboard", "wandb", "swanlab", "mlflow", "trackio"]
CONFIG = {"algorithm": {"name": "grpo"}, "api_key": "hunter2", "data": {"prompt_key": "problem"}}
PRELUDE = """
import logging, sys
from pathlib import Path
from PIL import Image
from seerl.tracking import make_trackers
from seerl.types import Generation
logging.basicConfig(level=logging.WARNING)
def opened(names, folder, ids=None, experiment="exp", total=4, start=0):
    config = {"algorithm": {"name": "grpo"}, "api_key": "hunter2", "data": {"prompt_key": "problem"}}
    return make_trackers(names, project="proj", experiment=experiment, run_dir=Path(folder), config=config,
                         total_steps=total, run_ids=ids, start_step=start)
def step(trackers, number, **more):
    trackers.log({"reward/overall": number / 4, "perf/time_per_step": 2.0, "val/pass@4": 0.5, **more}, number)
def answer(text="four\\n\\nis it", truth="4"):
    image = Image.new("RGB", (8, 6), "red")
    return Generation(row_id="r:1", prompt="2+2?", response=text, ground_truth=truth, score=1.0,
                      parts={"accuracy": 1.0}, images=(image,))
"""
"""What the programs that tests run begin with."""
TWICE = """
import json
names, folder = json.loads(sys.argv[1]), sys.argv[2]
first = opened(names, folder)
step(first, 1); step(first, 2, **{"actor/kl_loss": float("nan")})
first.log_generations([answer()], 2)
ids = first.state_dict()
first.finish(0)
again = opened(names, folder, ids, start=1)
step(again, 2); step(again, 3)
same = again.state_dict()
again.finish(0)
print("IDS " + json.dumps([ids, same]))
"""


class Ran(NamedTuple):
    """What a program did."""

    code: int
    out: str
    err: str


class Tracked(NamedTuple):
    """A run that every service tracked, was ended after step 2 and resumed after step 1."""

    folder: Path
    ids: dict[str, str]
    resumed: dict[str, str]


def environment(**more: str) -> dict[str, str]:
    """The environment without what steers trackers and terminals."""
    steers = re.compile(r"(WANDB|SWANLAB|MLFLOW|TRACKIO|TENSORBOARD|NO_COLOR|FORCE_COLOR|COLUMNS|PYTHONIO)")
    kept = {k: v for k, v in os.environ.items() if not steers.match(k)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", **more}


def run(program: str, *arguments: str, **more: str) -> Ran:
    """Runs a program with its standard input closed."""
    with TemporaryFile() as out, TemporaryFile() as err:
        child = _fork(program, arguments, more, (None, out.fileno(), err.fileno()))
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return Ran(os.waitstatus_to_exitcode(status), *texts)


def run_in_terminal(program: str, columns: int, *arguments: str, **more: str) -> Ran:
    """Runs a program in a terminal of so many columns; what the terminal got, without its control codes."""
    code, sent = run_in_terminal_raw(program, columns, *arguments, **more)
    return Ran(code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent), "")


def run_in_terminal_raw(program: str, columns: int, *arguments: str, **more: str) -> tuple[int, str]:
    """The program's exit code, and all that the terminal got."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    child = _fork(program, arguments, more, (theirs, theirs, theirs))
    os.close(theirs)
    got = b""
    try:
        while chunk := os.read(ours, 65536):
            got += chunk
    except OSError:  # the terminal's last user has gone
        pass
    os.close(ours)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), got.decode()


def _fork(
    program: str, arguments: Sequence[str], more: Mapping[str, str], files: tuple[int | None, int, int]
) -> int:
    """Runs a program in a fork of this process, which has torch imported already; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if files[0] is None:
            os.close(0)
        for number, file in enumerate(files):
            if file is not None:
                os.dup2(file, number)
        encoding = more.get("PYTHONIOENCODING", "utf-8")
        sys.stdin = None if files[0] is None else open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
        for name, value in {**dict.fromkeys(os.environ), **environment(**more)}.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
        logging.getLogger().handlers.clear()
        sys.argv = ["program", *arguments]
        try:
            exec(PRELUDE + textwrap.dedent(program), {"__name__": "__main__"})
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def opened(names: Sequence[str], folder: Path, ids: Mapping[str, str] | None = None) -> Trackers:
    """The named trackers in a folder."""
    return make_trackers(
        names, project="proj", experiment="exp", run_dir=folder, config=CONFIG, total_steps=4, run_ids=ids
    )


def answer(response: str = "four", truth: str = "4") -> Generation:
    """A validation answer with an image."""
    image = Image.new("RGB", (8, 6), "red")
    return Generation(
        row_id="r:1", prompt="2+2?", response=response, ground_truth=truth, score=1.0, images=(image,)
    )


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Services


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
    written = [path for path in tracked.folder.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert [path for path in written if b"hunter2" in path.read_bytes()] == []
    assert any(b"problem" in path.read_bytes() for path in written)


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


# The file


def test_each_record_is_in_the_file_before_the_next_step(tmp_path: Path) -> None:
    trackers = opened(["file"], tmp_path)
    trackers.log({"a": 1.0}, 1)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.0}]
    trackers.finish(0)


def test_figures_that_are_not_finite_are_null_in_the_file(tmp_path: Path) -> None:
    trackers = opened(["file"], tmp_path)
    trackers.log({"nan": math.nan, "inf": math.inf, "one": 1.0}, 1)
    trackers.finish(0)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "inf": None, "nan": None, "one": 1.0}]


def test_images_of_answers_lie_beside_the_file(tmp_path: Path) -> None:
    trackers = opened(["file"], tmp_path)
    trackers.log_generations([answer()], 3)
    trackers.finish(0)
    (record,) = lines(tmp_path / "generations.jsonl")
    with Image.open(tmp_path / record["images"][0]) as image:
        assert (image.format, image.size) == ("PNG", (8, 6))


@pytest.mark.parametrize("text", ["四\n4", "lone \ud83d surrogate", 'quotes " and \\ and \x00'])
def test_any_text_comes_back_from_the_file(tmp_path: Path, text: str) -> None:
    trackers = opened(["file"], tmp_path)
    trackers.log_generations([answer(response=text)], 1)
    assert [r["response"] for r in lines(tmp_path / "generations.jsonl")] == [text]


# All of them as one


class Recorder:
    """Remembers what it was told; raises from step `fails_at` on."""

    def __init__(self, fails_at: int = 99) -> None:
        self.run_id: str | None = "id"
        self.steps: list[int] = []
        self.ends: list[int] = []
        self.fails_at = fails_at

    def stage(self, name: str) -> None:
        """Nothing."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Remembers the step."""
        if step >= self.fails_at:
            raise ConnectionError("service down")
        self.steps.append(step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Nothing."""

    def finish(self, exit_code: int) -> None:
        """Remembers the end."""
        self.ends.append(exit_code)
        if self.fails_at < 99:
            raise ConnectionError("still down")


def test_an_unknown_tracker_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neptune is unknown; there are console, file, .*trackio"):
        opened(["console", "neptune"], tmp_path)


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
    assert first.ends == [2]


# Secrets


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


# The console


FOUR_STEPS = """
trackers = opened(["console"], ".", experiment="a[/b]试验")
trackers.stage("generating")
for number in range(1, 5):
    step(trackers, number, **{"actor/grad_norm": float("nan"), "val/[/x]_reward": float("inf")})
    logging.getLogger("seerl.test").warning("careful at %d", number)
trackers.log_generations([answer("vier \\u2713 \\x1b[2J [/b]")], 4)
trackers.finish(0)
"""


@pytest.mark.parametrize("more", [{}, {"PYTHONIOENCODING": "ascii"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_piped_console_prints_one_plain_line_per_step(more: dict[str, str]) -> None:
    done = run(FOUR_STEPS, **more)
    assert done.code == 0
    assert "left out" not in done.err, done.err
    assert "\x1b" not in done.out
    steps = [line for line in done.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert "reward 0.250" in steps[0]
    assert "grad norm nan" in steps[0]
    assert steps[0].endswith("left 00:06")
    assert "r:1: vier" in done.out


@pytest.mark.parametrize("columns", [100, 40])
def test_terminal_console_shows_the_step_the_reward_and_the_time_left(columns: int) -> None:
    code, screen, _ = run_in_terminal(FOUR_STEPS, columns)
    assert code == 0, screen
    assert "Traceback" not in screen
    assert "left out" not in screen
    assert "4/4" in screen
    assert re.search(r"reward\s+1\.000", screen)
    assert re.search(r"left\s+00:0[02468]", screen)
    assert "careful at 3" in screen
    assert "done" in screen


def test_terminal_that_has_no_unicode_gets_the_display_in_ascii() -> None:
    code, screen, _ = run_in_terminal(FOUR_STEPS, 80, PYTHONIOENCODING="ascii")
    assert code == 0, screen
    assert "left out" not in screen
    assert screen.isascii()
    assert "4/4" in screen
    assert "reward 1.000" in screen


def test_a_step_time_that_is_not_finite_leaves_the_console_working(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trackers = opened(["console"], tmp_path)
    trackers.log({"perf/time_per_step": math.nan}, 1)
    trackers.log({"perf/time_per_step": 3.0}, 2)
    trackers.log({"perf/time_per_step": 3.0}, 5)
    assert [line.rsplit(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "-",
        "00:06",
        "00:00",
    ]


def test_a_reader_that_goes_away_costs_the_console_and_not_the_training(tmp_path: Path) -> None:
    done = run(
        """
        import os
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer), os.close(reader)
        trackers = opened(["console", "file"], sys.argv[1])
        step(trackers, 1), step(trackers, 2)
        trackers.finish(0)
        """,
        str(tmp_path),
    )
    assert done.code == 0, done.err
    assert done.err.count("tracker console failed") == 1
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == [1, 2]
