"""Mappings and lists inside a configuration that cannot be changed after loading."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError("a configuration does not change after loading")


class FrozenDict(dict[str, Any]):
    """A dict that refuses changes. A pickled copy is a plain dict: it belongs to whoever receives it."""

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __deepcopy__(self, _: Any) -> FrozenDict:
        return self


class FrozenList(list[Any]):
    """A list that refuses changes; pickled like FrozenDict."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __deepcopy__(self, _: Any) -> FrozenList:
        return self


def frozen(value: Any) -> Any:
    """`value` with every dict and list inside replaced by one that refuses changes."""
    if isinstance(value, dict):
        return FrozenDict({key: frozen(inner) for key, inner in value.items()})
    return FrozenList(map(frozen, value)) if isinstance(value, list) else value


def thawed(value: Any) -> Any:
    """A plain copy of `value` for libraries that change what they are given, as transformers does."""
    if isinstance(value, dict):
        return {key: thawed(inner) for key, inner in value.items()}
    return [thawed(inner) for inner in value] if isinstance(value, list) else value


Mapping = Annotated[dict[str, Any], AfterValidator(frozen)]
