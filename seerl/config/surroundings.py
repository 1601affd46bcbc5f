"""What the configuration needs around it: files, templates, the model's own limits, devices, memory.

A finding is an error everywhere if no other machine would do better (a template that does not render, a
relative path that is not there). A device, a hub or a mounted folder may well exist where the training runs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.meta

from seerl.config.estimate import GIB, context_length, memory_estimate, read_model_config, total_memory
from seerl.config.schema import Config

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
_WEIGHT = re.compile(r"\*\d+(\.\d+)?$")
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag of chat templates that transformers adds to Jinja."""
_COMMA = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is missing or does not fit."""

    text: str
    everywhere: bool = False
    """Whether it would be so on any machine."""


def _missing(key: str, name: str, kind: str) -> Finding:
    path = Path(name).expanduser()
    where = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
    return Finding(f"{key}={name}: there is no such {kind}{where}", everywhere=not path.is_absolute())


def _templates(config: Config, _: bool) -> Iterator[Finding]:
    for name in ("format_prompt", "override_chat_template"):
        given, key = getattr(config.data, name), f"data.{name}"
        if not given:
            continue
        path = Path(given)
        if not path.is_file():
            yield _missing(key, given, "file")
            continue
        try:
            text = path.read_text(encoding="utf-8")
            if name == "format_prompt":
                same = not _used_variables(text)
            else:
                same = False
                _parse(_GENERATION.sub("", text))
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            yield Finding(f"{key}={given}: the template does not render: {error}", everywhere=True)
            continue
        if same:
            wanted = "the template does not use {{ content }}, so every prompt would be the same"
            yield Finding(f"{key}={given}: {wanted}", everywhere=True)


def _parse(text: str) -> jinja2.nodes.Template:
    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)


def _used_variables(text: str) -> set[str]:
    """The variables that a prompt template reads; it is rendered once, to see that it can be."""
    # A column that only real rows have is no fault of the template.
    with contextlib.suppress(jinja2.UndefinedError):
        jinja2.Template(text).render(content="a question")
    return jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(text))


def _data(config: Config, here: bool) -> Iterator[Finding]:
    for key in ("train_files", "val_files"):
        given = getattr(config.data, key)
        for entry in _entries(given):
            yield from _entry(f"data.{key}", entry, here)
    if config.data.image_dir and not Path(config.data.image_dir).expanduser().is_dir():
        yield _missing("data.image_dir", config.data.image_dir, "folder")
    checkpoint = config.trainer.load_checkpoint_path
    if checkpoint and not Path(checkpoint).expanduser().is_dir():
        yield _missing("trainer.load_checkpoint_path", checkpoint, "folder")


def _entries(given: str | tuple[str, ...]) -> list[str]:
    if isinstance(given, tuple):
        return [entry.strip() for entry in given]
    if not given or _exists(given):
        return [given] if given else []
    return [entry.strip() for entry in _COMMA.split(given) if entry.strip()]


def _entry(key: str, entry: str, here: bool) -> Iterator[Finding]:
    """One data source. A hub's data set is not looked up: only loading it can tell."""
    if _exists(entry) or _exists(entry := _WEIGHT.sub("", entry)):
        return
    path, at, split = entry.rpartition("@")
    name = path if at and Path(split).suffix not in _DATA_SUFFIXES else entry
    if _exists(name):
        return
    if _HUB_ID.fullmatch(name) and Path(name).suffix not in _DATA_SUFFIXES:
        if not here:
            yield Finding(f"{key}={entry}: taken for a data set on the hub; it was not looked up")
    else:
        yield _missing(key, name, "file or folder")


def _exists(name: str) -> bool:
    return Path(name).expanduser().exists()


def _model(config: Config, here: bool) -> Iterator[Finding]:
    model = config.worker.actor.model
    for name in ("model_path", "tokenizer_path"):
        given, key = getattr(model, name), f"worker.actor.model.{name}"
        if not given or Path(given).expanduser().is_dir():
            continue
        if not _HUB_ID.fullmatch(given):
            yield _missing(key, given, "folder, and this is not a hub id (org/name)")
        elif not here:
            yield Finding(f"{key}={given}: taken for a model on the hub; it was not looked up")
    shapes = read_model_config(config)
    folder = Path(model.model_path or "").expanduser()
    if model.model_path and folder.is_dir() and shapes is None:
        yield Finding(
            f"worker.actor.model.model_path={folder}: it has no readable config.json", everywhere=True
        )
    context = context_length(shapes) if shapes else None
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if context is not None and prompt + response > context:
        yield Finding(
            f"data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response} is "
            f"more than the model's context of {context} tokens; lower one of them",
            everywhere=True,
        )


def _devices(config: Config, _: bool) -> Iterator[Finding]:
    wanted = config.trainer.n_gpus_per_node
    if wanted == "auto" or wanted == 0:
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted > found:
        yield Finding(
            f"trainer.n_gpus_per_node={wanted}, but this machine has {found} GPU{'s' if found != 1 else ''}; "
            "set it to auto (what the machine has) or to 0 (the CPU)"
        )


def _memory(config: Config, _: bool) -> Iterator[Finding]:
    estimate = memory_estimate(config)
    if estimate is None:
        return
    name, available = total_memory(config)
    if estimate.total > available:
        part, size = max(estimate.parts.items(), key=lambda item: item[1])
        yield Finding(
            f"about {estimate.total / GIB:.1f} GiB are needed on one device, and {name} has "
            f"{available / GIB:.1f} GiB; most goes to {part} ({size / GIB:.1f} GiB): {estimate.advice(part)}"
        )


SURROUNDINGS: tuple[Callable[[Config, bool], Iterator[Finding]], ...] = (
    _templates,
    _data,
    _model,
    _devices,
    _memory,
)
