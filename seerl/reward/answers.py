"""Finding the final answer of a response, and whether it equals the truth."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_LONGEST = 400
"""Beyond this many characters an answer is compared as text only: no truth is so long, and parsing may not end."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def boxed(text: str) -> str | None:
    r"""What stands in the last whole \boxed{...}; None if there is none."""
    start = text.rfind(r"\boxed{")
    while start != -1:
        begin = start + len(r"\boxed{")
        depth = 1
        for i in range(begin, len(text)):
            if text[i] in "{}" and text[i - 1] != "\\":
                depth += 1 if text[i] == "{" else -1
                if depth == 0:
                    return text[begin:i].strip()
        start = text.rfind(r"\boxed{", 0, start)
    return None


def tagged(text: str) -> str | None:
    """What stands in the last <answer>...</answer>, over several lines if need be; None if there is none."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def final_answer(text: str) -> str:
    r"""The last <answer>, the last \boxed{} (of that answer, if both are there), else the whole text."""
    answer = tagged(text)
    inside = boxed(text if answer is None else answer)
    return inside if inside is not None else (text if answer is None else answer).strip()


def equivalent(answer: str, truth: Any) -> bool:
    """Whether two answers are the same text, or the same number or expression (plain or LaTeX) by math-verify.

    A comparison that math-verify gives up on, after some seconds, is no equality.
    """
    return _equivalent(answer.strip(), str(truth).strip())


@lru_cache(maxsize=4096)
def _equivalent(answer: str, truth: str) -> bool:
    if _plain(answer) == _plain(truth):
        return bool(_plain(truth))
    if not answer or len(answer) > _LONGEST:
        return False
    from math_verify import (
        parse,
        verify,
    )  # imports sympy, which a reward without mathematics need not pay for

    gold, given = (parse(rf"\boxed{{{_unwrapped(text)}}}") for text in (truth, answer))
    return bool(verify(gold, given))


def _unwrapped(text: str) -> str:
    inner = boxed(text)
    return (text if inner is None else inner).strip().strip("$").strip()


def _plain(text: str) -> str:
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", _unwrapped(text))
    return "".join(text.split()).rstrip(".").casefold()
