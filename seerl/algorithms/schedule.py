"""The learning rate as a factor of its peak."""

from __future__ import annotations

import math


def lr_factor(
    step: int,
    *,
    total_steps: int,
    kind: str,
    warmup_steps: int | None = None,
    warmup_ratio: float = 0.0,
    min_ratio: float | None = None,
) -> float:
    """The factor for optimizer step `step` (from 0): linear warm-up, then constant or a half cosine.

    The warm-up takes `warmup_steps`, or else `warmup_ratio` of all steps; its first step already moves. The
    cosine falls from 1 to `min_ratio` (0 if None) at `total_steps`.

    Raises:
        ValueError: for an unknown `kind`.
    """
    warmup = warmup_steps if warmup_steps is not None else int(warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if kind == "constant":
        return 1.0
    if kind != "cosine":
        raise ValueError(f"unknown learning-rate schedule {kind!r}")
    floor = min_ratio or 0.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
