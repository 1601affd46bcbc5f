"""Tokens that must never be sampled."""

from __future__ import annotations

from typing import Any

PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
    "boi_token_index",
    "eoi_token_index",
)
"""Configuration keys of the tokens that stand for images and videos, over transformers' families."""


def banned_token_ids(config: Any, vocabulary: int) -> tuple[int, ...]:
    """Ids that no answer may hold, ascending.

    A sampled image placeholder makes the next forward pass fail, for there is no image behind it; rows of the
    output layer beyond the tokenizer's `vocabulary` (its length, added tokens included) cannot be decoded.
    """
    placeholders = {getattr(config, name, None) for name in PLACEHOLDERS}
    rows = config.get_text_config().vocab_size
    ids = {i for i in placeholders if isinstance(i, int) and 0 <= i < rows}
    return tuple(sorted(ids | set(range(vocabulary, rows))))
