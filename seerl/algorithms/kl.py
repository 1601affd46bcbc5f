"""Estimators of the KL divergence between policy and reference, and what controls their weight.

Sources: joschu.net/blog/kl-approx.html; the adaptive controller is 1909.08593's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before exp."""


def _k1(p: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    return p - f


def _absolute(p: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    return (p - f).abs()


def _squared(p: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    return 0.5 * (p - f) ** 2


def _low_variance(p: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    log_ratio = (f - p).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (log_ratio.exp() - log_ratio - 1).clamp(-10.0, 10.0)


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "kl": _k1,
    "abs": _absolute,
    "mse": _squared,
    "low_var_kl": _low_variance,
}


def kl_estimate(name: str, p: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """The named estimate per token from the log-probabilities of policy `p` and reference `f`, any equal
    shape."""
    return KL_ESTIMATORS[name](p.float(), f.float())


def full_kl(logits_p: torch.Tensor, logits_f: torch.Tensor) -> torch.Tensor:
    """The exact divergence per row, (M, V) and (M, V) logits to (M,).

    A token that neither distribution can give (both at minus infinity) adds nothing.
    """
    log_p, log_f = torch.log_softmax(logits_p.float(), -1), torch.log_softmax(logits_f.float(), -1)
    difference = torch.where(log_p == float("-inf"), 0.0, log_p - log_f)
    return (log_p.exp() * difference).sum(-1)


@dataclass(slots=True)
class KLController:
    """The KL coefficient over the run: fixed, or moved so that the measured KL nears a target.

    value *= 1 + clip(kl / target - 1, -0.2, 0.2) x samples / horizon.
    """

    value: float
    adaptive: bool = False
    target: float = 0.1
    horizon: float = 10000.0

    def update(self, kl: float, samples: int) -> None:
        """Takes note of a step's mean KL over `samples` responses."""
        if self.adaptive:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * samples / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])
