"""Training, read from top to bottom: `Trainer.train` is the loop, `_step` one step of it.

One task runs it all. It waits (and can be interrupted) only while answers are sampled and scored and while
weights move; an optimizer step is never cut in half. What a checkpoint needs is noted right after each
update, without waiting in between, so an interrupted step is as if it had not begun.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from seerl.checkpoint.store import Trained, load
from seerl.experience import Collected, collect, optimizer_batches, with_advantages
from seerl.metrics import group_metrics, memory_metrics, timing_metrics
from seerl.run import Run
from seerl.timing import StageTimer
from seerl.types import FloatArray, ScoredGroup, TrainingGroup
from seerl.validation import validate

log = logging.getLogger(__name__)


class Trainer:
    """Improves the policy of a run, step by step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.step = 0
        self._saved_step: int | None = None
        self._best: float | None = None
        self._last_score = float("-inf")
        self._data_state: dict[str, Any] = run.loader.state_dict()
        self._timer = StageTimer()

    async def train(self) -> None:
        """Runs to the last step: validates and saves along the way as configured, and at the end."""
        trainer = self.run.config.trainer
        await self._sync_weights()
        validated = None
        if trainer.val_only or (trainer.val_before_train and self.step == 0):
            validated = await self._validate()
        if trainer.val_only:
            return
        if self.step >= self.run.total_steps:
            log.info(
                "step %d of %d: already trained; raise trainer.max_steps or trainer.total_epochs to go on",
                self.step,
                self.run.total_steps,
            )
        while self.step < self.run.total_steps:
            metrics = await self._step()
            self.run.trackers.log(metrics, self.step)
            if trainer.val_freq > 0 and self.step % trainer.val_freq == 0:
                validated = await self._validate()
            if trainer.save_freq > 0 and self.step % trainer.save_freq == 0:
                self.save(best=self._is_best(validated))
        if validated != self.step:
            await self._validate()
        if self._saved_step != self.step:
            self.save()

    async def _step(self) -> dict[str, float]:
        """One step: prompts to answers to scores to advantages to new weights, and the weights to the
        engine."""
        run, timer = self.run, self._timer
        with timer.stage("step"):
            run.trackers.stage("generating")
            collected = await collect(
                run.config, run.loader.take, run.engine, run.scorer, run.sampling(self.step + 1), timer
            )
            await run.engine.sleep()
            run.trackers.stage("updating")
            groups, metrics = self._learnable(collected.groups)
            metrics |= self._update(groups)
            self.step += 1
            self._data_state = run.loader.state_dict()
            await self._sync_weights()
        return metrics | self._step_metrics(collected)

    def _learnable(self, groups: tuple[ScoredGroup, ...]) -> tuple[list[TrainingGroup], dict[str, float]]:
        """The passes that the configured mathematics needs, and the advantages."""
        run, algorithm = self.run, self.run.config.algorithm
        kl_in_reward = run.reference is not None and not algorithm.use_kl_loss
        old: list[tuple[FloatArray, ...]] | None = None
        ref: list[tuple[FloatArray, ...]] | None = None
        if run.off_policy or kl_in_reward:
            with self._timer.stage("old"):
                old = run.policy.logprobs(groups)
        if run.reference is not None:
            with self._timer.stage("ref"):
                ref = run.reference.logprobs(groups)
        with self._timer.stage("adv"):
            learnable, metrics = with_advantages(
                algorithm,
                groups,
                kl_coef=run.kl.value if kl_in_reward else 0.0,
                weights=run.scorer.weights,
                old=old,
                ref=ref,
            )
        if kl_in_reward:
            run.kl.update(metrics["critic/kl"], len(groups) * run.config.worker.rollout.n)
        return learnable, metrics

    def _update(self, groups: list[TrainingGroup]) -> dict[str, float]:
        """The step's optimizer steps; figures are means over them."""
        actor = self.run.config.worker.actor
        batches = optimizer_batches(groups, actor.global_batch_size) * actor.ppo_epochs
        with self._timer.stage("update_actor"):
            figures = [self.run.policy.update(batch) for batch in batches]
        names = {name for f in figures for name in f}
        return {name: float(np.mean([f[name] for f in figures if name in f])) for name in sorted(names)}

    async def _sync_weights(self) -> None:
        with self._timer.stage("sync"):
            await self.run.engine.wake()
            await self.run.engine.update_weights(self.run.policy.weights(), self.step)

    def _step_metrics(self, collected: Collected) -> dict[str, float]:
        data = self.run.config.data
        figures = group_metrics(collected.groups, max_prompt=data.max_prompt_length)
        response_tokens = sum(c.token_ids.size for g in collected.groups for c in g.completions)
        times = timing_metrics(
            self._timer.take(), total_tokens=figures["perf/total_num_tokens"], response_tokens=response_tokens
        )
        rewards = self.run.scorer.metrics()
        return {
            **figures,
            **collected.metrics,
            **rewards,
            **times,
            **memory_metrics(self.run.device),
            "perf/mfu_actor": self.run.policy.take_flops()
            / (times["timing_s/update_actor"] * self.run.peak_flops),
            "data/epoch": float(self.run.loader.epoch),
            "data/bad_rows": float(self._bad_rows),
        }

    @property
    def _bad_rows(self) -> int:
        validation = self.run.validation_set
        return len(self.run.loader.bad_rows) + (len(validation.bad_rows) if validation else 0)

    async def _validate(self) -> int | None:
        """Validates the present weights and logs the result; the step it was done at, None without a set."""
        run = self.run
        if run.validation_set is None:
            return None
        run.trackers.stage("validating")
        metrics, generations = await validate(run)
        run.trackers.log(metrics, self.step)
        run.trackers.log_generations(generations, self.step)
        self._last_score = metrics["val/reward_score"]
        return self.step

    def _is_best(self, validated: int | None) -> bool:
        if validated != self.step or (self._best is not None and self._last_score <= self._best):
            return False
        self._best = self._last_score
        return True

    def save(self, *, best: bool = False) -> Path | None:
        """Writes a checkpoint of the last finished step; None where nothing has been learned since the last
        one."""
        if self.step == 0 or self._saved_step == self.step:
            return None
        run = self.run
        run.trackers.stage("saving")
        state = {
            "data": self._data_state,
            "kl": run.kl.state_dict(),
            "best_score": self._best,
            "trackers": run.trackers.state_dict(),
            "scheduler": run.policy.scheduler.state_dict(),
        }
        path = run.checkpoints.save(
            self.step, self._trained(), state, model_only=run.config.trainer.save_model_only, best=best
        )
        self._saved_step = self.step
        log.info("checkpoint saved: %s", path)
        return path

    def resume(self, path: Path) -> None:
        """Continues from a checkpoint as if nothing had come between."""
        state = load(path, self._trained())
        self.step = int(state["step"])
        log.info("resumed from %s", path)
        if state["model_only"]:
            return
        self._saved_step = self.step
        self._best = state["best_score"]
        self.run.kl.load_state_dict(state["kl"])
        self.run.loader.load_state_dict(state["data"])
        self._data_state = state["data"]

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint of the run's folder."""
        return self.run.checkpoints.latest()

    def _trained(self) -> Trained:
        policy = self.run.policy
        return Trained(module=policy.module, optimizer=policy.optimizer, scheduler=policy.scheduler)
