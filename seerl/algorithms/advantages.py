"""How much better than expected each answer was. Pure functions on flat tensors; nothing is padded.

Axes: M response tokens of the whole step, R responses, G groups. Responses of a group need not stand
together. Sources are named at each function; `docs/algorithms.md` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

EPS = 1e-6
"""Added to a group's standard deviation (as in the GRPO reference)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """One step's rewards. `token_rewards_M` holds each response's score on its last token, less the KL
    penalty of every token where that stands in the reward."""

    token_rewards_M: torch.Tensor
    response_M: torch.Tensor  # ascending index of the response a token belongs to
    group_R: torch.Tensor  # index of the group a response belongs to
    components: Mapping[str, torch.Tensor] = field(default_factory=dict)  # name to (R,), for gdpo
    gamma: float = 1.0

    def __post_init__(self) -> None:
        bad = (~torch.isfinite(self.token_rewards_M)).nonzero()
        if bad.numel():
            response = int(self.response_M[bad[0, 0]])
            raise ValueError(f"the reward of response {response} is not finite")

    @property
    def lengths_R(self) -> torch.Tensor:
        return torch.bincount(self.response_M, minlength=self.group_R.numel())

    @property
    def rewards_R(self) -> torch.Tensor:
        """A response's reward: the sum over its tokens."""
        total_R = torch.zeros(self.group_R.numel(), dtype=self.token_rewards_M.dtype)
        return total_R.index_add_(0, self.response_M, self.token_rewards_M)


class Groups:
    """Sums over groups of any sizes."""

    def __init__(self, group_R: torch.Tensor) -> None:
        self.group_R = group_R
        self.count = int(group_R.max()) + 1
        self.size_R = torch.bincount(group_R)[group_R]

    def sum(self, values_R: torch.Tensor) -> torch.Tensor:
        """The group's sum, given to each of its responses (R,)."""
        return torch.zeros(self.count, dtype=values_R.dtype).index_add_(0, self.group_R, values_R)[
            self.group_R
        ]

    def mean(self, values_R: torch.Tensor) -> torch.Tensor:
        return self.sum(values_R) / self.size_R

    def std(self, values_R: torch.Tensor) -> torch.Tensor:
        """Unbiased standard deviation of the group; 0 for a group of one."""
        squares_R = self.sum((values_R - self.mean(values_R)) ** 2)
        return (squares_R / (self.size_R - 1).clamp(min=1)).sqrt()

    def max(self, values_R: torch.Tensor) -> torch.Tensor:
        return self._extreme(values_R, "amax")

    def uniform(self, values_R: torch.Tensor) -> torch.Tensor:
        """(R,) bool: all of the group's values are equal, so they say nothing."""
        return self._extreme(values_R, "amax") == self._extreme(values_R, "amin")

    def _extreme(self, values_R: torch.Tensor, reduce: str) -> torch.Tensor:
        start = torch.zeros(self.count, dtype=values_R.dtype)
        return start.scatter_reduce_(0, self.group_R, values_R, reduce, include_self=False)[self.group_R]


def degenerate_groups(rewards_R: torch.Tensor, group_R: torch.Tensor) -> int:
    """How many groups have equal rewards throughout (a group of one among them)."""
    return int(group_R[Groups(group_R).uniform(rewards_R)].unique().numel())


def grpo(inputs: AdvantageInputs) -> torch.Tensor:
    """(R_i - mean) / (std + 1e-6) within the group (2402.03300)."""
    return _per_response(inputs, _group_normalised(inputs.rewards_R, Groups(inputs.group_R)))


def dr_grpo(inputs: AdvantageInputs) -> torch.Tensor:
    """R_i - mean within the group (2503.20783)."""
    groups, rewards_R = Groups(inputs.group_R), inputs.rewards_R
    return _per_response(inputs, _silenced(rewards_R - groups.mean(rewards_R), rewards_R, groups))


