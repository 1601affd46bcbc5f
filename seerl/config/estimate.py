"""How much memory a run will take on one device, by part. An estimate before anything is loaded, not a
promise.

Parameters are counted from config.json: embeddings V x H (twice if untied), per layer attention
2 H (heads + kv_heads) D and a gated MLP 3 H I; a vision tower likewise. Weights, gradients and AdamW's two
moments take 4 bytes each unless configured otherwise. Activations per packed token and layer: with
checkpointing the layer's input (2 H bytes in 16 bit) plus one layer's inside, without it about 34 H bytes
(2205.05198, section 4.1, with flash-style attention), doubled in 32 bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from seerl.config.schema import Config

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "bfloat16": 2, "float16": 2, "float32": 4, "auto": 2}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by part, and for each part the keys that make it smaller."""

    parts: dict[str, float]
    advice: dict[str, str] = field(
        default_factory=lambda: {
            "weights": "use a smaller model, or worker.actor.fsdp.torch_dtype=bf16",
            "gradients": "use a smaller model, or worker.actor.fsdp.torch_dtype=bf16",
            "optimizer": "set worker.actor.optim.strategy=adamw_bf16",
            "reference": "set algorithm.disable_kl=true, or worker.ref.fsdp.enable_cpu_offload=true",
            "activations": "lower worker.actor.micro_batch_size_per_device_for_update or set "
            "worker.actor.max_tokens_per_device, and keep enable_gradient_checkpointing=true",
            "engine": "lower worker.rollout.gpu_memory_utilization",
        }
    )

    @property
    def total(self) -> float:
        """The most that is held at one time. Engine and training take turns where the engine can sleep."""
        return sum(self.parts.values())


def read_model_config(config: Config) -> dict[str, Any] | None:
    """The model's config.json, if it is a local folder."""
    path = Path(config.worker.actor.model.model_path or "") / "config.json"
    if not config.worker.actor.model.model_path or not path.is_file():
        return None
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return {**read, **config.worker.actor.model.override_config} if isinstance(read, dict) else None


def count_parameters(model: dict[str, Any]) -> float | None:
    """Parameters by the shapes in config.json; None where they are not told in the usual names."""
    text = {**model, **model.get("text_config", {})}
    try:
        hidden, layers, vocabulary = text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]
        heads, inner = text["num_attention_heads"], text["intermediate_size"]
    except KeyError:
        return None
    head = text.get("head_dim") or hidden // heads
    kv_heads = text.get("num_key_value_heads") or heads
    experts = text.get("num_experts") or text.get("num_local_experts") or 1
    expert_inner = text.get("moe_intermediate_size") or inner
    layer = 2 * hidden * head * (heads + kv_heads) + 3 * hidden * (
        inner if experts == 1 else experts * expert_inner
    )
    embeddings = vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2)
    return float(layers * layer + embeddings + _vision_parameters(model.get("vision_config") or {}))


def _vision_parameters(vision: dict[str, Any]) -> float:
    hidden = vision.get("hidden_size") or vision.get("embed_dim") or 0
    depth = vision.get("depth") or vision.get("num_hidden_layers") or 0
    inner = vision.get("intermediate_size") or 4 * hidden
    return float(depth * (4 * hidden * hidden + 3 * hidden * inner))


def memory_estimate(config: Config) -> MemoryEstimate | None:
    """The estimate per device; None where the model's shapes are not known here."""
    model = read_model_config(config)
    parameters = count_parameters(model) if model else None
    if model is None or parameters is None:
        return None
    actor = config.worker.actor
    bf16_master = actor.optim.strategy == "adamw_bf16" or actor.fsdp.torch_dtype in ("bf16", "fp16")
    stored = 2 if bf16_master else 4
    parts = {
        "weights": parameters * stored,
        "gradients": parameters * stored,
        "optimizer": 2 * parameters * stored,
        "activations": _activations(config, model),
    }
    if not config.algorithm.disable_kl and config.algorithm.kl_coef > 0:
        offloaded = config.worker.ref.fsdp.enable_cpu_offload or config.worker.ref.offload.offload_params
        parts["reference"] = (
            0.0 if offloaded else parameters * BYTES[config.worker.ref.fsdp.torch_dtype or "fp32"]
        )
    return MemoryEstimate(parts)


def _activations(config: Config, model: dict[str, Any]) -> float:
    text = {**model, **model.get("text_config", {})}
    actor, data = config.worker.actor, config.data
    width = BYTES[actor.fsdp.mp_param_dtype]
    group = data.max_prompt_length + config.worker.rollout.n * data.max_response_length
    budget = actor.max_tokens_per_device or actor.micro_batch_size_per_device_for_update * (
        data.max_prompt_length + data.max_response_length
    )
    tokens = max(budget, group if actor.share_prefix else 0)
    per_layer = 17 * text["hidden_size"] * width
    layers = text["num_hidden_layers"]
    if actor.model.enable_gradient_checkpointing:
        return float(tokens * (layers * text["hidden_size"] * width + per_layer))
    return float(tokens * layers * per_layer)


def total_memory(config: Config) -> tuple[str, float]:
    """The device's name and its memory in bytes."""
    if config.trainer.n_gpus_per_node != 0:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name(0), float(torch.cuda.get_device_properties(0).total_memory)
    return "this machine", float(psutil.virtual_memory().total)
