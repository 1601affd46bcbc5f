"""A language model as judge, behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from typing import Any

import httpx

from seerl.reward.builtin.requests import bearer, key_from_environment, post_json

QUESTION = """You grade an answer. The question:
{prompt}

The reference answer: {ground_truth}

The answer to grade:
{response}

How good is it, from 0 (wrong) to {scale:g} (fully right)? Think briefly, then end with this line:
SCORE: <number>"""

_SCORE = re.compile(r"SCORE\W{0,6}(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_CACHE_SIZE = 20_000
_cache: OrderedDict[tuple[str, str, str], float] = OrderedDict()
"""Verdicts by (endpoint, model, question), the oldest first; each worker process has its own."""


async def compute_score(
    reward_inputs: list[dict[str, Any]],
    base_url: str,
    model: str,
    api_key_env: str = "OPENAI_API_KEY",
    question: str = QUESTION,
    scale: float = 1.0,
    concurrency: int = 16,
    retries: int = 3,
    request_timeout_s: float = 30.0,
    max_tokens: int = 512,
) -> list[dict[str, float]]:
    """The judge's verdict divided by `scale`, between 0 and 1, as the reward and as `judge`.

    Args:
        base_url: up to and with `/v1`.
        api_key_env: the environment variable that holds the key; without it none is sent.
        question: with the places {prompt}, {ground_truth}, {response} and {scale}.
        concurrency: requests under way at once, per worker process (`worker.reward.num_workers`).

    Raises:
        RuntimeError: the endpoint refuses, or fails `retries` + 1 times, or a verdict has no score.
    """
    key = key_from_environment(api_key_env)
    gate = asyncio.Semaphore(concurrency)
    url = base_url.rstrip("/") + "/chat/completions"

    async def verdict(client: httpx.AsyncClient, text: str) -> float:
        known = (url, model, text)
        if known not in _cache:
            async with gate:
                body = _body(model, text, max_tokens)
                answer = await post_json(client, url, body, retries=retries, key=key)
            _cache[known] = _score_in(answer)
        return min(1.0, max(0.0, _cache[known] / scale))

    questions = [_asked(question, x, scale) for x in reward_inputs]
    async with httpx.AsyncClient(headers=bearer(key), timeout=request_timeout_s) as client:
        distinct = list(dict.fromkeys(questions))
        verdicts = dict(
            zip(distinct, await asyncio.gather(*(verdict(client, q) for q in distinct)), strict=True)
        )
    while len(_cache) > _CACHE_SIZE:
        _cache.popitem(last=False)
    return [{"overall": verdicts[q], "judge": verdicts[q]} for q in questions]


def _body(model: str, text: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "temperature": 0.0, "max_tokens": max_tokens}


def _asked(question: str, reward_input: dict[str, Any], scale: float) -> str:
    names = ("prompt", "ground_truth", "response")
    return question.format(**{name: reward_input[name] for name in names}, scale=scale)


def _score_in(answer: Any) -> float:
    try:
        text = str(answer["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError):
        raise RuntimeError(f"the judge's endpoint answered no chat completion: {str(answer)[:300]}") from None
    found = _SCORE.findall(text)
    if not found:
        raise RuntimeError(f"the judge gave no line 'SCORE: <number>': {text[-300:]!r}")
    return float(found[-1])
