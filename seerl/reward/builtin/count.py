"""Counting: 1 for exactly the right whole number, else 0."""

from __future__ import annotations

import re
from typing import Any

from seerl.reward.answers import final_answer

_NUMBER = re.compile(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?![\w,])|(?<![\w.])-?\d+(?:\.\d+)?(?!\w)")


def last_number(text: str) -> float | None:
    """The last number of the last <answer>, of the last box, or of the text; words are no numbers."""
    found = _NUMBER.findall(final_answer(text))
    return float(found[-1].replace(",", "")) if found else None


def compute_score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """`accuracy`: the last number is the truth's."""
    scores = []
    for reward_input in reward_inputs:
        truth = last_number(str(reward_input["ground_truth"]))
        if truth is None:
            raise ValueError(f"the ground truth {reward_input['ground_truth']!r} holds no number")
        accuracy = float(last_number(reward_input["response"]) == truth)
        scores.append({"overall": accuracy, "accuracy": accuracy})
    return scores
