"""Keys and passwords never reach a tracker, a message or a run's files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""The words of a name, whether it is written api_key, apiKey, API-KEY or hf.token."""
SECRET_WORDS = {"auth", "authorization", "cookie", "credential", "credentials", "key", "apikey", "passphrase"}
SECRET_WORDS |= {"passwd", "password", "secret", "token"}
"""A name whose last word is one of these holds a secret; `max_tokens` and `api_key_env` do not."""
COLUMN_KEYS = re.compile(r"(prompt|answer|image|video|filter)_key$")
"""Keys of the configuration that name columns and scores."""
ADDRESS_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
ADDRESS_KEY = re.compile(r"(?i)([?&][\w.-]*(?:key|token|secret|password|signature)=)[^&#\s]+")
"""USER:PASSWORD@ and ?token=... in addresses."""
SHORTEST_SECRET = 8
"""Characters; shorter values of the environment are no keys, and would mask ordinary words."""


def is_secret_name(name: str) -> bool:
    """Whether values of this name are secrets."""
    words = [word.lower() for word in WORD.findall(name)]
    return bool(words) and words[-1] in SECRET_WORDS and not COLUMN_KEYS.search(name)


def masked(value: Any, name: str = "") -> Any:
    """A plain copy of nested mappings and lists in which what is secret reads `***`: values whose names speak
    of secrets, passwords in addresses, and the values of secret environment variables wherever they stand."""
    if is_secret_name(name) and value is not None and value != "" and not isinstance(value, bool):
        return MASK
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    return redacted(value) if isinstance(value, str) else value


def redacted(text: str) -> str:
    """The text without passwords in addresses and without the values of secret environment variables."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and is_secret_name(name):
            text = text.replace(value, MASK)
    return ADDRESS_KEY.sub(rf"\1{MASK}", ADDRESS_PASSWORD.sub(MASK, text))


def carries_secret(arguments: Sequence[str]) -> bool:
    """Whether a command line may hold a secret, so that libraries must not record it."""
    return any(
        redacted(argument) != argument
        or any(is_secret_name(name) for name in re.findall(r"([\w.-]+)[\"']?\s*[=:]", argument))
        for argument in arguments
    )
