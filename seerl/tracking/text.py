"""A validation answer as text, for trackers that show text."""

from __future__ import annotations

from seerl.types import Generation

COLUMNS = ("step", "row_id", "prompt", "response", "ground_truth", "score", "parts")
"""The columns of trackers that show tables."""


def as_row(generation: Generation, step: int) -> list[str | int | float]:
    """The answer as a table row, in the order of COLUMNS."""
    parts = ", ".join(f"{name}={value:.4g}" for name, value in generation.parts.items())
    return [
        step,
        generation.row_id,
        generation.prompt,
        generation.response,
        generation.ground_truth,
        generation.score,
        parts,
    ]


def as_text(generation: Generation) -> str:
    """The answer as Markdown; prompt and response are shown as they are."""
    fence = "````"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in generation.parts.items())
    return (
        f"**{generation.row_id}** score {generation.score:.4g} ({parts})\n\n"
        f"prompt:\n{fence}\n{generation.prompt}\n{fence}\n\n"
        f"response:\n{fence}\n{generation.response}\n{fence}\n\n"
        f"ground truth: `{generation.ground_truth}`"
    )
