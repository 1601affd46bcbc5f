"""The reward of DAPO (arXiv 2503.14476): right or wrong, less a punishment for nearing the length limit.

worker.reward.reward_function=examples/reward_function/dapo.py:compute_score
worker.reward.reward_function_kwargs={max_response_length:2048,overlong_buffer_length:512}
"""

from typing import Any

from math_verify import parse, verify


def accuracy_reward(response: str, ground_truth: Any) -> float:
    end = response[-300:]  # the answer stands at the end
    if r"\boxed{" not in end:
        return -1.0
    # From the last box on: math-verify finds where it closes, and compares 0.5 with \frac12.
    answer = parse(end[end.rfind(r"\boxed{") :])
    return 1.0 if verify(parse(rf"\boxed{{{ground_truth}}}"), answer) else -1.0


def soft_overlong_punishment(length: int, max_length: int, buffer_length: int) -> float:
    """0 up to the buffer before the limit, then falling to -1 at the limit; always 0 without a buffer."""
    if buffer_length == 0:
        return 0.0
    return max(-1.0, min(0.0, (max_length - buffer_length - length) / buffer_length))


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float = 1.0,
) -> list[dict[str, float]]:
    scores = []
    for reward_input in reward_inputs:
        accuracy = accuracy_reward(reward_input["response"], reward_input["ground_truth"])
        overlong = soft_overlong_punishment(
            reward_input["response_length"], max_response_length, overlong_buffer_length
        )
        scores.append(
            {
                "overall": accuracy + overlong_penalty_factor * overlong,
                "accuracy": accuracy,
                "overlong": overlong,
                "accuracy_normalized": 0.5 * (accuracy + 1.0),  # 0 or 1: what algorithm.filter_key can use
            }
        )
    return scores
