"""The figures of a step that come from its groups and its clock. Names are those EasyR1 users plot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import psutil
import torch

from seerl.experience import summary
from seerl.types import ScoredGroup


def group_metrics(groups: Sequence[ScoredGroup], *, max_prompt: int) -> dict[str, float]:
    """Lengths in tokens and scores by name."""
    prompts = np.array([g.prompt.token_ids.size for g in groups])
    responses = np.array([c.token_ids.size for g in groups for c in g.completions])
    cut = [c.finish_reason == "length" for g in groups for c in g.completions]
    names = sorted({name for g in groups for s in g.scores for name in s.parts})
    return {
        **summary("prompt_length", prompts),
        "prompt_length/clip_ratio": float((prompts >= max_prompt).mean()),
        **summary("response_length", responses),
        "response_length/clip_ratio": float(np.mean(cut)),
        "reward/overall": float(np.mean([s.overall for g in groups for s in g.scores])),
        **{
            f"reward/{n}": float(np.mean([s.parts.get(n, 0.0) for g in groups for s in g.scores]))
            for n in names
        },
        "batch/groups": float(len(groups)),
        "perf/total_num_tokens": float(
            sum((g.prompt.token_ids.size * len(g.completions)) for g in groups) + responses.sum()
        ),
    }


PER_TOKEN_STAGES = {"gen": "response", "old": "all", "ref": "all", "adv": "all", "update_actor": "all"}
"""Which tokens a stage's time is divided by for `timing_per_token_ms/*`."""


def timing_metrics(
    seconds: dict[str, float], *, total_tokens: float, response_tokens: float
) -> dict[str, float]:
    """Seconds by stage, milliseconds per token by stage, and the step's throughput on this one device."""
    tokens = {"response": max(response_tokens, 1.0), "all": max(total_tokens, 1.0)}
    return {
        **{f"timing_s/{stage}": s for stage, s in seconds.items()},
        **{
            f"timing_per_token_ms/{stage}": 1000 * seconds[stage] / tokens[kind]
            for stage, kind in PER_TOKEN_STAGES.items()
            if stage in seconds
        },
        "perf/time_per_step": seconds["step"],
        "perf/throughput": total_tokens / seconds["step"],
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Memory in GiB: of this process and its children on the CPU side, and of the device's allocator.

    A page that forked workers share counts once: it is divided among those that map it (PSS).
    """
    this = psutil.Process()
    used = 0
    for process in (this, *this.children(recursive=True)):
        try:
            memory = process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        used += getattr(memory, "pss", memory.uss)
    metrics = {"perf/cpu_memory_used_gb": used / 2**30}
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 2**30
    return metrics
