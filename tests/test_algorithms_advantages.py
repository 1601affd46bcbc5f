"""Advantages: values worked out by hand, and a second implementation in plain Python on random groups."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seerl.algorithms.advantages import ADVANTAGES, AdvantageInputs, advantages, degenerate_groups


def inputs(
    groups: list[list[float]], lengths: list[list[int]] | None = None, gamma: float = 1.0
) -> AdvantageInputs:
    """Each response's reward on its last token; lengths default to 1."""
    lengths = lengths or [[1] * len(g) for g in groups]
    token_rewards, response, group_of = [], [], []
    for g, (rewards, sizes) in enumerate(zip(groups, lengths, strict=True)):
        for reward, size in zip(rewards, sizes, strict=True):
            token_rewards += [0.0] * (size - 1) + [reward]
            response += [len(group_of)] * size
            group_of.append(g)
    return AdvantageInputs(
        token_rewards_M=torch.tensor(token_rewards, dtype=torch.float64),
        response_M=torch.tensor(response),
        group_R=torch.tensor(group_of),
        gamma=gamma,
    )


def check(name: str, given_inputs: AdvantageInputs, expected: list[float]) -> None:
    torch.testing.assert_close(
        advantages(name, given_inputs), torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-9
    )


def test_grpo_by_hand() -> None:
    # mean 0.5, deviations -+0.5, unbiased std sqrt(4 x 0.25 / 3) = 1 / sqrt(3)
    a = 0.5 / (1 / math.sqrt(3) + 1e-6)
    check("grpo", inputs([[1, 0, 1, 0]]), [a, -a, a, -a])


def test_grpo_gives_every_token_its_responses_advantage() -> None:
    # group of 2: mean 1, std sqrt(2)
    a = 1 / (math.sqrt(2) + 1e-6)
    check("grpo", inputs([[2, 0]], [[2, 3]]), [a, a, -a, -a, -a])


def test_dr_grpo_by_hand() -> None:
    check("dr_grpo", inputs([[1, 0, 0, 3]]), [0, -1, -1, 2])


def test_rloo_by_hand() -> None:
    # others' means: of 3 -> 0.5, of 1 -> 1.5, of 0 -> 2
    check("rloo", inputs([[3, 1, 0]]), [2.5, -0.5, -2])


def test_grpo_passk_by_hand() -> None:
    # best 3, second 1, mean 4/3, squares 25/9 + 1/9 + 16/9 = 42/9, std sqrt(42/18)
    check("grpo_passk", inputs([[3, 1, 0]]), [2 / (math.sqrt(42 / 18) + 1e-6), 0, 0])
    check("grpo_passk", inputs([[3, 3, 0]]), [0, 0, 0])


def test_opo_by_hand() -> None:
    # baseline (1 x 3 + 2 x 0 + 1 x 1) / 4 = 1
    check("opo", inputs([[3, 0, 1]], [[1, 2, 1]]), [2, -1, -1, 0])


def test_reinforce_plus_plus_by_hand() -> None:
    # returns with gamma 0.5: [0.5, 1] and [0]: mean 0.5, unbiased variance 0.25
    scale = 1 / math.sqrt(0.25 + 1e-8)
    check(
        "reinforce_plus_plus", inputs([[1.0], [0.0]], [[2], [1]], gamma=0.5), [0, 0.5 * scale, -0.5 * scale]
    )


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # R - mean: [1, -1]; over tokens [1, -1]: mean 0, unbiased variance 2
    scale = 1 / math.sqrt(2 + 1e-8)
    check("reinforce_plus_plus_baseline", inputs([[2, 0]]), [scale, -scale])


def test_gdpo_normalises_each_component_in_its_group() -> None:
    made = inputs([[1, 0]])
    components = {"a": torch.tensor([1.0, 0.0]).double(), "b": torch.tensor([0.0, 4.0]).double()}
    both = AdvantageInputs(
        token_rewards_M=made.token_rewards_M,
        response_M=made.response_M,
        group_R=made.group_R,
        components=components,
    )
    # each component is normalised to +-1/sqrt(2) (up to 1e-6), of opposite sign: the sum is about 0
    assert advantages("gdpo", both).abs().max() < 1.1
    only_a = AdvantageInputs(
        token_rewards_M=made.token_rewards_M,
        response_M=made.response_M,
        group_R=made.group_R,
        components={"a": components["a"]},
    )
    torch.testing.assert_close(
        advantages("gdpo", only_a), torch.tensor([1, -1]).double() / math.sqrt(2), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.0, -0.0], [1 / 3] * 7, [5.0]])
def test_equal_rewards_teach_exactly_nothing(name: str, rewards: list[float]) -> None:
    assert torch.equal(advantages(name, inputs([rewards])), torch.zeros(len(rewards), dtype=torch.float64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rewards_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match="response 1"):
        inputs([[1, bad]])


def test_degenerate_groups_are_counted() -> None:
    made = inputs([[1, 1], [0, 1], [2], [0.0, -0.0]])
    assert degenerate_groups(made.rewards_R, made.group_R) == 3


REWARDS = st.lists(
    st.lists(st.integers(-20, 20).map(lambda i: i / 4), min_size=1, max_size=6), min_size=1, max_size=5
)


def plain(name: str, groups: list[list[float]]) -> list[float]:
    """The formulas written out once more, with loops."""
    out: list[float] = []
    for rewards in groups:
        mean, n = sum(rewards) / len(rewards), len(rewards)
        uniform = max(rewards) == min(rewards)
        for i, reward in enumerate(rewards):
            if uniform:
                out.append(0.0)
            elif name == "grpo":
                out.append((reward - mean) / (statistics.stdev(rewards) + 1e-6))
            elif name == "dr_grpo":
                out.append(reward - mean)
            elif name == "rloo":
                out.append(reward - sum(rewards[:i] + rewards[i + 1 :]) / (n - 1))
            else:
                ordered = sorted(rewards)
                best = reward == ordered[-1] and ordered[-1] > ordered[-2]
                out.append((ordered[-1] - ordered[-2]) / (statistics.stdev(rewards) + 1e-6) if best else 0.0)
    return out


@given(REWARDS, st.sampled_from(["grpo", "dr_grpo", "rloo", "grpo_passk"]))
def test_group_estimators_equal_the_plain_loops(groups: list[list[float]], name: str) -> None:
    expected = torch.tensor(plain(name, groups), dtype=torch.float64)
    torch.testing.assert_close(advantages(name, inputs(groups)), expected, atol=1e-9, rtol=1e-9)
