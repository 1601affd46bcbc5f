"""Constraints over several keys. They hold on every machine, so each finding is an error everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from pydantic import ValidationError

from seerl.config.keys import allowed
from seerl.config.schema import Config, RolloutConfig

GROUP_ESTIMATORS = frozenset(
    {"grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gdpo"}
)
VALIDATION_KEYS = ("n", "temperature", "top_p", "top_k", "max_tokens", "seed", "ignore_eos")


def device_count(config: Config) -> int | None:
    """Devices that the configuration asks for; None where it leaves that to the machine."""
    per_node = config.trainer.n_gpus_per_node
    return None if per_node == "auto" else max(per_node, 1) * config.trainer.nnodes


def _batches(config: Config) -> Iterator[str]:
    prompts, update = config.data.rollout_batch_size, config.worker.actor.global_batch_size
    if prompts % update:
        divisors = [size for size in range(1, prompts + 1) if prompts % size == 0]
        yield (
            f"worker.actor.global_batch_size={update} does not divide data.rollout_batch_size={prompts}; "
            f"{_nearest(update, divisors)}"
        )
    mini = config.data.mini_rollout_batch_size
    if mini is not None and mini > prompts and not config.algorithm.online_filtering:
        yield (
            f"data.mini_rollout_batch_size={mini} is more than data.rollout_batch_size={prompts}, which only "
            "algorithm.online_filtering=true can use"
        )


def _devices(config: Config) -> Iterator[str]:
    devices, ulysses = device_count(config), config.worker.actor.ulysses_size
    if devices is None or devices == 1:
        return
    parallel = config.worker.rollout.tensor_parallel_size
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    if devices % parallel:
        yield (
            f"worker.rollout.tensor_parallel_size={parallel} does not divide the {devices} devices; "
            f"{_nearest(parallel, sizes)}"
        )
    if devices % ulysses:
        yield (
            f"worker.actor.ulysses_size={ulysses} does not divide the {devices} devices; "
            f"{_nearest(ulysses, sizes)}"
        )
        return
    ranks = devices // ulysses
    for key, size in (
        ("data.rollout_batch_size", config.data.rollout_batch_size),
        ("worker.actor.global_batch_size", config.worker.actor.global_batch_size),
    ):
        if size % ranks:
            around = [multiple for multiple in (size // ranks * ranks, -(-size // ranks) * ranks) if multiple]
            yield f"{key}={size} does not divide over {ranks} devices; {_nearest(size, around)}"


def _nearest(value: int, legal: list[int]) -> str:
    below = max((size for size in legal if size < value), default=None)
    above = min((size for size in legal if size > value), default=None)
    found = [str(size) for size in (below, above) if size is not None]
    return f"the nearest that do{'es' if len(found) == 1 else ''}: {' and '.join(found)}"


def _groups(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.worker.rollout
    if algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n < 2 and not config.trainer.val_only:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to one prompt, but "
            f"worker.rollout.n={rollout.n}; set worker.rollout.n to 2 or more (5 to 16 are usual)"
        )
    if algorithm.filter_low >= algorithm.filter_high:
        yield (
            f"algorithm.filter_low={algorithm.filter_low} is not below "
            f"algorithm.filter_high={algorithm.filter_high}"
        )
    if algorithm.kl_type == "adaptive" and not (algorithm.kl_horizon and algorithm.kl_target):
        yield "algorithm.kl_type=adaptive needs algorithm.kl_horizon and algorithm.kl_target above 0"
    if rollout.temperature == 0 and not config.trainer.val_only:
        yield (
            "worker.rollout.temperature=0: all responses to a prompt would be the same, and nothing would be "
            "learned; 1.0 is usual"
        )


def _lengths(config: Config) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    limit = config.worker.rollout.max_model_len
    if limit is not None and prompt + response > limit:
        yield (
            f"data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response} is "
            f"more than worker.rollout.max_model_len={limit}; lower one of them or raise the limit"
        )
    low, high = config.data.min_pixels, config.data.max_pixels
    if low is not None and high is not None and low > high:
        yield f"data.min_pixels={low} is more than data.max_pixels={high}"


def _validation(config: Config) -> Iterator[str]:
    key = "worker.rollout.val_override_config"
    for name, value in config.worker.rollout.val_override_config.items():
        if name not in VALIDATION_KEYS:
            yield f"{key}.{name}: unknown key; allowed are {', '.join(VALIDATION_KEYS)}"
            continue
        known = "n" if name == "max_tokens" else name  # both are an integer > 0
        try:
            RolloutConfig.model_validate({known: value}, strict=True)
        except ValidationError:
            yield f"{key}.{name}={value!r}: allowed is {allowed(RolloutConfig.model_fields[known])}"
    if config.data.val_batch_size == 0:
        yield "data.val_batch_size=0: give a number of prompts, or -1 for all at once"
    if config.trainer.val_only and not config.data.val_files:
        yield "trainer.val_only=true needs data.val_files"


def _correction(config: Config) -> Iterator[str]:
    rollout, name = config.worker.rollout, config.algorithm.rollout_correction
    truncates = rollout.top_p < 1 or rollout.top_k > 0
    on_vllm = rollout.name == "vllm" or (rollout.name == "auto" and find_spec("vllm") is not None)
    if name != "none" and truncates and on_vllm:
        yield (
            f"algorithm.rollout_correction={name} needs the engine's log-probabilities before truncation, "
            f"which vLLM does not give with top_p={rollout.top_p}, top_k={rollout.top_k}; set "
            "worker.rollout.top_p=1 and worker.rollout.top_k=-1, or worker.rollout.name=transformers"
        )


def _presence(config: Config) -> Iterator[str]:
    if not config.data.train_files and not config.trainer.val_only:
        yield "data.train_files is empty; give a hub id (org/name@split), a file or a folder"
    if not config.worker.actor.model.model_path:
        yield "worker.actor.model.model_path is not set; give a model folder or a hub id"


CONSTRAINTS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _presence,
    _batches,
    _devices,
    _groups,
    _lengths,
    _validation,
    _correction,
)
