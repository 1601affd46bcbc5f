r"""Reasoning in <think> tags, then the answer in \boxed{}: how to write a reward function.

    worker.reward.reward_function=examples/reward_function/math.py:compute_score

The function gets all responses to one prompt at once and returns a dict for each: `overall` is the reward,
every other number becomes a metric. It runs in processes of its own: an exception, an endless loop or a crash
costs a sample, never the run.
"""

import re
from typing import Any

from math_verify import parse, verify


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, which may hold braces itself; None without one."""
    start = text.rfind(r"\boxed{")
    if start == -1:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for end in range(begin, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[begin:end].strip()
    return None


def equal(answer: str, truth: str) -> bool:
    """Whether they are the same text, or to math-verify the same number or expression (0.5 and \\frac12)."""
    return answer == truth or verify(parse(rf"\boxed{{{truth}}}"), parse(rf"\boxed{{{answer}}}"))


def format_reward(response: str) -> float:
    pattern = r"<think>.*</think>.*\\boxed\{.*\}.*"
    return float(
        re.fullmatch(pattern, response, re.DOTALL) is not None
    )  # DOTALL: thoughts take several lines


def accuracy_reward(response: str, ground_truth: Any) -> float:
    answer = last_boxed(response)
    return float(answer is not None and equal(answer, str(ground_truth).strip()))


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        format_score = format_reward(reward_input["response"])
        accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
        overall = (1 - format_weight) * accuracy + format_weight * format_score
        scores.append({"overall": overall, "format": format_score, "accuracy": accuracy})
    return scores
