"""Attention over packed sequences, through transformers' attention interface: no modeling code is touched.

A packed sequence is a row of segments. A segment is a prompt followed by one or more responses, each of which
attends to the prompt and to itself, never to its siblings or to other segments. With one response a segment
is an ordinary causal sequence; with n it is a whole group whose prompt is computed once.

Two implementations are registered. `seerl_packed` serves the language model: given a layout (a keyword that
transformers hands through to every layer) it works segment by segment; without one it is transformers' own
SDPA, so that the same module also generates. `seerl_flash_segments` serves vision towers that mark their
windows and images by cumulative lengths; its name holds "flash" because transformers passes those lengths
only then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "seerl_packed"
VISION_SEGMENTS = "seerl_flash_segments"


@dataclass(frozen=True, slots=True)
class Segment:
    """One prompt and its responses, which follow one another in the packed sequence, in tokens."""

    prompt: int
    responses: tuple[int, ...]
    """Input tokens of each response: its last token is predicted but never an input."""

    @property
    def length(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The segments of one packed sequence, and their attention masks once asked for."""

    segments: tuple[Segment, ...]
    _masks: dict[tuple[Any, ...], torch.Tensor | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    def mask(self, segment: Segment, window: int | None, device: torch.device) -> torch.Tensor | None:
        """(S, S) bool, True where a query (row) may see a key (column); None for plain causal attention."""
        longest = segment.prompt + max(segment.responses, default=0)
        window = window if window is not None and window < longest else None
        if window is None and len(segment.responses) <= 1:
            return None
        key = (segment.prompt, segment.responses, window, device)
        if key not in self._masks:
            self._masks[key] = _segment_mask(segment, window, device)
        return self._masks[key]


def _segment_mask(segment: Segment, window: int | None, device: torch.device) -> torch.Tensor:
    lengths = torch.tensor(segment.responses, device=device)
    # 0 marks the prompt, i the i-th response; `place` is a token's index within prompt + own response.
    owner = torch.cat(
        [
            torch.zeros(segment.prompt, dtype=torch.long, device=device),
            torch.repeat_interleave(torch.arange(1, len(lengths) + 1, device=device), lengths),
        ]
    )
    place = torch.cat(
        [torch.arange(segment.prompt, device=device)]
        + [segment.prompt + torch.arange(n, device=device) for n in segment.responses]
    )
    kin = (owner[None, :] == 0) | (owner[:, None] == owner[None, :])
    distance = place[:, None] - place[None, :]
    visible = kin & (distance >= 0)
    return visible if window is None else visible & (distance < window)


def _heads_alike(query: torch.Tensor, key_or_value: torch.Tensor) -> torch.Tensor:
    """Repeats grouped key or value heads (1, KV, N, D) to the number of query heads."""
    heads = key_or_value.shape[1]
    repeats = query.shape[1] // heads
    if repeats == 1:
        return key_or_value
    return key_or_value.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)


def _decoding_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """One new token per row: (R, H, 1, D) over its cache (R, KV, N, D); returns (R, 1, H, D).

    The heads that share a key head stand as that head's queries, so that the cache is not copied per head.
    """
    rows, heads, _, dim = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, 1, heads, dim)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of (1, H, N, D) queries over (1, KV, N, D) keys; returns (1, N, H, D) as transformers
    expects.

    Dropout is never applied to a packed sequence: the policy's log-probabilities must be those it sampled
    with.

    Raises:
        ValueError: for score modifications (soft caps, sinks) that this implementation does not have.
    """
    if packed_layout is None and query.shape[2] == 1 and kwargs.get("position_bias") is None:
        return _decoding_attention(query, key, value, attention_mask, scaling), None
    if packed_layout is None or not getattr(module, "is_causal", True):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"packed sequences do not support this model's attention ({name})")
    key, value = _heads_alike(query, key), _heads_alike(query, value)
    # Split, not sliced: the backward pass of a slice writes a gradient of the whole sequence's length.
    lengths = [segment.length for segment in packed_layout.segments]
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = []
    for segment, (q, k, v) in zip(packed_layout.segments, parts, strict=True):
        mask = packed_layout.mask(segment, kwargs.get("sliding_window"), query.device)
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def segmented_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Full attention within each stretch of (1, H, N, D) given by `cu_seq_lens_q` (int, from 0 to N).

    Neighbouring stretches of one length are computed as a batch: pictures of one size, or the windows inside
    them, cost one call instead of one each.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    key, value = _heads_alike(query, key), _heads_alike(query, value)
    runs = _runs(cu_seq_lens_q.diff().tolist())
    stretches = [length * count for length, count in runs]
    parts = zip(*(x[0].split(stretches, dim=1) for x in (query, key, value)), strict=True)
    outputs = []
    for (length, count), whole in zip(runs, parts, strict=True):
        q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in whole)  # (count, H, length, D)
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0), None


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    """Neighbouring equal lengths as (length, how many); empty stretches dropped."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1)
        elif length:
            runs.append((length, 1))
    return runs


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
AttentionInterface.register(VISION_SEGMENTS, segmented_attention)
