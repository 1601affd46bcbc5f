"""Policy losses per token, and how they are averaged. Pure functions on flat tensors, all in float32.

Axes: M response tokens of a micro-batch, R its responses. gspo, gspo_token and gmpo look at whole responses,
so a response must not be torn over micro-batches (it never is). Sources are named at each function;
`docs/algorithms.md` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from seerl.algorithms.kl import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss may look at. p: policy, q: policy at the start of the step ("old")."""

    logprobs_M: torch.Tensor  # p, carries the gradient
    old_logprobs_M: torch.Tensor  # q
    advantages_M: torch.Tensor
    response_M: torch.Tensor
    num_responses: int
    clip_low: float = 0.2
    clip_high: float = 0.3
    clip_dual: float = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    @property
    def log_ratio_M(self) -> torch.Tensor:
        """p - q, clamped so that its exponential stays finite."""
        return (self.logprobs_M.float() - self.old_logprobs_M.float()).clamp(
            -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """Per token: the loss, and whether the upper or the lower bound took the gradient away."""

    token_loss_M: torch.Tensor
    clipped_high_M: torch.Tensor
    clipped_low_M: torch.Tensor


def response_mean(values_M: torch.Tensor, response_M: torch.Tensor, num_responses: int) -> torch.Tensor:
    """(R,) mean of each response's tokens."""
    total_R = torch.zeros(num_responses, dtype=values_M.dtype, device=values_M.device)
    total_R = total_R.index_add(0, response_M, values_M)
    return total_R / torch.bincount(response_M, minlength=num_responses).clamp(min=1)


def default(inputs: LossInputs) -> LossOutputs:
    """PPO's clipped objective (1707.06347) with a dual clip for A < 0 (1912.09729)."""
    return _clipped(inputs, inputs.log_ratio_M.exp())


def gspo(inputs: LossInputs) -> LossOutputs:
    """The default with one ratio per response, exp(mean_t (p - q)) (2507.18071)."""
    mean_R = response_mean(inputs.log_ratio_M, inputs.response_M, inputs.num_responses)
    return _clipped(inputs, mean_R[inputs.response_M].exp())


def gspo_token(inputs: LossInputs) -> LossOutputs:
    """gspo's value, with each token's own gradient: stopgrad(s) x exp(p - stopgrad(p)) (2507.18071)."""
    mean_R = response_mean(inputs.log_ratio_M.detach(), inputs.response_M, inputs.num_responses)
    own_M = (inputs.logprobs_M - inputs.logprobs_M.detach()).float().exp()
    return _clipped(inputs, mean_R[inputs.response_M].exp() * own_M)


def cispo(inputs: LossInputs) -> LossOutputs:
    """-A p stopgrad(clip(ratio)): clipped tokens keep a gradient (2506.13585)."""
    ratio_M = inputs.log_ratio_M.exp().detach()
    low, high = 1 - inputs.clip_low, 1 + inputs.clip_high
    return LossOutputs(
        token_loss_M=-inputs.advantages_M * inputs.logprobs_M.float() * ratio_M.clamp(low, high),
        clipped_high_M=ratio_M > high,
        clipped_low_M=ratio_M < low,
    )


def sapo(inputs: LossInputs) -> LossOutputs:
    """-A (4 / tau) sigmoid(tau (ratio - 1)): a soft gate instead of a clip (2511.20347)."""
    ratio_M = inputs.log_ratio_M.exp()
    tau_M = torch.where(inputs.advantages_M >= 0, inputs.tau_positive, inputs.tau_negative)
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1)) * 4 / tau_M
    never_M = torch.zeros_like(ratio_M, dtype=torch.bool)
    return LossOutputs(
        token_loss_M=-inputs.advantages_M * gate_M, clipped_high_M=never_M, clipped_low_M=never_M
    )


def gmpo(inputs: LossInputs) -> LossOutputs:
    """-A x the geometric mean of token ratios, each clipped on the side its advantage pushes to (2507.20673).

    The clip acts on p - q with the bounds log(1 - low) and log(1 + high).
    """
    low = torch.log1p(torch.tensor(-min(inputs.clip_low, 1 - 1e-6))).item()
    high = torch.log1p(torch.tensor(inputs.clip_high)).item()
    log_ratio_M, positive_M = inputs.log_ratio_M, inputs.advantages_M >= 0
    clipped_M = torch.where(positive_M, log_ratio_M.clamp(max=high), log_ratio_M.clamp(min=low))
    mean_R = response_mean(clipped_M, inputs.response_M, inputs.num_responses)
    return LossOutputs(
        token_loss_M=-inputs.advantages_M * mean_R[inputs.response_M].exp(),
        clipped_high_M=positive_M & (log_ratio_M > high),
        clipped_low_M=~positive_M & (log_ratio_M < low),
    )


def gpg(inputs: LossInputs) -> LossOutputs:
    """-A p: the plain policy gradient (2504.02546)."""
    never_M = torch.zeros_like(inputs.logprobs_M, dtype=torch.bool)
    loss_M = -inputs.advantages_M * inputs.logprobs_M.float()
    return LossOutputs(token_loss_M=loss_M, clipped_high_M=never_M, clipped_low_M=never_M)


LOSSES: dict[str, Callable[[LossInputs], LossOutputs]] = {
    "default": default,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "gpg": gpg,
}


def policy_loss(name: str, inputs: LossInputs) -> LossOutputs:
    """The named loss, per token."""
    return LOSSES[name](inputs)


def _clipped(inputs: LossInputs, ratio_M: torch.Tensor) -> LossOutputs:
    advantages_M = inputs.advantages_M
    bounded_M = ratio_M.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    plain_M, held_M = -advantages_M * ratio_M, -advantages_M * bounded_M
    loss_M = torch.maximum(plain_M, held_M)
    negative_M = advantages_M < 0
    ceiling_M = -advantages_M * inputs.clip_dual
    beyond_dual_M = negative_M & (loss_M > ceiling_M)
    return LossOutputs(
        token_loss_M=torch.where(negative_M, torch.minimum(loss_M, ceiling_M), loss_M),
        clipped_high_M=(advantages_M > 0) & (held_M > plain_M),
        clipped_low_M=(negative_M & (held_M > plain_M)) | beyond_dual_M,
    )


def token_weights(
    mode: str,
    response_M: torch.Tensor,
    lengths_R: torch.Tensor,
    *,
    loss_tokens: int,
    responses: int,
    max_response_length: int,
) -> torch.Tensor:
    """(M,) weights that turn token losses into their average over a whole optimizer step.

    `loss_tokens` and `responses` are counts over the whole step, so that sums over micro-batches and devices
    add up to the same average however the step is cut.

    Raises:
        ValueError: for an unknown mode.
    """
    if mode == "token":
        return torch.full(response_M.shape, 1.0 / loss_tokens, device=response_M.device)
    if mode == "seq":
        return (1.0 / (lengths_R.float() * responses))[response_M]
    if mode == "seq_sum":
        return torch.full(response_M.shape, 1.0 / responses, device=response_M.device)
    if mode == "seq_sum_norm":
        return torch.full(response_M.shape, 1.0 / (responses * max_response_length), device=response_M.device)
    raise ValueError(f"unknown averaging mode {mode!r}")
