"""The reward for easy-VQA: an answer is one word, right or not."""

from typing import Any

SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
ANSWERS = frozenset({"yes", "no", *SHAPES, *COLOURS})


def score(reward_inputs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One dict per response: `overall`, `accuracy`, and `format`: is it one of the thirteen answers."""
    scores = []
    for reward_input in reward_inputs:
        answer = reward_input["response"].strip()
        right, known = answer == reward_input["ground_truth"], answer in ANSWERS
        scores.append(
            {"overall": 0.9 * right + 0.1 * known, "accuracy": float(right), "format": float(known)}
        )
    return scores
