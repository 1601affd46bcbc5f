r"""Reasoning in <think> tags, then the answer in \boxed{}: 0.1 x format + 0.9 x accuracy."""

from __future__ import annotations

import re
from typing import Any

from seerl.reward.answers import boxed, equivalent


def without_tag_spaces(text: str) -> str:
    """Some models write `< think >`: the space around <, > and / is taken out."""
    return re.sub(r"\s*([<>/])\s*", r"\1", text)


def appear_in_order(text: str, *marks: str) -> bool:
    """Whether the text starts with the first mark and has the others after it, in this order (in linear time, which
    a regular expression with several `.*` does not promise)."""
    position = 0
    for mark in marks:
        position = text.find(mark, position)
        if position == -1:
            return False
        position += len(mark)
    return text.startswith(marks[0])


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    """`format`: thoughts and a box are there; `accuracy`: the last box equals the truth."""
    scores = []
    for reward_input in reward_inputs:
        response = without_tag_spaces(reward_input["response"])
        answer = boxed(response)
        form = float(appear_in_order(response, "<think>", "</think>", r"\boxed{", "}"))
        accuracy = float(answer is not None and equivalent(answer, reward_input["ground_truth"]))
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "format": form, "accuracy": accuracy})
    return scores
