"""Where engine and trainer disagree on probabilities: importance weights between them, and how far apart they
are.

w = exp(q - b) per token, with q the trainer's log-probability at the start of the step and b the engine's as
it sampled. Truncated importance sampling (`tis`) bounds the weights, masked (`mis`, IcePop) drops what lies
outside [1/cap, cap]; `seq_*` use a response's product of w, `geo_mis` its geometric mean.
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
    level, act = CORRECTIONS[name]
    weights_M, cut_M = act(level(log_w_M, response_M, num_responses).exp(), cap)
    return Correction(
        weights_M=weights_M,
        cut_M=cut_M,
        abs_diff_M=difference_M.abs(),
        k3_M=log_w_M.exp() - log_w_M - 1,
    )


def _token(log_w_M: torch.Tensor, _response_M: torch.Tensor, _num_responses: int) -> torch.Tensor:
    return log_w_M


def _product(log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int) -> torch.Tensor:
    sums_R = torch.zeros(num_responses, device=log_w_M.device).index_add(0, response_M, log_w_M)
    return sums_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[response_M]


def _geometric(log_w_M: torch.Tensor, response_M: torch.Tensor, num_responses: int) -> torch.Tensor:
    return response_mean(log_w_M, response_M, num_responses)[response_M]


Weights = tuple[torch.Tensor, torch.Tensor]  # the factor on the loss, and where it cut


def _keep(w_M: torch.Tensor, _cap: float) -> Weights:
    return torch.ones_like(w_M), torch.zeros_like(w_M, dtype=torch.bool)


def _bound(w_M: torch.Tensor, cap: float) -> Weights:
    return w_M.clamp(max=cap), w_M > cap


def _mask(w_M: torch.Tensor, cap: float) -> Weights:
    outside_M = (w_M > cap) | (w_M < 1 / cap)
    return torch.where(outside_M, 0.0, w_M), outside_M


def _drop(w_M: torch.Tensor, cap: float) -> Weights:
    outside_M = _mask(w_M, cap)[1]
    return (~outside_M).float(), outside_M


Level = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
CORRECTIONS: dict[str, tuple[Level, Callable[[torch.Tensor, float], Weights]]] = {
    "none": (_token, _keep),
    "tis": (_token, _bound),
    "mis": (_token, _mask),
    "seq_tis": (_product, _bound),
    "seq_mis": (_product, _mask),
    "geo_mis": (_geometric, _drop),
}
"""What the ratio is taken over, and what is done with it."""
