"""Programs that tests of trackers run, in pipes and terminals, and what trackers are given there."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import re
import struct
import sys
import termios
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from PIL import Image

from seerl.tracking import Trackers, make_trackers
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
