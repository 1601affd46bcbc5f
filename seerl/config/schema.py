"""Every configuration key: its type, default, meaning and bounds. `seerl explain KEY` prints what stands here.

Sections, names and meanings are those EasyR1 users have. Checks that need more than one key are in `checks.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Frozen after loading; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DataConfig(Section):
    train_files: str | list[str] = ""
    val_files: str | list[str] = ""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    image_key: str = "images"
    video_key: str = "videos"
    image_dir: str | None = None
    video_fps: float = Field(2.0, gt=0)
    max_prompt_length: int = Field(512, gt=0)
    max_response_length: int = Field(512, gt=0)
    rollout_batch_size: int = Field(512, gt=0)
    mini_rollout_batch_size: int | None = Field(None, gt=0)
    val_batch_size: int = -1
    format_prompt: str | None = None
    system_prompt: str | None = None
    override_chat_template: str | None = None
    shuffle: bool = True
    seed: int = 1
    min_pixels: int | None = Field(262144, gt=0)
    max_pixels: int | None = Field(4194304, gt=0)
    filter_overlong_prompts: bool = True
    filter_overlong_prompts_workers: int = Field(16, gt=0)
    on_bad_row: Literal["skip", "raise"] = "skip"


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    disable_kl: bool = False
    use_kl_loss: bool = False
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = "kl"
    kl_coef: float = Field(1e-3, ge=0)
    kl_type: Literal["fixed", "adaptive"] = "fixed"
    kl_horizon: float = Field(10000.0, gt=0)
    kl_target: float = Field(0.1, gt=0)
    online_filtering: bool = False
    filter_key: str = "overall"
    filter_low: float = 0.01
    filter_high: float = 0.99
    rollout_correction: Literal["none", "tis", "mis", "seq_tis", "seq_mis", "geo_mis"] = "none"
    rollout_correction_cap: float = Field(2.0, gt=1)


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    alpha: int = Field(64, gt=0)
    target_modules: str = "all-linear"
    exclude_modules: str | None = None


class ModelConfig(Section):
    model_path: str | None = None
    tokenizer_path: str | None = None
    override_config: dict[str, Any] = {}
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = True
    freeze_vision_tower: bool = False
    lora: LoraConfig = LoraConfig()


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(1e-2, ge=0)
    strategy: Literal["adamw", "adamw_bf16"] = "adamw"
    lr_warmup_ratio: float = Field(0.0, ge=0, le=1)
    lr_warmup_steps: int | None = Field(None, ge=0)
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float | None = Field(None, ge=0, le=1)


class FsdpConfig(Section):
    enable_full_shard: bool = True
    enable_cpu_offload: bool = False
    enable_rank0_init: bool = True
    fsdp_size: int = -1
    torch_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    mp_param_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    mp_reduce_dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    mp_buffer_dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    use_orig_params: bool = False


class OffloadConfig(Section):
    offload_params: bool = False
    offload_optimizer: bool = False


class ActorConfig(Section):
    global_batch_size: int = Field(256, gt=0)
    micro_batch_size_per_device_for_update: int = Field(4, gt=0)
    micro_batch_size_per_device_for_experience: int = Field(16, gt=0)
    max_tokens_per_device: int | None = Field(None, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    clip_ratio_low: float = Field(0.2, ge=0)
    clip_ratio_high: float = Field(0.3, ge=0)
    clip_ratio_dual: float = Field(3.0, gt=1)
    loss_avg_mode: Literal["token", "seq", "seq_sum", "seq_sum_norm"] = "token"
    loss_type: str = "default"
    tau_positive: float = Field(1.0, gt=0)
    tau_negative: float = Field(1.05, gt=0)
    entropy_coef: float = Field(0.0, ge=0)
    ppo_epochs: int = Field(1, gt=0)
    padding_free: bool = True
    dynamic_batching: bool = True
    share_prefix: bool = True
    ulysses_size: int = Field(1, gt=0)
    use_torch_compile: bool = True
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    fsdp: FsdpConfig = FsdpConfig()
    offload: OffloadConfig = OffloadConfig()


class RefConfig(Section):
    fsdp: FsdpConfig = FsdpConfig()
    offload: OffloadConfig = OffloadConfig()


class RolloutConfig(Section):
    name: Literal["auto", "vllm", "transformers"] = "auto"
    n: int = Field(1, gt=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    seed: int = 1
    ignore_eos: bool = False
    limit_images: int = Field(0, ge=0)
    dtype: str = "bf16"
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    enforce_eager: bool = False
    enable_chunked_prefill: bool = False
    tensor_parallel_size: int = Field(2, gt=0)
    max_model_len: int | None = Field(None, gt=0)
    max_num_batched_tokens: int = Field(8192, gt=0)
    disable_log_stats: bool = True
    disable_tqdm: bool = False
    val_override_config: dict[str, Any] = {}


class RewardConfig(Section):
    reward_function: str | list[dict[str, Any]] | None = None
    reward_function_kwargs: dict[str, Any] = {}
    skip_special_tokens: bool = True
    num_cpus: int = Field(1, gt=0)
    timeout_s: float = Field(60.0, gt=0)
    on_error: Literal["zero", "skip", "raise"] = "zero"
    num_workers: int = Field(2, gt=0)


class WorkerConfig(Section):
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()
    reward: RewardConfig = RewardConfig()


class TrainerConfig(Section):
    total_epochs: int = Field(15, gt=0)
    max_steps: int | None = Field(None, gt=0)
    project_name: str = "seerl"
    experiment_name: str = "demo"
    logger: list[str] = ["console"]
    nnodes: int = Field(1, gt=0)
    n_gpus_per_node: int | Literal["auto"] = "auto"
    max_try_make_batch: int = 20
    critic_warmup: int = Field(0, ge=0)
    val_freq: int = -1
    val_before_train: bool = True
    val_only: bool = False
    val_generations_to_log: int = Field(0, ge=0)
    save_freq: int = -1
    save_limit: int = -1
    save_model_only: bool = False
    save_checkpoint_path: str | None = None
    load_checkpoint_path: str | None = None
    find_last_checkpoint: bool = True
    ray_timeline: str | None = None


class Config(Section):
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    worker: WorkerConfig = WorkerConfig()
    trainer: TrainerConfig = TrainerConfig()
