"""The schema as text: one key, a section, a whole resolved configuration."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from seerl.config.estimate import memory_estimate
from seerl.config.loading import dump_config, known_keys, nearest_key
from seerl.config.schema import Config
from seerl.errors import UserError


def explain(key: str) -> str:
    """A key's meaning, type, default and bounds; a section's keys with the first words of each.

    Raises:
        UserError: for an unknown key, with the nearest known one.
    """
    keys = known_keys()
    if key not in keys:
        near = nearest_key(key)
        raise UserError(f"{key}: unknown key" + (f"; did you mean `{near}`?" if near else ""))
    field = keys[key]
    meaning = " ".join((field.description or "").split())
    if _is_section(field.annotation):
        inside = [k for k in keys if k.startswith(f"{key}.") and "." not in k[len(key) + 1 :]]
        lines = [f"  {k.removeprefix(f'{key}.'):<45} {_default(keys[k])}" for k in inside]
        return "\n".join([f"{key}: {meaning}", *lines])
    bounds = _bounds(field)
    return "\n".join(
        [
            key,
            f"  {meaning}",
            f"  type:    {type_name(field.annotation)}",
            f"  default: {_default(field)}",
            *([f"  bounds:  {bounds}"] if bounds else []),
        ]
    )


def describe(config: Config) -> str:
    """The resolved configuration, the batch arithmetic in words, and the memory estimate of one device."""
    return "\n\n".join([dump_config(config).rstrip(), batch_arithmetic(config), _memory_table(config)])


def batch_arithmetic(config: Config) -> str:
    """How prompts become samples, optimizer steps and micro-batches."""
    data, actor, n = config.data, config.worker.actor, config.worker.rollout.n
    updates = data.rollout_batch_size // actor.global_batch_size * actor.ppo_epochs
    budget = actor.max_tokens_per_device or actor.micro_batch_size_per_device_for_update * (
        data.max_prompt_length + data.max_response_length
    )
    cut = (
        f"at most {budget} tokens"
        if actor.dynamic_batching
        else f"{actor.micro_batch_size_per_device_for_update} samples"
    )
    return (
        f"One step: {data.rollout_batch_size} prompts x {n} responses = {data.rollout_batch_size * n} samples,\n"
        f"  in {updates} optimizer step{'s' if updates != 1 else ''} of {actor.global_batch_size} prompts "
        f"({actor.global_batch_size * n} samples),\n  each cut into micro-batches of {cut}."
    )


def _memory_table(config: Config) -> str:
    estimate = memory_estimate(config)
    if estimate is None:
        return "Memory per device: not estimated (the model's config.json is not on this machine)."
    lines = [f"  {part:<12} {size / 2**30:8.2f} GiB" for part, size in estimate.parts.items()]
    return "\n".join(
        [
            "Memory per device, about:",
            *lines,
            f"  {'in all':<12} {estimate.total / 2**30:8.2f} GiB (without the engine)",
        ]
    )


def markdown() -> str:
    """docs/configuration.md: every key in a table per section."""
    out = [
        "# Configuration",
        "",
        "Made from the schema (`python -m seerl.config.explain > docs/configuration.md`); `seerl explain KEY` prints",
        "one key. A command line is `config=FILE key.path=value ...`; later wins; values are YAML.",
        "",
    ]
    keys = known_keys()
    for section, field in keys.items():
        if not _is_section(field.annotation):
            continue
        inside = [k for k in keys if k.rpartition(".")[0] == section and not _is_section(keys[k].annotation)]
        if not inside:
            continue
        meaning = " ".join((field.description or "").split())
        out += [f"## {section}", "", meaning, "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key in inside:
            known = keys[key]
            bounds = _bounds(known)
            text = " ".join((known.description or "").split()).replace("|", "\\|")
            kind = type_name(known.annotation).replace("|", "\\|") + (f", {bounds}" if bounds else "")
            out.append(f"| `{key.rpartition('.')[2]}` | {kind} | `{_default(known)}` | {text} |")
        out.append("")
    return "\n".join(out)


def type_name(annotation: Any) -> str:
    """A type as a person writes it: `int | null`, `a | b` for a choice of words."""
    if annotation is type(None):
        return "null"
    arguments = get_args(annotation)
    text = str(annotation)
    if text.startswith("typing.Literal"):
        return " | ".join(str(a) for a in arguments)
    if "|" in text and arguments and not text.startswith(("list", "dict", "tuple")):
        return " | ".join(type_name(a) for a in arguments)
    if text.startswith("list["):
        return f"list of {type_name(arguments[0])}"
    if text.startswith("tuple["):
        return "pair of " + type_name(arguments[0])
    if text.startswith("dict["):
        return "mapping"
    return str(getattr(annotation, "__name__", annotation))


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _default(field: Any) -> str:
    if _is_section(field.annotation):
        return "(section)"
    value = field.default
    if value is PydanticUndefined:
        return "required"
    words = {None: "null", True: "true", False: "false", "": '""'}
    return words[value] if isinstance(value, str | bool | None) and value in words else str(value)


def _bounds(field: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    return ", ".join(found)


if __name__ == "__main__":
    print(markdown())
