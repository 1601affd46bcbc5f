"""From `config=FILE key.path=value ...` to a checked, frozen `Config`, or one message with every problem."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from seerl.config.deprecated import replace_deprecated
from seerl.config.schema import Config
from seerl.errors import UserError


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and what the user should know of how it was read."""

    config: Config
    notes: list[str]


def load_config(args: Sequence[str]) -> Loaded:
    """Reads the file named by `config=`, then the overrides in order; later wins.

    Raises:
        UserError: naming every unknown key, wrong type and value out of range at once.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for argument in args:
        key, separator, text = argument.partition("=")
        if not separator or not key:
            problems.append(f"{argument!r} is not key=value{_without_dashes(argument)}")
        elif key == "config":
            values = _merged(_read_file(text), values)
        elif key.startswith("-"):
            problems.append(f"{argument!r}: keys have no dashes; write {argument.lstrip('-')}")
        else:
            try:
                values = _merged(values, _nested(key, _parse(text)))
            except (yaml.YAMLError, ValueError) as error:
                problems.append(f"{key}={text}: not a YAML value ({_first_line(error)})")
    values = _resolved(values, problems)
    notes = replace_deprecated(values)
    config = None
    try:
        config = Config.model_validate(_parsed_dicts(values, Config))
    except ValidationError as error:
        problems += [_problem(detail) for detail in error.errors()]
    if problems or config is None:
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(f"the configuration has {count}:\n" + "\n".join(f"  - {p}" for p in problems))
    return Loaded(_with_save_path(config), notes)


def dump_config(config: Config) -> str:
    """YAML that loads to the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, Any]:
    """Every key of the schema with its pydantic field, sections included, in the order of the schema."""
    keys: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        keys[prefix + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def nearest_key(key: str) -> str | None:
    """The known key a misspelt one most likely means: by the whole, else by its last part."""
    keys = list(known_keys())
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    if close:
        return close[0]
    leaf = key.rpartition(".")[2]
    leaves = {k.rpartition(".")[2]: k for k in reversed(keys)}
    close = difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.7)
    return leaves[close[0]] if close else None


def _read_file(name: str) -> dict[str, Any]:
    path = Path(name)
    if not path.is_file():
        raise UserError(f"config={name}: there is no such file (looked in {Path.cwd()})")
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config={name} is not YAML: {' '.join(str(error).split())}") from error
    if read is None:
        return {}
    if not isinstance(read, dict):
        kind = type(read).__name__
        raise UserError(f"config={name}: sections (data:, worker:, ...) are expected, not a {kind}")
    return read


def _parse(text: str) -> Any:
    if text.strip() in ("None", "null"):
        return None
    return _number(yaml.safe_load(text))


def _number(value: Any) -> Any:
    """YAML 1.1 takes 1e-6 for a string; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value) if "e" in value.lower() else value
        except ValueError:
            return value
    return value


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        if not part:
            raise ValueError("an empty part in the key")
        value = {part: value}
    return dict(value)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`; mappings are merged, everything else replaced."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        out[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return out


def _resolved(values: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Interpolations (`${data.seed}`, `${oc.env:HOME}`) replaced by what they stand for."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        problems.append(f"an interpolation cannot be resolved: {_first_line(error)}")
        return {}
    return {str(k): v for k, v in resolved.items()} if isinstance(resolved, dict) else {}


def _parsed_dicts(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Quoted mappings (`val_override_config='{"n": 16}'`) where a mapping is expected, numbers written as
    1e-6."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        field = model.model_fields.get(name)
        inner = field.annotation if field is not None else None
        if isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(value, dict):
            out[name] = _parsed_dicts(value, inner)
        elif isinstance(value, str) and "dict[" in str(inner) and value.lstrip().startswith("{"):
            out[name] = _mapping(value)
        else:
            out[name] = _number(value) if "float" in str(inner) else value
    return out


def _mapping(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text


def _problem(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        near = nearest_key(key)
        return f"{key}: unknown key" + (f"; did you mean `{near}`?" if near else "")
    return f"{key}={detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _with_save_path(config: Config) -> Config:
    trainer = config.trainer
    if trainer.save_checkpoint_path:
        return config
    path = str(Path("checkpoints") / trainer.project_name / trainer.experiment_name)
    return config.model_copy(update={"trainer": trainer.model_copy(update={"save_checkpoint_path": path})})


def _without_dashes(argument: str) -> str:
    return f"; keys have no dashes: write {argument.lstrip('-')}=VALUE" if argument.startswith("-") else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
