"""From hidden states to log-probabilities and entropies, without ever holding the logits of a whole batch.

The distribution is log softmax(logits / temperature) over every token that may be sampled: tokens that stand
for images and the padding of the vocabulary are left out, here as in the rollout engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 26
"""Logits held at a time (256 MiB in float32); what is larger is recomputed chunk by chunk in the backward
pass."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The language model's last layer: the projection to the vocabulary and what some families do to its
    logits.

    `scale` multiplies the logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`);
    `softcap` bends them to softcap * tanh(logits / softcap) (Gemma).
    """

    projection: torch.nn.Linear
    banned: torch.Tensor  # (B,) ids never sampled
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.projection.weight.shape[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(M, H) hidden states to (M, V) float32 logits before temperature; banned tokens at minus
        infinity."""
        logits = self.projection(hidden).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.banned.numel() == 0 else logits.index_fill(-1, self.banned, float("-inf"))


def make_head(model: torch.nn.Module, banned: Sequence[int]) -> OutputHead:
    """The output head of a transformers causal or image-text model."""
    projection = model.get_output_embeddings()  # type: ignore[operator]
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    divisor = getattr(config, "logits_scaling", None)
    scale = getattr(config, "logit_scale", None) or (1.0 / divisor if divisor else 1.0)
    device = projection.weight.device
    return OutputHead(
        projection=projection,
        banned=torch.tensor(sorted(banned), dtype=torch.long, device=device),
        scale=float(scale),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def token_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: OutputHead,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets` (M,) given hidden states (M, H), and the distribution's exact entropies.

    Both are (M,) in float32. Entropies carry a gradient only where asked for.
    """
    rows = max(1, CHUNK_ELEMENTS // head.vocabulary)
    if hidden.shape[0] <= rows:
        return _chunk(hidden, targets, head, temperature, entropy_gradient)
    parts = [
        checkpoint(_chunk, h, t, head, temperature, entropy_gradient, use_reentrant=False)
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk(
    hidden: torch.Tensor, targets: torch.Tensor, head: OutputHead, temperature: float, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = F.log_softmax(head.logits(hidden) / temperature, dim=-1)
    chosen = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        source = log_p if entropy_gradient else log_p.detach()
        # p log p is 0 where p is 0; torch.special.entr has no gradient problem at 0 but one at minus
        # infinity.
        finite = source.masked_fill(source == float("-inf"), 0.0)
        entropy = -(source.exp() * finite).sum(-1)
    return chosen, entropy
