"""Reward functions as TRL has them: lists in, one float a completion out; the data's columns come by name.

    worker:
      reward:
        reward_function:
          - {function: examples/reward_function/trl_style.py:accuracy}
          - {function: examples/reward_function/trl_style.py:brevity, weight: 0.2, kwargs: {limit: 200}}

None says that a reward does not apply to a sample: there only the others count, and a sample to which none
applies is left out of its group. The answer column comes as `ground_truth`; completions are texts.
"""

from typing import Any


def accuracy(completions: list[str], ground_truth: list[Any], **_: Any) -> list[float]:
    answers = [completion.rpartition("Answer:")[2].strip() for completion in completions]
    return [float(answer == str(truth)) for answer, truth in zip(answers, ground_truth, strict=True)]


def brevity(completions: list[str], limit: int = 400, **columns: Any) -> list[float | None]:
    """Only for rows whose column `task` is "short"; for the others no opinion."""
    tasks = columns.get("task", ["short"] * len(completions))
    return [
        min(1.0, limit / max(len(completion), 1)) if task == "short" else None
        for completion, task in zip(completions, tasks, strict=True)
    ]
