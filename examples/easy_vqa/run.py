"""easy-VQA from data to table: prepared, a small model warmed up, trained by GRPO, and measured.

    python -m examples.easy_vqa.run [key=value ...]

`run.sh` installs what is needed and calls this. Further arguments go to `seerl train`. Everything lands in
runs/easy_vqa.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from examples.easy_vqa.prepare import guess_rates, prepare
from examples.easy_vqa.reward import COLOURS, SHAPES
from examples.quickstart.make_base import print_progress
from examples.quickstart.tiny_model import make_model, make_tokenizer, save
from examples.quickstart.training import ROOT, console, show, show_paths, train
from examples.quickstart.warm_up import Choice, Lesson, Progress, Row, lessons, read_rows, warm_up

STEPS = 450
PATCH = 8
"""16 image tokens of 16 pixels a picture: the smallest shapes are hardly larger."""
RIGHT_SHARE = {"yes/no": 0.6, "colour": 0.3, "shape": 0.5}
"""Belief in the right answer; the other answers of its kind share the rest (see the quickstart's base
model)."""
ANSWERS = {"yes/no": ("yes", "no"), "colour": COLOURS, "shape": SHAPES}


def unsure(row: Row) -> tuple[Choice, ...]:
    """What is taught of a row."""
    right, kind = row["answer"], row["kind"]
    others = [answer for answer in ANSWERS[kind] if answer != right]
    share = RIGHT_SHARE[kind]
    return (Choice(right, right, share), *(Choice(a, a, (1 - share) / len(others)) for a in others))


def make_base(folder: Path, rows: list[Row], *, steps: int = STEPS, seed: int = 0) -> Progress:
    """A new model, taught to look at the picture but to be unsure of what it sees."""
    tokenizer = make_tokenizer(text for row in rows[:2000] for text in (row["problem"], row["answer"]))
    save(folder, make_model(tokenizer, patch=PATCH, seed=seed), tokenizer)
    return warm_up(folder, of_each_kind(rows, seed), most_steps=steps, report=print_progress)


def of_each_kind(rows: list[Row], seed: int) -> Iterator[Lesson]:
    """Lessons of the three kinds in turn: eight of ten questions are yes/no ones, and in their company the
    shapes take three times as many steps to be learned."""
    by_kind = [[row for row in rows if row["kind"] == kind] for kind in ANSWERS]
    return itertools.chain.from_iterable(zip(*(lessons(k, unsure, seed) for k in by_kind), strict=True))


def main() -> None:
    os.chdir(ROOT)
    folder = Path("runs/easy_vqa")
    data, base = folder / "data", folder / "base"
    if not (data / "train.parquet").exists():
        console.print("Preparing easy-VQA ...")
        prepare(data)
    train_rows, test_rows = read_rows(data / "train.parquet"), read_rows(data / "test.parquet")
    if not (base / "model.safetensors").exists():
        console.print("Teaching a new model to look (supervised) ...")
        start = time.perf_counter()
        made = base.with_name("base.partial")
        progress = make_base(made, train_rows)
        made.rename(base)
        console.print(f"Stopped after {progress.step} steps, {time.perf_counter() - start:.0f} s.")
    kinds = [row["kind"] for row in test_rows]
    summary = train(folder, Path("examples/easy_vqa/config.yaml"), sys.argv[1:], kinds)
    show(
        "easy-VQA, 9,673 test questions: right answers, sampled", summary, guess_rates(train_rows, test_rows)
    )
    show_paths(summary)


if __name__ == "__main__":
    main()
