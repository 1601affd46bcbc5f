"""Sums and means of token values over the responses they belong to, flat and without padding.

Axes: M tokens, R responses; `response_M` gives each token's response, `mask_M` (bool, None: all) the tokens
that count.
"""

from __future__ import annotations

import torch


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """float64 as it is, everything else (bf16, fp16, integers) as float32."""
    return values if values.dtype == torch.float64 else values.float()


def where_counted(values_M: torch.Tensor, mask_M: torch.Tensor | None) -> torch.Tensor:
    """0 on tokens that do not count, whatever stands there (a product would let NaN and infinity through)."""
    return values_M if mask_M is None else torch.where(mask_M.bool(), values_M, 0)


def response_sum(
    values_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, mask_M: torch.Tensor | None = None
) -> torch.Tensor:
    """(R,) sum of each response's tokens."""
    return values_M.new_zeros(num_responses).index_add(0, response_M, where_counted(values_M, mask_M))


def response_mean(
    values_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, mask_M: torch.Tensor | None = None
) -> torch.Tensor:
    """(R,) mean of each response's tokens; 0 for a response without any that count."""
    # Counted by adding ones: bincount would make the host wait for the device.
    count_R = response_sum(torch.ones_like(values_M), response_M, num_responses, mask_M)
    return response_sum(values_M, response_M, num_responses, mask_M) / count_R.clamp(min=1)
