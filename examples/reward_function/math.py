r"""Reasoning in <think> tags, then the answer in \boxed{}: how to write a reward function.

    worker.reward.reward_function=examples/reward_function/math.py:compute_score

The function gets all responses to one prompt at once and returns a dict for each: `overall` is the reward,
every other number becomes a metric. It runs in processes of its own: an exception, an endless loop or a crash
costs a sample, never the run.
"""

import re
from typing import Any

from seerl.reward.answers import boxed, equivalent


def format_reward(response: str) -> float:
    return float(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", response, re.DOTALL) is not None)


def accuracy_reward(response: str, ground_truth: str) -> float:
    answer = boxed(response)
    return float(answer is not None and equivalent(answer, ground_truth))


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        format_score = format_reward(reward_input["response"])
        accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
        overall = (1 - format_weight) * accuracy + format_weight * format_score
        scores.append({"overall": overall, "format": format_score, "accuracy": accuracy})
    return scores
