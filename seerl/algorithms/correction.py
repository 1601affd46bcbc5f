"""Where engine and trainer disagree on probabilities: importance weights between them, and how far apart they
are.

w = exp(q - b) per token, with q the trainer's log-probability at the start of the step and b the engine's as
it sampled. Truncated importance sampling (`tis`) multiplies the loss by min(w, cap); masking (`mis`) drops
the tokens whose w lies outside [1/cap, cap] and leaves the rest as they are (IcePop also multiplies the rest
by w). `seq_tis` and `seq_mis` do the same with a response's product of w, `geo_mis` drops responses by its
geometric mean. What is dropped still counts in the average, so the step shrinks instead of leaning on the
rest.

All but `none`, `tis` and `mis` look at whole responses, which must not be torn over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from seerl.algorithms.kl import LOG_RATIO_LIMIT
from seerl.algorithms.tokens import at_least_float32, response_mean, response_sum, where_counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Per token: the factor on the loss (no gradient), and the disagreement that is always logged."""

    weights_M: torch.Tensor
    cut_M: torch.Tensor  # bool: bounded or dropped
    abs_diff_M: torch.Tensor  # |q - b|
    k3_M: torch.Tensor  # exp(q - b) - (q - b) - 1, an estimate of KL(engine || trainer)


def correct(
    name: str,
    old_logprobs_M: torch.Tensor,
    behaviour_M: torch.Tensor,
    response_M: torch.Tensor,
    *,
    num_responses: int,
    cap: float,
    mask_M: torch.Tensor | None = None,
) -> Correction:
    """The named correction; `none` weighs everything 1. Tokens that do not count (`mask_M`, bool) differ by
    0."""
    q_M, b_M = at_least_float32(old_logprobs_M.detach()), at_least_float32(behaviour_M)
    difference_M = where_counted(q_M - b_M, mask_M)
    level, act = CORRECTIONS[name]
    weights_M, cut_M = act(_bounded(level(difference_M, response_M, num_responses, mask_M)).exp(), cap)
    return Correction(
        weights_M=weights_M,
        cut_M=where_counted(cut_M, mask_M),
        abs_diff_M=difference_M.abs(),
        k3_M=_bounded(difference_M).exp() - _bounded(difference_M) - 1,
    )


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _token(
    log_w_M: torch.Tensor, _response_M: torch.Tensor, _num_responses: int, _mask_M: torch.Tensor | None
) -> torch.Tensor:
    return log_w_M


def _product(
    log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, mask_M: torch.Tensor | None
) -> torch.Tensor:
    return response_sum(log_w_M, response_M, num_responses, mask_M)[response_M]


def _geometric(
    log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, mask_M: torch.Tensor | None
) -> torch.Tensor:
    return response_mean(log_w_M, response_M, num_responses, mask_M)[response_M]


Weights = tuple[torch.Tensor, torch.Tensor]  # the factor on the loss, and where it cut


def _keep(w_M: torch.Tensor, _cap: float) -> Weights:
    return torch.ones_like(w_M), torch.zeros_like(w_M, dtype=torch.bool)


def _bound(w_M: torch.Tensor, cap: float) -> Weights:
    return w_M.clamp(max=cap), w_M > cap


def _drop(w_M: torch.Tensor, cap: float) -> Weights:
    outside_M = (w_M > cap) | (w_M < 1 / cap)
    return (~outside_M).to(w_M.dtype), outside_M


Level = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor | None], torch.Tensor]
CORRECTIONS: dict[str, tuple[Level, Callable[[torch.Tensor, float], Weights]]] = {
    "none": (_token, _keep),
    "tis": (_token, _bound),
    "mis": (_token, _drop),
    "seq_tis": (_product, _bound),
    "seq_mis": (_product, _drop),
    "geo_mis": (_geometric, _drop),
}
"""What the ratio is taken over, and what is done with it."""
