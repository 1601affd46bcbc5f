"""Prompts as a model's forward takes them: position ids and image features."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from seerl.types import Prompt


class PromptPositions:
    """Position ids of prompts (A, P), by the family's own function where images take part in them."""

    def __init__(self, body: torch.nn.Module, config: Any) -> None:
        self._rope_index = getattr(body, "get_rope_index", None)
        self._types = {
            token: kind
            for kind, names in ((1, ("image_token_id", "image_token_index")), (2, ("video_token_id",)))
            for name in names
            if (token := getattr(config, name, None)) is not None
        }

    def __call__(self, prompt: Prompt) -> torch.Tensor:
        ids = torch.from_numpy(prompt.token_ids)
        if self._rope_index is None:
            return torch.arange(ids.numel()).unsqueeze(0)
        if prompt.media is None:
            return torch.arange(ids.numel()).expand(3, -1)
        kinds = torch.zeros_like(ids, dtype=torch.int)
        for token, kind in self._types.items():
            kinds[ids == token] = kind
        known = inspect.signature(self._rope_index).parameters
        given: dict[str, Any] = {name: t for name, t in prompt.media.features.items() if name in known}
        if "mm_token_type_ids" in known:
            given["mm_token_type_ids"] = kinds.unsqueeze(0)
        positions, _ = self._rope_index(input_ids=ids.unsqueeze(0), **given)
        return positions[:, 0]


def joined_features(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """The processor's outputs of several prompts, one after another along the first axis.

    Raises:
        ValueError: for a prompt whose images were not prepared for the model.
    """
    parts: dict[str, list[torch.Tensor]] = {}
    for prompt in prompts:
        if prompt.media is None:
            continue
        if not prompt.media.features:
            raise ValueError(f"prompt {prompt.uid} has images but no features")
        for name, tensor in prompt.media.features.items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}
