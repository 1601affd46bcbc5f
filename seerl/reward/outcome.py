"""What a reward worker answers, and how a user's return value becomes a number.

Needs nothing but the standard library: workers must start fast and stay small.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGEST = 1e15
"""In float32, in which advantages are computed, sums and squares of larger values overflow."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sample's value, or why it has none."""

    overall: float | None = None
    """None without a fault: the function said that it does not apply to this sample."""
    parts: Mapping[str, float] = field(default_factory=dict)
    fault: str | None = None
    """The kind of fault, fit for a metric's name."""
    detail: str = ""
    """What a person needs to mend it: a traceback, or what came back instead of a score."""


@dataclass(frozen=True, slots=True)
class CallFault:
    """A whole call failed, so no sample of it has a value yet."""

    fault: str
    detail: str
    fatal: bool = False
    """The function could not even be loaded: no other call can do better."""


class BadValue(Exception):
    """A value that is no score."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


def user_traceback(error: BaseException) -> str:
    """The traceback from where it enters the user's code on: what called it is of no use to the user."""
    told = traceback.TracebackException.from_exception(error)
    own = Path(__file__).parent
    told.stack[:] = [
        frame
        for frame in told.stack
        if not frame.filename.startswith("<frozen importlib") and Path(frame.filename).parent != own
    ]
    return "".join(told.format()).rstrip()


def place(error: BaseException) -> str:
    """`FILE:LINE: KIND: message` of an error, where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}: {type(error).__name__}: {error}"


def outcome_of(result: Any, *, none_is_absent: bool) -> Outcome:
    """The outcome a returned score means: a number, or a mapping with `overall` and further numbers.

    Values of other names that are no numbers (texts kept for a log, None) are left out.

    Args:
        none_is_absent: None means "does not apply" (TRL's convention) rather than a fault.
    """
    if result is None and none_is_absent:
        return Outcome()
    try:
        if not isinstance(result, Mapping):
            return Outcome(overall=_number(result, "the score"))
        if "overall" not in result:
            have = ", ".join(map(repr, result)) or "nothing"
            raise BadValue("no_overall", f"a score is a dict with the key 'overall'; this one has {have}")
        parts = {
            str(name): _number(value, f"the score's {name!r}")
            for name, value in result.items()
            if name != "overall" and value is not None and not isinstance(value, (str, bytes))
        }
        return Outcome(overall=_number(result["overall"], "the score's 'overall'"), parts=parts)
    except BadValue as bad:
        return Outcome(fault=bad.fault, detail=f"{bad}. It was returned as {_short(result)}")


def outcomes_of(result: Any, count: int, *, none_is_absent: bool) -> list[Outcome] | CallFault:
    """The outcomes of a call on `count` samples, or the fault of one that returned no such list."""
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        return CallFault("wrong_length", f"a list of {count} scores is expected, not {_short(result)}")
    scores = list(result)
    if len(scores) != count:
        return CallFault("wrong_length", f"{len(scores)} scores for {count} responses: {_short(scores)}")
    return [outcome_of(score, none_is_absent=none_is_absent) for score in scores]


def _number(value: Any, what: str) -> float:
    """A finite float of a bool, an int, a float, or a numpy or tensor value with one element."""
    number = value
    if hasattr(number, "item") and not isinstance(number, (bool, int, float)):
        try:
            number = number.item()
        except (ValueError, RuntimeError, TypeError):
            raise BadValue(
                "not_a_number", f"{what} has several elements, a single number is expected"
            ) from None
    if number is None or isinstance(number, (str, bytes, complex)) or not hasattr(number, "__float__"):
        raise BadValue("not_a_number", f"{what} is a {type(value).__name__}, a number is expected")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise BadValue("not_a_number", f"{what} is a {type(value).__name__}, a number is expected") from None
    if not math.isfinite(number):
        raise BadValue("not_finite", f"{what} is {number}")
    if abs(number) > LARGEST:
        raise BadValue("not_finite", f"{what} is {number}, beyond {LARGEST:g}: its square is not finite")
    return number


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the user's class may be broken as well, and this is only for the message
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= 300 else text[:300] + "..."
