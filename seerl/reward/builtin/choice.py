"""Multiple choice: 1 for the right letter, else 0."""

from __future__ import annotations

import re
from typing import Any

from seerl.reward.answers import final_answer

_ALONE = re.compile(r"\W*([A-Z])(?:\W*$|\s*[).:,\]}])")
_STATED = re.compile(r"(?i:answer|choice)\s*(?:is|:|：)?\s*(?:option\s*)?[*(\[]*([A-Z])(?![A-Za-z'])")
_ANY = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])")


def chosen_letter(text: str, letters: str) -> str | None:
    """The letter an answer chooses: "B", "(B)", "B. a cat", "the answer is B", else the last letter alone."""
    text = final_answer(text)
    if (alone := _ALONE.match(text)) and alone[1] in letters:
        return alone[1]
    for pattern in (_STATED, _ANY):
        found = [letter for letter in pattern.findall(text) if letter in letters]
        if found:
            return found[-1]
    return text.upper() if len(text) == 1 and text.upper() in letters else None


def compute_score(reward_inputs: list[dict[str, Any]], letters: str = "ABCD") -> list[dict[str, float]]:
    """`accuracy`: the letter of the last <answer>, of the last box, or of the text is the truth's."""
    scores = []
    for reward_input in reward_inputs:
        truth = chosen_letter(str(reward_input["ground_truth"]), letters)
        if truth is None:
            raise ValueError(f"the ground truth {reward_input['ground_truth']!r} names none of {letters}")
        accuracy = float(chosen_letter(reward_input["response"], letters) == truth)
        scores.append({"overall": accuracy, "accuracy": accuracy})
    return scores
