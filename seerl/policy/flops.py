"""How many operations the mathematics of an update asks for: what model FLOPs utilization is measured in.

A matrix product of (N, K) and (K, M) is 2 N K M operations. The backward pass takes twice those of the
forward pass. What is computed again to save memory is not counted (PaLM, 2204.02311, appendix B), and a
prompt that is computed once for its n responses counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from seerl.policy.model import LoadedModel, vision_towers
from seerl.policy.packing import packed_tokens
from seerl.types import AnyGroup

TRAINED = 3
"""Forward and backward pass, in forward passes."""
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """Operations per unit of what a forward pass reads. Norms, rotations and softmax are left out, and so is
    the attention inside the vision tower; sliding windows count as full attention."""

    per_token: float
    """Linear layers of the language model, for each token that is computed."""
    per_pair: float
    """Scores and values of all layers, for each pair of a token and one that it sees."""
    per_response_token: float
    """The output layer."""
    per_patch: float
    """The vision tower."""
    patch_pixels: int
    """Pixels of a patch; 0 where the tower does not say."""

    @classmethod
    def of(cls, model: LoadedModel) -> TrainingFlops:
        """Counts the weights of a model's layers."""
        text = model.config.get_text_config()
        towers = [tower for _, tower in vision_towers(model.module)]
        in_towers = {id(part) for tower in towers for part in tower.modules()}
        head = model.module.get_output_embeddings()  # type: ignore[operator]
        language = (p for p in model.module.modules() if id(p) not in in_towers and p is not head)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            per_token=TRAINED * 2.0 * _weights(language, _active_share(text)),
            per_pair=TRAINED * 4.0 * text.num_hidden_layers * text.num_attention_heads * width,
            per_response_token=TRAINED * 2.0 * head.weight.numel(),
            per_patch=sum(map(_per_patch, towers)),
            patch_pixels=_patch_pixels(model.config.vision_config) if towers else 0,
        )

    def __call__(self, groups: Iterable[AnyGroup], share_prefix: bool) -> float | None:
        """Operations of the forward and backward pass over the groups; None where pictures come in a form
        whose patches cannot be counted."""
        total = 0.0
        for group in groups:
            prompt, lengths = group.prompt.token_ids.size, [c.token_ids.size for c in group.completions]
            prompts = 1 if share_prefix else len(lengths)
            pairs = prompts * prompt * (prompt + 1) / 2
            pairs += sum((n - 1) * prompt + (n - 1) * n / 2 for n in lengths)
            total += self.per_token * packed_tokens(group, share_prefix)
            total += self.per_pair * pairs
            total += self.per_response_token * sum(lengths)
            patches = self._patches(group)
            if patches is None:
                return None
            total += self.per_patch * prompts * patches
        return total

    def _patches(self, group: AnyGroup) -> float | None:
        """What the vision tower reads for a prompt: patches laid out as a grid (Qwen's processors), or
        pictures or tiles (..., channels, height, width), padding included as it is computed too."""
        if group.prompt.media is None:
            return 0.0
        features = group.prompt.media.features
        grid, pixels = features.get("image_grid_thw"), features.get("pixel_values")
        if grid is not None:
            return float(grid.prod(-1).sum())
        if pixels is None or pixels.dim() < 4 or not self.patch_pixels:
            return None
        return pixels.numel() / pixels.shape[-3] / self.patch_pixels


def _weights(parts: Iterable[nn.Module], active_share: float = 1.0) -> float:
    """Weights that meet every input: those of linear layers, and the active share of experts, which
    transformers keeps as one parameter (experts, out, in) per projection."""
    total = 0.0
    for part in parts:
        if isinstance(part, nn.Linear):
            total += part.weight.numel()
        elif not isinstance(part, CONVOLUTIONS):
            stacked = (p for p in part.parameters(recurse=False) if p.dim() == 3)
            total += active_share * sum(p.numel() for p in stacked)
    return total


def _per_patch(tower: nn.Module) -> float:
    """Operations of forward and backward pass for a patch. The merger sees one token for
    `spatial_merge_size`^2 patches; pictures, the input of the convolution, need no gradient."""
    merger = getattr(tower, "merger", None)
    merging = set(merger.modules()) if isinstance(merger, nn.Module) else set()
    merged = getattr(tower.config, "spatial_merge_size", 1) ** 2
    linear = _weights(p for p in tower.modules() if p not in merging) + _weights(merging) / merged
    convolved = sum(p.weight.numel() for p in tower.modules() if isinstance(p, CONVOLUTIONS))
    trained = any(p.requires_grad for p in tower.parameters())
    return 2.0 * (TRAINED * linear + 2 * convolved if trained else linear + convolved)


def _active_share(text: object) -> float:
    experts = next((n for k in ("num_experts", "num_local_experts") if (n := getattr(text, k, None))), 1)
    return float(getattr(text, "num_experts_per_tok", None) or experts) / float(experts)


def _patch_pixels(vision: PretrainedConfig) -> int:
    size = getattr(vision, "patch_size", None)
    if isinstance(size, int):
        return size * size
    return math.prod(size) if isinstance(size, list | tuple) and len(size) == 2 else 0
