"""Log-probabilities of groups under one model: packed where the model allows it, one by one where it does
not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from seerl.models.inputs import PromptPositions
from seerl.policy.logprobs import OutputHead, make_head, token_logprobs
from seerl.policy.model import LoadedModel
from seerl.policy.packing import G, PackedBatch, first_fit, pack, packed_tokens, singles
from seerl.types import AnyGroup, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLimit:
    """How much one forward pass holds: packed tokens (dynamic batching) or responses."""

    tokens: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.samples is None):
            raise ValueError("a micro-batch is limited by tokens or by samples")


class PolicyForward:
    """One model's forward pass over groups, the same for the trained policy and the frozen reference."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        banned: Sequence[int],
        temperature: float,
        autocast: torch.dtype | None,
        packing: bool = True,
        share_prefix: bool = True,
    ) -> None:
        self.model = model
        self._banned = tuple(banned)
        self.head: OutputHead = make_head(model.module, banned)
        self.temperature = temperature
        self.packing = packing and model.packable
        self.share_prefix = share_prefix and self.packing
        self._autocast = autocast
        self._positions = PromptPositions(model.body, model.config)

    @property
    def device(self) -> torch.device:
        return next(self.model.module.parameters()).device

    def to(self, device: torch.device) -> None:
        """Moves the model, and what the head holds beside it."""
        self.model.module.to(device)
        self.head = make_head(self.model.module, self._banned)

    def units(self, groups: Sequence[G]) -> list[G]:
        """What is packed as a whole: groups, or single responses for models that cannot pack."""
        return list(groups) if self.packing else [one for group in groups for one in singles(group)]

    def cut(self, units: Sequence[AnyGroup], limit: MicroBatchLimit) -> list[list[int]]:
        """Indices of units, micro-batch by micro-batch."""
        if not self.packing:
            return [[i] for i in range(len(units))]
        if limit.tokens is not None:
            return first_fit([packed_tokens(u, self.share_prefix) for u in units], limit.tokens)
        assert limit.samples is not None
        return first_fit([len(u.completions) for u in units], limit.samples)

    def pack(self, units: Sequence[AnyGroup]) -> PackedBatch:
        return pack(
            units,
            self._positions,
            share_prefix=self.share_prefix,
            plain=not self.packing,
            device=self.device,
        )

    def autocast(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def __call__(
        self, batch: PackedBatch, *, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the batch's response tokens, both (M,) float32."""
        kwargs = (
            {} if batch.layout is None else {"packed_layout": batch.layout, "attention_mask": _no_mask(batch)}
        )
        positions = batch.position_ids if batch.position_ids.shape[0] > 1 else batch.position_ids[0]
        with self.autocast():
            out = self.model.body(
                input_ids=batch.input_ids, position_ids=positions, use_cache=False, **batch.features, **kwargs
            )
            hidden = out.last_hidden_state[0].index_select(0, batch.predictors_M)
            return token_logprobs(
                hidden, batch.targets_M, self.head, self.temperature, entropy_gradient=entropy_gradient
            )

    @torch.no_grad()
    def logprobs_of(self, groups: Sequence[G], limit: MicroBatchLimit) -> list[tuple[FloatArray, ...]]:
        """Per group, per response: (T,) log-probabilities, in the order given."""
        units = self.units(groups)
        arrays: dict[int, list[FloatArray]] = {}
        for members in self.cut(units, limit):
            batch = self.pack([units[i] for i in members])
            logprobs, _ = self(batch)
            split = np.split(logprobs.cpu().numpy(), np.cumsum(batch.lengths_R.cpu().numpy())[:-1])
            pieces: Iterator[FloatArray] = iter(split)
            for i in members:
                arrays[i] = [next(pieces) for _ in units[i].completions]
        flat = iter(array for i in range(len(units)) for array in arrays[i])
        return [tuple(next(flat) for _ in group.completions) for group in groups]


def _no_mask(batch: PackedBatch) -> torch.Tensor:
    """transformers takes a 4D mask as prepared and builds none of its own; the layout says who sees whom."""
    return torch.empty(1, 1, 1, 1, device=batch.input_ids.device, dtype=torch.bool)
