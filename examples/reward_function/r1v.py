"""Reasoning in <think> tags and the answer in <answer> tags, as in R1-V.

worker.reward.reward_function=examples/reward_function/r1v.py:compute_score
"""

import re
from typing import Any

from seerl.reward.answers import equivalent


def format_reward(response: str) -> float:
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>"
    return float(
        re.fullmatch(pattern, response, re.DOTALL) is not None
    )  # DOTALL: thoughts take several lines


def accuracy_reward(response: str, ground_truth: str) -> float:
    answer = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
    return float(equivalent(answer[1] if answer else response, ground_truth))


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.5) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        format_score = format_reward(reward_input["response"])
        accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
        overall = (1 - format_weight) * accuracy + format_weight * format_score
        scores.append({"overall": overall, "format": format_score, "accuracy": accuracy})
    return scores
