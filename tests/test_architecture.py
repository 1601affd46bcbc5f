"""Arrows between rooms point downwards only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "seerl"

COMMON = {"types", "errors", "config", "secrets"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "secrets": set(),
    "types": set(),
    "timing": set(),
    "config": {"errors", "cluster", "secrets"},
    "algorithms": set(),
    "models": {"types"},
    "cluster": COMMON,
    "data": COMMON | {"models"},
    "rollout": COMMON | {"models"},
    "reward": COMMON,
    "policy": COMMON | {"models", "algorithms"},
    "checkpoint": COMMON | {"models"},
    "tracking": COMMON,
    "experience": COMMON | {"algorithms", "reward", "rollout", "timing"},
    "metrics": COMMON | {"experience"},
    "run": COMMON
    | {"algorithms", "checkpoint", "cluster", "data", "policy", "reward", "rollout", "tracking", "models"},
    "validation": COMMON | {"experience", "run", "timing"},
    "trainer": COMMON | {"checkpoint", "experience", "metrics", "run", "timing", "validation"},
    "cli": COMMON | {"run", "trainer", "checkpoint", "reward"},
}
"""Room (or module beside the rooms) to the rooms it may know."""

ONE_FILE_ONLY = {"vllm": "rollout/vllm_engine.py", "swanlab": "tracking/swanlab.py"}
"""Libraries that a single file may import."""


def imports(path: Path) -> set[str]:
    """The dotted names a file imports, at any depth of the code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_know_only_rooms_below(path: Path) -> None:
    known = {
        name.split(".")[1] for name in imports(path) if name.startswith("seerl.") and len(name.split(".")) > 1
    }
    own = room(path)
    beyond = known - MAY_IMPORT[own] - {own, "__version__"}
    assert not beyond, f"{own} may not know {sorted(beyond)}"


@pytest.mark.parametrize(("library", "home"), ONE_FILE_ONLY.items())
def test_one_file_knows_the_library(library: str, home: str) -> None:
    users = {
        str(p.relative_to(PACKAGE)) for p in FILES if any(n.split(".")[0] == library for n in imports(p))
    }
    assert users == {home}


def test_algorithms_know_nothing_but_torch() -> None:
    for path in (PACKAGE / "algorithms").glob("*.py"):
        outside = {n.split(".")[0] for n in imports(path)} - {"torch", "seerl", "__future__"}
        assert outside <= {"collections", "dataclasses", "math", "typing"}, path


def test_no_file_is_longer_than_400_lines() -> None:
    long = {str(p): n for p in FILES if (n := len(p.read_text(encoding="utf-8").splitlines())) > 400}
    assert set(long) <= {str(PACKAGE / "config" / "schema.py")}, (
        "the schema is a table; everything else is code"
    )
