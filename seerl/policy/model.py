"""A transformers model, loaded and prepared to be trained: one path for text and vision-language families."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig

from seerl.config.frozen import thawed
from seerl.config.schema import FsdpConfig, ModelConfig
from seerl.errors import UserError
from seerl.models.families import DTYPES, auto_model
from seerl.policy.attention import PACKED, VISION_SEGMENTS

log = logging.getLogger(__name__)

PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types that see a token's past through attention alone; others carry a state across segments."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, with what the trainer must know of its family."""

    module: torch.nn.Module
    config: PretrainedConfig
    packable: bool

    @property
    def body(self) -> torch.nn.Module:
        """The model without its output head: hidden states of the last layer."""
        return self.module.base_model  # type: ignore[return-value]


def load_model(
    config: ModelConfig, fsdp: FsdpConfig, device: torch.device, *, trainable: bool = True
) -> LoadedModel:
    """Loads `config.model_path` for training (or frozen) onto `device`.

    Master weights are float32 unless `fsdp.torch_dtype` says otherwise.

    Raises:
        UserError: for a folder without configuration or weights, an unknown architecture, a hub that cannot
        be
            reached.
    """
    if not config.model_path:
        raise UserError("worker.actor.model.model_path is not set; give a model folder or a hub id")
    hf_config = _load_config(config)
    module = _load_weights(config, hf_config, DTYPES[fsdp.torch_dtype or "fp32"])
    packable = _use_packed_attention(module)
    _remove_dropout(module)
    module.to(device)
    if not trainable:
        module.requires_grad_(False)
        return LoadedModel(module.eval(), module.config, packable)  # type: ignore[arg-type]
    if config.freeze_vision_tower:
        freeze_vision_tower(module)
    if config.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return LoadedModel(module.train(), module.config, packable)  # type: ignore[arg-type]


def _load_config(config: ModelConfig) -> PretrainedConfig:
    path = str(config.model_path)
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise UserError(f"worker.actor.model.model_path={path}: the folder has no config.json")
    try:
        return AutoConfig.from_pretrained(
            path, trust_remote_code=config.trust_remote_code, **thawed(config.override_config)
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"worker.actor.model.model_path={path} cannot be loaded: {_first_line(error)}"
        ) from error


def _load_weights(config: ModelConfig, hf_config: PretrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    path = str(config.model_path)
    folder = Path(path)
    _require_generation_config(folder)
    try:
        loaded: Any = auto_model(hf_config).from_pretrained(
            path,
            config=hf_config,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise UserError(
            f"worker.actor.model.model_path={path}: a weight file is damaged or not whole "
            f"({_first_line(error)}); copy or download it again"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:  # the last: shapes of another config.json
        raise UserError(
            f"worker.actor.model.model_path={path} cannot be loaded, config.json and weights may not belong "
            f"together: {_first_line(error)}"
        ) from error
    module, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"worker.actor.model.model_path={path}: {len(missing)} weights are not in the files, e.g. "
            f"{missing[0]}; training would start from random values there"
        )
    return module


def _require_generation_config(folder: Path) -> None:
    """transformers passes over a broken file, and with it over the tokens that end an answer."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds {content!r} where keys and values are expected")
        ends = content.get("eos_token_id")
        if not all(type(token) is int for token in (ends if isinstance(ends, list) else [ends or 0])):
            raise ValueError(f"eos_token_id={ends!r} is no token id and no list of them")
    except ValueError as error:
        raise UserError(
            f"worker.actor.model.model_path={folder}: generation_config.json is damaged ({error}); copy it "
            "again, or remove it to end answers with the tokenizer's end-of-sequence token alone"
        ) from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _use_packed_attention(module: torch.nn.Module) -> bool:
    """Switches the model to this package's attention; False where its layers cannot be packed."""
    text = module.config.get_text_config()  # type: ignore[union-attr, operator]
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if not kinds <= PACKABLE_LAYERS:
        log.warning(
            "%s has layers that cannot be packed (%s): every response is computed on its own",
            module.config.model_type,  # type: ignore[union-attr]
            ", ".join(sorted(kinds - PACKABLE_LAYERS)),
        )
        return False
    chosen = {"text_config": PACKED} if text is not module.config else {"": PACKED}
    if _tower_has_segments(module):
        chosen["vision_config"] = VISION_SEGMENTS
    module.set_attn_implementation(chosen)  # type: ignore[operator]
    if text._attn_implementation != PACKED:  # transformers only warns about models it cannot switch
        log.warning("%s does not use transformers' attention interface: no packing", module.config.model_type)  # type: ignore[union-attr]
        return False
    return True


def vision_towers(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules that read images, by name: those whose configuration is the model's vision
    configuration."""
    vision = getattr(module.config, "vision_config", None)
    if vision is None:
        return []
    found: list[tuple[str, torch.nn.Module]] = []
    for name, part in module.named_modules():
        inside_found = any(name.startswith(f"{outer}.") for outer, _ in found)
        if not inside_found and type(getattr(part, "config", None)) is type(vision):
            found.append((name, part))
    return found


def _tower_has_segments(module: torch.nn.Module) -> bool:
    return any(
        "grid_thw" in inspect.signature(tower.forward).parameters for _, tower in vision_towers(module)
    )


def freeze_vision_tower(module: torch.nn.Module) -> None:
    """No gradients, no updates for the parameters of the vision tower.

    Raises:
        UserError: for a model without one, where the key would silently do nothing.
    """
    towers = vision_towers(module)
    if not towers:
        raise UserError(
            "worker.actor.model.freeze_vision_tower=true, but "
            f"{module.config.model_type} has no vision tower; set it to false"  # type: ignore[union-attr]
        )
    for _, tower in towers:
        tower.requires_grad_(False)


def _remove_dropout(module: torch.nn.Module) -> None:
    """The trained log-probabilities must be those of the policy that sampled: no random masks in between."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by their `state_dict` names; tied ones under each of their names."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        yield name, tensor.detach()
