"""The schema as text: one key, a section, or a whole resolved configuration."""

from __future__ import annotations

import inspect
import re
import textwrap
from functools import cache
from typing import Any

from seerl.config.checks import NOT_YET
from seerl.config.constraints import CONSTRAINTS, device_count
from seerl.config.estimate import GIB, memory_estimate
from seerl.config.keys import allowed, choices, default_text, is_section, known_keys, meaning, nearest_key
from seerl.config.loading import dump_config
from seerl.config.schema import Config
from seerl.config.surroundings import SURROUNDINGS
from seerl.errors import UserError

INDENT: dict[str, Any] = {
    "initial_indent": "  ",
    "subsequent_indent": "    ",
    "break_long_words": False,
    "break_on_hyphens": False,
}


def explain(key: str) -> str:
    """A key's meaning, what it allows, its default and what is checked; for a section, its keys with their
    defaults.

    Raises:
        UserError: for an unknown key, with the nearest known one.
    """
    keys = known_keys()
    if key not in keys:
        near = nearest_key(key)
        sections = ", ".join(name for name in keys if "." not in name)
        raise UserError(
            f"{key}: unknown key; " + (f"did you mean `{near}`?" if near else f"the sections are {sections}")
        )
    field = keys[key]
    if is_section(field):
        lines = [f"  {name.rpartition('.')[2]:<45} {_short(name)}" for name in children(key)]
        return "\n".join([f"{key}: {meaning(field)}", *lines])
    lines = [meaning(field), f"allowed: {allowed(field)}", f"default: {default_text(field)}"]
    if later := not_yet(key):
        lines.append(f"not in this version: {later}")
    lines += [f"checked: {sentence}" for sentence in constraints_on(key)]
    return "\n".join([key, *(textwrap.fill(line, 110, **INDENT) for line in lines)])


@cache
def constraints() -> tuple[str, ...]:
    """What is checked before anything is loaded: the sentences in the docstrings of the checks."""
    texts = (inspect.getdoc(check) or "" for check in (*CONSTRAINTS, *SURROUNDINGS))
    sentences = (part for text in texts for part in re.split(r"(?<=\.)\n", text))
    return tuple(" ".join(sentence.split()) for sentence in sentences if sentence.strip())


def constraints_on(key: str) -> list[str]:
    """Those that name the key."""
    named = re.compile(rf"(?<![\w.]){re.escape(key)}(?!\.?\w)")
    return [sentence for sentence in constraints() if named.search(sentence)]


def not_yet(key: str) -> str | None:
    """The values that `seerl train` refuses in this version; None if it takes all."""
    unsupported = next((test for name, test, _ in NOT_YET if name == key), None)
    if unsupported is None:
        return None
    words = [word for word in choices(known_keys()[key].annotation) if unsupported(word)]
    if not words and unsupported(2) and not unsupported(1):
        return "more than 1"
    return ", ".join(words) or f"anything but {default_text(known_keys()[key])}"


def describe(config: Config) -> str:
    """The resolved configuration, the batch arithmetic in words, and the memory estimate of one device."""
    return "\n\n".join([dump_config(config).rstrip(), batch_arithmetic(config), memory_table(config)])


def batch_arithmetic(config: Config) -> str:
    """How prompts become samples, optimizer steps and micro-batches."""
    data, actor, n = config.data, config.worker.actor, config.worker.rollout.n
    updates = -(-data.rollout_batch_size // actor.global_batch_size) * actor.ppo_epochs
    longest = data.max_prompt_length + data.max_response_length
    budget = actor.max_tokens_per_device or actor.micro_batch_size_per_device_for_update * longest
    by_samples = f"{actor.micro_batch_size_per_device_for_update} samples"
    cut = f"at most {budget} tokens" if actor.dynamic_batching else by_samples
    epochs = f" ({actor.ppo_epochs} passes over them)" if actor.ppo_epochs > 1 else ""
    steps = f"{updates} optimizer step{'s' if updates != 1 else ''}{epochs}"
    samples, per_update = data.rollout_batch_size * n, actor.global_batch_size * n
    devices = device_count(config) or 1
    split = f"split over {devices} devices, " if devices > 1 else ""
    return (
        f"One step: {data.rollout_batch_size} prompts x {n} responses = {samples} samples,\n"
        f"  in {steps} of {actor.global_batch_size} prompts ({per_update} samples),\n"
        f"  each {split}cut into micro-batches of {cut}."
    )


def memory_table(config: Config) -> str:
    """The memory estimate of one device, part by part."""
    estimate = memory_estimate(config)
    if estimate is None:
        return "Memory per device: not estimated (the model's config.json is not on this machine)."
    lines = [f"  {part:<15} {_size_text(size):>12}" for part, size in estimate.parts.items()]
    most = f"  {'most at a time':<15} {_size_text(estimate.total):>12}"
    return "\n".join(["Memory per device, about:", *lines, most])


def _size_text(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB or size == 0 else f"{1024 * size / GIB:.1f} MiB"


def children(section: str) -> list[str]:
    """The keys directly under a section, in the order of the schema."""
    return [key for key in known_keys() if key.rpartition(".")[0] == section]


def _short(key: str) -> str:
    field = known_keys()[key]
    return "(section)" if is_section(field) else default_text(field)
