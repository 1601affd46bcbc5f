"""Groups to micro-batches, and micro-batches to flat tensors on the device that uses them.

A micro-batch is one packed sequence: prompts and responses one after another, no padding. With sharing a
group's prompt and its images stand there once; without, once per response. Groups are never torn apart, so
that every loss that looks at a whole response or group sees it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch

from seerl.models.inputs import joined_features
from seerl.policy.attention import PackedLayout, Segment
from seerl.types import AnyGroup, FloatArray, Group, IntArray, Prompt, ScoredGroup, TrainingGroup

G = TypeVar("G", Group, ScoredGroup, TrainingGroup)

PositionsOf = Callable[[Prompt], torch.Tensor]
"""A prompt to its position ids (A, P), A axes (1, or 3 for multi-axis rotary embeddings)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One micro-batch. N input tokens, M response tokens (the ones that carry a loss), R responses."""

    input_ids: torch.Tensor  # (1, N)
    position_ids: torch.Tensor  # (A, 1, N)
    features: Mapping[str, torch.Tensor]
    layout: PackedLayout | None
    """None where the sequence is a single ordinary one, for models whose layers cannot be packed."""
    predictors_M: torch.Tensor  # rows of the hidden states that predict each response token
    targets_M: torch.Tensor
    response_M: torch.Tensor  # which of the R responses a token belongs to, ascending
    lengths_R: torch.Tensor  # tokens of each response

    def per_token(self, arrays: Iterable[FloatArray]) -> torch.Tensor:
        """(M,) float32 on the batch's device, from one array per response in the order of packing."""
        return torch.from_numpy(np.concatenate(list(arrays))).to(self.input_ids.device, non_blocking=True)


def packed_tokens(group: AnyGroup, share_prefix: bool) -> int:
    """Input tokens that a group takes in a packed sequence."""
    prompts = 1 if share_prefix else len(group.completions)
    responses = sum(c.token_ids.size - 1 for c in group.completions)
    return prompts * group.prompt.token_ids.size + responses


def first_fit(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices cut into bins of at most `limit` in all: few, well filled, and the same for the same sizes.

    What alone is over the limit gets a bin of its own. First fit by descending size (within 11/9 of the
    best).
    """
    bins: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for slot, (filled, members) in enumerate(bins):
            if filled + sizes[index] <= limit:
                members.append(index)
                bins[slot] = (filled + sizes[index], members)
                break
        else:
            bins.append((sizes[index], [index]))
    return [sorted(members) for _, members in bins]


def singles(group: G) -> list[G]:
    """A group as groups of one response: for models whose layers carry a state from token to token."""
    per_response = [f.name for f in fields(group) if isinstance(getattr(group, f.name), tuple)]
    return [
        replace(group, **{name: (getattr(group, name)[i],) for name in per_response})  # type: ignore[arg-type]
        for i in range(len(group.completions))
    ]


@dataclass(slots=True)
class _Builder:
    """Gathers the flat arrays of one packed sequence segment by segment."""

    ids: list[IntArray]
    positions: list[torch.Tensor]
    segments: list[Segment]
    predictors: list[IntArray]
    targets: list[IntArray]
    length: int = 0

    def add(self, prompt: Prompt, positions: torch.Tensor, responses: Sequence[IntArray]) -> None:
        start, size = self.length, prompt.token_ids.size
        next_position = int(positions.max()) + 1
        self.ids.append(prompt.token_ids)
        self.positions.append(positions)
        offset = start + size
        for tokens in responses:
            inputs = tokens.size - 1
            self.ids.append(tokens[:-1])
            follow = torch.arange(next_position, next_position + inputs)
            self.positions.append(follow.expand(positions.shape[0], -1))
            # The first token is predicted by the prompt's last hidden state, token j + 1 by token j's.
            self.predictors.append(np.concatenate([[start + size - 1], np.arange(offset, offset + inputs)]))
            self.targets.append(tokens)
            offset += inputs
        self.segments.append(Segment(size, tuple(t.size - 1 for t in responses)))
        self.length = offset


def pack(
    groups: Sequence[AnyGroup],
    positions_of: PositionsOf,
    *,
    share_prefix: bool,
    plain: bool = False,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Builds the tensors of one micro-batch on `device`.

    `plain` leaves the layout out, for a single response handed to the model as an ordinary sequence.
    """
    builder = _Builder([], [], [], [], [])
    prompts: list[Prompt] = []
    for group in groups:
        positions = positions_of(group.prompt)
        answers = [c.token_ids for c in group.completions]
        for responses in [answers] if share_prefix else [[a] for a in answers]:
            builder.add(group.prompt, positions, responses)
            prompts.append(group.prompt)
    if plain and len(builder.targets) != 1:
        raise ValueError("a plain batch holds one response")
    lengths = torch.tensor([t.size for t in builder.targets])

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return PackedBatch(
        input_ids=put(torch.from_numpy(np.concatenate(builder.ids)).unsqueeze(0)),
        position_ids=put(torch.cat(builder.positions, dim=1).unsqueeze(1)),
        features={name: put(tensor) for name, tensor in joined_features(prompts).items()},
        layout=None if plain else PackedLayout(tuple(builder.segments)),
        predictors_M=put(torch.from_numpy(np.concatenate(builder.predictors))),
        targets_M=put(torch.from_numpy(np.concatenate(builder.targets))),
        response_M=put(torch.repeat_interleave(torch.arange(len(lengths)), lengths)),
        lengths_R=put(lengths),
    )
