"""The trained model on one device: log-probabilities of groups, and optimizer steps on batches of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from seerl.config.schema import ActorConfig
from seerl.models.banned import banned_token_ids
from seerl.models.families import DTYPES
from seerl.policy.flops import TrainingFlops
from seerl.policy.forward import MicroBatchLimit, PolicyForward
from seerl.policy.loss import LossSettings, StepMetrics, micro_batch_loss
from seerl.policy.model import LoadedModel, load_model, named_weights
from seerl.policy.optim import make_optimizer, make_scheduler, set_progress
from seerl.policy.packing import G
from seerl.types import FloatArray, TrainingBatch, TrainingGroup

log = logging.getLogger(__name__)


def micro_batch_limit(config: ActorConfig, samples: int, sequence_length: int) -> MicroBatchLimit:
    """The limit that `samples` (a micro_batch_size_per_device key) stands for: with dynamic batching, the
    tokens of that many samples of `sequence_length` (longest prompt + longest response)."""
    if not config.dynamic_batching:
        return MicroBatchLimit(samples=samples)
    return MicroBatchLimit(tokens=config.max_tokens_per_device or samples * sequence_length)


def make_forward(
    config: ActorConfig, model: LoadedModel, *, banned: Sequence[int], temperature: float
) -> PolicyForward:
    """The forward pass as `worker.actor` configures it; bf16 or fp16 by autocast over float32 master
    weights."""
    compute = DTYPES[config.fsdp.mp_param_dtype]
    return PolicyForward(
        model,
        banned=banned,
        temperature=temperature or 1.0,
        autocast=None if compute is torch.float32 else compute,
        packing=config.padding_free,
        share_prefix=config.share_prefix,
    )


class Policy:
    """The model that learns.

    Args:
        config: `worker.actor`.
        settings: what the loss needs of the configuration.
        vocabulary: the tokenizer's length; rows of the output layer beyond it are never sampled.
        total_optimizer_steps: of the whole run, for the learning-rate schedule.
        sequence_length: the longest prompt plus the longest response, in tokens.
    """

    def __init__(
        self,
        config: ActorConfig,
        settings: LossSettings,
        *,
        device: torch.device,
        vocabulary: int,
        temperature: float,
        total_optimizer_steps: int,
        sequence_length: int,
    ) -> None:
        self.config = config
        self.settings = settings
        fsdp = config.fsdp
        if config.optim.strategy == "adamw_bf16":  # AdamW's moments take the type of the weights
            fsdp = fsdp.model_copy(update={"torch_dtype": "bf16"})
        self.model = load_model(config.model, fsdp, device)
        self.banned = banned_token_ids(self.model.config, vocabulary)
        self.forward = make_forward(config, self.model, banned=self.banned, temperature=temperature)
        self._flops_of = TrainingFlops.of(self.model)
        self._flops: float | None = 0.0
        self.optimizer = make_optimizer(self.model.module.parameters(), config.optim)
        self.scheduler = make_scheduler(self.optimizer, config.optim, total_optimizer_steps)
        self.update_limit = micro_batch_limit(
            config, config.micro_batch_size_per_device_for_update, sequence_length
        )
        self.experience_limit = micro_batch_limit(
            config, config.micro_batch_size_per_device_for_experience, sequence_length
        )

    @property
    def module(self) -> torch.nn.Module:
        return self.model.module

    def logprobs(self, groups: Sequence[G]) -> list[tuple[FloatArray, ...]]:
        """Log-probabilities of every response under the present weights, per group."""
        return self.forward.logprobs_of(groups, self.experience_limit)

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """One optimizer step on the whole batch, in as many micro-batches as memory asks for.

        A gradient that is not finite changes nothing: the step is left out and counted.
        """
        metrics = StepMetrics()
        units = self.forward.units(self._teaching(batch.groups))
        flops = self._flops_of(units, self.forward.share_prefix)
        self._flops = None if flops is None or self._flops is None else self._flops + flops
        for members in self.forward.cut(units, self.update_limit):
            chosen = [units[i] for i in members]
            packed = self.forward.pack(chosen)
            logprobs, entropy = self.forward(packed, entropy_gradient=self.settings.entropy_coef > 0)
            loss = micro_batch_loss(self.settings, batch, chosen, packed, logprobs, entropy, metrics)
            loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.max_grad_norm))
        finite = norm == norm and norm != float("inf")
        if finite:
            self.optimizer.step()
        else:
            log.warning("gradient norm is %s: this optimizer step is left out", norm)
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            **metrics.result(),
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "actor/skipped_updates": float(not finite),
        }

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps done, over the whole run."""
        return int(self.scheduler.last_epoch)

    def set_progress(self, optimizer_steps: int) -> None:
        """Continues the schedule after that many optimizer steps."""
        set_progress(self.scheduler, optimizer_steps)

    def take_flops(self) -> float | None:
        """Operations of the updates since the last call; None where they cannot be counted."""
        flops, self._flops = self._flops, 0.0
        return flops

    def _teaching(self, groups: Sequence[TrainingGroup]) -> Sequence[TrainingGroup]:
        """The groups that give a gradient: without KL and entropy terms those of zero advantage give none.

        They still count in the averages; the step's figures are then means over the rest.
        """
        if self.settings.kl_coef > 0 or self.settings.entropy_coef > 0:
            return groups
        return [g for g in groups if any(a.any() for a in g.advantages)] or groups[:1]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The present weights by their `state_dict` names."""
        return named_weights(self.module)
