"""The quickstart's pictures and questions, and easy-VQA's in the same layout."""

from __future__ import annotations

import itertools
import sys
import types
from collections import Counter, defaultdict
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from examples.easy_vqa import prepare
from examples.easy_vqa.reward import score as easy_vqa_score
from examples.quickstart.reward import score
from examples.quickstart.warm_up import read_rows
from seerl.data.synthetic import (
    CELL,
    COLOURS,
    GRID,
    GUESS_RATES,
    KINDS,
    Example,
    draw,
    examples,
    kind_of,
    write_data,
)

GEOMETRY3K = {
    "images": datasets.Sequence(datasets.Image()),
    "problem": datasets.Value("string"),
    "answer": datasets.Value("string"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), train_rows=600, validation_rows=200, seed=5)


def some(count: int, seed: int = 0) -> list[Example]:
    return list(itertools.islice(examples(seed), count))


def test_parquet_has_the_columns_and_types_of_geometry3k(written: Path) -> None:
    for name, rows in (("train", 600), ("validation", 200)):
        data = datasets.Dataset.from_parquet(str(written / f"{name}.parquet"))
        assert dict(data.features) == GEOMETRY3K
        assert len(data) == rows
        assert data[0]["problem"].count("<image>") == len(data[0]["images"]) == 1
        assert data[0]["images"][0].size == (GRID * CELL, GRID * CELL)


def test_no_picture_stands_in_both_splits(written: Path) -> None:
    train, validation = (
        {picture["bytes"] for row in read_rows(written / f"{name}.parquet") for picture in row["images"]}
        for name in ("train", "validation")
    )
    assert len(validation) > 100
    assert not train & validation


def test_the_same_seed_writes_the_same_rows_and_another_seed_others(written: Path, tmp_path: Path) -> None:
    again = write_data(tmp_path / "again", train_rows=600, validation_rows=200, seed=5)
    other = write_data(tmp_path / "other", train_rows=600, validation_rows=200, seed=6)
    for name in ("train.parquet", "validation.parquet"):
        assert read_rows(again / name) == read_rows(written / name)
        assert read_rows(other / name) != read_rows(written / name)


def test_answers_are_what_the_pixels_show() -> None:
    for example in some(400):
        assert seen_answer(draw(example.items), example.question) == example.answer, example


def test_the_kind_of_a_problem_is_known_from_its_words() -> None:
    for example in some(40):
        assert kind_of(f"<image>{example.question}") == example.kind
    with pytest.raises(ValueError, match="Where is it"):
        kind_of("<image>Where is it?")


def test_who_reads_but_does_not_look_gets_no_more_than_the_stated_rate() -> None:
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for example in some(8000, seed=1):
        answers[example.question][example.answer] += 1
    right: dict[str, list[bool]] = defaultdict(list)
    for example in some(8000, seed=2):
        right[example.kind].append(answers[example.question].most_common(1)[0][0] == example.answer)
    for kind in KINDS:
        assert sum(right[kind]) / len(right[kind]) == pytest.approx(GUESS_RATES[kind], abs=0.04)


def seen_answer(image: Image.Image, question: str) -> str:
    """The answer re-derived from the picture's pixels alone."""
    cells = [image.crop(box) for box in cell_boxes()]
    looks = [look(cell) for cell in cells if (np.asarray(cell) != 255).any()]
    kind, words = kind_of(question), question.rstrip("?").split()
    if kind == "count":
        return str(len(looks))
    if kind == "colour":
        return next(colour for colour, shape, _ in looks if shape == words[-1])
    if kind == "shape":
        return next(shape for colour, shape, _ in looks if colour == words[-1])
    sizes = {colour: width for colour, _, width in looks}
    assert set(sizes) == {words[3].strip(","), words[-1]}
    return max(sizes, key=lambda colour: sizes[colour])


