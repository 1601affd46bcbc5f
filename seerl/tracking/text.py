"""Names, answers and images in the forms that trackers take."""

from __future__ import annotations

import logging
import re
import sys

from PIL.Image import Image

from seerl.types import Generation

log = logging.getLogger(__name__)

COLUMNS = ("step", "row_id", "prompt", "response", "ground_truth", "score", "parts")
"""The columns of trackers that show tables."""


def as_row(generation: Generation, step: int) -> list[str | int | float]:
    """The answer as a table row, in the order of COLUMNS."""
    return [
        step,
        generation.row_id,
        generation.prompt,
        generation.response,
        generation.ground_truth,
        generation.score,
        ", ".join(f"{name}={value:.4g}" for name, value in generation.parts.items()),
    ]


def as_text(generation: Generation) -> str:
    """The answer as Markdown; prompt and response are shown as they are."""
    texts = (generation.prompt, generation.response, generation.ground_truth)
    longest = max((len(run) for text in texts for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    parts = "".join(f", {name} {value:.4g}" for name, value in generation.parts.items())
    blocks = [
        f"{label}:\n{fence}\n{text}\n{fence}"
        for label, text in zip(("prompt", "response", "ground truth"), texts, strict=True)
    ]
    return "\n\n".join([f"**{generation.row_id}** score {generation.score:.4g}{parts}", *blocks])


def rgb_images(generation: Generation) -> list[Image]:
    """The answer's images in the one mode that every tracker and PNG can hold."""
    return [image.convert("RGB") for image in generation.images]


def accepted(name: str, refused: re.Pattern[str], *, longest: int, tracker: str) -> str:
    """The name with what a tracker refuses replaced by `-`, cut to its longest; said where it changes."""
    fitting = refused.sub("-", name)[:longest]
    if not fitting.strip("-. "):
        fitting = "seerl"
    if fitting != name:
        log.warning("%s does not take the name %r, so it is %r there", tracker, name, fitting)
    return fitting


def somebody_to_ask() -> bool:
    """Whether a person at a terminal can answer a question for a key."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
