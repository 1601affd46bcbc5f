"""Where engine and trainer disagree on probabilities: importance weights between them, and how far apart they are.

w = exp(q - b) per token, with q the trainer's log-probability at the start of the step and b the engine's as it
sampled. Truncated importance sampling (`tis`) bounds the weights, masked (`mis`, IcePop) drops what lies outside
[1/cap, cap]; `seq_*` use a response's product of w, `geo_mis` its geometric mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from seerl.algorithms.kl import LOG_RATIO_LIMIT
from seerl.algorithms.losses import response_mean


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
) -> Correction:
    """The named correction; `none` weighs everything 1."""
    difference_M = (old_logprobs_M.detach() - behaviour_M).float()
    log_w_M = difference_M.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weights_M, cut_M = CORRECTIONS[name](log_w_M, response_M, num_responses, cap)
    return Correction(
        weights_M=weights_M,
        cut_M=cut_M,
        abs_diff_M=difference_M.abs(),
        k3_M=log_w_M.exp() - log_w_M - 1,
    )


Weights = tuple[torch.Tensor, torch.Tensor]


def _none(log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, cap: float) -> Weights:
    return torch.ones_like(log_w_M), torch.zeros_like(log_w_M, dtype=torch.bool)


def _tis(log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, cap: float) -> Weights:
    w_M = log_w_M.exp()
    return w_M.clamp(max=cap), w_M > cap


def _mis(log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, cap: float) -> Weights:
    w_M = log_w_M.exp()
    outside_M = (w_M > cap) | (w_M < 1 / cap)
    return torch.where(outside_M, 0.0, w_M), outside_M


def _product(log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int) -> torch.Tensor:
    sums_R = torch.zeros(num_responses, device=log_w_M.device).index_add(0, response_M, log_w_M)
    return sums_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[response_M]


def _seq_tis(log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, cap: float) -> Weights:
    return _tis(_product(log_w_M, response_M, num_responses), response_M, num_responses, cap)


def _seq_mis(log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, cap: float) -> Weights:
    return _mis(_product(log_w_M, response_M, num_responses), response_M, num_responses, cap)


def _geo_mis(log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int, cap: float) -> Weights:
    w_M = response_mean(log_w_M, response_M, num_responses)[response_M].exp()
    outside_M = (w_M > cap) | (w_M < 1 / cap)
    return torch.where(outside_M, 0.0, 1.0), outside_M


CORRECTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, int, float], Weights]] = {
    "none": _none,
    "tis": _tis,
    "mis": _mis,
    "seq_tis": _seq_tis,
    "seq_mis": _seq_mis,
    "geo_mis": _geo_mis,
}
