"""The data that travels between the stages of a step, from a prompt to what the policy learns from.

    Prompt --rollout--> Group --reward--> ScoredGroup --algorithms--> TrainingGroup --> TrainingBatch

Each stage takes one type and returns the next, so training on an unscored sample cannot be written. A group
is one prompt and its n completions; it is never torn apart and its prompt is never copied. Nothing is padded.

Axes in comments: P tokens of the prompt, T tokens of one completion, n completions of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL.Image import Image

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length"]
"""`stop`: the model ended its answer (an end-of-sequence token); `length`: max_response_length cut it off."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """The images of one prompt, held once however many completions it gets."""

    images: tuple[Image, ...]
    """RGB, already scaled to lie between min_pixels and max_pixels, in the order of their places in the
    text."""
    unexpanded_token_ids: IntArray
    """The prompt with one placeholder per image: what engines take that expand placeholders themselves
    (vLLM)."""
    features: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The processor's outputs for the model's forward (`pixel_values`, `image_grid_thw`, ...), opaque to
    everything between the processor and the model. Per image or per patch along the first axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data set, ready to be answered."""

    uid: str
    """Unique within the run: the row's id and the epoch it was drawn in."""
    row_id: str
    """Names the row to a person: file and index."""
    token_ids: IntArray  # (P,), every image already expanded to its placeholder tokens
    text: str
    """The rendered prompt as the tokenizer saw it, images as placeholders."""
    ground_truth: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, for the reward function and the logs."""
    media: Media | None = None

    def __post_init__(self) -> None:
        _require(self.token_ids.ndim == 1 and self.token_ids.size > 0, f"prompt {self.uid} has no tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, as the rollout engine sampled it."""

    token_ids: IntArray  # (T,), T >= 1, the end-of-sequence token included
    logprobs: FloatArray | None  # (T,)
    """The engine's log-probability of each token under log softmax(logits / temperature) over every token
    that may be sampled, before top-k and top-p; None where the engine can only give the truncated
    distribution's."""
    finish_reason: FinishReason
    weight_version: int
    """The version given to the engine with the weights that wrote this completion."""

    def __post_init__(self) -> None:
        size = self.token_ids.size
        _require(self.token_ids.ndim == 1 and size > 0, "a completion has at least one token")
        if self.logprobs is not None:
            _require(
                self.logprobs.shape == (size,), f"{self.logprobs.shape} log-probabilities for {size} tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the reward function said of one completion."""

    overall: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further named values, each a metric `reward/NAME`."""
    error: str | None = None
    """The kind of fault if the completion could not be scored (and counts as 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt and its completions: the unit that is generated, scored, filtered, packed and logged."""

    prompt: Prompt
    completions: tuple[Completion, ...]  # n

    def __post_init__(self) -> None:
        _require(len(self.completions) > 0, f"group {self.prompt.uid} has no completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with one score per completion."""

    prompt: Prompt
    completions: tuple[Completion, ...]  # n
    scores: tuple[Score, ...]  # n

    def __post_init__(self) -> None:
        have, want = len(self.scores), len(self.completions)
        _require(have == want, f"group {self.prompt.uid}: {have} scores for {want} completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """A group as the policy learns from it: per completion, per-token arrays of its length."""

    prompt: Prompt
    completions: tuple[Completion, ...]  # n
    advantages: tuple[FloatArray, ...]  # n x (T,)
    old_logprobs: tuple[FloatArray, ...] | None = None
    """n x (T,), log-probabilities under the policy at the start of the step; None where the step is exactly
    on-policy, for there they are the trained policy's own, detached."""
    ref_logprobs: tuple[FloatArray, ...] | None = None
    """n x (T,), under the frozen reference; None without a KL term in the loss."""

    def __post_init__(self) -> None:
        lengths = [c.token_ids.size for c in self.completions]
        for name in ("advantages", "old_logprobs", "ref_logprobs"):
            arrays = getattr(self, name)
            if arrays is not None:
                have = [a.size for a in arrays]
                _require(
                    have == lengths, f"group {self.prompt.uid}: {name} of lengths {have} for {lengths} tokens"
                )

    @property
    def response_tokens(self) -> int:
        """The number of tokens that carry a loss."""
        return sum(c.token_ids.size for c in self.completions)


AnyGroup = Group | ScoredGroup | TrainingGroup
"""What the policy can compute log-probabilities of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """The groups of one optimizer step, with the counts over the WHOLE step (all devices and micro-batches)
    that the loss is divided by, so that it does not depend on how the batch is cut."""

    groups: tuple[TrainingGroup, ...]
    loss_tokens: int
    responses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One validation answer as trackers show it."""

    row_id: str
    prompt: str
    response: str
    ground_truth: str
    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
