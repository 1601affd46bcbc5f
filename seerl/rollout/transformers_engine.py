"""Sampling with transformers alone, on the policy's own weights: nothing to install, nothing to copy.

A prompt and its images are computed once for all n answers; the answers are decoded side by side on its
repeated cache, and finished ones leave the batch. Every answer's randomness is its own, so it does not depend
on what else is in the batch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from seerl.errors import UserError
from seerl.models.inputs import PromptPositions, joined_features
from seerl.rollout.engine import Sampled, Sampling
from seerl.types import Completion, Prompt

COMPACT_BELOW = 0.8
"""The batch is cut down to its unfinished rows when fewer than this share of it is left."""
SAMPLED_AT_A_TIME = 1 << 25
"""Probabilities (rows x vocabulary) looked at together while sampling: bounds its float64 copies."""


@dataclass(slots=True)
class _Rows:
    """The answers in the works, one per row: R rows, K positions of the longest prompt, A position axes."""

    prompts: list[Prompt]
    places: list[int]
    uniforms: np.ndarray  # (R, max_tokens) in [0, 1)
    axes: int
    next_position: torch.Tensor  # (R,), of an answer's first token
    visible: torch.Tensor  # (R, K + max_tokens) bool: which positions are no padding
    tokens: list[list[int]]
    logprobs: list[list[float]]
    open: np.ndarray  # (R,) bool

    def select(self, rows: np.ndarray) -> _Rows:
        keep = torch.from_numpy(rows).to(self.next_position.device)
        return _Rows(
            prompts=[self.prompts[i] for i in rows],
            places=[self.places[i] for i in rows],
            uniforms=self.uniforms[rows],
            axes=self.axes,
            next_position=self.next_position[keep],
            visible=self.visible[keep],
            tokens=[self.tokens[i] for i in rows],
            logprobs=[self.logprobs[i] for i in rows],
            open=self.open[rows],
        )


class TransformersEngine:
    """Samples from `module`, a transformers causal or image-text model, which may be the policy's own.

    Args:
        end_token_ids: every token that ends an answer.
        banned_token_ids: tokens never sampled.
        autocast: the type to compute in, None for the weights' own.
        max_batch_tokens: cached tokens held at a time; further prompts (or further answers to a prompt) wait.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        end_token_ids: Sequence[int],
        banned_token_ids: Sequence[int],
        autocast: torch.dtype | None = None,
        max_batch_tokens: int = 1 << 18,
    ) -> None:
        self._module = module
        self._positions = PromptPositions(module.base_model, module.config)  # type: ignore[arg-type]
        self._ends = frozenset(end_token_ids)
        self._banned = list(banned_token_ids)
        self._autocast_type = autocast
        self._max_batch_tokens = max_batch_tokens
        self._version = -1

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def _device(self) -> torch.device:
        return next(self._module.parameters()).device

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncGenerator[Sampled]:
        """See `RolloutEngine.generate`.

        Raises:
            FloatingPointError: when the model's logits are not finite numbers.
        """
        training = self._module.training
        self._module.eval()
        try:
            for wave, places in self._waves(prompts, sampling):
                rows, cache, logits = self._prefill(wave, places, sampling)
                while True:
                    chosen, logprobs = _sample(logits, rows.uniforms[:, len(rows.tokens[0])], sampling)
                    for sampled in self._take(rows, chosen, logprobs, sampling):
                        yield sampled
                    await asyncio.sleep(0)
                    if not rows.open.any():
                        break
                    if rows.open.mean() < COMPACT_BELOW:
                        keep = np.flatnonzero(rows.open)
                        rows, chosen = rows.select(keep), chosen[keep]
                        cache.reorder_cache(torch.from_numpy(keep).to(self._device))  # type: ignore[arg-type]
                    logits = self._decode(rows, chosen, cache)
        finally:
            self._module.train(training)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies weights that are not the module's own already; nothing is cached between generations.

        Raises:
            KeyError: for a weight that the model does not have.
            ValueError: for a weight of another shape.
        """
        own = self._module.state_dict(keep_vars=True)
        for name, tensor in weights:
            if name not in own:
                raise KeyError(f"weight {name} is not in the engine's model")
            if own[name].shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)} for {tuple(own[name].shape)}"
                raise ValueError(f"weight {name} has another shape than in the engine's model: {shapes}")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].data.copy_(tensor)
        self._version = version

    async def sleep(self) -> None:
        """Nothing to give back: the weights are the trainer's own."""

    async def wake(self) -> None:
        """Nothing to take back."""

    def close(self) -> None:
        """Nothing to end."""

    def _waves(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[list[Prompt], range]]:
        """Prompts in order and the places to answer, as many at a time as the cache may hold."""
        n, room = sampling.n, self._max_batch_tokens
        wave: list[Prompt] = []
        longest = 0
        for prompt in prompts:
            length = prompt.token_ids.size + sampling.max_tokens
            longest = max(longest, length)
            if wave and (len(wave) + 1) * n * longest > room:
                yield wave, range(n)
                wave, longest = [], length
            if n * length > room:  # this prompt's answers alone are too many
                some = max(1, room // length)
                for first in range(0, n, some):
                    yield [prompt], range(first, min(first + some, n))
                longest = 0
            else:
                wave.append(prompt)
        if wave:
            yield wave, range(n)

    def _prefill(
        self, prompts: list[Prompt], places: range, sampling: Sampling
    ) -> tuple[_Rows, DynamicCache, torch.Tensor]:
        """Computes each prompt once, left-padded to the longest, and repeats its cache for every place."""
        device, n = self._device, len(places)
        longest = max(p.token_ids.size for p in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        positions = [self._positions(p) for p in prompts]
        position_ids = torch.zeros(positions[0].shape[0], len(prompts), longest, dtype=torch.long)
        visible = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for row, (prompt, position) in enumerate(zip(prompts, positions, strict=True)):
            size = prompt.token_ids.size
            ids[row, -size:] = torch.from_numpy(prompt.token_ids)
            position_ids[:, row, -size:] = position
            visible[row, -size:] = True
        cache = DynamicCache(config=self._module.config.get_text_config())  # type: ignore[union-attr, operator]
        logits = self._forward(
            ids.to(device),
            position_ids.to(device),
            visible.to(device),
            cache,
            **{name: t.to(device) for name, t in joined_features(prompts).items()},
        )
        copies = torch.arange(len(prompts), device=device).repeat_interleave(n)
        # The one operation on rows that every kind of cache layer has.
        cache.reorder_cache(copies)  # type: ignore[arg-type]
        room = torch.ones(len(prompts), sampling.max_tokens, dtype=torch.bool)
        rows = _Rows(
            prompts=[p for p in prompts for _ in range(n)],
            places=[place for _ in prompts for place in places],
            uniforms=np.stack([_uniforms(sampling, p.uid, place) for p in prompts for place in places]),
            axes=position_ids.shape[0],
            next_position=torch.tensor([int(p.max()) + 1 for p in positions]).repeat_interleave(n).to(device),
            visible=torch.cat([visible, room], dim=1).to(device)[copies],
            tokens=[[] for _ in range(len(prompts) * n)],
            logprobs=[[] for _ in range(len(prompts) * n)],
            open=np.ones(len(prompts) * n, dtype=bool),
        )
        return rows, cache, logits[copies]

    def _decode(self, rows: _Rows, chosen: np.ndarray, cache: DynamicCache) -> torch.Tensor:
        """(R, V) logits of the next token, given the one just chosen."""
        ids = torch.from_numpy(chosen).to(self._device)[:, None]
        written = len(rows.tokens[0])
        position_ids = (rows.next_position + written - 1)[None, :, None].expand(rows.axes, -1, -1)
        unwritten = rows.uniforms.shape[1] - written
        return self._forward(ids, position_ids, rows.visible[:, : rows.visible.shape[1] - unwritten], cache)

    @torch.no_grad()
    def _forward(
        self,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor,
        cache: DynamicCache,
        **features: torch.Tensor,
    ) -> torch.Tensor:
        precision: AbstractContextManager[Any] = nullcontext()
        if self._autocast_type is not None:
            precision = torch.autocast(self._device.type, dtype=self._autocast_type)
        with precision:
            out = self._module(
                input_ids=ids,
                position_ids=position_ids if position_ids.shape[0] > 1 else position_ids[0],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **features,
            )
        logits = out.logits[:, -1].float()
        logits[:, self._banned] = float("-inf")
        return logits

    def _take(
        self, rows: _Rows, chosen: np.ndarray, logprobs: np.ndarray, sampling: Sampling
    ) -> Iterator[Sampled]:
        """Notes the chosen tokens; gives the completions that they finish."""
        for row, (token, logprob) in enumerate(zip(chosen.tolist(), logprobs.tolist(), strict=True)):
            rows.tokens[row].append(token)
            rows.logprobs[row].append(logprob)
            if not rows.open[row]:
                continue
            ended = token in self._ends and not sampling.ignore_eos
            if ended or len(rows.tokens[row]) >= sampling.max_tokens:
                rows.open[row] = False
                completion = Completion(
                    token_ids=np.array(rows.tokens[row], dtype=np.int64),
                    logprobs=np.array(rows.logprobs[row], dtype=np.float32),
                    finish_reason="stop" if ended else "length",
                    weight_version=self._version,
                )
                yield Sampled(rows.prompts[row], rows.places[row], completion)


def _uniforms(sampling: Sampling, uid: str, index: int) -> np.ndarray:
    """The random numbers of one answer, a function of (seed, uid, index) alone."""
    name = f"{sampling.seed}/{uid}/{index}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(sampling.max_tokens)


def _sample(logits: torch.Tensor, uniforms: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (R,) by inverting the cumulative distribution at `uniforms` (R,), and their log-probabilities
    (R,).

    Log-probabilities are of the distribution at this temperature before top-k and top-p.
    """
    heights = torch.from_numpy(uniforms).to(logits.device)
    rows = max(1, SAMPLED_AT_A_TIME // logits.shape[-1])
    parts = [
        _sample_rows(*part, sampling) for part in zip(logits.split(rows), heights.split(rows), strict=True)
    ]
    chosen, picked = (torch.cat(tensors).cpu().numpy() for tensors in zip(*parts, strict=True))
    if not np.isfinite(picked).all():
        raise UserError(
            "the model's logits are not finite: its weights have diverged. Go on from an earlier checkpoint "
            "(trainer.load_checkpoint_path) with a lower worker.actor.optim.lr or worker.actor.max_grad_norm"
        )
    return chosen, picked


def _sample_rows(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0:
        chosen = logits.argmax(-1)
    else:
        heights = _truncated(log_p, sampling).double().cumsum(-1)
        wanted = uniforms[:, None] * heights[:, -1:]
        chosen = torch.searchsorted(heights, wanted, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return chosen, log_p.gather(-1, chosen[:, None]).squeeze(-1)


def _truncated(log_p: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities with those outside top-k, then outside top-p, at 0; not normalised."""
    p = log_p.exp()
    if 0 < sampling.top_k < p.shape[-1]:
        kth = p.topk(sampling.top_k, dim=-1).values[:, -1:]
        p = p.masked_fill(p < kth, 0.0)
    if sampling.top_p < 1:
        ordered, places = p.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        dropped = before >= sampling.top_p * p.sum(-1, keepdim=True)
        p = p.masked_fill(dropped.scatter(-1, places, dropped), 0.0)
    return p
