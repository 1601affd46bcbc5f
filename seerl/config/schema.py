"""Every configuration key: its type, default, meaning and bounds. `seerl explain KEY` prints what stands
here.

Sections, names and meanings are those EasyR1 users have. Checks that need more than one key, or the machine,
are in `checks.py`; so is the list of values that this version knows but does not do yet.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from seerl.config.frozen import FrozenDict, Mapping
from seerl.config.model_schema import (
    ActorConfig,
    CriticConfig,
    EngineDtype,
    FsdpConfig,
    LoraConfig,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    RefConfig,
)
from seerl.config.section import Section

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "FsdpConfig",
    "LoraConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainerConfig",
    "WorkerConfig",
]

TrackerName = Literal["console", "file", "wandb", "swanlab", "tensorboard", "mlflow", "trackio"]


class DataConfig(Section):
    """The data sets and how their rows become prompts."""

    train_files: str | tuple[str, ...] = ""
    """`org/name@split` on the Hugging Face Hub (ModelScope with USE_MODELSCOPE_HUB=1), a local parquet, json,
    jsonl, csv or arrow file, or a folder of them; `@split` is optional (train). A comma list or YAML list
    joins several; an optional `*weight` behind an entry sets the mix."""
    val_files: str | tuple[str, ...] = ""
    """The validation data, given like train_files; empty: no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: text with an `<image>` for each image, or a list of chat messages."""
    answer_key: str = "answer"
    """Column of the ground truth that the reward function gets; any JSON type."""
    image_key: str = "images"
    """Column of the images: bytes, paths, {bytes, path}, base64, data URLs; one or a list. It may be
    absent."""
    video_key: str = "videos"
    """Column of the videos."""
    image_dir: str | None = None
    """Folder that relative image or video paths start from."""
    video_fps: float = Field(2.0, gt=0)
    """Frames sampled a second from a video."""
    max_prompt_length: int = Field(512, gt=0)
    """Longest prompt in tokens, image tokens included; a longer one is left out, never cut."""
    max_response_length: int = Field(512, gt=0)
    """Longest response in tokens."""
    rollout_batch_size: int = Field(512, gt=0)
    """Prompts taken per training step, over all devices; each gets worker.rollout.n responses."""
    mini_rollout_batch_size: int | None = Field(None, gt=0)
    """Prompts generated at a time while a filtered batch is filled; null: rollout_batch_size."""
    val_batch_size: int = Field(-1, ge=-1)
    """Prompts per validation batch; -1: all at once."""
    format_prompt: str | None = None
    """Path of a Jinja2 template around every prompt, rendered with `content` = the row's prompt and every
    other column."""
    system_prompt: str | None = None
    """A system message before every prompt."""
    override_chat_template: str | None = None
    """Path of a Jinja2 chat template used instead of the model's own."""
    shuffle: bool = True
    """Whether the training order is shuffled; it is a function of (seed, epoch) alone."""
    seed: int = Field(1, ge=0)
    """Seed of the training order."""
    min_pixels: int | None = Field(262144, gt=0)
    """Smallest width x height; smaller images are scaled up, aspect ratio kept. null: as they are."""
    max_pixels: int | None = Field(4194304, gt=0)
    """Largest width x height; larger images are scaled down, aspect ratio kept. null: as they are."""
    filter_overlong_prompts: bool = True
    """Whether prompts over max_prompt_length are looked for and left out before training starts."""
    filter_overlong_prompts_workers: int = Field(16, gt=0)
    """Most worker processes that look for them; never more than there are CPUs."""
    on_bad_row: Literal["skip", "raise"] = "skip"
    """`skip`: a row that cannot be used is set aside, counted, and listed with its reason in bad_rows.jsonl;
    `raise`: the run stops with that reason."""


