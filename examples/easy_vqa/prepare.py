"""The public easy-VQA set (PyPI package `easy-vqa`, MIT licence) in the layout that SeeRL and EasyR1 read.

    python -m examples.easy_vqa.prepare FOLDER

Writes train.parquet (38,575 questions on 4,000 pictures) and test.parquet (9,673 on 1,000): images, problem
with `<image>`, answer, and the question's kind. Pictures come from the installed package, byte for byte.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS = ("yes/no", "colour", "shape")
SHAPES = frozenset({"circle", "rectangle", "triangle"})


def kind_of(answer: str) -> str:
    """What sort of question has this answer."""
    if answer in ("yes", "no"):
        return "yes/no"
    return "shape" if answer in SHAPES else "colour"


def rows_of(
    questions: tuple[Sequence[str], Sequence[str], Sequence[int]], pictures: Mapping[int, str]
) -> Iterator[dict[str, Any]]:
    """One row per question, given (texts, answers, picture numbers) and each picture's file."""
    encoded = {number: Path(file).read_bytes() for number, file in pictures.items()}
    for text, answer, number in zip(*questions, strict=True):
        yield {
            "images": [{"bytes": encoded[number], "path": None}],
            "problem": f"<image>{text}",
            "answer": answer,
            "kind": kind_of(answer),
        }


def guess_rates(train: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How much of the test questions, by kind and in all, can be had without looking: by giving each the
    commonest answer that the same words had in training."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in train:
        answers[row["problem"]][row["answer"]] += 1
    right: dict[str, list[bool]] = defaultdict(list)
    for row in test:
        known = answers[row["problem"]].most_common(1)
        hit = bool(known) and known[0][0] == row["answer"]
        right[row["kind"]].append(hit)
        right["all"].append(hit)
    return {kind: sum(hits) / len(hits) for kind, hits in right.items()}


def prepare(folder: Path) -> Path:
    """Writes both files."""
    import datasets
    import easy_vqa

    features = datasets.Features(
        {
            "images": datasets.Sequence(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "kind": datasets.Value("string"),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, questions, pictures in (
        ("test", easy_vqa.get_test_questions(), easy_vqa.get_test_image_paths()),
        ("train", easy_vqa.get_train_questions(), easy_vqa.get_train_image_paths()),
    ):
        rows = list(rows_of(questions, pictures))
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(folder / f"{name}.parquet"))
    return folder


if __name__ == "__main__":
    print(prepare(Path(sys.argv[1])))
