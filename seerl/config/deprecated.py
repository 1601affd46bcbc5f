"""Keys of earlier EasyR1 releases: read as what they are called now, with a note."""

from __future__ import annotations

from typing import Any

RENAMED = {
    "worker.actor.ulysses_sequence_parallel_size": "worker.actor.ulysses_size",
    "worker.reward.compute_score": "worker.reward.reward_function",
    "worker.reward.score_function": "worker.reward.reward_function",
    "worker.reward.score_function_kwargs": "worker.reward.reward_function_kwargs",
    "trainer.total_episodes": "trainer.total_epochs",
}
DROPPED = {
    "worker.reward.reward_type": "the form is read from the reward file",
    "worker.reward.val_reward_function": "validation uses worker.reward.reward_function",
    "worker.reward.val_reward_function_kwargs": "validation uses worker.reward.reward_function_kwargs",
}


def replace_deprecated(values: dict[str, Any]) -> list[str]:
    """Moves old keys in `values` to their present names, in place; returns a note for each."""
    notes = []
    for old, new in RENAMED.items():
        found, value = _pop(values, old)
        if found:
            if not _has(values, new):
                _put(values, new, value)
            notes.append(f"{old} is called {new} now")
    for old, why in DROPPED.items():
        if _pop(values, old)[0]:
            notes.append(f"{old} is not needed any more: {why}")
    return notes


def _section(values: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    *path, leaf = key.split(".")
    inner: Any = values
    for part in path:
        inner = inner.get(part) if isinstance(inner, dict) else None
    return (inner if isinstance(inner, dict) else None), leaf


def _pop(values: dict[str, Any], key: str) -> tuple[bool, Any]:
    section, leaf = _section(values, key)
    if section is None or leaf not in section:
        return False, None
    return True, section.pop(leaf)


def _has(values: dict[str, Any], key: str) -> bool:
    section, leaf = _section(values, key)
    return section is not None and leaf in section


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    section, leaf = _section(values, key)
    if section is not None:
        section[leaf] = value
