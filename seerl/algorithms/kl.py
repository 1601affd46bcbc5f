"""Estimators of the KL divergence between policy and reference, and what controls their weight.

Sources: joschu.net/blog/kl-approx.html; the adaptive controller is 1909.08593's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from seerl.algorithms.tokens import at_least_float32

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
    shape.

    Values hold for tokens sampled from the policy. As a term of the loss, `kl` does not pull towards the
    reference: its gradient is the score function, whose mean is 0. Use another one there.
    """
    return KL_ESTIMATORS[name](at_least_float32(p), at_least_float32(f))


def full_kl(logits_p: torch.Tensor, logits_f: torch.Tensor) -> torch.Tensor:
    """The exact divergence per row, (M, V) and (M, V) logits to (M,).

    Rows are independent, so any chunk of them may be given. A token that the policy cannot give (its logit is
    minus infinity) adds nothing, to the value and to the gradient.
    """
    log_p = torch.log_softmax(at_least_float32(logits_p), -1)
    log_f = torch.log_softmax(at_least_float32(logits_f), -1)
    impossible = log_p == float("-inf")
    # Masked before subtracting: -inf - -inf is NaN, and its gradient would be too.
    difference = log_p.masked_fill(impossible, 0.0) - log_f.masked_fill(impossible, 0.0)
    return (log_p.exp() * difference).sum(-1)


@dataclass(slots=True)
class FixedController:
    """A KL coefficient that stays as configured."""

    value: float

    def update(self, kl: float, samples: int) -> None:
        """Takes note of a step's mean KL over `samples` responses."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the configured coefficient holds, also where it was another in the checkpoint."""


@dataclass(slots=True)
class AdaptiveController(FixedController):
    """A KL coefficient that moves so that the measured KL nears a target (1909.08593).

    value *= 1 + clip(kl / target - 1, -0.2, 0.2) x samples / horizon, never below 0.
    """

    target: float = 0.1
    horizon: float = 10000.0

    def update(self, kl: float, samples: int) -> None:
        """Takes note of a step's mean KL over `samples` responses.

        Raises:
            ValueError: for a KL that is not a number; it would stay in the coefficient for good.
        """
        if math.isnan(kl):
            raise ValueError("the KL divergence from the reference is NaN")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= max(0.0, 1.0 + error * samples / self.horizon)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where the coefficient has moved to."""
        self.value = float(state["value"])


def kl_controller(kind: str, *, coef: float, target: float, horizon: float) -> FixedController:
    """The controller of this kind, `fixed` or `adaptive`, that starts at `coef`."""
    if kind == "adaptive":
        return AdaptiveController(value=coef, target=target, horizon=horizon)
    return FixedController(value=coef)
