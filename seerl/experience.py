"""From prompts to what the policy learns from: sampled, scored, filtered, with advantages.

Scoring consumes groups as soon as their last completion is there and runs in processes of its own, so it
waits for nothing but the worker pool, and only the end of `sample_and_score` waits for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from seerl.algorithms.advantages import (
    AdvantageInputs,
    advantages,
    degenerate_groups,
    returns_to_go,
    token_rewards,
)
from seerl.algorithms.filtering import keep_group
from seerl.algorithms.kl import kl_estimate
from seerl.config.schema import AlgorithmConfig, Config
from seerl.errors import UserError
from seerl.reward.scorer import Scorer
from seerl.rollout.collect import collect_groups
from seerl.rollout.engine import RolloutEngine, Sampling
from seerl.timing import StageTimer
from seerl.types import FloatArray, Prompt, ScoredGroup, TrainingBatch, TrainingGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """One step's scored groups, in the order of their prompts, and what was met on the way."""

    groups: tuple[ScoredGroup, ...]
    metrics: dict[str, float]


async def sample_and_score(
    engine: RolloutEngine,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    timer: StageTimer,
) -> list[ScoredGroup]:
    """Answers the prompts and scores the answers, in the order of the prompts.

    A group none of whose completions could be scored is left out.
    """
    scoring: dict[str, asyncio.Task[ScoredGroup | None]] = {}
    try:
        with timer.stage("gen"):
            async for group in collect_groups(engine, prompts, sampling):
                scoring[group.prompt.uid] = asyncio.create_task(scorer.score(group))
        with timer.stage("reward"):
            scored = await asyncio.gather(*(scoring[p.uid] for p in prompts))
    except BaseException:
        for task in scoring.values():
            task.cancel()
        raise
    return [group for group in scored if group is not None]


async def collect(
    config: Config,
    take: Callable[[int], Sequence[Prompt]],
    engine: RolloutEngine,
    scorer: Scorer,
    sampling: Sampling,
    timer: StageTimer,
) -> Collected:
    """Scored groups for one step: `rollout_batch_size` of them, or, filtered online, as many that pass.

    Raises:
        UserError: when filtering has not filled the batch within `trainer.max_try_make_batch` rounds.
    """
    wanted = config.data.rollout_batch_size
    at_a_time = config.data.mini_rollout_batch_size or wanted
    limit = config.trainer.max_try_make_batch
    kept: list[ScoredGroup] = []
    dropped: Counter[str] = Counter()
    asked = rounds = 0
    while len(kept) < wanted if config.algorithm.online_filtering else asked < wanted:
        if 0 < limit <= rounds and config.algorithm.online_filtering:
            raise UserError(_unfilled(config, len(kept), dropped))
        rounds += 1
        count = at_a_time if config.algorithm.online_filtering else min(at_a_time, wanted - asked)
        with timer.stage("data"):
            prompts = take(count)
        asked += count
        scored = await sample_and_score(engine, scorer, prompts, sampling, timer)
        dropped["unscored"] += len(prompts) - len(scored)
        for group in scored:
            keep, reason = _filtered(config.algorithm, group)
            if keep:
                kept.append(group)
            else:
                dropped[reason] += 1
    if not kept:
        raise UserError("no completion of this step could be scored; see the first errors logged above")
    metrics = {f"batch/dropped_{reason}": float(count) for reason, count in sorted(dropped.items()) if count}
    if config.algorithm.online_filtering:
        metrics |= {"batch/rounds": float(rounds), "batch/surplus_groups": float(max(0, len(kept) - wanted))}
    return Collected(groups=tuple(kept[:wanted]), metrics=metrics)


def _filtered(config: AlgorithmConfig, group: ScoredGroup) -> tuple[bool, str]:
    if not config.online_filtering:
        return True, ""
    key = config.filter_key
    try:
        values = [s.overall if key == "overall" else s.parts[key] for s in group.scores]
    except KeyError:
        known = ", ".join(["overall", *group.scores[0].parts])
        raise UserError(f"algorithm.filter_key={key}: the reward function gives {known}") from None
    return keep_group(values, config.filter_low, config.filter_high)


