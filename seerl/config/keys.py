"""The keys of the schema as data: their names, what each allows, and the one a misspelt key means."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from seerl.config.schema import Config

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_WORDS = {str: "text", int: "integer", float: "number", bool: "true | false", type(None): "null"}


@cache
def known_keys() -> dict[str, FieldInfo]:
    """Every dotted key with its pydantic field, sections included, in the order of the schema."""
    return _keys(Config, "")


def _keys(model: type[BaseModel], prefix: str) -> dict[str, FieldInfo]:
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        keys[prefix + name] = field
        if is_section(field):
            keys |= _keys(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
    return keys


def is_section(field: FieldInfo) -> bool:
    """Whether the key holds further keys."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def accepts(field: FieldInfo, kind: type) -> bool:
    """Whether a value of the type `kind` (`str`, `dict`, `tuple`, ...) may stand there."""
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return any(option is kind or get_origin(option) is kind for option in options)


def nearest_key(key: str) -> str | None:
    """The known key a misspelt one most likely means: by the whole, else by its last part."""
    keys, key = list(known_keys()), key.lower()
    if close := difflib.get_close_matches(key, keys, n=1, cutoff=0.75):
        return close[0]
    leaves = {known.rpartition(".")[2]: known for known in reversed(keys)}
    close = difflib.get_close_matches(key.rpartition(".")[2], list(leaves), n=1, cutoff=0.7)
    return leaves[close[0]] if close else None


def choices(annotation: Any) -> list[str]:
    """The words that may stand there, those inside lists included."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for inner in get_args(annotation) for word in choices(inner)]


def allowed(field: FieldInfo) -> str:
    """What may stand there, as a person writes it: `integer > 0, or null`."""
    annotation = field.annotation
    options = list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]
    bounds = _bounds(field)
    texts = []
    for option in options:
        text = _type_text(option)
        texts.append(f"{text} {bounds}" if bounds and option in (int, float) else text)
    return ", or ".join(texts)


def default_text(field: FieldInfo) -> str:
    """The default, as YAML would have it."""
    if isinstance(field.default, bool) or field.default is None:
        return {True: "true", False: "false", None: "null"}[field.default]
    if isinstance(field.default, tuple):
        return "[" + ", ".join(map(str, field.default)) + "]"
    return '""' if field.default == "" else str(field.default)


def meaning(field: FieldInfo) -> str:
    """The key's documentation on one line."""
    return " ".join((field.description or "").split())


def _bounds(field: Any) -> str:
    """The field's limits on numbers, as they are written."""
    return " and ".join(
        f"{sign} {getattr(rule, name)}"
        for rule in getattr(field, "metadata", ())
        for name, sign in _SIGNS.items()
        if hasattr(rule, name)
    )


def _type_text(option: Any) -> str:
    origin, arguments = get_origin(option), get_args(option)
    if origin is Literal:
        return " | ".join(str(word) for word in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"list of {len(arguments)} {_type_text(arguments[0])}s"
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    if origin is dict:
        return "mapping"
    if origin is Annotated:
        return " ".join([_type_text(arguments[0]), *(_bounds(rule) for rule in arguments[1:])]).strip()
    return _WORDS.get(option, getattr(option, "__name__", str(option)))


def dotted(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(key.path, value) of nested mappings, an empty one as a value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from dotted(inner, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), value
