"""Sampling with transformers alone, on the policy's own weights: nothing to install, nothing to copy.

A prompt and its images are computed once for all n answers; the answers are decoded side by side on its
repeated cache, and finished ones leave the batch. Every answer's randomness is its own, so it does not depend
on what else is in the batch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from seerl.models.inputs import PromptPositions, joined_features
from seerl.rollout.engine import Sampled, Sampling
from seerl.types import Completion, Prompt

COMPACT_BELOW = 0.8
"""The batch is cut down to its unfinished rows when fewer than this share of it is left."""


@dataclass(slots=True)
class _Rows:
    """The answers in the works, one per row: R rows, K cached positions."""

    prompts: list[Prompt]
    indices: list[int]
    uniforms: np.ndarray  # (R, max_tokens) in [0, 1)
    next_position: torch.Tensor  # (R,)
    visible: torch.Tensor  # (R, 1, 1, K + max_tokens) bool: which cached positions are no padding
    tokens: list[list[int]]
    logprobs: list[list[float]]
    open: np.ndarray  # (R,) bool

    def select(self, rows: np.ndarray) -> _Rows:
        keep = torch.from_numpy(rows).to(self.next_position.device)
        return _Rows(
            prompts=[self.prompts[i] for i in rows],
            indices=[self.indices[i] for i in rows],
            uniforms=self.uniforms[rows],
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
        max_batch_tokens: cached tokens held at a time; further prompts wait.
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

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Sampled]:
        """See `RolloutEngine.generate`."""
        training = self._module.training
        self._module.eval()
        try:
            for wave in self._waves(prompts, sampling):
                rows, cache, logits = self._prefill(wave, sampling)
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
                        cache.batch_select_indices(torch.from_numpy(keep).to(self._device))
                    logits = self._decode(rows, chosen, cache)
        finally:
            self._module.train(training)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies weights that are not the module's own already; nothing is cached between generations."""
        own = self._module.state_dict(keep_vars=True)
        for name, tensor in weights:
            if name not in own:
                raise KeyError(f"weight {name} is not in the engine's model")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].data.copy_(tensor)
        self._version = version

    async def sleep(self) -> None:
        """Nothing to give back: the weights are the trainer's own."""

    async def wake(self) -> None:
        """Nothing to take back."""

    def close(self) -> None:
        """Nothing to end."""

    def _waves(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[list[Prompt]]:
        """Prompts in order, as many at a time as the cache may hold."""
        wave: list[Prompt] = []
        longest = 0
        for prompt in prompts:
            grown = max(longest, prompt.token_ids.size)
            if wave and (len(wave) + 1) * sampling.n * (grown + sampling.max_tokens) > self._max_batch_tokens:
                yield wave
                wave, grown = [], prompt.token_ids.size
            wave.append(prompt)
            longest = grown
        if wave:
            yield wave

    def _prefill(self, prompts: list[Prompt], sampling: Sampling) -> tuple[_Rows, DynamicCache, torch.Tensor]:
        """Computes each prompt once, left-padded to the longest, and repeats its cache n times."""
        device, n = self._device, sampling.n
        longest = max(p.token_ids.size for p in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        positions = [self._positions(p) for p in prompts]
        position_ids = torch.zeros(positions[0].shape[0], len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, (prompt, position) in enumerate(zip(prompts, positions, strict=True)):
            size = prompt.token_ids.size
            ids[row, -size:] = torch.from_numpy(prompt.token_ids)
            position_ids[:, row, -size:] = position
            mask[row, -size:] = 1
        cache = DynamicCache(config=self._module.config.get_text_config())  # type: ignore[union-attr, operator]
        logits = self._forward(
            ids.to(device),
            position_ids.to(device),
            mask.to(device),
            cache,
            **{name: t.to(device) for name, t in joined_features(prompts).items()},
        )
        cache.batch_repeat_interleave(n)
        room = torch.ones(len(prompts), sampling.max_tokens, dtype=torch.bool)
        visible = torch.cat([mask.bool(), room], dim=1)[:, None, None, :]
        rows = _Rows(
            prompts=[p for p in prompts for _ in range(n)],
            indices=[i for _ in prompts for i in range(n)],
            uniforms=np.stack([_uniforms(sampling, p.uid, i) for p in prompts for i in range(n)]),
            next_position=torch.tensor([int(p.max()) + 1 for p in positions]).repeat_interleave(n).to(device),
            visible=visible.repeat_interleave(n, dim=0).to(device),
            tokens=[[] for _ in range(len(prompts) * n)],
            logprobs=[[] for _ in range(len(prompts) * n)],
            open=np.ones(len(prompts) * n, dtype=bool),
        )
        self._axes = position_ids.shape[0]
        return rows, cache, logits.repeat_interleave(n, dim=0)

    def _decode(self, rows: _Rows, chosen: np.ndarray, cache: DynamicCache) -> torch.Tensor:
        """(R, V) logits of the next token, given the one just chosen."""
        ids = torch.from_numpy(chosen).to(self._device)[:, None]
        written = len(rows.tokens[0])
        position_ids = (rows.next_position + written - 1)[None, :, None].expand(self._axes, -1, -1)
        seen = cache.get_seq_length() + 1
        return self._forward(ids, position_ids, rows.visible[..., :seen], cache)

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
                yield Sampled(rows.prompts[row], rows.indices[row], completion)


def _uniforms(sampling: Sampling, uid: str, index: int) -> np.ndarray:
    """The random numbers of one answer, a function of (seed, uid, index) alone."""
    name = f"{sampling.seed}/{uid}/{index}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(sampling.max_tokens)


def _sample(logits: torch.Tensor, uniforms: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (R,) by inverting the cumulative distribution at `uniforms`, and their log-probabilities (R,).

    Log-probabilities are of the distribution at this temperature before top-k and top-p.
    """
    log_p = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0:
        chosen = logits.argmax(-1)
    else:
        heights = _truncated(log_p, sampling).double().cumsum(-1)
        wanted = torch.from_numpy(uniforms).to(heights.device)[:, None] * heights[:, -1:]
        chosen = torch.searchsorted(heights, wanted, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    picked = log_p.gather(-1, chosen[:, None]).squeeze(-1)
    return chosen.cpu().numpy(), picked.cpu().numpy()


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