class AlgorithmConfig(Section):
    """Advantages, KL, filtering and corrections; the formulas are in docs/algorithms.md."""

    adv_estimator: Literal[
        "grpo",
        "dr_grpo",
        "grpo_passk",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "gdpo",
        "gae",
    ] = "grpo"
    """How rewards become advantages."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later rewards (reinforce_plus_plus, gae)."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of gae."""
    disable_kl: bool = False
    """No reference model at all."""
    use_kl_loss: bool = False
    """KL as a term of the loss; otherwise it is taken off the token rewards."""
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = "kl"
    """The estimator of the KL divergence from the reference."""
    kl_coef: float = Field(1e-3, ge=0)
    """Weight of the KL; 0: no reference model."""
    kl_type: Literal["fixed", "adaptive"] = "fixed"
    """Whether kl_coef moves so that the KL in the reward nears kl_target."""
    kl_horizon: float = Field(10000.0, ge=0)
    """Samples over which the adaptive controller moves."""
    kl_target: float = Field(0.1, ge=0)
    """KL that the adaptive controller aims at."""
    online_filtering: bool = False
    """Keep a group only where filter_low < its mean filter_key < filter_high; generate more until the batch
    is full."""
    filter_key: str = "overall"
    """The score that online filtering looks at: `overall` or another name that the reward function gives."""
    filter_low: float = 0.01
    """Lower bound of online filtering, excluded."""
    filter_high: float = 0.99
    """Upper bound of online filtering, excluded."""
    adv_scale: Literal["group", "batch", "none"] = "group"
    """What grpo divides by: the group's standard deviation, the batch's, or nothing."""
    rollout_correction: Literal["none", "tis", "mis", "seq_tis", "seq_mis", "geo_mis"] = "none"
    """What is done where engine and trainer disagree on probabilities: importance weights bounded (tis) or
    masked (mis), per token or per response."""
    rollout_correction_cap: float = Field(2.0, gt=1)
    """Largest weight of the rollout correction; masks keep [1/cap, cap]."""
    entropy_top_share: float = Field(1.0, gt=0, le=1)
    """Below 1: only the tokens with the highest entropy, that share of the step's, keep a policy gradient."""
    off_policy_mask: float | None = None
    """Leaves out responses of negative advantage whose mean (engine - policy) log-probability is above
    this."""
    unbiased_kl: bool = False
    """The KL term of the loss is multiplied by the ratio."""
    mask_truncated: bool = False
    """Responses cut off by max_response_length give no gradient."""
    entropy_target: float | None = Field(None, ge=0)
    """Entropy below which an entropy bonus is raised step by step."""
    ref_sync_steps: int | None = Field(None, gt=0)
    """Every so many steps the reference moves towards the policy."""
    ref_sync_mix: float = Field(0.6, ge=0, le=1)
    """The policy's share in the moved reference."""


class RolloutConfig(Section):
    """How answers are sampled."""

    name: Literal["auto", "vllm", "transformers"] = "auto"
    """The engine; auto: vllm where it is installed, else transformers."""
    n: int = Field(1, gt=0)
    """Responses per prompt; group estimators need more than 1."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens that hold this probability."""
    top_k: int = Field(-1, ge=-1)
    """Sample from this many most likely tokens; -1: all."""
    seed: int = Field(1, ge=0)
    """Seed of the sampling; a response depends on (weights, seed, step, row, number) alone."""
    ignore_eos: bool = False
    """Go on to max_response_length whatever the model says."""
    limit_images: int = Field(0, ge=0)
    """Most images per prompt; 0: what the data needs."""
    dtype: EngineDtype = "bf16"
    """Type the engine computes in."""
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    """Share of the GPU's memory that vLLM takes."""
    enforce_eager: bool = False
    """No CUDA graphs in vLLM."""
    enable_chunked_prefill: bool = False
    """vLLM may cut prompts into chunks."""
    tensor_parallel_size: int = Field(2, gt=0)
    """Devices per vLLM engine; a single device runs with 1."""
    max_model_len: int | None = Field(None, gt=0)
    """Longest prompt + response of the engine; null: max_prompt_length + max_response_length."""
    max_num_batched_tokens: int = Field(8192, gt=0)
    """Tokens vLLM computes at a time."""
    disable_log_stats: bool = True
    """vLLM does not log its statistics."""
    disable_tqdm: bool = False
    """Accepted for EasyR1's configurations; generation shows no bar of its own."""
    val_override_config: Mapping = FrozenDict()
    """Sampling of validation where it differs: temperature, top_p, top_k, n, max_tokens, seed, ignore_eos."""


