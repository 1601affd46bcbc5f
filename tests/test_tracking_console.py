"""The `console` tracker: plain lines in a pipe, a display in a terminal."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.tracker_programs import lines, opened, run, run_in_terminal

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
