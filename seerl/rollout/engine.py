"""What a rollout engine is to the trainer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from seerl.types import Completion, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are drawn. Temperature 0 is greedy; top_k -1 keeps every token."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int
    seed: int
    """Completion i of a prompt is a function of (weights, seed, the prompt's uid, i) alone, whatever else is
    in the batch, up to the engine's floating-point noise."""
    ignore_eos: bool = False


class Sampled(NamedTuple):
    """One finished completion: number `place` (from 0) of the n that its prompt gets."""

    prompt: Prompt
    place: int
    completion: Completion


class RolloutEngine(Protocol):
    """Answers prompts. Asynchronous: `generate` gives control back between decoding steps, so that finished
    answers are scored while others are still being written. One generation at a time: a generator that is
    not read to its end is closed before the next (`contextlib.aclosing`)."""

    @property
    def weight_version(self) -> int:
        """The version given with the weights in use."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Sampled]:
        """Yields `sampling.n` completions for every prompt, each as soon as it is finished, in any order.

        Stops at any of the model's end-of-sequence tokens unless `ignore_eos`; tokens that stand for images
        or videos are never sampled, and their log-probability is minus infinity for the others'
        normalisation.
        """
        ...

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces weights in place (names as in the model's `state_dict`) and resets every cache that was
        computed with the old ones."""
        ...

    async def sleep(self) -> None:
        """Gives the device's memory to the trainer; weights are dropped, so `update_weights` follows
        `wake`."""
        ...

    async def wake(self) -> None:
        """Takes the memory back."""
        ...

    def close(self) -> None:
        """Ends the engine and its processes."""
        ...
