"""The optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from seerl.algorithms.schedule import lr_factor
from seerl.config.schema import OptimConfig


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained; moments take the parameters' type (bf16 with
    `adamw_bf16`)."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(
        trained, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate as a function of optimizer steps done, over `total_steps` of the whole run."""

    def factor(step: int) -> float:
        return lr_factor(
            step,
            total_steps=total_steps,
            kind=config.lr_scheduler_type,
            warmup_steps=config.lr_warmup_steps,
            warmup_ratio=config.lr_warmup_ratio,
            min_ratio=config.min_lr_ratio,
        )

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def set_progress(scheduler: torch.optim.lr_scheduler.LambdaLR, steps: int) -> None:
    """Puts the schedule where it stands after that many optimizer steps, with the learning rate it was made
    with."""
    scheduler.last_epoch = steps
    groups = scheduler.optimizer.param_groups
    for group, peak, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = peak * factor(steps)
