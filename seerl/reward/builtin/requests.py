"""Asking a service over HTTP: concurrent, with a limit, retried when it is worth it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

import httpx

_WORTH_RETRYING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_LONGEST_WAIT_S = 20.0


def key_from_environment(name: str | None) -> str | None:
    """The key in that environment variable; None where there is none."""
    return (os.environ.get(name) or None) if name else None


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries a key, if there is one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


async def post_json(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    *,
    retries: int,
    key: str | None = None,
    first_wait_s: float = 0.5,
) -> Any:
    """Posts JSON and returns the JSON that comes back.

    Busy and broken services and lost connections are asked again, `retries` times, waiting twice as long each
    time or as long as `Retry-After` says. So is one whose answer is no JSON: a proxy's error page, mostly.

    Args:
        key: never part of an error, though some services repeat it in what they answer.

    Raises:
        RuntimeError: the service refused, or still failed at the last try; with what it said.
    """
    wait = first_wait_s
    for left in range(retries, -1, -1):
        told = None
        try:
            answer = await client.post(url, json=body)
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if answer.is_success:
                try:
                    return answer.json()
                except (json.JSONDecodeError, UnicodeDecodeError):
                    problem = f"status {answer.status_code} and no JSON: {_said(answer, key)}"
            else:
                problem = f"status {answer.status_code}: {_said(answer, key)}"
                if answer.status_code not in _WORTH_RETRYING:
                    raise RuntimeError(f"{url} refused: {problem}")
                told = answer.headers.get("retry-after", "")
        if left == 0:
            raise RuntimeError(f"{url} failed {retries + 1} times, at last with {problem}")
        seconds = float(told) if told and told.replace(".", "", 1).isdigit() else wait
        await asyncio.sleep(min(seconds, _LONGEST_WAIT_S))
        wait *= 2
    raise AssertionError("the last try returns or raises")


def _said(answer: httpx.Response, key: str | None) -> str:
    text = answer.text.replace(key, "***") if key else answer.text
    return text[:500]
