"""What a finished run left in its folder, summed up."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from seerl.tracking.file import read_history

Metrics = dict[int, dict[str, float]]
"""Figures by step; step 0 is before training."""
ACCURACY = "val/accuracy_reward"


def read_metrics(run: Path) -> Metrics:
    """The figures of metrics.jsonl, as they count after a resume; one that is not finite is NaN."""
    history = read_history(run / "metrics.jsonl")
    return {
        step: {name: math.nan if value is None else value for name, value in row.items()}
        for step, row in history.items()
    }


def read_generations(run: Path, step: int) -> list[dict[str, Any]]:
    """The validation answers logged at a step, one per row, in the order of the rows."""
    by_row: dict[int, dict[str, Any]] = {}
    for line in (run / "generations.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["step"] == step:
            by_row[row_index(record["row_id"])] = record
    return [record for _, record in sorted(by_row.items())]


def row_index(row_id: str) -> int:
    """`validation.parquet:17` is row 17."""
    return int(row_id.rpartition(":")[2])


def accuracy_by_kind(generations: Sequence[dict[str, Any]], kinds: Sequence[str]) -> dict[str, float]:
    """The share of right answers by kind; `kinds` names the kind of every row of the validation file."""
    right: dict[str, list[float]] = defaultdict(list)
    for generation in generations:
        right[kinds[row_index(generation["row_id"])]].append(generation["parts"]["accuracy"])
    return {kind: sum(right[kind]) / len(right[kind]) for kind in dict.fromkeys(kinds) if right[kind]}


def summarise(run: Path, export: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """The figures of summary.json.

    `train_seconds` is the time of all steps and the validations between them, not of those before and after.
    """
    metrics = read_metrics(run)
    first, last = min(metrics), max(metrics)
    steps = [figures["timing_s/step"] for figures in metrics.values() if "timing_s/step" in figures]
    between = [
        figures.get("timing_s/val", 0.0) for step, figures in metrics.items() if step not in (first, last)
    ]
    return {
        "accuracy_before": metrics[first][ACCURACY],
        "accuracy_after": metrics[last][ACCURACY],
        "accuracy_before_by_kind": accuracy_by_kind(read_generations(run, first), kinds),
        "accuracy_after_by_kind": accuracy_by_kind(read_generations(run, last), kinds),
        "train_seconds": sum(steps) + sum(between),
        "step_seconds_median": median(steps),
        "steps": last,
        "checkpoint": str(run / f"global_step_{last}"),
        "export": str(export),
        "metrics": str(run / "metrics.jsonl"),
    }
