"""The `file` tracker: on disk after every step, whatever is cut off, full or resumed."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from seerl.tracking.file import read_history
from tests.tracker_programs import answer, generation, lines, opened, trackers


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
