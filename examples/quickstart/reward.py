"""The quickstart's reward: one point for the right answer, of which a tenth is for the form alone."""

import re
from typing import Any

FORM = re.compile(r"<think>.*?</think>\s*\\boxed\{([^{}]*)\}", re.DOTALL)


def score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One dict per response: `overall`, and its parts `format` and `accuracy`, each 0 or 1."""
    scores = []
    for reward_input in reward_inputs:
        formed = FORM.fullmatch(reward_input["response"].strip())
        right = formed is not None and formed[1].strip() == reward_input["ground_truth"]
        overall = 0.1 * (formed is not None) + 0.9 * right
        scores.append({"overall": overall, "format": float(formed is not None), "accuracy": float(right)})
    return scores
