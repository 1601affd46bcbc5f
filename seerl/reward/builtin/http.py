"""A scoring service of the user's own: all responses to a prompt in one request.

The request is `{"inputs": [...]}` with response, response_length, ground_truth, prompt, finish_reason, uid
and extra of each. The answer is `{"scores": [...]}` or a plain list: for each input, in order, a number or a
dict with `overall`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import httpx

from seerl.reward.builtin.requests import bearer, key_from_environment, post_json


async def compute_score(
    reward_inputs: list[dict[str, Any]],
    url: str,
    headers: Mapping[str, str] | None = None,
    api_key_env: str | None = None,
    send_images: bool = False,
    retries: int = 3,
    request_timeout_s: float = 30.0,
) -> list[Any]:
    """What the service answers. With `send_images`, `images` holds base64 PNG texts.

    Args:
        headers: sent as they are; being configuration they appear in logs, so a key has no place in them.
        api_key_env: the environment variable of a key that is sent as a bearer token.

    Raises:
        RuntimeError: the service refuses, or fails `retries` + 1 times, or answers something else.
    """
    inputs = [_sendable(x, send_images) for x in reward_inputs]
    key = key_from_environment(api_key_env)
    sent_headers = {**(headers or {}), **bearer(key)}
    async with httpx.AsyncClient(headers=sent_headers, timeout=request_timeout_s) as client:
        answer = await post_json(client, url, {"inputs": inputs}, retries=retries, key=key)
    scores = answer.get("scores") if isinstance(answer, dict) else answer
    if not isinstance(scores, list):
        raise RuntimeError(f'{url} answered {str(answer)[:300]} where {{"scores": [...]}} is expected')
    return scores


def _sendable(reward_input: dict[str, Any], send_images: bool) -> dict[str, Any]:
    sent = {name: _plain(value) for name, value in reward_input.items() if name != "images"}
    if send_images:
        sent["images"] = [_png(image) for image in reward_input["images"]]
    return sent


def _plain(value: Any) -> Any:
    """JSON of a column: arrays as lists, and what JSON has no form for as its text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _png(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()
