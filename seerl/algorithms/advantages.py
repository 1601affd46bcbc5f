"""How much better than expected each answer was. Pure functions on flat tensors; nothing is padded.

Axes: M response tokens of the whole step, R responses, G groups. Responses of a group need not stand
together, and groups may differ in size. Sources are named at each function; `docs/algorithms.md` has the
formulas.

Choices the papers leave open:
- A group whose rewards are all equal (a group of one among them) gets exactly 0 from every estimator that
  compares within groups. Where the result is whitened, it still counts in the batch's mean and variance.
- Statistics are taken in float64 and the result is float32, so that rewards of any size neither overflow nor
  lose their differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from seerl.algorithms.tokens import response_sum, where_counted

STD_EPS = 1e-6
"""Added to a group's standard deviation (as in the GRPO reference)."""
WHITEN_EPS = 1e-8
"""Added to the variance when whitening."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """One step's rewards.

    Raises:
        ValueError: for shapes that do not fit each other, and for a reward that is NaN or infinite, naming
            its response.
    """

    token_rewards_M: torch.Tensor
    """Each response's score on its last token, less the KL penalty of every token where that stands in the
    reward; see `token_rewards`."""
    response_M: torch.Tensor
    """Which response a token belongs to; ascending."""
    group_R: torch.Tensor
    """Which group a response belongs to."""
    components: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name to (R,): the rewards that gdpo normalises one by one, not yet weighted."""
    component_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the components; 1 for those not named."""
    gamma: float = 1.0
    mask_M: torch.Tensor | None = None
    """Bool; the tokens the policy wrote, None: all. The others earn nothing and get advantage 0."""

    def __post_init__(self) -> None:
        responses = self.group_R.numel()
        if self.token_rewards_M.shape != self.response_M.shape:
            raise ValueError(
                f"{self.token_rewards_M.numel()} token rewards for {self.response_M.numel()} tokens"
            )
        if self.response_M.numel() and int(self.response_M.max()) >= responses:
            raise ValueError(f"tokens of response {int(self.response_M.max())}, but {responses} responses")
        _require_finite(self.token_rewards_M, "the reward", self.response_M)
        for name, values_R in self.components.items():
            if values_R.shape != self.group_R.shape:
                raise ValueError(f"reward {name!r} has {values_R.numel()} values for {responses} responses")
            _require_finite(values_R, f"reward {name!r}")
        unknown = sorted(set(self.component_weights) - set(self.components))
        if unknown:
            raise ValueError(f"weights of {unknown}, but the rewards are {sorted(self.components)}")

    @property
    def lengths_R(self) -> torch.Tensor:
        """Tokens of each response that count."""
        return response_sum(
            torch.ones_like(self.response_M), self.response_M, self.group_R.numel(), self.mask_M
        )

    @property
    def rewards_R(self) -> torch.Tensor:
        """A response's reward, float64: the sum over its tokens."""
        return response_sum(self.token_rewards_M.double(), self.response_M, self.group_R.numel(), self.mask_M)


def _require_finite(values: torch.Tensor, what: str, response_M: torch.Tensor | None = None) -> None:
    bad = (~torch.isfinite(values)).nonzero()
    if bad.numel():
        index = int(bad[0, 0])
        response = index if response_M is None else int(response_M[index])
        raise ValueError(f"{what} of response {response} is not finite: {float(values[index])}")


def token_rewards(
    rewards_R: torch.Tensor, lengths_R: torch.Tensor, penalty_M: torch.Tensor | None = None
) -> torch.Tensor:
    """(M,) float32 token rewards: a response's reward on its last token, less each token's penalty
    (kl_coef x KL estimate).

    Raises:
        ValueError: for a response without tokens, and for a reward that is NaN or infinite.
    """
    empty = (lengths_R < 1).nonzero()
    if empty.numel():
        raise ValueError(f"response {int(empty[0, 0])} has no tokens")
    _require_finite(rewards_R, "the reward")
    rewards_M = torch.zeros(int(lengths_R.sum()), device=rewards_R.device)
    rewards_M[lengths_R.cumsum(0) - 1] = rewards_R.float()
    return rewards_M if penalty_M is None else rewards_M - penalty_M.float()


