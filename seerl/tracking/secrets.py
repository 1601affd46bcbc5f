"""Keys and passwords never reach a tracker."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_NAME = re.compile(r"(^|_)(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
NOT_SECRET = re.compile(r"^(prompt|answer|image|video|filter)_key$")
"""Keys of the configuration that name columns."""


def masked(value: Any, name: str = "") -> Any:
    """A copy of nested mappings and lists in which values whose names speak of secrets are `***`."""
    if value and SECRET_NAME.search(name) and not NOT_SECRET.match(name):
        return "***"
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    return value


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with the value of each `path.to.api_key=VALUE` masked: trackers record them."""
    kept = []
    for argument in arguments:
        name, sign, value = argument.partition("=")
        last = name.lstrip("-+").rpartition(".")[2].replace("-", "_")
        kept.append(name + sign + str(masked(value, last)))
    return kept
