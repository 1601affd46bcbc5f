"""Policy losses per token, and how they are averaged. Pure functions on flat tensors.

Axes: M response tokens of a micro-batch, R its responses. Everything is computed in float32 (float64 stays
float64) whatever comes in, and nothing makes the host wait for the device. Sources are named at each
function; `docs/algorithms.md` has the formulas.

gspo, gspo_token and gmpo look at whole responses (`WHOLE_RESPONSES`): a response must not be torn over
micro-batches. The others are sums over tokens and may be cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from seerl.algorithms.kl import LOG_RATIO_LIMIT
from seerl.algorithms.tokens import at_least_float32, response_mean, where_counted


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
    mask_M: torch.Tensor | None = None  # bool, the tokens that count; None: all

    @property
    def p_M(self) -> torch.Tensor:
        """The policy's log-probabilities; 0 on tokens that do not count, as in q_M and A_M."""
        return where_counted(at_least_float32(self.logprobs_M), self.mask_M)

    @property
    def q_M(self) -> torch.Tensor:
        return where_counted(at_least_float32(self.old_logprobs_M.detach()), self.mask_M)

    @property
    def A_M(self) -> torch.Tensor:
        return where_counted(at_least_float32(self.advantages_M), self.mask_M)

    @property
    def ratio_M(self) -> torch.Tensor:
        """exp(p - q)"""
        return bounded_exp(self.p_M - self.q_M)

    def mean_R(self, values_M: torch.Tensor) -> torch.Tensor:
        """(R,) masked mean over each response's tokens."""
        return response_mean(values_M, self.response_M, self.num_responses, self.mask_M)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """Per token: the loss, and where a bound replaced the ratio. 0 and False on tokens that do not count."""

    token_loss_M: torch.Tensor
    clipped_high_M: torch.Tensor
    """Bool: the clip to [1 - low, 1 + high] raised the loss (EasyR1's `pg_clipfrac_higher`)."""
    clipped_low_M: torch.Tensor
    """Bool: the dual clip lowered it (EasyR1's `pg_clipfrac_lower`)."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio clamped so that it stays finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def default(inputs: LossInputs) -> LossOutputs:
    """PPO's clipped objective (1707.06347) with a dual clip for A < 0 (1912.09729)."""
    return _clipped(inputs, inputs.ratio_M)


def gspo(inputs: LossInputs) -> LossOutputs:
    """The default with one ratio per response, s = exp(mean_t (p - q)) (2507.18071)."""
    s_R = bounded_exp(inputs.mean_R(inputs.p_M - inputs.q_M))
    return _clipped(inputs, s_R[inputs.response_M])


def gspo_token(inputs: LossInputs) -> LossOutputs:
    """gspo's value, with each token's own gradient: stopgrad(s) x exp(p - stopgrad(p)) (2507.18071)."""
    p_M = inputs.p_M
    s_R = bounded_exp(inputs.mean_R(p_M.detach() - inputs.q_M))
    return _clipped(inputs, s_R[inputs.response_M] * (p_M - p_M.detach()).exp())


def cispo(inputs: LossInputs) -> LossOutputs:
    """-A p stopgrad(clip(ratio)): clipped tokens keep a gradient (2506.13585)."""
    ratio_M = inputs.ratio_M.detach()
    held_M = ratio_M.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    return LossOutputs(
        token_loss_M=-inputs.A_M * inputs.p_M * held_M,
        clipped_high_M=held_M != ratio_M,
        clipped_low_M=_nowhere(inputs),
    )


def sapo(inputs: LossInputs) -> LossOutputs:
    """-A (4 / tau) sigmoid(tau (ratio - 1)): a soft gate instead of a clip (2511.20347)."""
    advantages_M, ratio_M = inputs.A_M, inputs.ratio_M
    tau_M = torch.full_like(ratio_M, inputs.tau_positive).masked_fill(advantages_M < 0, inputs.tau_negative)
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1)) * 4 / tau_M
    return _unclipped(inputs, -advantages_M * gate_M)


