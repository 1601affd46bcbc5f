"""Keys of earlier EasyR1 releases: read as what they are called now, with a note.

They are replaced in the file and in every override on its own, before anything is merged, so that an old name
on the command line still wins over the new one in the file.
"""

from __future__ import annotations

from typing import Any

RENAMED: dict[str, tuple[str, ...]] = {
    "data.format_prompt_path": ("data.format_prompt",),
    "worker.actor.clip_ratio": ("worker.actor.clip_ratio_low", "worker.actor.clip_ratio_high"),
    "worker.actor.entropy_coeff": ("worker.actor.entropy_coef",),
    "worker.actor.kl_loss_coef": ("algorithm.kl_coef",),
    "worker.actor.kl_loss_type": ("algorithm.kl_penalty",),
    "worker.actor.offload.optimizer_offload": ("worker.actor.offload.offload_optimizer",),
    "worker.actor.offload.param_offload": ("worker.actor.offload.offload_params",),
    "worker.actor.ulysses_sequence_parallel_size": ("worker.actor.ulysses_size",),
    "worker.actor.use_kl_loss": ("algorithm.use_kl_loss",),
    "worker.actor.optim.lr_warmup_steps_ratio": ("worker.actor.optim.lr_warmup_ratio",),
    "worker.actor.optim.warmup_style": ("worker.actor.optim.lr_scheduler_type",),
    "worker.critic.offload.optimizer_offload": ("worker.critic.offload.offload_optimizer",),
    "worker.critic.offload.param_offload": ("worker.critic.offload.offload_params",),
    "worker.critic.optim.lr_warmup_steps_ratio": ("worker.critic.optim.lr_warmup_ratio",),
    "worker.critic.optim.warmup_style": ("worker.critic.optim.lr_scheduler_type",),
    "worker.critic.ulysses_sequence_parallel_size": ("worker.critic.ulysses_size",),
    "worker.ref.offload.param_offload": ("worker.ref.offload.offload_params",),
    "worker.reward.compute_score": ("worker.reward.reward_function",),
    "worker.reward.score_function": ("worker.reward.reward_function",),
    "worker.reward.score_function_kwargs": ("worker.reward.reward_function_kwargs",),
    "trainer.test_freq": ("trainer.val_freq",),
    "trainer.total_episodes": ("trainer.total_epochs",),
    "trainer.val_generations_to_log_to_wandb": ("trainer.val_generations_to_log",),
}
"""Old key, and the present ones that take its value."""

DROPPED = {
    "worker.hybrid_engine": "policy and rollout engine always share their devices",
    "worker.actor.strategy": "models are always laid out with FSDP2",
    "worker.critic.strategy": "models are always laid out with FSDP2",
    "worker.ref.strategy": "models are always laid out with FSDP2",
    "worker.rollout.free_cache_engine": "the engine always gives its memory back while the policy trains",
    "worker.rollout.max_num_seqs": "the engine chooses how many responses it writes at a time",
    "worker.reward.reward_type": "the form is read from the reward file",
    "worker.reward.val_reward_function": "validation uses worker.reward.reward_function",
    "worker.reward.val_reward_function_kwargs": "validation uses worker.reward.reward_function_kwargs",
}


def replace_deprecated(values: dict[str, Any]) -> list[str]:
    """Moves old keys in `values` (nested mappings) to their present names, in place; a note for each."""
    notes = []
    for old, names in RENAMED.items():
        found, value = _pop(values, old)
        if found:
            for new in names:
                _put(values, new, value)
            notes.append(f"{old} is called {' and '.join(names)} now")
    for old, why in DROPPED.items():
        if _pop(values, old)[0]:
            notes.append(f"{old} is not needed any more: {why}")
    return notes


def _pop(values: dict[str, Any], key: str) -> tuple[bool, Any]:
    *path, leaf = key.split(".")
    inner: Any = values
    for part in path:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or leaf not in inner:
        return False, None
    return True, inner.pop(leaf)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets the key. What stands where a section belongs is left for validation to refuse."""
    *path, leaf = key.split(".")
    inner: Any = values
    for part in path:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            return
    inner[leaf] = value