class Groups:
    """Statistics over groups of any sizes, each given to every response of the group (R,)."""

    def __init__(self, group_R: torch.Tensor) -> None:
        self.group_R = group_R
        sizes_G = torch.bincount(group_R)
        self.count = sizes_G.numel()
        self.size_R = sizes_G[group_R]

    def sum(self, values_R: torch.Tensor) -> torch.Tensor:
        total_G = values_R.new_zeros(self.count).index_add(0, self.group_R, values_R)
        return total_G[self.group_R]

    def mean(self, values_R: torch.Tensor) -> torch.Tensor:
        return self.sum(values_R) / self.size_R

    def std(self, values_R: torch.Tensor) -> torch.Tensor:
        """Unbiased standard deviation; 0 for a group of one."""
        squares_R = self.sum((values_R - self.mean(values_R)) ** 2)
        return (squares_R / (self.size_R - 1).clamp(min=1)).sqrt()

    def max(self, values_R: torch.Tensor) -> torch.Tensor:
        return self._extreme(values_R, "amax")

    def uniform(self, values_R: torch.Tensor) -> torch.Tensor:
        """Bool: all of the group's values are equal, so they say nothing."""
        return self._extreme(values_R, "amax") == self._extreme(values_R, "amin")

    def _extreme(self, values_R: torch.Tensor, reduce: str) -> torch.Tensor:
        start_G = values_R.new_zeros(self.count)
        return start_G.scatter_reduce(0, self.group_R, values_R, reduce, include_self=False)[self.group_R]


def degenerate_groups(rewards_R: torch.Tensor, group_R: torch.Tensor) -> int:
    """How many groups have equal rewards throughout (a group of one among them)."""
    return int(group_R[Groups(group_R).uniform(rewards_R)].unique().numel())


def grpo(inputs: AdvantageInputs) -> torch.Tensor:
    """(R_i - mean) / (std + 1e-6) within the group (2402.03300)."""
    return _per_token(inputs, _normalised(inputs.rewards_R, Groups(inputs.group_R)))


def dr_grpo(inputs: AdvantageInputs) -> torch.Tensor:
    """R_i - mean within the group (2503.20783)."""
    return _per_token(inputs, _centred(inputs.rewards_R, Groups(inputs.group_R)))


def grpo_passk(inputs: AdvantageInputs) -> torch.Tensor:
    """(best - second best) / (std + 1e-6) for the group's best response, 0 for the rest (2503.19595).

    Of several equal best ones the second best is as good, so all get 0.
    """
    groups, rewards_R = Groups(inputs.group_R), inputs.rewards_R
    best_R = groups.max(rewards_R)
    is_best_R = rewards_R == best_R
    alone_R = is_best_R & (groups.sum(is_best_R.long()) == 1) & (groups.size_R > 1)
    second_R = groups.max(torch.where(is_best_R, float("-inf"), rewards_R))
    margin_R = (best_R - second_R) / (groups.std(rewards_R) + STD_EPS)
    return _per_token(inputs, torch.where(alone_R, margin_R, 0.0))


def rloo(inputs: AdvantageInputs) -> torch.Tensor:
    """R_i minus the mean of the group's other rewards (2402.14740)."""
    groups, rewards_R = Groups(inputs.group_R), inputs.rewards_R
    others_R = (groups.sum(rewards_R) - rewards_R) / (groups.size_R - 1).clamp(min=1)
    return _per_token(inputs, _silenced(rewards_R - others_R, groups.uniform(rewards_R)))


def reinforce_plus_plus(inputs: AdvantageInputs) -> torch.Tensor:
    """Discounted return-to-go of each token, whitened over the step's tokens (2501.03262).

    It compares over the batch, not within groups, so a group of equal rewards is not silenced.
    """
    return _whitened(inputs, returns_to_go(inputs))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> torch.Tensor:
    """R_i - group mean, whitened over the step's tokens (2501.03262)."""
    groups, rewards_R = Groups(inputs.group_R), inputs.rewards_R
    whitened_M = _whitened(inputs, _centred(rewards_R, groups)[inputs.response_M])
    return _silenced(whitened_M, groups.uniform(rewards_R)[inputs.response_M])


