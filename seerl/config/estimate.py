"""How much memory a run takes on one device, by part. An estimate before anything is loaded, not a promise.

Parameters are counted from config.json: embeddings V H (twice if untied), per layer attention
2 H D (heads + kv_heads) and a gated MLP 3 H I; a vision tower 4 H^2 + 3 H I per layer, its patch projection
and the merger of m patches, m H (m H + H_out). In bytes, with P parameters, of which T are trained, s bytes
per stored and c per computed value, over d devices if sharded:

    weights P s / d, gradients T s / d, optimizer 2 T s / d (AdamW's two moments), reference P r / d
    activations  tokens of a micro-batch x (layers H c + 17 H c) with checkpointing: each layer's input and
                 one layer's inside; x layers 17 H c without (2205.05198, section 4.1: 34 H bytes in 16 bit)
    engine       vLLM's own copy of the weights, P c; transformers samples from the policy itself
    KV cache     keys and values, 2 layers kv_heads D c for each token of one group's n responses: the least
                 that must fit; vLLM takes more, up to worker.rollout.gpu_memory_utilization

Training and generation take turns: gradients and activations are held while training, engine and KV cache
while generating (vLLM on the CPU cannot sleep and keeps its own). The larger turn counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from seerl.config.schema import Config

GIB = 2**30
TRAINING = ("gradients", "activations")
GENERATING = ("engine", "KV cache")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "auto": 2}
_ADVICE = {
    "weights": "take a smaller model, or set worker.actor.fsdp.torch_dtype=bf16",
    "gradients": "take a smaller model, or set worker.actor.fsdp.torch_dtype=bf16",
    "optimizer": "set worker.actor.optim.strategy=adamw_bf16",
    "reference": "set algorithm.disable_kl=true, or worker.ref.fsdp.torch_dtype=bf16",
    "activations": "lower worker.actor.micro_batch_size_per_device_for_update or "
    "worker.actor.max_tokens_per_device, and keep worker.actor.model.enable_gradient_checkpointing=true",
    "engine": "take a smaller model, or worker.rollout.name=transformers",
    "KV cache": "lower data.max_response_length or worker.rollout.n",
}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by part."""

    parts: dict[str, float]
    sleeps: bool = True
    """Whether the engine gives its memory back while the policy trains."""

    @property
    def total(self) -> float:
        """The most that is held at one time."""
        return max(self._sum(TRAINING if self.sleeps else TRAINING + GENERATING), self._sum(GENERATING))

    @property
    def kept(self) -> float:
        """What the policy and the reference hold while answers are generated."""
        return self._sum(())

    def _sum(self, turn: tuple[str, ...]) -> float:
        others = set(TRAINING + GENERATING) - set(turn)
        return sum(size for part, size in self.parts.items() if part not in others)

    def advice(self, part: str) -> str:
        """What makes the part smaller."""
        return _ADVICE[part]


