"""The quickstart's base model: taught with right answers for half a minute, and stopped while still unsure.

python -m examples.quickstart.make_base FOLDER TRAIN.parquet
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from examples.quickstart.tiny_model import make_model, make_tokenizer, save
from examples.quickstart.warm_up import Progress, Row, lessons, read_rows, warm_up
from seerl.data.synthetic import kind_of

UNTIL, MOST_STEPS = 0.25, 120
THOUGHTS = {
    "count": "I count them.",
    "colour": "I see its colour.",
    "shape": "I see its shape.",
    "size": "I compare them.",
}


def response(row: Row) -> str:
    """The form every answer takes."""
    return f"<think>{THOUGHTS[kind_of(row['problem'])]}</think>\\boxed{{{row['answer']}}}"


def make_base(
    folder: Path,
    train_file: Path,
    *,
    seed: int = 0,
    until: float = UNTIL,
    most_steps: int = MOST_STEPS,
    batch_size: int = 64,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Makes the model folder from nothing and the training pictures."""
    rows = read_rows(train_file)
    texts = [text for row in rows[:600] for text in (row["problem"].removeprefix("<image>"), response(row))]
    tokenizer = make_tokenizer(texts)
    save(folder, make_model(tokenizer, seed=seed), tokenizer)
    right = lessons(rows, response, seed)
    return warm_up(folder, right, until=until, most_steps=most_steps, batch_size=batch_size, report=report)


def print_progress(progress: Progress) -> None:
    """A line every ten steps."""
    if progress.step % 10 == 0:
        print(
            f"  step {progress.step:3}  loss {progress.loss:.3f}  right answers {progress.probability:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    make_base(Path(sys.argv[1]), Path(sys.argv[2]), report=print_progress)
