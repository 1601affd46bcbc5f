"""Finding things: how well boxes [x1, y1, x2, y2] cover those of the truth."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from seerl.reward.answers import final_answer

Box = tuple[float, float, float, float]
_BOX = re.compile(r"[\[(]\s*" + r"\s*,\s*".join([r"(-?\d+(?:\.\d+)?)"] * 4) + r"\s*[\])]")
_MOST = 100
"""Boxes beyond this many are left out of the matching, and still count as wrong."""


def boxes_in(text: str) -> list[Box]:
    """Every [x1, y1, x2, y2] of the text, corners put in order."""
    return [_ordered(tuple(map(float, match))) for match in _BOX.findall(text)]


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes; 0 where the union has no area."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(0.0, width) * max(0.0, height)
    union = _area(a) + _area(b) - both
    return both / union if union > 0 else 0.0


def matched_iou(given: Sequence[Box], truth: Sequence[Box]) -> float:
    """The sum of IoU over pairs, best pair first, divided by the larger number of boxes.

    So missing and surplus boxes both cost.
    """
    indices = itertools.product(range(min(len(given), _MOST)), range(len(truth)))
    pairs = sorted(((iou(given[i], truth[j]), i, j) for i, j in indices), reverse=True)
    used_given: set[int] = set()
    used_truth: set[int] = set()
    total = 0.0
    for value, i, j in pairs:
        if i not in used_given and j not in used_truth:
            used_given.add(i)
            used_truth.add(j)
            total += value
    return total / max(len(given), len(truth), 1)


def compute_score(
    reward_inputs: list[dict[str, Any]], threshold: float | None = None
) -> list[dict[str, float]]:
    """`iou`: see `matched_iou`, of the boxes in the last <answer>, else in the whole response.

    The reward is 0 or 1 with a `threshold` to reach, else the IoU itself.
    """
    scores = []
    for reward_input in reward_inputs:
        truth = _truth(reward_input["ground_truth"])
        value = matched_iou(boxes_in(final_answer(reward_input["response"])), truth)
        overall = value if threshold is None else float(value >= threshold)
        scores.append({"overall": overall, "iou": value})
    return scores


def _truth(given: Any) -> list[Box]:
    boxes = boxes_in(str(given.tolist() if hasattr(given, "tolist") else given))
    if not boxes:
        raise ValueError(f"the ground truth {given!r} holds no box [x1, y1, x2, y2]")
    return boxes


def _ordered(box: Sequence[float]) -> Box:
    x1, y1, x2, y2 = box
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
