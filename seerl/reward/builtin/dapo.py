"""The reward of DAPO (arXiv 2503.14476): 1 or -1 for the answer, less the soft overlong punishment."""

from __future__ import annotations

from typing import Any

from seerl.reward.answers import boxed, equivalent

_TAIL = 300
"""The answer is looked for in this many last characters only: it stands at the end."""


def soft_overlong(length: int, max_length: int, buffer: int) -> float:
    """0 up to max - buffer tokens, then falling to -1 at max (equation 13 of the paper); 0 without a
    buffer."""
    if buffer == 0:
        return 0.0
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float = 1.0,
) -> list[dict[str, float]]:
    """`accuracy`: 1 or -1; `overlong`: the punishment; `accuracy_normalized`: 0 or 1, for filter_key."""
    if not 0 <= overlong_buffer_length <= max_response_length:
        raise ValueError(
            f"overlong_buffer_length={overlong_buffer_length}: between 0 (no punishment) and "
            f"max_response_length={max_response_length}"
        )
    scores = []
    for reward_input in reward_inputs:
        answer = boxed(reward_input["response"][-_TAIL:])
        right = answer is not None and equivalent(answer, reward_input["ground_truth"])
        overlong = soft_overlong(reward_input["response_length"], max_response_length, overlong_buffer_length)
        accuracy = 1.0 if right else -1.0
        scores.append(
            {
                "overall": accuracy + overlong_penalty_factor * overlong,
                "accuracy": accuracy,
                "overlong": overlong,
                "accuracy_normalized": float(right),
            }
        )
    return scores
