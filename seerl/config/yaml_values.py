"""YAML as people mean it in configurations: 1e-6 is a number, and a date stays text."""

from __future__ import annotations

import re
from typing import Any

import yaml

_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_RARE_LINE_ENDS = re.compile("[\r\x85\u2028\u2029]")
_TAG = "tag:yaml.org,2002:"
_RESOLVERS = {
    first: [(tag, rule) for tag, rule in rules if tag not in (f"{_TAG}float", f"{_TAG}timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Loader(yaml.SafeLoader):
    """Reads plain data only, by the resolvers below."""


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for something else; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Outside double quotes, rare line ends (NEL, U+2028, ...) are read back as spaces.
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if _RARE_LINE_ENDS.search(text) else None)


_Dumper.add_representer(str, _represent_text)
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {first: list(rules) for first, rules in _RESOLVERS.items()}
    _class.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """The value of YAML text, its keys as text. Python's None is read as null where it stands alone.

    Raises:
        ValueError: text that is not YAML, or nested too deeply.
    """
    if text.strip() == "None":
        return None
    try:
        return _with_text_keys(yaml.load(text, _Loader))
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value


def write_yaml(value: Any) -> str:
    """YAML that `read_yaml` reads back to the same value, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