def cell_boxes() -> list[tuple[int, int, int, int]]:
    corners = [(n % GRID * CELL, n // GRID * CELL) for n in range(GRID * GRID)]
    return [(x, y, x + CELL, y + CELL) for x, y in corners]


def look(cell: Image.Image) -> tuple[str, str, int]:
    """Colour, shape and width in pixels of the shape in a cell, by its middle and its corners."""
    pixels = np.asarray(cell)
    inked = {(x, y) for y, x in np.argwhere((pixels != 255).any(axis=2)).tolist()}
    (rgb,) = {tuple(pixels[y, x].tolist()) for x, y in inked}
    left, right = min(x for x, _ in inked), max(x for x, _ in inked)
    top, bottom = min(y for _, y in inked), max(y for _, y in inked)
    middle = ((left + right) // 2, (top + bottom) // 2) in inked
    corners = [(x, y) in inked for x in (left, right) for y in (top, bottom)]
    shape = {
        (True, 4): "square",
        (True, 2): "triangle",
        (True, 0): "cross",
        (False, 0): "ring",
    }[middle, sum(corners)]
    return {value: name for name, value in COLOURS.items()}[rgb], shape, right - left + 1


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>I count them.</think>\\boxed{3}", (1.0, 1.0, 1.0)),
        ("<think>I count\nthem.</think>\n\\boxed{ 3 }\n", (1.0, 1.0, 1.0)),
        ("<think>I count them.</think>\\boxed{4}", (0.1, 1.0, 0.0)),
        ("\\boxed{3}", (0.0, 0.0, 0.0)),
        ("<think>I count them.</think>\\boxed{3", (0.0, 0.0, 0.0)),
        ("<think>I count them.</think>\\boxed{3} or \\boxed{4}", (0.0, 0.0, 0.0)),
        ("", (0.0, 0.0, 0.0)),
    ],
)
def test_quickstart_reward(response: str, expected: tuple[float, float, float]) -> None:
    (got,) = score([{"response": response, "ground_truth": "3"}])
    assert (got["overall"], got["format"], got["accuracy"]) == pytest.approx(expected)


def test_easy_vqa_reward_gives_a_tenth_for_a_known_but_wrong_answer() -> None:
    inputs = [
        {"response": text, "ground_truth": "teal"} for text in ("teal", " teal\n", "red", "teal red", "")
    ]
    got = [(s["overall"], s["accuracy"], s["format"]) for s in easy_vqa_score(inputs)]
    assert got == [(1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (0.1, 0.0, 1.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)]


def test_easy_vqa_becomes_the_same_layout_with_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package is fetched by run.sh only; its interface is stood in for by two pictures and four questions.
    pictures = {}
    for number, colour in enumerate(("red", "blue")):
        pictures[number] = str(tmp_path / f"{number}.png")
        Image.new("RGB", (64, 64), colour).save(pictures[number])
    questions = (
        [
            "is there a red shape?",
            "what color is the shape?",
            "what is the blue shape?",
            "is there a circle?",
        ],
        ["yes", "blue", "circle", "no"],
        [0, 1, 1, 0],
    )
    package = types.ModuleType("easy_vqa")
    for split in ("train", "test"):
        setattr(package, f"get_{split}_questions", lambda: questions)
        setattr(package, f"get_{split}_image_paths", lambda: pictures)
    monkeypatch.setitem(sys.modules, "easy_vqa", package)
    folder = prepare.prepare(tmp_path / "data")
    data = datasets.Dataset.from_parquet(str(folder / "test.parquet"))
    assert dict(data.features) == {**GEOMETRY3K, "kind": datasets.Value("string")}
    assert data["kind"] == ["yes/no", "colour", "shape", "yes/no"]
    rows = read_rows(folder / "test.parquet")
    assert [row["images"][0]["bytes"] for row in rows] == [
        Path(pictures[n]).read_bytes() for n in questions[2]
    ]
    assert prepare.guess_rates(rows, rows) == {"yes/no": 1.0, "colour": 1.0, "shape": 1.0, "all": 1.0}


def test_guess_rates_take_the_commonest_answer_to_the_same_words() -> None:
    def row(answer: str) -> dict[str, str]:
        return {"problem": "is it?", "answer": answer, "kind": "yes/no"}

    train = [row("yes"), row("yes"), row("no")]
    test = [row("yes"), row("no"), row("no"), {"problem": "new words", "answer": "red", "kind": "colour"}]
    assert prepare.guess_rates(train, test) == {"yes/no": 1 / 3, "colour": 0.0, "all": 0.25}
