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
        self._own_checkpoint = True
        self.last_checkpoint: Path | None = None
        """The checkpoint saved, or else resumed from, last."""
        self._validated: tuple[int, float] | None = None
        self._data_state: dict[str, Any] = run.loader.state_dict() if run.loader else {}
        self._timer = StageTimer()

    async def train(self) -> None:
        """Runs to the last step: saves and validates along the way as configured, and at the end."""
        trainer, last = self.run.config.trainer, self.run.total_steps
        await self._sync_weights()
        if trainer.val_only or (trainer.val_before_train and self.step == 0) or self._validation_is_missing:
            await self._validate()
        if trainer.val_only:
            return
        if self.step >= last:
            log.info(
                "step %d of %d: already trained; raise trainer.max_steps or trainer.total_epochs to go on",
                self.step,
                last,
            )
            if self._validated is None:
                await self._validate()
        while self.step < last:
            self.run.trackers.log(await self._step(), self.step)
            # Saved first: whatever goes wrong in a validation, what was learned is there.
            if self.step == last or self._due(trainer.save_freq):
                self.save()
            if self.step == last or self._due(trainer.val_freq):
                await self._validate()

    @property
    def _validation_is_missing(self) -> bool:
        """Whether the run was interrupted between saving this step and validating it."""
        known = self.run.checkpoints.validated_step()
        own = self._own_checkpoint and self._saved_step == self.step
        return own and self._due(self.run.config.trainer.val_freq) and known != self.step

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    async def _step(self) -> dict[str, float]:
        """One step: prompts to answers to scores to advantages to new weights, and the weights to the
        engine."""
        run, timer = self.run, self._timer
        assert run.loader is not None
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
        policy: list[tuple[FloatArray, ...]] | None = None
        ref: list[tuple[FloatArray, ...]] | None = None
        if run.off_policy or kl_in_reward:
            with self._timer.stage("old"):
                policy = run.policy.logprobs(groups)
        if run.reference is not None:
            with self._timer.stage("ref"):
                ref = run.reference.logprobs(groups)
        with self._timer.stage("adv"):
            learnable, metrics = with_advantages(
                algorithm,
                groups,
                kl_coef=run.kl.value if kl_in_reward else None,
                weights=run.scorer.weights,
                off_policy=run.off_policy,
                policy=policy,
                ref=ref,
            )
        if kl_in_reward:
            run.kl.update(metrics["critic/kl"], sum(len(g.completions) for g in groups))
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
            **self._utilization(times["timing_s/update_actor"]),
            "data/epoch": float(self.run.loader.epoch if self.run.loader else 0),
            "data/bad_rows": float(self._bad_rows),
        }

    def _utilization(self, seconds: float) -> dict[str, float]:
        flops = self.run.policy.take_flops()
        return {} if flops is None else {"perf/mfu_actor": flops / (seconds * self.run.peak_flops)}

    @property
    def _bad_rows(self) -> int:
        sets = (self.run.loader, self.run.validation_set)
        return sum(len(one.bad_rows) for one in sets if one is not None)

    async def _validate(self) -> None:
        """Validates the present weights, if there is a set to do it on, and logs the result."""
        run = self.run
        if run.validation_set is None:
            return
        run.trackers.stage("validating")
        metrics, generations = await validate(run)
        run.trackers.log(metrics, self.step)
        run.trackers.log_generations(generations, self.step)
        if "val/reward_score" in metrics:
            self._validated = self.step, metrics["val/reward_score"]
            self._note_score()

    def _note_score(self) -> None:
        if self._validated is None or self.run.config.trainer.val_only or not self._own_checkpoint:
            return
        if self._validated[0] == self.step == self._saved_step:
            self.run.checkpoints.note_score(*self._validated)

    def save(self) -> Path | None:
        """Writes a checkpoint of the last finished step; None where nothing has been learned since the last
        one."""
        if self.step == 0 or self._saved_step == self.step:
            return None
        run = self.run
        run.trackers.stage("saving")
        state = {
            "data": self._data_state,
            "kl": run.kl.state_dict(),
            "trackers": run.trackers.state_dict(),
            "optimizer_steps": run.policy.optimizer_steps,
        }
        path = run.checkpoints.save(self.step, self._trained(run.config.trainer.save_model_only), state)
        self._saved_step, self._own_checkpoint, self.last_checkpoint = self.step, True, path
        log.info("checkpoint saved: %s", path)
        self._note_score()
        return path

    def resume(self, path: Path) -> None:
        """Continues from a checkpoint as if nothing had come between; `build_run` has placed the loader."""
        state = load(path, self._trained(weights_only=self.run.config.trainer.val_only))
        self.step = self._saved_step = int(state["step"])
        self.last_checkpoint = path
        self._own_checkpoint = path.parent.resolve() == self.run.checkpoints.folder.resolve()
        log.info("resumed from %s", path)
        if not state["model_only"]:
            self.run.policy.set_progress(int(state["optimizer_steps"]))
            self.run.kl.load_state_dict(state["kl"])

    @property
    def how_to_resume(self) -> str:
        """What a user types to go on from the last checkpoint."""
        trainer, path = self.run.config.trainer, self.last_checkpoint
        if trainer.find_last_checkpoint and not trainer.load_checkpoint_path:
            return "The same command resumes."
        return f"To go on from there: trainer.load_checkpoint_path={path}" if path else ""

    def _trained(self, weights_only: bool) -> Trained:
        policy = self.run.policy
        return Trained(module=policy.module, optimizer=None if weights_only else policy.optimizer)
