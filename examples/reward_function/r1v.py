"""Reasoning in <think> tags and the answer in <answer> tags, as in R1-V.

worker.reward.reward_function=examples/reward_function/r1v.py:compute_score
"""

import re
from typing import Any

from math_verify import parse, verify


def equal(answer: str, truth: str) -> bool:
    """Whether they are the same text, or to math-verify the same number or expression (0.5 and \\frac12)."""
    return answer == truth or verify(parse(rf"\boxed{{{truth}}}"), parse(rf"\boxed{{{answer}}}"))


def format_reward(response: str) -> float:
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>"
    return float(
        re.fullmatch(pattern, response, re.DOTALL) is not None
    )  # DOTALL: thoughts take several lines


def accuracy_reward(response: str, ground_truth: Any) -> float:
    tagged = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
    answer = tagged[1] if tagged else response
    return float(equal(answer.strip(), str(ground_truth).strip()))


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.5) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        format_score = format_reward(reward_input["response"])
        accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
        overall = (1 - format_weight) * accuracy + format_weight * format_score
        scores.append({"overall": overall, "format": format_score, "accuracy": accuracy})
    return scores
