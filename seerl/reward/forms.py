"""The forms a reward function may have, and calling each of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from seerl.reward.outcome import CallFault, Outcome, outcome_of, outcomes_of, user_traceback


class Form(Enum):
    """How a reward function takes its samples, by its signature."""

    BATCH = "f(reward_inputs: list[dict], **kwargs)"
    SEQUENTIAL = "f(reward_input: dict, **kwargs)"
    EARLIER_BATCH = "f(predicts: list[str], ground_truths: list[str], **kwargs)"
    EARLIER_FUNCTION = "f(predict: str, ground_truth: str, **kwargs)"
    TRL = "f(prompts, completions, **columns)"

    @property
    def one_by_one(self) -> bool:
        """Whether the function sees one sample at a time."""
        return self in (Form.SEQUENTIAL, Form.EARLIER_FUNCTION)


def form_of(function: Callable[..., Any], reward_type: str | None) -> Form:
    """The form of a function: REWARD_TYPE says whether it takes one sample or many, else its parameters'
    names do; the names also tell the earlier forms and TRL's, whatever REWARD_TYPE is.

    Raises:
        ValueError: for a REWARD_TYPE that does not exist.
    """
    if reward_type not in (None, "batch", "sequential", "function"):
        raise ValueError(f"REWARD_TYPE={reward_type!r} is not known: use 'batch' or 'sequential'")
    names = inspect.signature(function).parameters
    many = reward_type in (None, "batch")
    one = reward_type != "batch"
    if many and "reward_inputs" in names:
        return Form.BATCH
    if one and "reward_input" in names:
        return Form.SEQUENTIAL
    if many and "completions" in names:
        return Form.TRL
    if many and "ground_truths" in names:
        return Form.EARLIER_BATCH
    if one and "ground_truth" in names:
        return Form.EARLIER_FUNCTION
    return Form.BATCH if many else Form.SEQUENTIAL


def sees_images(function: Callable[..., Any], form: Form) -> bool:
    """Whether a function of this form can get at the images of its samples."""
    if form in (Form.BATCH, Form.SEQUENTIAL):
        return True
    return form is Form.TRL and "images" in _accepted(function, {"images": None})


def misfit(function: Callable[..., Any], form: Form, kwargs: Mapping[str, Any]) -> str | None:
    """Why a function of this form cannot be called with these keyword arguments; None if it can."""
    signature = inspect.signature(function)
    try:
        if form is Form.TRL:  # its other parameters are columns, known only with the data
            signature.bind_partial(**kwargs)
        else:
            signature.bind(
                *[None] * (2 if form in (Form.EARLIER_BATCH, Form.EARLIER_FUNCTION) else 1), **kwargs
            )
    except TypeError as error:
        return f"{error}: it has the parameters {signature} and would be called as {form.value}"
    return None


def call(
    function: Callable[..., Any], form: Form, inputs: Sequence[dict[str, Any]], kwargs: Mapping[str, Any]
) -> list[Outcome] | CallFault:
    """Scores the samples; whatever the function raises, `SystemExit` among it, becomes a fault."""
    if inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object with `async def __call__`)
    ):
        return asyncio.run(_call_async(function, form, inputs, kwargs))
    if form.one_by_one:
        return [_guarded(function, form, x, kwargs) for x in inputs]
    try:
        return _many_outcomes(_many(function, form, inputs, kwargs), form, len(inputs))
    except BaseException as error:
        return _fault(error)


async def _call_async(
    function: Callable[..., Any], form: Form, inputs: Sequence[dict[str, Any]], kwargs: Mapping[str, Any]
) -> list[Outcome] | CallFault:
    if form.one_by_one:
        return list(await asyncio.gather(*(_guarded_async(function, form, x, kwargs) for x in inputs)))
    try:
        return _many_outcomes(await _many(function, form, inputs, kwargs), form, len(inputs))
    except BaseException as error:
        return _fault(error)


def _many_outcomes(result: Any, form: Form, count: int) -> list[Outcome] | CallFault:
    return outcomes_of(result, count, none_is_absent=form is Form.TRL)


def _guarded(
    function: Callable[..., Any], form: Form, reward_input: dict[str, Any], kwargs: Mapping[str, Any]
) -> Outcome:
    try:
        return outcome_of(_one(function, form, reward_input, kwargs), none_is_absent=False)
    except BaseException as error:
        return _sample_fault(error)


async def _guarded_async(
    function: Callable[..., Any], form: Form, reward_input: dict[str, Any], kwargs: Mapping[str, Any]
) -> Outcome:
    try:
        return outcome_of(await _one(function, form, reward_input, kwargs), none_is_absent=False)
    except BaseException as error:
        return _sample_fault(error)


def _one(function: Callable[..., Any], form: Form, x: dict[str, Any], kwargs: Mapping[str, Any]) -> Any:
    if form is Form.SEQUENTIAL:
        return function(x, **kwargs)
    return function(x["response"], x["ground_truth"], **kwargs)


def _many(
    function: Callable[..., Any], form: Form, inputs: Sequence[dict[str, Any]], kwargs: Mapping[str, Any]
) -> Any:
    if form is Form.BATCH:
        return function(list(inputs), **kwargs)
    responses, truths = [x["response"] for x in inputs], [x["ground_truth"] for x in inputs]
    if form is Form.EARLIER_BATCH:
        return function(responses, truths, **kwargs)
    known = {"prompts": [x["prompt"] for x in inputs], "completions": responses, "ground_truth": truths}
    known |= {
        name: [x[name] for x in inputs] for name in ("images", "uid", "finish_reason", "response_length")
    }
    columns = {name: [x["extra"].get(name) for x in inputs] for name in inputs[0]["extra"]}
    return function(**_accepted(function, {**columns, **known, **kwargs}))


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _fault(error: BaseException) -> CallFault:
    return CallFault(type(error).__name__, user_traceback(error))


def _sample_fault(error: BaseException) -> Outcome:
    fault = _fault(error)
    return Outcome(fault=fault.fault, detail=fault.detail)