class RewardConfig(Section):
    """How answers are scored."""

    reward_function: str | tuple[Mapping, ...] | None = None
    """`FILE:NAME` (NAME defaults to main), the name of a built-in reward, or a list of {function, weight,
    name, kwargs} whose weighted sum is the reward."""
    reward_function_kwargs: Mapping = FrozenDict()
    """Passed to the function."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the response that the function gets."""
    num_cpus: int = Field(1, gt=0)
    """CPUs a reward process counts for when it is placed on a cluster."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one group, and for one sample when a group is repeated sample by sample."""
    on_error: Literal["zero", "skip", "raise"] = "zero"
    """A sample that cannot be scored gets 0, is left out of its group, or stops the run."""
    num_workers: int = Field(2, gt=0)
    """Processes that score."""


class WorkerConfig(Section):
    """The parts of a step."""

    actor: ActorConfig = ActorConfig()
    """The policy."""
    critic: CriticConfig = CriticConfig()
    """The critic of gae."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    ref: RefConfig = RefConfig()
    """The reference model."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""


class TrainerConfig(Section):
    """The run: length, validation, checkpoints, trackers, devices."""

    total_epochs: int = Field(15, gt=0)
    """Passes over the training data."""
    max_steps: int | None = Field(None, gt=0)
    """Training steps; if set it alone decides."""
    project_name: str = Field("seerl", min_length=1)
    """Groups runs in trackers and folders."""
    experiment_name: str = Field("demo", min_length=1)
    """Names the run; the same name resumes it."""
    logger: tuple[TrackerName, ...] = ("console",)
    """The trackers."""
    nnodes: int = Field(1, gt=0)
    """Machines."""
    n_gpus_per_node: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """GPUs per machine; auto: what the machine has; 0: the CPU."""
    max_try_make_batch: int = Field(20, ge=-1)
    """Rounds of generation to fill a filtered batch; -1: no limit."""
    critic_warmup: int = Field(0, ge=0)
    """Steps in which only the critic learns."""
    val_freq: int = Field(-1, ge=-1)
    """Validate every so many steps; -1: only before and after."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and end."""
    val_generations_to_log: int = Field(0, ge=0)
    """Validation answers handed to the trackers."""
    save_freq: int = Field(-1, ge=-1)
    """Save every so many steps; -1: only at the end, and when the run is interrupted."""
    save_limit: int = Field(-1, ge=-1)
    """Checkpoints kept beside the best; -1: all."""
    save_model_only: bool = False
    """Checkpoints hold weights without the optimizer; they cannot be resumed exactly."""
    save_checkpoint_path: str | None = None
    """Folder of the checkpoints; null: checkpoints/PROJECT/EXPERIMENT."""
    load_checkpoint_path: str | None = None
    """A checkpoint (global_step_N) to continue from."""
    find_last_checkpoint: bool = True
    """Continue from the last checkpoint in save_checkpoint_path, if there is one."""
    ray_timeline: str | None = None
    """File for Ray's timeline."""


class Config(Section):
    """The whole configuration."""

    data: DataConfig = DataConfig()
    """Data sets and prompts."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages, KL, filtering."""
    worker: WorkerConfig = WorkerConfig()
    """Policy, sampling, scoring."""
    trainer: TrainerConfig = TrainerConfig()
    """The run."""