def _unfilled(config: Config, kept: int, dropped: Counter[str]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common() if count)
    bounds = config.algorithm
    return (
        f"online filtering kept {kept} of the {config.data.rollout_batch_size} groups a step needs in "
        f"{config.trainer.max_try_make_batch} rounds (dropped: {reasons}). Groups are kept where "
        f"{bounds.filter_low} < mean {bounds.filter_key} < {bounds.filter_high}: widen that range, use "
        "easier or harder data, raise trainer.max_try_make_batch (-1: no limit), or set "
        "algorithm.online_filtering=false"
    )


def with_advantages(
    config: AlgorithmConfig,
    groups: Sequence[ScoredGroup],
    *,
    kl_coef: float | None,
    weights: Mapping[str, float],
    off_policy: bool,
    policy: Sequence[tuple[FloatArray, ...]] | None,
    ref: Sequence[tuple[FloatArray, ...]] | None,
) -> tuple[list[TrainingGroup], dict[str, float]]:
    """Advantages of every response token over the whole step, and the step's reward figures.

    Args:
        kl_coef: times the KL estimate it is taken off the token rewards; None: no KL in the reward.
        weights: of a list of rewards by name, for the estimators that look at each by itself.
        off_policy: whether `policy` goes into the groups, for the loss's ratio. On-policy the update takes
            its own log-probabilities, so that the ratio is exactly 1.
        policy, ref: per group, per response (T,) log-probabilities; both are needed for the KL.
    """
    lengths = [c.token_ids.size for g in groups for c in g.completions]
    lengths_R = torch.tensor(lengths)
    response_M = torch.repeat_interleave(torch.arange(len(lengths)), lengths_R)
    group_R = torch.tensor([i for i, g in enumerate(groups) for _ in g.completions])
    scores_R = torch.tensor([s.overall for g in groups for s in g.scores], dtype=torch.float32)
    penalty_M: torch.Tensor | None = None
    metrics = {"batch/degenerate_groups": float(degenerate_groups(scores_R, group_R))}
    if kl_coef is not None:
        assert policy is not None
        assert ref is not None
        kl_M = kl_estimate(config.kl_penalty, _flat(policy), _flat(ref))
        penalty_M = kl_coef * kl_M
        metrics |= {"critic/kl": float(kl_M.mean()), "critic/kl_coef": kl_coef}
    components = {
        name: torch.tensor([s.parts.get(name, 0.0) for g in groups for s in g.scores]) for name in weights
    }
    inputs = AdvantageInputs(
        token_rewards_M=token_rewards(scores_R, lengths_R, penalty_M),
        response_M=response_M,
        group_R=group_R,
        components=components,
        component_weights=weights,
        gamma=config.gamma,
    )
    advantages_M = advantages(config.adv_estimator, inputs)
    figures = {
        "score": scores_R,
        "rewards": inputs.rewards_R,
        "returns": returns_to_go(inputs),
        "advantages": advantages_M,
    }
    for name, values in figures.items():
        metrics |= summary(f"critic/{name}", values.numpy())
    pieces = iter(np.split(advantages_M.float().numpy(), np.cumsum(lengths)[:-1]))
    return [
        TrainingGroup(
            prompt=g.prompt,
            completions=g.completions,
            advantages=tuple(next(pieces) for _ in g.completions),
            old_logprobs=policy[i] if off_policy and policy is not None else None,
            ref_logprobs=None if ref is None else ref[i],
        )
        for i, g in enumerate(groups)
    ], metrics


def _flat(arrays: Sequence[tuple[FloatArray, ...]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([a for group in arrays for a in group]))


def summary(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, largest and smallest of a figure."""
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def optimizer_batches(groups: Sequence[TrainingGroup], size: int) -> list[TrainingBatch]:
    """The step's groups in order, `size` prompts to an optimizer step, each with its own global counts."""
    batches = []
    for start in range(0, len(groups), size):
        chosen = tuple(groups[start : start + size])
        batches.append(
            TrainingBatch(
                groups=chosen,
                loss_tokens=sum(g.response_tokens for g in chosen),
                responses=sum(len(g.completions) for g in chosen),
            )
        )
    return batches