def grpo_passk(inputs: AdvantageInputs) -> torch.Tensor:
    """(best - second best) / (std + 1e-6) for the group's best response, 0 for the rest (2503.19595).

    Of several equal best ones the margin is 0.
    """
    groups, rewards_R = Groups(inputs.group_R), inputs.rewards_R
    best_R = groups.max(rewards_R)
    is_best_R = rewards_R == best_R
    second_R = groups.max(torch.where(is_best_R, float("-inf"), rewards_R))
    unique_R = is_best_R & (groups.sum(is_best_R.float()) == 1) & torch.isfinite(second_R)
    margin_R = (best_R - second_R) / (groups.std(rewards_R) + EPS)
    return _per_response(inputs, torch.where(unique_R, margin_R, 0.0))


def rloo(inputs: AdvantageInputs) -> torch.Tensor:
    """R_i minus the mean of the group's other rewards (2402.14740)."""
    groups, rewards_R = Groups(inputs.group_R), inputs.rewards_R
    others_R = (groups.sum(rewards_R) - rewards_R) / (groups.size_R - 1).clamp(min=1)
    return _per_response(inputs, _silenced(rewards_R - others_R, rewards_R, groups))


def reinforce_plus_plus(inputs: AdvantageInputs) -> torch.Tensor:
    """Discounted return-to-go of each token, whitened over the step's tokens (2501.03262)."""
    return whiten(_returns_to_go(inputs.token_rewards_M, inputs.response_M, inputs.gamma))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> torch.Tensor:
    """R_i - group mean, whitened over the step's tokens (2501.03262)."""
    return whiten(dr_grpo(inputs))


def opo(inputs: AdvantageInputs) -> torch.Tensor:
    """R_i minus the group's mean reward weighted by length (2505.23585)."""
    groups, rewards_R = Groups(inputs.group_R), inputs.rewards_R
    lengths_R = inputs.lengths_R.to(rewards_R.dtype)
    baseline_R = groups.sum(lengths_R * rewards_R) / groups.sum(lengths_R)
    return _per_response(inputs, _silenced(rewards_R - baseline_R, rewards_R, groups))


def gdpo(inputs: AdvantageInputs) -> torch.Tensor:
    """Each reward component normalised within its group as in grpo, summed, whitened over the step
    (2601.05242).

    `components` are taken as they come, already weighted; without any, the whole reward is the one component.
    """
    groups = Groups(inputs.group_R)
    components = list(inputs.components.values()) or [inputs.rewards_R]
    total_R = torch.stack([_group_normalised(c, groups) for c in components]).sum(0)
    return whiten(_per_response(inputs, total_R))


ADVANTAGES: dict[str, Callable[[AdvantageInputs], torch.Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gdpo": gdpo,
}


def advantages(name: str, inputs: AdvantageInputs) -> torch.Tensor:
    """Advantages of every response token, (M,)."""
    return ADVANTAGES[name](inputs)


def whiten(values_M: torch.Tensor) -> torch.Tensor:
    """(x - mean) / sqrt(var + 1e-8) over all tokens, var unbiased; equal values give exactly 0."""
    if values_M.numel() < 2 or bool(values_M.max() == values_M.min()):
        return torch.zeros_like(values_M)
    return (values_M - values_M.mean()) * torch.rsqrt(values_M.var() + 1e-8)


def _group_normalised(values_R: torch.Tensor, groups: Groups) -> torch.Tensor:
    normalised_R = (values_R - groups.mean(values_R)) / (groups.std(values_R) + EPS)
    return _silenced(normalised_R, values_R, groups)


def _silenced(advantages_R: torch.Tensor, rewards_R: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Exactly 0 in uniform groups: the rounding of a mean must not be blown up to a signal."""
    return torch.where(groups.uniform(rewards_R), 0.0, advantages_R)


def _per_response(inputs: AdvantageInputs, values_R: torch.Tensor) -> torch.Tensor:
    return values_R[inputs.response_M]


def _returns_to_go(rewards_M: torch.Tensor, response_M: torch.Tensor, gamma: float) -> torch.Tensor:
    returns = rewards_M.tolist()
    owners = response_M.tolist()
    for t in range(len(returns) - 2, -1, -1):
        if owners[t] == owners[t + 1]:
            returns[t] += gamma * returns[t + 1]
    return torch.tensor(returns, dtype=rewards_M.dtype)
