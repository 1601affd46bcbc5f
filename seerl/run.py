"""A run put together from its configuration: the one place that knows which parts there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from seerl.algorithms.kl import KLController, make_controller
from seerl.checkpoint.store import CheckpointStore, read_trainer_state
from seerl.cluster.devices import local_device
from seerl.config import Config, dump_config
from seerl.data.loader import PromptLoader, ValidationSet
from seerl.errors import UserError
from seerl.policy.loss import loss_settings
from seerl.policy.policy import Policy
from seerl.policy.reference import Reference
from seerl.reward.scorer import Scorer
from seerl.rollout.banned import banned_token_ids
from seerl.rollout.engine import RolloutEngine, Sampling
from seerl.tracking import Trackers, make_trackers

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts that the trainer moves data between."""

    config: Config
    device: torch.device
    loader: PromptLoader
    validation_set: ValidationSet | None
    policy: Policy
    reference: Reference | None
    engine: RolloutEngine
    scorer: Scorer
    kl: KLController
    checkpoints: CheckpointStore
    trackers: Trackers
    decode: Callable[[Sequence[int], bool], str]
    total_steps: int

    @property
    def off_policy(self) -> bool:
        """Whether a step's later optimizer steps train on answers of earlier weights."""
        actor = self.config.worker.actor
        return actor.ppo_epochs > 1 or actor.global_batch_size < self.config.data.rollout_batch_size

    def sampling(self, step: int) -> Sampling:
        """How the answers of one training step are drawn; every step has its own seed."""
        rollout = self.config.worker.rollout
        return Sampling(
            n=rollout.n,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=self.config.data.max_response_length,
            seed=rollout.seed * 1_000_003 + step,
            ignore_eos=rollout.ignore_eos,
        )

    @property
    def validation_sampling(self) -> Sampling:
        """How validation answers are drawn: as in training but once, with `val_override_config` on top."""
        rollout = self.config.worker.rollout
        settings = {
            "n": 1,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_tokens": self.config.data.max_response_length,
            "seed": rollout.seed,
            "ignore_eos": rollout.ignore_eos,
            **rollout.val_override_config,
        }
        return Sampling(**settings)

    def close(self, exit_code: int) -> None:
        """Ends engines, workers and trackers."""
        for end in (self.engine.close, self.scorer.close, self.loader.close):
            end()
        self.trackers.finish(exit_code)
