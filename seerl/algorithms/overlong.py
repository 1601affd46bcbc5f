"""Soft overlong punishment: answers that near the length limit lose reward gradually (DAPO, 2503.14476)."""

from __future__ import annotations

import torch


def overlong_punishment(
    lengths_R: torch.Tensor, *, max_length: int, buffer: int, factor: float = 1.0
) -> torch.Tensor:
    """(R,) float32, to be added to the rewards: 0 up to max_length - buffer tokens, then
    factor (max_length - buffer - T) / buffer, never below -factor.

    Raises:
        ValueError: where not 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"an overlong buffer of {buffer} tokens for at most {max_length}: 0 < buffer <= max")
    return factor * ((max_length - buffer - lengths_R.float()) / buffer).clamp(-1.0, 0.0)