def opo(inputs: AdvantageInputs) -> torch.Tensor:
    """R_i minus the group's mean reward weighted by length (2505.23585)."""
    groups, rewards_R = Groups(inputs.group_R), inputs.rewards_R
    lengths_R = inputs.lengths_R.to(rewards_R.dtype)
    baseline_R = groups.sum(lengths_R * rewards_R) / groups.sum(lengths_R).clamp(min=1)
    return _per_token(inputs, _silenced(rewards_R - baseline_R, groups.uniform(rewards_R)))


def gdpo(inputs: AdvantageInputs) -> torch.Tensor:
    """Each reward component normalised within its group as in grpo, summed with its weight, whitened over the
    step (2601.05242).

    Without components the whole reward is the only one. A group is silenced where every component with a
    weight is equal throughout; equal sums of different components still teach.
    """
    groups = Groups(inputs.group_R)
    components = {name: values_R.double() for name, values_R in inputs.components.items()}
    components = components or {"": inputs.rewards_R}
    total_R = torch.zeros_like(inputs.rewards_R)
    silent_R = torch.ones_like(inputs.group_R, dtype=torch.bool)
    for name, values_R in components.items():
        weight = inputs.component_weights.get(name, 1.0)
        if weight == 0:
            continue
        total_R = total_R + weight * _normalised(values_R, groups)
        silent_R = silent_R & groups.uniform(values_R)
    return _silenced(_whitened(inputs, total_R[inputs.response_M]), silent_R[inputs.response_M])


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
"""A new estimator is a function and a row here."""


def advantages(name: str, inputs: AdvantageInputs) -> torch.Tensor:
    """Advantages of every response token, (M,) float32."""
    return ADVANTAGES[name](inputs).float()


def whiten(values_M: torch.Tensor, mask_M: torch.Tensor | None = None) -> torch.Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the tokens that count, var unbiased; 0 on the others.

    Equal values, and a single one, give exactly 0.
    """
    counted_M = values_M if mask_M is None else values_M[mask_M.bool()]
    if counted_M.numel() < 2 or bool(counted_M.max() == counted_M.min()):
        return torch.zeros_like(values_M)
    scale = torch.rsqrt(counted_M.var() + WHITEN_EPS)
    return where_counted((values_M - counted_M.mean()) * scale, mask_M)


def _whitened(inputs: AdvantageInputs, values_M: torch.Tensor) -> torch.Tensor:
    return whiten(values_M, inputs.mask_M)


def _centred(values_R: torch.Tensor, groups: Groups) -> torch.Tensor:
    return _silenced(values_R - groups.mean(values_R), groups.uniform(values_R))


def _normalised(values_R: torch.Tensor, groups: Groups) -> torch.Tensor:
    return _centred(values_R, groups) / (groups.std(values_R) + STD_EPS)


def _silenced(advantages: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Exactly 0 in uniform groups: the rounding of a mean must not be blown up to a signal."""
    return torch.where(uniform, 0.0, advantages)


def _per_token(inputs: AdvantageInputs, values_R: torch.Tensor) -> torch.Tensor:
    return where_counted(values_R[inputs.response_M], inputs.mask_M)


def returns_to_go(inputs: AdvantageInputs) -> torch.Tensor:
    """G_t = r_t + gamma G_t+1 over a response's tokens that count, (M,) float64; 0 on the others.

    All responses at once, from their last tokens backwards.
    """
    rewards_M = inputs.token_rewards_M.double()
    returns_M = torch.zeros_like(rewards_M)
    mask_M = torch.ones_like(rewards_M) if inputs.mask_M is None else inputs.mask_M
    counted = mask_M.nonzero()[:, 0]
    lengths_R = inputs.lengths_R.long()
    ends_R = lengths_R.cumsum(0) - 1
    following_R = rewards_M.new_zeros(lengths_R.numel())
    for back in range(int(lengths_R.max())):
        longer = (lengths_R > back).nonzero()[:, 0]
        tokens = counted[ends_R[longer] - back]
        following_R[longer] = rewards_M[tokens] + inputs.gamma * following_R[longer]
        returns_M[tokens] = following_R[longer]
    return returns_M
