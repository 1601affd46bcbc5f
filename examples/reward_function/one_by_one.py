"""A reward that looks at one response at a time: the simplest form, here with partial credit.

worker.reward.reward_function=examples/reward_function/one_by_one.py:partial_credit

The last number of the response is compared with the ground truth: right gives 1, near gives something, and an
answer that was cut off at max_response_length gives nothing.
"""

import re
from typing import Any

REWARD_TYPE = "sequential"  # one sample a call; without this line a function gets a list of them


def last_number(text: str) -> float | None:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def partial_credit(reward_input: dict[str, Any], tolerance: float = 0.1) -> dict[str, float]:
    truth = float(reward_input["ground_truth"])
    number = last_number(reward_input["response"])
    if number is None or reward_input["finish_reason"] == "length":
        return {"overall": 0.0, "accuracy": 0.0}
    distance = abs(number - truth) / max(abs(truth), 1.0)
    near = max(0.0, 1.0 - distance / tolerance)
    return {"overall": 1.0 if number == truth else 0.5 * near, "accuracy": float(number == truth)}
