"""From `config=FILE key.path=value ...` to a checked, frozen `Config`, or one message with every problem."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from seerl.config.deprecated import replace_deprecated
from seerl.config.keys import accepts, allowed, choices, dotted, is_section, known_keys, nearest_key
from seerl.config.schema import Config
from seerl.config.yaml_values import read_yaml, write_yaml
from seerl.errors import UserError
from seerl.secrets import masked


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and what the user should know of how it was read."""

    config: Config
    notes: list[str]


def load_config(args: Sequence[str]) -> Loaded:
    """Reads the files named by `config=`, then the overrides; of each, later wins.

    Raises:
        UserError: naming every unknown key, wrong type and value out of range at once.
    """
    files: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    problems: list[str] = []
    notes: list[str] = []
    for argument in args:
        key, _, text = argument.partition("=")
        try:
            _require_key_and_value(argument)
            if key == "config":
                files = _merged(files, _current(_read_file(text), notes))
            else:
                overrides = _merged(overrides, _current(_override(key, text), notes))
        except ValueError as error:
            problems.append(str(error))
    defaults = Config().model_dump(mode="json")  # an interpolation may name a key that nobody set
    read_well = len(problems)
    values = _resolved(_merged(defaults, _merged(files, overrides)), problems)
    config = None
    try:
        config = Config.model_validate(_unquoted(values, Config))
    except ValidationError as error:
        told = "${" if len(problems) > read_well else None
        details = [d for d in error.errors() if told is None or told not in str(d["input"])]
        problems += dict.fromkeys(map(_problem, details))
    if problems or config is None:
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(f"the configuration has {count}:\n" + "\n".join(f"  - {p}" for p in problems))
    return Loaded(_with_save_path(config), list(dict.fromkeys(notes)))


def dump_config(config: Config) -> str:
    """YAML that loads to the same configuration, but for keys and passwords, which read `***`."""
    return write_yaml(_escaped(masked(config.model_dump(mode="json"))))


def changed_keys(config: Config, dumped: str) -> list[str]:
    """`KEY: before -> now` for each key that differs from a configuration dumped before."""
    before, now = (dict(dotted(read_yaml(text))) for text in (dumped, dump_config(config)))
    return [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def _require_key_and_value(argument: str) -> None:
    key, separator, _ = argument.partition("=")
    bare = key.lstrip("-+")
    if bare != key:
        written = argument.lstrip("-+") if separator else f"{bare}=VALUE"
        raise ValueError(f"{argument}: keys have no dashes or plus signs before them; write {written}")
    if not separator and Path(argument).suffix in (".yaml", ".yml"):
        raise ValueError(f"{argument!r} is not key=value; a file is given as config={argument}")
    if not separator or not key:
        raise ValueError(f"{argument!r} is not key=value")
    if key == "config" and not argument.partition("=")[2].strip():
        raise ValueError("config=: the name of a YAML file is missing")


def _read_file(name: str) -> dict[str, Any]:
    path = Path(name)
    try:
        read = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config={name}: there is no such file (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise ValueError(f"config={name}: a folder; cannot be read as a YAML file") from None
    except OSError as error:
        raise ValueError(f"config={name}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"config={name}: not a YAML file ({error})") from None
    if read is not None and not isinstance(read, dict):
        raise ValueError(f"config={name}: sections (data:, worker:, ...) are expected at its top")
    return read or {}


def _override(key: str, text: str) -> dict[str, Any]:
    """The override as nested mappings. Its value is YAML, or where text is expected, what was typed."""
    if not all(key.split(".")):
        raise ValueError(f"{key}={text}: a part of the key is empty")
    field = known_keys().get(key)
    try:
        typed = field is not None and _is_text(text.strip(), field)
        value: Any = text if typed else read_yaml(text)
    except ValueError as error:
        raise ValueError(f"{key}={text}: not a YAML value ({error})") from None
    first, *rest = key.split(".")
    for part in reversed(rest):
        value = {part: value}
    return {first: value}


def _is_text(text: str, field: FieldInfo) -> bool:
    """Whether the value is meant as typed: not null, not quoted, no list or mapping where one may be."""
    if not accepts(field, str) or (accepts(field, type(None)) and text in ("", "~", "null", "None")):
        return False
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    container = {"[": tuple, "{": dict}.get(text[:1])
    return not quoted and not (container and accepts(field, container))


def _current(values: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    notes += replace_deprecated(values)
    return values


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`; mappings are merged, everything else replaced."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _resolved(values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Interpolations (`${data.seed}`, `${oc.env:HOME}`) replaced by what they stand for."""
    if "${" not in repr(values):
        return values
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        key = getattr(error, "full_key", None)
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        problems.append(f"{key + ': ' if key else ''}cannot be resolved ({why})")
        return values
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _escaped(value: Any) -> Any:
    """Text as it must stand in a file so that it is not taken for an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _unquoted(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Mappings and lists given as text (`val_override_config: '{"n": 16}'`) read where one is expected."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is not None and is_section(field):
            if value is None:  # `worker:` with nothing under it
                continue
            assert isinstance(field.annotation, type)
            value = _unquoted(value, field.annotation) if isinstance(value, dict) else value
        elif field is not None and isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
            kind = dict if value.lstrip().startswith("{") else tuple
            value = _read_again(value) if accepts(field, kind) else value
        out[name] = value
    return out


def _read_again(text: str) -> Any:
    try:
        return read_yaml(text)
    except ValueError:
        return text


def _problem(detail: Any) -> str:
    """One line: the key, its value, what is allowed, and what was probably meant."""
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    keys = known_keys()
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key" + _hint(key, location)
    while key not in keys and location:  # below the key, pydantic names the alternative it tried
        location.pop()
        key = ".".join(location)
    field = keys[key]
    value = detail["input"]
    if is_section(field):
        return f"{key}={value!r}: a section is expected, with keys such as {_first_key(key)}"
    text = f"{key}={value!r}: allowed is {allowed(field)}"
    near_words = difflib.get_close_matches(str(value), choices(field.annotation), n=1, cutoff=0.5)
    return text + (f"; did you mean {near_words[0]}?" if near_words else "")


def _hint(key: str, location: list[str]) -> str:
    dotted = next((part for part in location if "." in part), None)
    if dotted:
        nested = dotted.replace(".", ": {")
        return f"; in a file, keys are nested: {nested}: ...{'}' * dotted.count('.')}"
    if near := nearest_key(key):
        return f"; did you mean `{near}`?"
    inside = [name for name in known_keys() if name.rpartition(".")[0] == ".".join(location[:-1])]
    return f"; there are {', '.join(name.rpartition('.')[2] for name in inside)}" if len(inside) < 9 else ""


def _first_key(section: str) -> str:
    return next(key for key in known_keys() if key.startswith(f"{section}."))


def _with_save_path(config: Config) -> Config:
    trainer = config.trainer
    if trainer.save_checkpoint_path:
        return config
    path = str(Path("checkpoints") / trainer.project_name / trainer.experiment_name)
    return config.model_copy(update={"trainer": trainer.model_copy(update={"save_checkpoint_path": path})})
