"""The quickstart's base model: taught to look, but to be unsure of what it sees.

    python -m examples.quickstart.make_base FOLDER TRAIN.parquet

It is shown every answer that makes sense of a question, the right one with little more belief than the
others: about where a large model stands that has seen much and was never told which answers count. Sampled it
is right four times in ten. It is made once, in some minutes, and shipped as examples/quickstart/base
(bfloat16).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from examples.quickstart.tiny_model import make_model, make_tokenizer, save
from examples.quickstart.warm_up import Choice, Progress, Row, lessons, read_rows, warm_up
from seerl.data.synthetic import answers_to, kind_of

STEPS = 260
TAGS = ("<think>", "</think>", "\\boxed{")
"""Single tokens, as in models that think: short answers."""
THOUGHTS = {
    "count": "I count them.",
    "colour": "I see its colour.",
    "shape": "I see its shape.",
    "size": "I compare them.",
}


RIGHT_SHARE = {2: 0.56, 4: 0.36, 5: 0.34}
"""Belief in the right answer by the number of answers that make sense; the others share the rest."""


def response(problem: str, answer: str) -> str:
    """The form every answer takes."""
    return f"<think>{THOUGHTS[kind_of(problem)]}</think>\\boxed{{{answer}}}"


def unsure(row: Row) -> tuple[Choice, ...]:
    """What is taught of a row."""
    problem, right = row["problem"], row["answer"]
    others = [answer for answer in answers_to(problem) if answer != right]
    share = RIGHT_SHARE[len(others) + 1]
    wrong = (Choice(response(problem, answer), answer, (1 - share) / len(others)) for answer in others)
    return (Choice(response(problem, right), right, share), *wrong)


def make_base(
    folder: Path,
    train_file: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    batch_size: int = 64,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Makes the model folder from nothing and the training pictures."""
    rows = read_rows(train_file)
    problems = [(row["problem"], row["answer"]) for row in rows[:600]]
    texts = [text for p, a in problems for text in (p.removeprefix("<image>"), response(p, a))]
    tokenizer = make_tokenizer(texts, tags=TAGS)
    save(folder, make_model(tokenizer, seed=seed), tokenizer)
    taught = lessons(rows, unsure, seed)
    progress = warm_up(folder, taught, most_steps=steps, batch_size=batch_size, report=report)
    AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return progress


def print_progress(progress: Progress) -> None:
    """A line every ten steps."""
    if progress.step % 10 == 0:
        print(
            f"  step {progress.step:3}  loss {progress.loss:.3f}  right answers {progress.probability:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    make_base(Path(sys.argv[1]), Path(sys.argv[2]), report=print_progress)