def gmpo(inputs: LossInputs) -> LossOutputs:
    """The default with one ratio per response: the geometric mean of its tokens' ratios, each first clipped
    on the side its advantage pushes to (2507.20673).

    The bounds are those of the default, in logarithms: p - q stays below log(1 + high) where A >= 0, above
    log(1 - low) where A < 0. The paper states them in logarithms outright (e^-0.4, e^0.4), which is low 0.33,
    high 0.49 here. The mean then keeps the bound by itself; what the default adds is the dual clip.
    """
    low = math.log1p(-inputs.clip_low) if inputs.clip_low < 1 else -math.inf
    high = math.log1p(inputs.clip_high)
    log_ratio_M, positive_M = inputs.p_M - inputs.q_M, inputs.A_M >= 0
    held_M = torch.where(positive_M, log_ratio_M.clamp(max=high), log_ratio_M.clamp(min=low))
    out = _dual_clipped(inputs, bounded_exp(inputs.mean_R(held_M))[inputs.response_M])
    return LossOutputs(
        token_loss_M=out.token_loss_M,
        clipped_high_M=held_M != log_ratio_M,
        clipped_low_M=out.clipped_low_M,
    )


def gpg(inputs: LossInputs) -> LossOutputs:
    """-A p: the plain policy gradient (2504.02546)."""
    return _unclipped(inputs, -inputs.A_M * inputs.p_M)


LOSSES: dict[str, Callable[[LossInputs], LossOutputs]] = {
    "default": default,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "gpg": gpg,
}
"""A new loss is a function and a row here."""

WHOLE_RESPONSES = frozenset({"gspo", "gspo_token", "gmpo"})
"""Losses that need every token of a response in the same micro-batch."""


def policy_loss(name: str, inputs: LossInputs) -> LossOutputs:
    """The named loss, per token."""
    return LOSSES[name](inputs)


def _clipped(inputs: LossInputs, ratio_M: torch.Tensor) -> LossOutputs:
    """max(-A ratio, -A clip(ratio)), then the dual clip."""
    bounded_M = ratio_M.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    return _dual_clipped(inputs, ratio_M, bounded_M)


def _dual_clipped(
    inputs: LossInputs, ratio_M: torch.Tensor, bounded_M: torch.Tensor | None = None
) -> LossOutputs:
    """The larger of -A ratio and -A bounded; where A < 0 no more than -A x dual."""
    advantages_M = inputs.A_M
    plain_M = -advantages_M * ratio_M
    held_M = plain_M if bounded_M is None else -advantages_M * bounded_M
    loss_M, ceiling_M = torch.where(held_M > plain_M, held_M, plain_M), -advantages_M * inputs.clip_dual
    beyond_M = (advantages_M < 0) & (loss_M > ceiling_M)
    return LossOutputs(
        token_loss_M=torch.where(beyond_M, ceiling_M, loss_M),
        clipped_high_M=held_M > plain_M,
        clipped_low_M=beyond_M,
    )


def _unclipped(inputs: LossInputs, token_loss_M: torch.Tensor) -> LossOutputs:
    nowhere_M = _nowhere(inputs)
    return LossOutputs(token_loss_M=token_loss_M, clipped_high_M=nowhere_M, clipped_low_M=nowhere_M)


def _nowhere(inputs: LossInputs) -> torch.Tensor:
    return torch.zeros_like(inputs.response_M, dtype=torch.bool)


def token_weights(
    mode: str,
    response_M: torch.Tensor,
    lengths_R: torch.Tensor,
    *,
    loss_tokens: int,
    responses: int,
    max_response_length: int,
    mask_M: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(M,) weights that turn token losses into their average over a whole optimizer step.

    Args:
        mode: `token`, sum over tokens / tokens; `seq`, mean over responses of their means; `seq_sum`, mean
            over responses of their sums; `seq_sum_norm`, sum / (responses x max_response_length).
        lengths_R: how many of each response's tokens count (`mask_M`): all of the response's, also where
            some of them are in another micro-batch.
        loss_tokens, responses: counts over the whole step, all devices and micro-batches, so that the sums of
            loss x weight add up to the same average however the step is cut.
        mask_M: bool, the tokens that count; the others weigh 0.

    Raises:
        ValueError: for an unknown mode.
    """
    if mode == "seq":
        weights_M = (1.0 / (lengths_R.to(dtype).clamp(min=1) * responses))[response_M]
        return where_counted(weights_M, mask_M)
    divisors = {
        "token": loss_tokens,
        "seq_sum": responses,
        "seq_sum_norm": responses * max_response_length,
    }
    if mode not in divisors:
        raise ValueError(f"unknown averaging mode {mode!r}; known are seq, {', '.join(divisors)}")
    weights_M = torch.full(response_M.shape, 1.0 / divisors[mode], dtype=dtype, device=response_M.device)
    return where_counted(weights_M, mask_M)
