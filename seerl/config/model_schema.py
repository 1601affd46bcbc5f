"""The keys of the trained models: policy, critic and reference. The other sections are in `schema.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from seerl.config.frozen import FrozenDict, Mapping
from seerl.config.section import Section

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _short_name(given: Any) -> Any:
    """torch's names of the types mean the same."""
    return _SHORT.get(given, given) if isinstance(given, str) else given


Dtype = Annotated[Literal["bf16", "fp16", "fp32"], BeforeValidator(_short_name)]
EngineDtype = Annotated[Literal["auto", "bf16", "fp16", "fp32"], BeforeValidator(_short_name)]


class LoraConfig(Section):
    """Low-rank adapters."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0: all weights are trained."""
    alpha: int = Field(64, gt=0)
    """Scale of the adapters, over rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get adapters."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Pattern or names of modules that get none."""


class ModelConfig(Section):
    """The model to train."""

    model_path: str | None = None
    """Folder or hub id of a causal or image-text model."""
    tokenizer_path: str | None = None
    """Folder or hub id of tokenizer and processor; null: model_path."""
    override_config: Mapping = FrozenDict()
    """Values that replace those of the model's config.json."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""
    freeze_vision_tower: bool = False
    """The vision tower is not trained."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters."""


class OptimConfig(Section):
    """The optimizer and its schedule."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    weight_decay: float = Field(1e-2, ge=0)
    """AdamW's weight decay."""
    strategy: Literal["adamw", "adamw_bf16"] = "adamw"
    """`adamw_bf16` holds weights and moments in bfloat16: a third of the memory, coarser updates."""
    lr_warmup_ratio: float = Field(0.0, ge=0, le=1)
    """Share of all optimizer steps in which the learning rate rises to its peak."""
    lr_warmup_steps: int | None = Field(None, ge=0)
    """The same in steps; takes precedence."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """Where the cosine ends, as a share of lr; null: 0."""


class FsdpConfig(Section):
    """How a model lies on its devices. On one device only the types matter."""

    enable_full_shard: bool = True
    """Shard weights, gradients and optimizer state over devices."""
    enable_cpu_offload: bool = False
    """Keep weights in CPU memory between uses; in this version the reference model's alone."""
    enable_rank0_init: bool = True
    """One rank reads the weights and hands them on."""
    fsdp_size: int = Field(-1, ge=-1)
    """Devices in a shard group; fewer than there are gives hybrid sharding; -1: all."""
    torch_dtype: Dtype | None = None
    """Type of the stored weights; null: fp32 master weights."""
    mp_param_dtype: Dtype = "bf16"
    """Type to compute in."""
    mp_reduce_dtype: Dtype = "fp32"
    """Type in which gradients are summed over devices."""
    mp_buffer_dtype: Dtype = "fp32"
    """Type of buffers."""
    use_orig_params: bool = False
    """Accepted for EasyR1's configurations; without effect in FSDP2."""


class OffloadConfig(Section):
    """What moves to CPU memory while the rollout engine runs; in this version only the reference moves."""

    offload_params: bool = False
    """Weights."""
    offload_optimizer: bool = False
    """Optimizer state."""


class BatchConfig(Section):
    """Batch sizes of a trained model."""

    global_batch_size: int = Field(256, gt=0)
    """PROMPTS per optimizer step, over all devices; must divide data.rollout_batch_size."""
    micro_batch_size_per_device_for_update: int = Field(4, gt=0)
    """Samples per forward and backward pass on one device; with dynamic_batching it sets the token budget:
    that many samples of max_prompt_length + max_response_length."""
    micro_batch_size_per_device_for_experience: int = Field(16, gt=0)
    """The same for passes that compute log-probabilities alone."""
    max_tokens_per_device: int | None = Field(None, gt=0)
    """The token budget of a micro-batch outright."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
    ppo_epochs: int = Field(1, gt=0)
    """Passes over each rollout batch."""
    padding_free: bool = True
    """Pack responses one after another without padding; false: each is computed on its own."""
    dynamic_batching: bool = True
    """Cut micro-batches by tokens instead of by samples."""
    ulysses_size: int = Field(1, gt=0)
    """Devices that share one sequence; divides the device count."""
    model: ModelConfig = ModelConfig()
    """The model."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    fsdp: FsdpConfig = FsdpConfig()
    """Sharding and types."""
    offload: OffloadConfig = OffloadConfig()
    """Offloading while the rollout engine runs."""


class ActorConfig(BatchConfig):
    """The policy: model, batch sizes, loss, optimizer."""

    clip_ratio_low: float = Field(0.2, ge=0)
    """How far below 1 the ratio may go."""
    clip_ratio_high: float = Field(0.3, ge=0)
    """How far above 1 the ratio may go."""
    clip_ratio_dual: float = Field(3.0, gt=1)
    """Bound on the loss of tokens with negative advantage, in units of the advantage."""
    loss_avg_mode: Literal["token", "seq", "seq_sum", "seq_sum_norm"] = "token"
    """How token losses are averaged over the whole optimizer step."""
    loss_type: Literal[
        "default",
        "gspo",
        "gspo_token",
        "cispo",
        "sapo",
        "gmpo",
        "gpg",
        "clip_cov",
        "kl_cov",
        "vespo",
        "luspo",
    ] = "default"
    """The policy loss."""
    tau_positive: float = Field(1.0, gt=0)
    """Temperature of sapo's gate where the advantage is not negative."""
    tau_negative: float = Field(1.05, gt=0)
    """Temperature of sapo's gate where it is negative."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus."""
    cov_share: float = Field(2e-4, gt=0, le=1)
    """Share of tokens that clip_cov and kl_cov act on."""
    cov_kl_coef: float = Field(1.0, ge=0)
    """Weight of kl_cov's penalty."""
    share_prefix: bool = True
    """A group's prompt and its images are computed once for all n responses."""
    use_torch_compile: bool = True
    """Accepted for EasyR1's configurations; this version computes eagerly, with the same results."""


class CriticConfig(BatchConfig):
    """The critic of gae."""

    cliprange_value: float = Field(0.5, gt=0)
    """How far a value may move from its old one."""
    loss_avg_mode: Literal["token", "seq"] = "token"
    """How value losses are averaged over the whole optimizer step."""


class RefConfig(Section):
    """The frozen reference model; it is built only where KL is used."""

    fsdp: FsdpConfig = FsdpConfig()
    """Types, and whether it lies in CPU memory between passes (enable_cpu_offload)."""
    offload: OffloadConfig = OffloadConfig()
    """Offloading."""
