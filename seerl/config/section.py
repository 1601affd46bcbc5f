"""What every section of the configuration has in common."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """Frozen after loading; unknown keys are errors; the text under a key is its documentation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = _types_in(annotation)
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("a number is expected")
        return value


def _types_in(annotation: Any) -> set[Any]:
    """The types that an annotation is made of."""
    return {annotation}.union(*(_types_in(inner) for inner in get_args(annotation)))
