"""The loss of one micro-batch, weighted so that micro-batches add up to the whole step's loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from seerl.algorithms.correction import correct
from seerl.algorithms.kl import kl_estimate
from seerl.algorithms.losses import LossInputs, policy_loss, token_weights
from seerl.config.schema import ActorConfig, AlgorithmConfig
from seerl.policy.packing import PackedBatch
from seerl.types import TrainingBatch, TrainingGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss takes from the configuration (`worker.actor`, `algorithm`, `data`)."""

    loss_type: str
    loss_avg_mode: str
    clip_low: float
    clip_high: float
    clip_dual: float
    tau_positive: float
    tau_negative: float
    entropy_coef: float
    kl_coef: float
    """0 where no KL term stands in the loss."""
    kl_penalty: str
    correction: str
    correction_cap: float
    max_response_length: int


def loss_settings(actor: ActorConfig, algorithm: AlgorithmConfig, max_response_length: int) -> LossSettings:
    """The loss as configured."""
    in_loss = algorithm.use_kl_loss and not algorithm.disable_kl
    return LossSettings(
        loss_type=actor.loss_type,
        loss_avg_mode=actor.loss_avg_mode,
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        clip_dual=actor.clip_ratio_dual,
        tau_positive=actor.tau_positive,
        tau_negative=actor.tau_negative,
        entropy_coef=actor.entropy_coef,
        kl_coef=algorithm.kl_coef if in_loss else 0.0,
        kl_penalty=algorithm.kl_penalty,
        correction=algorithm.rollout_correction,
        correction_cap=algorithm.rollout_correction_cap,
        max_response_length=max_response_length,
    )


@dataclass(slots=True)
class StepMetrics:
    """Sums and maxima over a step's micro-batches, kept on the device until the step's one read-out."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, name: str, value: torch.Tensor) -> None:
        """Adds to a figure that is a total over the step, such as the loss."""
        value = value.detach().float().sum()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_tokens(self, name: str, values_M: torch.Tensor) -> None:
        """Adds per-token values to a figure that is a mean over the step's tokens."""
        self.add(name, values_M)
        self.tokens[name] += values_M.numel()

    def maximum(self, name: str, value: torch.Tensor) -> None:
        value = value.detach().float().max()
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def result(self) -> dict[str, float]:
        """The figures as numbers: totals, token means and maxima."""
        figures = {**self.sums, **self.maxima}
        if not figures:
            return {}
        values = torch.stack(list(figures.values())).tolist()
        return {
            name: value / self.tokens[name] if name in self.tokens else value
            for name, value in zip(figures, values, strict=True)
        }


def micro_batch_loss(
    settings: LossSettings,
    batch: TrainingBatch,
    groups: Sequence[TrainingGroup],
    packed: PackedBatch,
    logprobs_M: torch.Tensor,
    entropy_M: torch.Tensor,
    metrics: StepMetrics,
) -> torch.Tensor:
    """The scalar whose gradients over all micro-batches add up to the gradient of the step's loss.

    `batch` gives the whole step's counts; `groups` are this micro-batch's, in the order in which they are
    packed. Where a group has no old log-probabilities the step is on-policy and they are the present ones,
    detached.
    """
    old_M = _old_logprobs(groups, packed, logprobs_M)
    weights_M = token_weights(
        settings.loss_avg_mode,
        packed.response_M,
        packed.lengths_R,
        loss_tokens=batch.loss_tokens,
        responses=batch.responses,
        max_response_length=settings.max_response_length,
    )
    out = policy_loss(
        settings.loss_type,
        LossInputs(
            logprobs_M=logprobs_M,
            old_logprobs_M=old_M,
            advantages_M=packed.per_token(a for g in groups for a in g.advantages),
            response_M=packed.response_M,
            num_responses=packed.lengths_R.numel(),
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            clip_dual=settings.clip_dual,
            tau_positive=settings.tau_positive,
            tau_negative=settings.tau_negative,
        ),
    )
    token_loss_M = out.token_loss_M
    if all(c.logprobs is not None for g in groups for c in g.completions):
        behaviour_M = packed.per_token(
            c.logprobs for g in groups for c in g.completions if c.logprobs is not None
        )
        token_loss_M = _corrected(settings, token_loss_M, old_M, behaviour_M, packed, metrics)
    loss = (weights_M * token_loss_M).sum()
    metrics.add("actor/pg_loss", loss)
    metrics.add_tokens("actor/pg_clipfrac_higher", out.clipped_high_M)
    metrics.add_tokens("actor/pg_clipfrac_lower", out.clipped_low_M)
    metrics.add_tokens("actor/ppo_kl", old_M - logprobs_M)
    metrics.add_tokens("actor/entropy_loss", entropy_M)
    if settings.kl_coef > 0:
        ref_M = packed.per_token(a for g in groups for a in g.ref_logprobs or ())
        kl = (weights_M * kl_estimate(settings.kl_penalty, logprobs_M, ref_M)).sum()
        metrics.add("actor/kl_loss", kl)
        loss = loss + settings.kl_coef * kl
    if settings.entropy_coef > 0:
        loss = loss - settings.entropy_coef * (weights_M * entropy_M).sum()
    return loss


def _old_logprobs(
    groups: Sequence[TrainingGroup], packed: PackedBatch, logprobs_M: torch.Tensor
) -> torch.Tensor:
    given = [g.old_logprobs is not None for g in groups]
    if not any(given):
        return logprobs_M.detach()
    if not all(given):
        raise ValueError("a micro-batch mixes groups with and without old log-probabilities")
    return packed.per_token(a for g in groups for a in g.old_logprobs or ())


def _corrected(
    settings: LossSettings,
    token_loss_M: torch.Tensor,
    old_M: torch.Tensor,
    behaviour_M: torch.Tensor,
    packed: PackedBatch,
    metrics: StepMetrics,
) -> torch.Tensor:
    """The token losses with the rollout correction; the engine's disagreement is logged in any case."""
    correction = correct(
        settings.correction,
        old_M,
        behaviour_M,
        packed.response_M,
        num_responses=packed.lengths_R.numel(),
        cap=settings.correction_cap,
    )
    metrics.add_tokens("rollout/logprob_diff_mean", correction.abs_diff_M)
    metrics.maximum("rollout/logprob_diff_max", correction.abs_diff_M)
    metrics.add_tokens("rollout/k3", correction.k3_M)
    metrics.add_tokens("rollout/correction_cut", correction.cut_M)
    return token_loss_M * correction.weights_M
