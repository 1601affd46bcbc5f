"""What must hold before anything is loaded: constraints over several keys, files, lengths, devices, memory.

`seerl train` takes every finding as an error. `seerl check` is often run elsewhere than the training (a
laptop, a login node): what only that machine lacks, and what this version does not do yet, is then a note.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from seerl.config.estimate import memory_estimate, read_model_config, total_memory
from seerl.config.schema import Config
from seerl.errors import UserError

ExtraCheck = Callable[[Config], list[str]]

GROUP_ESTIMATORS = frozenset(
    {"grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gdpo"}
)

NOT_YET: list[tuple[str, Callable[[Any], bool]]] = [
    ("algorithm.adv_estimator", lambda v: v in ("gae", "remax")),
    ("algorithm.kl_penalty", lambda v: v == "full"),
    ("algorithm.adv_scale", lambda v: v != "group"),
    ("algorithm.entropy_top_share", lambda v: v < 1),
    ("algorithm.off_policy_mask", lambda v: v is not None),
    ("algorithm.unbiased_kl", bool),
    ("algorithm.mask_truncated", bool),
    ("algorithm.entropy_target", lambda v: v is not None),
    ("algorithm.ref_sync_steps", lambda v: v is not None),
    ("worker.actor.loss_type", lambda v: v in ("clip_cov", "kl_cov", "vespo", "luspo")),
    ("worker.actor.model.lora.rank", lambda v: v > 0),
    ("worker.actor.ulysses_size", lambda v: v > 1),
    ("trainer.nnodes", lambda v: v > 1),
    ("trainer.n_gpus_per_node", lambda v: v != "auto" and v > 1),
    ("trainer.ray_timeline", lambda v: v is not None),
]
"""Values that the configuration knows and this version does not do: key, and which values."""

VALIDATION_KEYS = {"n", "temperature", "top_p", "top_k", "max_tokens", "seed", "ignore_eos"}
TEMPLATES = ("data.format_prompt", "data.override_chat_template")


@dataclass(slots=True)
class Report:
    """What was found: errors stop a run, notes do not."""

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_config(config: Config, *, here: bool, extra_checks: list[ExtraCheck] | None = None) -> Report:
    """Runs every check. `here`: the training runs on this machine, so what it lacks is an error."""
    report = Report()
    for check in (_batches, _groups, _lengths, _validation, _correction, _templates):
        report.errors += check(config)
    for extra in extra_checks or []:
        report.errors += extra(config)
    elsewhere = [*_not_yet(config), *_data(config), *_model(config), *_devices(config), *_memory(config)]
    (report.errors if here else report.notes).extend(elsewhere)
    return report


def check_or_raise(config: Config, extra_checks: list[ExtraCheck] | None = None) -> None:
    """The checks as a training run makes them.

    Raises:
        UserError: naming every finding.
    """
    errors = check_config(config, here=True, extra_checks=extra_checks).errors
    if errors:
        raise UserError("\n".join(errors) if len(errors) == 1 else "\n".join(f"- {e}" for e in errors))


def value_of(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _not_yet(config: Config) -> Iterator[str]:
    for key, unsupported in NOT_YET:
        value = value_of(config, key)
        if unsupported(value):
            yield f"{key}={value}: this version does not do that yet; leave the key at its default"


def _batches(config: Config) -> Iterator[str]:
    rollout, actor = config.data.rollout_batch_size, config.worker.actor.global_batch_size
    if rollout % actor:
        legal = [size for size in range(1, rollout + 1) if rollout % size == 0]
        below = max((s for s in legal if s < actor), default=legal[0])
        above = min((s for s in legal if s > actor), default=legal[-1])
        yield (
            f"worker.actor.global_batch_size={actor} does not divide data.rollout_batch_size={rollout}; the nearest "
            f"values that do are {below} and {above}"
            if below != above
            else f"worker.actor.global_batch_size={actor} does not divide data.rollout_batch_size={rollout}; "
            f"{below} does"
        )
    mini = config.data.mini_rollout_batch_size
    if mini is not None and mini > rollout and not config.algorithm.online_filtering:
        yield f"data.mini_rollout_batch_size={mini} is more than data.rollout_batch_size={rollout}"


def _groups(config: Config) -> Iterator[str]:
    name, n = config.algorithm.adv_estimator, config.worker.rollout.n
    if name in GROUP_ESTIMATORS and n < 2:
        yield (
            f"algorithm.adv_estimator={name} compares the responses to one prompt, but worker.rollout.n={n}; set "
            "worker.rollout.n to 2 or more (5 to 16 are usual)"
        )
    algorithm = config.algorithm
    if algorithm.filter_low >= algorithm.filter_high:
        yield f"algorithm.filter_low={algorithm.filter_low} is not below filter_high={algorithm.filter_high}"
    if config.worker.rollout.temperature == 0 and not config.trainer.val_only:
        yield "worker.rollout.temperature=0: all responses to a prompt are the same, so nothing is learned"


def _lengths(config: Config) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest, limit = prompt + response, config.worker.rollout.max_model_len
    if limit is not None and longest > limit:
        yield (
            f"data.max_prompt_length={prompt} + data.max_response_length={response} = {longest} is more than "
            f"worker.rollout.max_model_len={limit}; lower one or raise the limit"
        )
    model = read_model_config(config)
    context = (model or {}).get("max_position_embeddings") or (model or {}).get("text_config", {}).get(
        "max_position_embeddings"
    )
    if context and longest > context:
        yield (
            f"data.max_prompt_length={prompt} + data.max_response_length={response} = {longest} is more than the "
            f"model's context of {context} tokens"
        )
    low, high = config.data.min_pixels, config.data.max_pixels
    if low is not None and high is not None and low > high:
        yield f"data.min_pixels={low} is more than data.max_pixels={high}"


def _validation(config: Config) -> Iterator[str]:
    for key in config.worker.rollout.val_override_config:
        if key not in VALIDATION_KEYS:
            known = ", ".join(sorted(VALIDATION_KEYS))
            yield f"worker.rollout.val_override_config.{key}: unknown; allowed are {known}"
    if config.data.val_batch_size == 0:
        yield "data.val_batch_size=0: give a number of prompts, or -1 for all at once"
    if config.trainer.val_only and not config.data.val_files:
        yield "trainer.val_only=true needs data.val_files"


def _correction(config: Config) -> Iterator[str]:
    rollout, name = config.worker.rollout, config.algorithm.rollout_correction
    if name != "none" and rollout.name != "transformers" and (rollout.top_p < 1 or rollout.top_k > 0):
        yield (
            f"algorithm.rollout_correction={name} needs the engine's log-probabilities before truncation, which vLLM "
            f"does not give with top_p={rollout.top_p}, top_k={rollout.top_k}; set worker.rollout.top_p=1 and "
            "top_k=-1, or worker.rollout.name=transformers"
        )


def _templates(config: Config) -> Iterator[str]:
    for key in TEMPLATES:
        name = value_of(config, key)
        if not name:
            continue
        path = Path(name)
        if not path.is_file():
            yield f"{key}={name}: there is no such file"
            continue
        try:
            template = jinja2.Environment(undefined=jinja2.Undefined).from_string(
                path.read_text(encoding="utf-8")
            )
            if key == "data.format_prompt" and "sample text" not in template.render(content="sample text"):
                yield f"{key}={name}: the template does not use {{{{ content }}}}, so every prompt would be the same"
        except (jinja2.TemplateError, UnicodeDecodeError) as error:
            yield f"{key}={name}: the template does not render: {error}"


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def _data(config: Config) -> Iterator[str]:
    if not config.data.train_files and not config.trainer.val_only:
        yield "data.train_files is empty; give a hub id (org/name@split), a file or a folder"
    if config.data.image_dir and not Path(config.data.image_dir).is_dir():
        yield f"data.image_dir={config.data.image_dir}: there is no such folder"
    for key in ("load_checkpoint_path",):
        name = getattr(config.trainer, key)
        if name and not Path(name).is_dir():
            yield f"trainer.{key}={name}: there is no such folder"


def _model(config: Config) -> Iterator[str]:
    path = config.worker.actor.model.model_path
    if not path:
        yield "worker.actor.model.model_path is not set; give a model folder or a hub id"
    elif not Path(path).is_dir() and not HUB_ID.fullmatch(path):
        yield f"worker.actor.model.model_path={path}: there is no such folder, and it is not a hub id (org/name)"


def _devices(config: Config) -> Iterator[str]:
    wanted = config.trainer.n_gpus_per_node
    if wanted == "auto" or wanted == 0:
        return
    from seerl.cluster.devices import gpu_count

    found = gpu_count()
    if wanted > found:
        yield (
            f"trainer.n_gpus_per_node={wanted}, but this machine has {found} GPU{'s' if found != 1 else ''}; set it "
            "to auto (what the machine has) or to 0 (the CPU)"
        )


def _memory(config: Config) -> Iterator[str]:
    estimate = memory_estimate(config)
    if estimate is None:
        return
    name, available = total_memory(config)
    if estimate.total > available:
        part, size = max(estimate.parts.items(), key=lambda item: item[1])
        yield (
            f"about {estimate.total / 2**30:.1f} GiB are needed and {name} has {available / 2**30:.1f} GiB; most "
            f"goes to {part} ({size / 2**30:.1f} GiB): {estimate.advice[part]}"
        )
