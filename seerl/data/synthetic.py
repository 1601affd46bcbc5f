"""Pictures of coloured shapes with questions about them: a task small enough for a CPU and a few minutes.

Rows have the column layout of the geometry3k data set (images, problem with `<image>`, answer) and are read
back like any other data. A picture is a 3 x 3 grid of cells, one to five of them filled. The answer cannot be
had from the question: what a guesser who reads but does not look gets at best is `GUESS_RATES`.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

GRID, CELL = 3, 28
PICTURE = GRID * CELL
"""Side of a picture in pixels. A cell has the size of a Qwen2.5-VL image token: 2 x 2 patches of 14."""
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
    "black": (20, 20, 20),
}
SHAPES = ("ring", "square", "triangle", "cross")
MOST_SHAPES = 5
RADIUS, SMALL_RADIUS = (11, 12), 7
GUESS_RATES = {"count": 1 / MOST_SHAPES, "colour": 1 / len(COLOURS), "shape": 1 / len(SHAPES), "size": 1 / 2}
KINDS = tuple(GUESS_RATES)


@dataclass(frozen=True, slots=True)
class Item:
    """One shape: its cell (0 to 8, row by row), look, and place off the cell's middle. Lengths in pixels."""

    cell: int
    shape: str
    colour: str
    radius: int
    dx: int
    dy: int


@dataclass(frozen=True, slots=True)
class Example:
    """A picture's shapes, one question about them and its answer."""

    kind: str
    items: tuple[Item, ...]
    question: str
    answer: str


def draw(items: Sequence[Item]) -> Image.Image:
    """The picture: shapes on white, none over the edge of its cell."""
    image = Image.new("RGB", (PICTURE, PICTURE), (255, 255, 255))
    canvas = ImageDraw.Draw(image)
    for item in items:
        x = item.cell % GRID * CELL + CELL // 2 + item.dx
        y = item.cell // GRID * CELL + CELL // 2 + item.dy
        r, colour = item.radius, COLOURS[item.colour]
        box = (x - r, y - r, x + r, y + r)
        if item.shape == "ring":
            canvas.ellipse(box, outline=colour, width=max(3, r // 3))
        elif item.shape == "square":
            canvas.rectangle(box, fill=colour)
        elif item.shape == "triangle":
            canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
        else:
            arm = max(2, r // 3)
            canvas.rectangle((x - r, y - arm, x + r, y + arm), fill=colour)
            canvas.rectangle((x - arm, y - r, x + arm, y + r), fill=colour)
    return image


def _items(rng: random.Random, count: int) -> list[Item]:
    """Shapes in different cells and colours; in different shapes too, as long as there are enough."""
    colours = rng.sample(list(COLOURS), count)
    shapes = rng.sample(SHAPES, count) if count <= len(SHAPES) else rng.choices(SHAPES, k=count)
    return [
        Item(cell, shape, colour, rng.randint(*RADIUS), rng.randint(-1, 1), rng.randint(-1, 1))
        for cell, shape, colour in zip(rng.sample(range(GRID**2), count), shapes, colours, strict=True)
    ]


def _count(rng: random.Random) -> Example:
    items = _items(rng, rng.randint(1, MOST_SHAPES))
    return Example("count", tuple(items), "How many shapes are there?", str(len(items)))


def _colour(rng: random.Random) -> Example:
    items = _items(rng, rng.randint(1, 2))
    asked = rng.choice(items)
    return Example("colour", tuple(items), f"What colour is the {asked.shape}?", asked.colour)


def _shape(rng: random.Random) -> Example:
    items = _items(rng, rng.randint(1, 2))
    asked = rng.choice(items)
    return Example("shape", tuple(items), f"What shape is {asked.colour}?", asked.shape)


def _size(rng: random.Random) -> Example:
    large, other = _items(rng, 2)
    small = Item(other.cell, other.shape, other.colour, SMALL_RADIUS, other.dx, other.dy)
    first, second = rng.sample((large, small), 2)
    question = f"Which is larger, {first.colour} or {second.colour}?"
    return Example("size", (large, small), question, large.colour)


_MAKERS: dict[str, Callable[[random.Random], Example]] = {
    "count": _count,
    "colour": _colour,
    "shape": _shape,
    "size": _size,
}
_OPENINGS = {"How many": "count", "What colour": "colour", "What shape": "shape", "Which is larger": "size"}


def kind_of(problem: str) -> str:
    """The kind of question that a row's problem asks."""
    opening = re.match(rf"(?:<image>)?({'|'.join(_OPENINGS)})", problem)
    if opening is None:
        raise ValueError(f"not a question of this task: {problem!r}")
    return _OPENINGS[opening[1]]


def answers_to(problem: str) -> tuple[str, ...]:
    """The answers that make sense of a problem before one looks."""
    kind = kind_of(problem)
    if kind == "size":
        return tuple(re.findall("|".join(COLOURS), problem))
    if kind == "count":
        return tuple(str(n) for n in range(1, MOST_SHAPES + 1))
    return tuple(COLOURS) if kind == "colour" else SHAPES


def examples(seed: int) -> Iterator[Example]:
    """An endless stream, the kinds in turn, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        for kind in KINDS:
            yield _MAKERS[kind](rng)


def row(example: Example) -> dict[str, Any]:
    """The example in geometry3k's columns."""
    encoded = io.BytesIO()
    draw(example.items).save(encoded, "PNG")
    return {
        "images": [{"bytes": encoded.getvalue(), "path": None}],
        "problem": f"<image>{example.question}",
        "answer": example.answer,
    }


def write_data(folder: Path, *, train_rows: int = 8192, validation_rows: int = 512, seed: int = 0) -> Path:
    """Writes train.parquet and validation.parquet into `folder`; no picture of one stands in the other."""
    import datasets

    features = datasets.Features(
        {
            "images": datasets.Sequence(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    stream = (row(example) for example in examples(seed))
    validation = [next(stream) for _ in range(validation_rows)]
    held_out = {picture["bytes"] for r in validation for picture in r["images"]}
    train: list[dict[str, Any]] = []
    while len(train) < train_rows:
        candidate = next(stream)
        if held_out.isdisjoint(picture["bytes"] for picture in candidate["images"]):
            train.append(candidate)
    for name, rows in (("validation", validation), ("train", train)):
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(folder / f"{name}.parquet"))
    return folder
