"""What must hold before anything is loaded; `seerl check` and `seerl train` ask it here.

`seerl train` takes every finding as an error. `seerl check` is often run elsewhere than the training (a
laptop, a login node, CI): what only that machine lacks, and what this version does not do yet, is then a
note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from seerl.config.constraints import CONSTRAINTS
from seerl.config.schema import Config
from seerl.config.surroundings import SURROUNDINGS
from seerl.errors import UserError

ExtraCheck = Callable[[Config], list[str]]

DEVICE = "this version trains on one device"
LATER = "this version does not do that yet"

NOT_YET: list[tuple[str, Callable[[Any], bool], str]] = [
    ("algorithm.adv_estimator", lambda v: v in ("gae", "remax"), LATER),
    ("algorithm.kl_penalty", lambda v: v == "full", LATER),
    ("algorithm.adv_scale", lambda v: v != "group", LATER),
    ("algorithm.entropy_top_share", lambda v: v < 1, LATER),
    ("algorithm.off_policy_mask", lambda v: v is not None, LATER),
    ("algorithm.unbiased_kl", bool, LATER),
    ("algorithm.mask_truncated", bool, LATER),
    ("algorithm.entropy_target", lambda v: v is not None, LATER),
    ("algorithm.ref_sync_steps", lambda v: v is not None, LATER),
    ("worker.actor.loss_type", lambda v: v in ("clip_cov", "kl_cov", "vespo", "luspo"), LATER),
    ("worker.actor.model.lora.rank", lambda v: v > 0, LATER),
    ("worker.actor.ulysses_size", lambda v: v > 1, DEVICE),
    ("trainer.nnodes", lambda v: v > 1, DEVICE),
    ("trainer.n_gpus_per_node", lambda v: v != "auto" and v > 1, DEVICE),
    ("trainer.ray_timeline", lambda v: v is not None, LATER),
]
"""The one list of values that are known but not done by this version: key, which values, why."""

NO_EFFECT: list[tuple[str, str]] = [
    ("worker.actor.offload.offload_params", "the weights stay on the device while the engine runs"),
    ("worker.actor.offload.offload_optimizer", "the optimizer's state stays on the device"),
    ("worker.actor.fsdp.enable_cpu_offload", "the policy's weights stay on the device"),
]
"""Switches that this version accepts and does nothing for, and what happens instead."""


@dataclass(slots=True)
class Report:
    """What was found: errors stop a run, notes do not."""

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_config(config: Config, *, here: bool, extra_checks: Sequence[ExtraCheck] = ()) -> Report:
    """Runs every check. `here`: the training runs on this machine, so what it lacks is an error.

    `extra_checks` are those of other parts (the reward function); what they return are errors.
    """
    report = Report()
    for constraint in CONSTRAINTS:
        report.errors += constraint(config)
    for extra in extra_checks:
        report.errors += extra(config)
    (report.errors if here else report.notes).extend(_not_yet(config))
    report.notes += [
        f"{key}=true has no effect in this version: {instead}"
        for key, instead in NO_EFFECT
        if _value(config, key)
    ]
    for look in SURROUNDINGS:
        for finding in look(config, here):
            (report.errors if here or finding.everywhere else report.notes).append(finding.text)
    return report


def check_or_raise(config: Config, extra_checks: Sequence[ExtraCheck] = ()) -> list[str]:
    """The checks as a training run makes them; returns the notes.

    Raises:
        UserError: naming every finding.
    """
    report = check_config(config, here=True, extra_checks=extra_checks)
    errors = report.errors
    if errors:
        raise UserError("\n".join(errors) if len(errors) == 1 else "\n".join(f"- {e}" for e in errors))
    return report.notes


def _not_yet(config: Config) -> Iterator[str]:
    for key, unsupported, why in NOT_YET:
        value = _value(config, key)
        if unsupported(value):
            yield f"{key}={value}: {why}; leave the key at its default"


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
