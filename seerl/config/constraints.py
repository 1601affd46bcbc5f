"""Constraints over several keys. They hold on every machine, so each finding is an error everywhere.

A check's docstring says what must hold, a sentence for each constraint with the full keys in it, each on a
line of its own: `seerl explain` prints those that name a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt

from pydantic import ValidationError

from seerl.config.estimate import uses_vllm
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
    """worker.actor.global_batch_size divides data.rollout_batch_size.
    data.mini_rollout_batch_size is at most data.rollout_batch_size, unless algorithm.online_filtering is on.
    """
    prompts, update = config.data.rollout_batch_size, config.worker.actor.global_batch_size
    if prompts % update:
        divisors = _divisors(prompts)
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
    """worker.rollout.tensor_parallel_size and worker.actor.ulysses_size divide the number of devices,
    trainer.nnodes x trainer.n_gpus_per_node.
    data.rollout_batch_size and worker.actor.global_batch_size divide over the devices that hold different
    sequences.
    """
    devices, ulysses = device_count(config), config.worker.actor.ulysses_size
    if devices is None or devices == 1:
        return
    parallel = config.worker.rollout.tensor_parallel_size
    sizes = _divisors(devices)
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


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in small]


def _nearest(value: int, legal: list[int]) -> str:
    below = max((size for size in legal if size < value), default=None)
    above = min((size for size in legal if size > value), default=None)
    found = [str(size) for size in (below, above) if size is not None]
    return f"the nearest that do{'es' if len(found) == 1 else ''}: {' and '.join(found)}"


def _groups(config: Config) -> Iterator[str]:
    """worker.rollout.n is more than 1 where algorithm.adv_estimator compares the responses of a group.
    algorithm.filter_low is below algorithm.filter_high.
    algorithm.kl_target is above 0 and algorithm.kl_horizon above a fifth of a step's responses where
    algorithm.kl_type is adaptive and the KL is in the reward.
    worker.reward.reward_function is a list of rewards where algorithm.adv_estimator is gdpo, and the KL term
    is then in the loss (algorithm.use_kl_loss) or off (algorithm.disable_kl).
    worker.rollout.temperature is above 0 in training.
    trainer.critic_warmup is 0 unless algorithm.adv_estimator is gae.
    """
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
    if not config.trainer.val_only:
        yield from _adaptive_kl(config)
        yield from _gdpo(config)
    if rollout.temperature == 0 and not config.trainer.val_only:
        yield (
            "worker.rollout.temperature=0: all responses to a prompt would be the same, and nothing would be "
            "learned; 1.0 is usual"
        )
    if config.trainer.critic_warmup and algorithm.adv_estimator != "gae":
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup}: there is no critic with "
            f"algorithm.adv_estimator={algorithm.adv_estimator}; set it to 0"
        )


def _adaptive_kl(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_type != "adaptive" or algorithm.disable_kl or algorithm.use_kl_loss:
        return
    if not algorithm.kl_target > 0:
        yield "algorithm.kl_type=adaptive needs algorithm.kl_target above 0"
    responses = config.data.rollout_batch_size * config.worker.rollout.n
    if not algorithm.kl_horizon > responses / 5:
        yield (
            f"algorithm.kl_horizon={algorithm.kl_horizon} must be above a fifth of the {responses} responses "
            "of a step, or one step could take the adaptive KL coefficient to 0 for good; 10000 is usual"
        )


def _gdpo(config: Config) -> Iterator[str]:
    algorithm, given = config.algorithm, config.worker.reward.reward_function
    if algorithm.adv_estimator != "gdpo":
        return
    if isinstance(given, str) or (given is not None and len(given) < 2):
        yield (
            "algorithm.adv_estimator=gdpo normalises several rewards one by one: make "
            "worker.reward.reward_function a list of two or more, such as "
            "[{function: a.py:accuracy}, {function: a.py:format, weight: 0.1}], or use grpo"
        )
    if not (algorithm.disable_kl or algorithm.use_kl_loss or algorithm.kl_coef == 0):
        yield (
            "algorithm.adv_estimator=gdpo normalises the rewards without a KL penalty in them; set "
            "algorithm.use_kl_loss=true or algorithm.disable_kl=true"
        )


def _lengths(config: Config) -> Iterator[str]:
    """data.max_prompt_length + data.max_response_length is at most worker.rollout.max_model_len.
    data.min_pixels is at most data.max_pixels.
    """
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
    """worker.rollout.val_override_config has only sampling keys, with values that worker.rollout allows.
    data.val_batch_size is not 0.
    data.val_files is set where trainer.val_only is on.
    """
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
    """algorithm.rollout_correction needs worker.rollout.top_p and worker.rollout.top_k that cut nothing off,
    or the transformers engine (worker.rollout.name).
    """
    rollout, name = config.worker.rollout, config.algorithm.rollout_correction
    truncates = rollout.top_p < 1 or rollout.top_k > 0
    if name != "none" and truncates and uses_vllm(config):
        yield (
            f"algorithm.rollout_correction={name} needs the engine's log-probabilities before truncation, "
            f"which vLLM does not give with top_p={rollout.top_p}, top_k={rollout.top_k}; set "
            "worker.rollout.top_p=1 and worker.rollout.top_k=-1, or worker.rollout.name=transformers"
        )


def _presence(config: Config) -> Iterator[str]:
    """data.train_files is set unless trainer.val_only is on.
    worker.actor.model.model_path is set.
    """
    if not config.data.train_files and not config.trainer.val_only:
        yield "data.train_files is empty; give a hub id (org/name@split), a file or a folder"
    if not config.worker.actor.model.model_path:
        yield "worker.actor.model.model_path is not set; give a model folder or a hub id"


def _names(config: Config) -> Iterator[str]:
    """trainer.project_name and trainer.experiment_name name folders below the place of all runs."""
    for name in ("project_name", "experiment_name"):
        given = getattr(config.trainer, name)
        if given.startswith(("/", "~")) or ".." in given.split("/") or not given.isprintable():
            yield (
                f"trainer.{name}={given!r}: a name, with no line breaks, no .. and no / in front; "
                "another folder is set by trainer.save_checkpoint_path"
            )


CONSTRAINTS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _presence,
    _batches,
    _devices,
    _groups,
    _lengths,
    _validation,
    _correction,
    _names,
)
