"""From `worker.reward` to functions that can be called.

A reward is `FILE:NAME` (a user's own file; NAME defaults to `main`), the name of a built-in, or a list of
entries `{function: ..., weight: 1.0, name: ..., kwargs: {...}}` whose weighted sum is the reward.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from seerl.errors import UserError
from seerl.reward.forms import Form, form_of, misfit, sees_images

if TYPE_CHECKING:
    from seerl.config.schema import Config, RewardConfig

LARGEST_WEIGHT = 1e6
BUILT_IN = ("math", "r1v", "dapo", "choice", "iou", "count", "llm_judge", "http")
"""Each a module of `seerl.reward.builtin` with `compute_score`."""

KEY = "worker.reward.reward_function"
LOAD_LIMIT_S = 300.0
"""How long importing a reward file may take."""
_ENTRY_KEYS = ("function", "weight", "name", "kwargs")


@dataclass(frozen=True, slots=True)
class Entry:
    """One reward of the configuration, not yet loaded: it travels to the workers."""

    source: str
    """A file's absolute path, or a built-in's name."""
    attribute: str
    name: str
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reward:
    """A loaded reward function."""

    function: Callable[..., Any]
    form: Form
    kwargs: Mapping[str, Any]
    uses_images: bool
    """Pictures are sent only to those that may look at them: they are most of what a call weighs."""


def reward_entries(config: RewardConfig) -> list[Entry]:
    """The rewards of the configuration; nothing is imported.

    Raises:
        UserError: nothing is named, a file is missing, a built-in does not exist, an entry is malformed.
    """
    given = config.reward_function
    if not given:
        raise UserError(
            f"{KEY} is not set: give FILE:NAME of a reward function, or one of {', '.join(BUILT_IN)}"
        )
    if isinstance(given, str):
        return [_entry(given, KEY, kwargs=config.reward_function_kwargs)]
    entries = [
        _list_entry(item, f"{KEY}[{i}]", config.reward_function_kwargs) for i, item in enumerate(given)
    ]
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{KEY}: two entries are called {name!r}; give each its own `name`")
    return entries


def _list_entry(item: Mapping[str, Any], key: str, shared: Mapping[str, Any]) -> Entry:
    if unknown := sorted(set(item) - set(_ENTRY_KEYS)):
        raise UserError(f"{key}.{unknown[0]} is not known: an entry has {', '.join(_ENTRY_KEYS)}")
    if not isinstance(item.get("function"), str):
        raise UserError(f"{key}.function is missing: give FILE:NAME or one of {', '.join(BUILT_IN)}")
    weight = item.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not abs(weight) <= LARGEST_WEIGHT:
        raise UserError(f"{key}.weight={weight!r}: a number of at most {LARGEST_WEIGHT:g} is needed")
    kwargs = item.get("kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise UserError(f"{key}.kwargs={kwargs!r}: a mapping of argument names to values is needed")
    return _entry(
        item["function"], key, name=item.get("name"), weight=float(weight), kwargs={**shared, **kwargs}
    )


def _entry(
    given: str, key: str, *, name: str | None = None, weight: float = 1.0, kwargs: Mapping[str, Any]
) -> Entry:
    if given in BUILT_IN:
        return Entry(given, "compute_score", name or given, weight, dict(kwargs))
    file, colon, attribute = given.rpartition(":")
    if not colon:
        file, attribute = given, "main"
    path = Path(file).expanduser().resolve()
    if path.suffix != ".py" and not path.exists():
        raise UserError(
            f"{key}={given} is neither FILE.py:NAME nor a built-in reward ({', '.join(BUILT_IN)})"
        )
    if not path.is_file():
        raise UserError(f"{key}={given}: there is no file {path}")
    return Entry(str(path), attribute or "main", name or attribute or "main", weight, dict(kwargs))


def load_reward(entry: Entry) -> Reward:
    """Imports the function. A user's file may import its neighbours: its folder comes last on `sys.path`.

    Raises:
        UserError: the file has no such function, or one that cannot be called so.
        Exception: whatever the file raises when imported.
    """
    module = _module(entry)
    where = f"{entry.source}:{entry.attribute}"
    function = getattr(module, entry.attribute, None)
    if not callable(function):
        defined = [
            n
            for n, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        has = f"it defines {', '.join(defined)}" if defined else "it defines no function"
        raise UserError(f"{KEY}={where}: the file has no function {entry.attribute!r}; {has}")
    try:
        form = form_of(function, getattr(module, "REWARD_TYPE", None))
    except ValueError as error:
        raise UserError(f"{KEY}={where}: {error}") from None
    if reason := misfit(function, form, entry.kwargs):
        raise UserError(f"{KEY}={where}: {reason}")
    if entry.source in BUILT_IN:
        uses_images = bool(entry.kwargs.get("send_images"))
    else:
        uses_images = sees_images(function, form)
    return Reward(function, form, entry.kwargs, uses_images)


def _module(entry: Entry) -> ModuleType:
    if entry.source in BUILT_IN:
        return importlib.import_module(f"seerl.reward.builtin.{entry.source}")
    path = Path(entry.source)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"seerl_reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{KEY}={path}: this is not a Python file (it must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    spec.loader.exec_module(module)
    return module


def check_reward(config: Config) -> list[str]:
    """What is wrong with the reward of a configuration, for `seerl check`.

    The function is imported, in a process of its own, and its parameters compared with how it will be called.
    """
    from seerl.reward.worker import check_in_worker

    try:
        entries = reward_entries(config.worker.reward)
    except UserError as error:
        return [str(error)]
    return [problem for entry in entries if (problem := check_in_worker(entry))]
