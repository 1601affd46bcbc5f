"""Reasoning in <think> tags, the answer in <answer> tags: 0.5 x format + 0.5 x accuracy."""

from __future__ import annotations

import re
from typing import Any

from seerl.reward.answers import equivalent

_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.5) -> list[dict[str, float]]:
    """`format`: the response is <think>...</think><answer>...</answer> and nothing else.

    `accuracy`: the first answer, or without tags the whole response, equals the truth.
    """
    scores = []
    for reward_input in reward_inputs:
        response = reward_input["response"]
        found = _ANSWER.search(response)
        form = float(_FORMAT.fullmatch(response) is not None)
        accuracy = float(equivalent(found[1] if found else response, reward_input["ground_truth"]))
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "format": form, "accuracy": accuracy})
    return scores