def read_model_config(config: Config) -> dict[str, Any] | None:
    """The model's config.json with `override_config` over it; None if it cannot be read here."""
    given = config.worker.actor.model
    if not given.model_path:
        return None
    try:
        read = json.loads((Path(given.model_path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # the last: `~` of a user without a home
        return None
    return {**read, **given.override_config} if isinstance(read, dict) else None


def _text(model: dict[str, Any]) -> dict[str, Any]:
    inner = model.get("text_config")
    return {**model, **inner} if isinstance(inner, dict) else model


def _size(values: dict[str, Any], *names: str) -> int:
    """The first of the names that holds a whole number; 0 if none does."""
    return next((v for name in names if isinstance(v := values.get(name), int)), 0)


def context_length(model: dict[str, Any]) -> int | None:
    """Tokens that the model's positions reach; None if its config does not say."""
    return _size(_text(model), "max_position_embeddings", "n_positions") or None


def count_parameters(model: dict[str, Any]) -> tuple[int, int] | None:
    """Parameters of the language model and of the vision tower; None where the usual names are missing."""
    text = _text(model)
    hidden, layers = _size(text, "hidden_size", "n_embd"), _size(text, "num_hidden_layers", "n_layer")
    heads, vocabulary = _size(text, "num_attention_heads", "n_head"), _size(text, "vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return None
    head = _size(text, "head_dim") or hidden // heads
    attention = 2 * hidden * head * (heads + (_size(text, "num_key_value_heads") or heads))
    inner = _size(text, "intermediate_size") or 4 * hidden
    if experts := _size(text, "num_experts", "num_local_experts", "n_routed_experts"):
        inner = experts * (_size(text, "moe_intermediate_size") or inner)
    tied = text.get("tie_word_embeddings", True)
    language = layers * (attention + 3 * hidden * inner) + vocabulary * hidden * (1 if tied else 2)
    vision = model.get("vision_config")
    return language, _vision_parameters(vision if isinstance(vision, dict) else {})


def _vision_parameters(vision: dict[str, Any]) -> int:
    hidden, depth = _size(vision, "embed_dim", "hidden_size"), _size(vision, "depth", "num_hidden_layers")
    inner = _size(vision, "intermediate_size") or 4 * hidden
    patch = 3 * (_size(vision, "temporal_patch_size") or 1) * _size(vision, "patch_size") ** 2 * hidden
    merged = _size(vision, "spatial_merge_size") ** 2 * hidden
    merger = merged * (merged + (_size(vision, "out_hidden_size") or hidden))
    return depth * (4 * hidden * hidden + 3 * hidden * inner) + patch + merger


def memory_estimate(config: Config) -> MemoryEstimate | None:
    """The estimate per device; None where the model's shapes are not known here."""
    model = read_model_config(config)
    counted = count_parameters(model) if model else None
    if model is None or counted is None:
        return None
    actor, ref = config.worker.actor, config.worker.ref
    parameters = sum(counted)
    trained = counted[0] if actor.model.freeze_vision_tower else parameters
    in_16_bit = actor.optim.strategy == "adamw_bf16" or actor.fsdp.torch_dtype in ("bf16", "fp16")
    stored = (2 if in_16_bit else 4) / _shards(config, actor.fsdp.enable_full_shard)
    parts = {"weights": parameters * stored}
    learns = not config.trainer.val_only
    if learns:
        parts |= {"gradients": trained * stored, "optimizer": 2 * trained * stored}
    if learns and not config.algorithm.disable_kl and config.algorithm.kl_coef > 0:
        away = on_gpu(config) and (ref.fsdp.enable_cpu_offload or ref.offload.offload_params)
        width = BYTES[ref.fsdp.torch_dtype or "fp32"] / _shards(config, ref.fsdp.enable_full_shard)
        parts["reference"] = 0.0 if away else parameters * width
    if learns:
        parts["activations"] = _activations(config, _text(model))
    vllm = uses_vllm(config)
    parts["engine"] = float(parameters * BYTES[config.worker.rollout.dtype]) if vllm else 0.0
    parts["KV cache"] = _kv_cache(config, _text(model), vllm)
    return MemoryEstimate(parts, sleeps=not vllm or on_gpu(config))


def uses_vllm(config: Config) -> bool:
    """Whether vLLM writes the answers, as far as this machine can tell."""
    name = config.worker.rollout.name
    return name == "vllm" or (name == "auto" and find_spec("vllm") is not None)


def _shards(config: Config, sharded: bool) -> int:
    per_node = config.trainer.n_gpus_per_node
    return 1 if per_node == "auto" or not sharded else max(per_node, 1) * config.trainer.nnodes


def _activations(config: Config, text: dict[str, Any]) -> float:
    actor, data = config.worker.actor, config.data
    hidden, layers = _size(text, "hidden_size", "n_embd"), _size(text, "num_hidden_layers", "n_layer")
    width = BYTES[actor.fsdp.mp_param_dtype]
    longest = data.max_prompt_length + data.max_response_length
    tokens = actor.max_tokens_per_device or actor.micro_batch_size_per_device_for_update * longest
    layer = 17 * hidden * width
    held = layers * hidden * width + layer if actor.model.enable_gradient_checkpointing else layers * layer
    return float(max(tokens, longest) * held)


def _kv_cache(config: Config, text: dict[str, Any], vllm: bool) -> float:
    rollout, data = config.worker.rollout, config.data
    hidden, layers = _size(text, "hidden_size", "n_embd"), _size(text, "num_hidden_layers", "n_layer")
    heads = _size(text, "num_attention_heads", "n_head")
    head = _size(text, "head_dim") or hidden // heads
    token = 2 * layers * (_size(text, "num_key_value_heads") or heads) * head * BYTES[rollout.dtype]
    prompts = 1 if vllm else rollout.n  # vLLM's prefix cache holds a group's prompt once
    return float(token * (prompts * data.max_prompt_length + rollout.n * data.max_response_length))


def on_gpu(config: Config) -> bool:
    """Whether the run uses GPUs. Only asks torch where the configuration leaves it to the machine."""
    if config.trainer.n_gpus_per_node != "auto":
        return config.trainer.n_gpus_per_node > 0
    import torch

    return torch.cuda.is_available()


def gpu_here(config: Config) -> bool:
    """Whether the run uses GPUs and this machine has one."""
    if not on_gpu(config):
        return False
    import torch

    return torch.cuda.is_available()


def total_memory(config: Config) -> tuple[str, float]:
    """The name of one device on this machine and its memory in bytes."""
    if gpu_here(config):
        import torch

        return torch.cuda.get_device_name(0), float(torch.cuda.get_device_properties(0).total_memory)
    return "this machine", float(psutil.virtual_memory().total)
