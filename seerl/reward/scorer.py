"""Groups in, scored groups out.

No fault of one sample changes another sample's score: a call that fails as a whole is repeated sample by
sample, and only those that fail alone are at fault. So a group of n costs at most n + 1 time limits of worker
time per reward, even if every one of its samples loops for ever; and a function that has not returned once in
many calls stops the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from seerl.config.schema import RewardConfig
from seerl.errors import UserError
from seerl.reward.loading import Entry, reward_entries
from seerl.reward.outcome import CallFault, Outcome
from seerl.reward.pool import RewardPool
from seerl.types import Completion, Group, Prompt, Score, ScoredGroup

log = logging.getLogger(__name__)
_SHOWN = 2000
"""How many characters of a response or a ground truth a message shows."""


class Scorer:
    """Scores completions with the configured reward, in worker processes of its own.

    Args:
        decode: token ids and whether to leave special tokens out -> text.

    Raises:
        UserError: the configuration names no reward that exists.
    """

    def __init__(self, config: RewardConfig, decode: Callable[[Sequence[int], bool], str]) -> None:
        self._config = config
        self._decode = decode
        self._entries = reward_entries(config)
        self._errors: Counter[str] = Counter()
        self._unscored = 0
        self._told: set[str] = set()
        self._too_slow_together: set[int] = set()
        self._pool = RewardPool(self._entries, workers=config.num_workers, timeout_s=config.timeout_s)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward of a list by its name, as `Score.parts` has them; empty for a single one."""
        return {e.name: e.weight for e in self._entries} if len(self._entries) > 1 else {}

    async def score(self, group: Group) -> ScoredGroup | None:
        """The group with a score per completion.

        A completion that cannot be scored gets 0 with `on_error=zero` and is left out of the group with
        `skip`. One that no reward applies to (TRL style's None) is always left out: that is no fault.

        Returns:
            None if no completion is left.

        Raises:
            UserError: the function cannot be loaded or never returns, or, with `on_error=raise`, could not
                score a sample.
        """
        inputs = [self._reward_input(group.prompt, c) for c in group.completions]
        by_entry = await asyncio.gather(*(self._of_entry(i, inputs) for i in range(len(self._entries))))
        kept: list[tuple[Completion, Score]] = []
        for completion, reward_input, *outcomes in zip(group.completions, inputs, *by_entry, strict=True):
            score = _combined(self._entries, outcomes)
            if score is None:
                self._report_unscored(group.prompt)
                continue
            if score.error is not None:
                self._report(group.prompt, reward_input["response"], outcomes, score.error)
                if self._config.on_error == "skip":
                    continue
            kept.append((completion, score))
        if not kept:
            return None
        completions, scores = zip(*kept, strict=True)
        return ScoredGroup(prompt=group.prompt, completions=completions, scores=scores)

    def metrics(self) -> dict[str, float]:
        """How many samples could not be scored since this was last asked, in all and by kind of fault.

        And as `reward/unscored`, if there are any, how many no reward applied to.
        """
        errors, self._errors = self._errors, Counter()
        unscored, self._unscored = self._unscored, 0
        figures = {"reward/errors": float(errors.total())}
        figures |= {f"reward/errors/{kind}": float(count) for kind, count in sorted(errors.items())}
        return figures | ({"reward/unscored": float(unscored)} if unscored else {})

    def close(self) -> None:
        """Ends the workers."""
        self._pool.close()

    def _reward_input(self, prompt: Prompt, completion: Completion) -> dict[str, Any]:
        return {
            "response": self._decode(completion.token_ids.tolist(), self._config.skip_special_tokens),
            "response_length": int(completion.token_ids.size),
            "ground_truth": prompt.ground_truth,
            "prompt": prompt.text,
            "images": list(prompt.media.images) if prompt.media else [],
            "finish_reason": completion.finish_reason,
            "uid": prompt.uid,
            "extra": dict(prompt.columns),
        }

    async def _of_entry(self, entry: int, inputs: Sequence[dict[str, Any]]) -> list[Outcome]:
        if inputs[0]["images"] and not await self._pool.uses_images(entry):
            inputs = [{**x, "images": []} for x in inputs]
        return await self._outcomes(entry, inputs)

    async def _outcomes(self, entry: int, inputs: Sequence[dict[str, Any]]) -> list[Outcome]:
        if len(inputs) > 1 and entry in self._too_slow_together:
            return await self._alone(entry, inputs)
        answer = await self._pool.call(entry, inputs)
        if not isinstance(answer, CallFault):
            return answer
        if len(inputs) == 1:
            return [Outcome(fault=answer.fault, detail=answer.detail)]
        outcomes = await self._alone(entry, inputs)
        if answer.fault == "timeout" and all(o.fault != "timeout" for o in outcomes):
            self._too_slow_together.add(entry)  # no sample hangs, the limit just does not suffice for so many
        return outcomes

    async def _alone(self, entry: int, inputs: Sequence[dict[str, Any]]) -> list[Outcome]:
        outcomes = await asyncio.gather(*(self._outcomes(entry, [x]) for x in inputs))
        return [outcome for [outcome] in outcomes]

    def _report(self, prompt: Prompt, response: str, outcomes: Sequence[Outcome], kind: str) -> None:
        self._errors[kind] += 1
        if kind in self._told and self._config.on_error != "raise":
            return
        self._told.add(kind)
        name, detail = next(
            (e.name, o.detail) for e, o in zip(self._entries, outcomes, strict=True) if o.fault == kind
        )
        message = (
            f"the reward function {name!r} could not score a response to row {prompt.row_id} ({kind}): "
            f"{detail}\n"
            f"The response: {_cut(repr(response))}\nThe ground truth: {_cut(repr(prompt.ground_truth))}"
        )
        if self._config.on_error == "raise":
            raise UserError(f"{message}\nStopped because worker.reward.on_error=raise.")
        what = {"zero": "It scores 0", "skip": "It is left out"}[self._config.on_error]
        log.warning("%s\n%s; further faults of this kind are counted in reward/errors.", message, what)

    def _report_unscored(self, prompt: Prompt) -> None:
        self._unscored += 1
        if "unscored" not in self._told:
            self._told.add("unscored")
            names = ", ".join(repr(entry.name) for entry in self._entries)
            log.warning(
                "a response to row %s is left out of its group, for it got None from every reward function "
                "(%s); further ones are counted in reward/unscored.",
                prompt.row_id,
                names,
            )


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _combined(entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> Score | None:
    """One reward as it is; of several the weighted sum, each one's unweighted value a part by its name.

    A reward that does not apply adds nothing; None where none applies.
    """
    for outcome in outcomes:
        if outcome.fault is not None:
            return Score(overall=0.0, error=outcome.fault)
    values = {e.name: (e.weight, o) for e, o in zip(entries, outcomes, strict=True) if o.overall is not None}
    if not values:
        return None
    if len(entries) == 1:
        [(weight, outcome)] = values.values()
        return Score(overall=weight * (outcome.overall or 0.0), parts=outcome.parts)
    total = sum(weight * (outcome.overall or 0.0) for weight, outcome in values.values())
    return Score(overall=total, parts={name: outcome.overall or 0.0 for name, (_, outcome) in values.items()})
