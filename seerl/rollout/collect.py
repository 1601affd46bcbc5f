"""Single completions to groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from seerl.rollout.engine import RolloutEngine, Sampling
from seerl.types import Completion, Group, Prompt


async def collect_groups(
    engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sampling
) -> AsyncIterator[Group]:
    """Hands on each prompt's group as soon as the last of its completions is there, completions by index."""
    waiting: dict[str, dict[int, Completion]] = {p.uid: {} for p in prompts}
    if len(waiting) < len(prompts):
        raise ValueError("two prompts have the same uid: their completions could not be told apart")
    async with aclosing(engine.generate(prompts, sampling)) as sampled:  # ends the engine's work when we end
        async for prompt, place, completion in sampled:
            have = waiting[prompt.uid]
            have[place] = completion
            if len(have) == sampling.n:
                del waiting[prompt.uid]
                yield Group(prompt=prompt, completions=tuple(have[i] for i in range(sampling.n)))
    if waiting:
        raise RuntimeError(
            f"the engine ended with {len(waiting)} prompts unanswered, e.g. {next(iter(waiting))}"
        )
