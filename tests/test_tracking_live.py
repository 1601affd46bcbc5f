"""The live display in a real terminal: what is on the screen, not what was sent."""

from __future__ import annotations

import re

import pytest

from tests.tracker_programs import run_in_terminal_raw

PROGRAM = """
import time
early = logging.StreamHandler()
logging.getLogger("library").addHandler(early)
logging.getLogger("library").propagate = False
trackers = opened(["console"], ".", experiment="exp", start=2, total=6)
for number in range(3, 7):
    trackers.stage("generating")
    time.sleep(0.3)
    logging.getLogger("library").warning("library says %d", number)
    logging.getLogger("seerl.x").warning("careful at %d", number)
    print("warned at", number, file=sys.stderr)  # as the warnings module does
    print("printed at", number)
    trackers.stage("updating")
    time.sleep(0.3)
    trackers.log({"reward/overall": number / 4, "reward/accuracy": 0.5, "response_length/mean": 12.0,
                  "perf/throughput": 1234.5, "perf/time_per_step": 2.0}, number)
trackers.stage("validating")
trackers.log({"val/reward_score": 0.75, "val/accuracy_reward": 0.5}, 6)
trackers.log_generations([answer()], 6)
trackers.finish(0)
print("after the end")
logging.getLogger("library").warning("library goes on")
"""


def screen(sent: str, columns: int) -> list[str]:
    """The lines that a terminal shows after all this: carriage returns, line feeds with scrolling, cursor up
    and erased lines; colours change nothing."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for code, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z])|(.|\n)", sent):
        if text == "\n":
            row += 1
            if row == len(rows):
                rows.append([])
        elif text == "\r":
            column = 0
        elif text:
            assert column < columns, f"a line runs over the edge: {''.join(rows[row])!r}"
            rows[row] += [" "] * (column + 1 - len(rows[row]))
            rows[row][column] = text
            column += 1
        elif code.endswith("A"):
            row -= int(code[2:-1] or 1)
        elif code == "\x1b[2K":
            rows[row] = []
    return ["".join(line).rstrip() for line in rows]


@pytest.mark.parametrize("columns", [120, 60])
def test_messages_of_every_kind_stand_whole_above_one_display(columns: int) -> None:
    code, sent = run_in_terminal_raw(PROGRAM, columns)
    assert code == 0, sent
    shown = screen(sent, columns)
    text = "\n".join(shown)
    assert "Traceback" not in text
    for number in range(3, 7):
        for message in ("library says", "printed at", "warned at"):
            assert f"{message} {number}" in shown, text
        assert any(re.fullmatch(rf"WARNING.*careful at {number}", line) for line in shown), text
    boxes = [line for line in shown if line.startswith("╭")]
    assert len(boxes) == 1, text
    assert "proj/exp" in boxes[0]
    display = text[text.index("╭") :]
    for piece in ("done", "6/6", "reward 1.500", "accuracy 50.0%", "tokens/s 1,2", "left 00:00"):
        assert piece in display, display
    assert re.search(r"reward\s.*0\.750\s", text[: text.index("╭")]), "validation is a table"
    assert shown[-3:-1] == ["after the end", "library goes on"]
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l"), "the cursor is given back"


def test_stages_are_shown_as_they_come() -> None:
    _, sent = run_in_terminal_raw(PROGRAM, 100)
    for stage in ("generating", "updating", "done"):
        assert stage in sent


def test_no_color_means_none() -> None:
    _, sent = run_in_terminal_raw(PROGRAM, 100, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-7]|38|4[0-7]|9[0-7])[0-9;]*m", sent)


@pytest.mark.parametrize("columns", [8, 20, 33])
def test_a_terminal_of_hardly_any_width_ends_no_run(columns: int) -> None:
    code, sent = run_in_terminal_raw(PROGRAM, columns)
    assert code == 0, sent
    assert "tracker console failed" not in sent.replace("\r\n", " ")


def test_an_error_before_the_end_gives_the_cursor_back() -> None:
    program = 'import atexit\ntrackers = opened(["console"], ".")\natexit._run_exitfuncs()'
    _, sent = run_in_terminal_raw(program, 80)
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")
