"""Advantages: values worked out by hand, hostile rewards, and a second implementation in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seerl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    advantages,
    degenerate_groups,
    token_rewards,
    whiten,
)
from tests import algorithm_loops as loops

GROUP_ESTIMATORS = sorted(set(ADVANTAGES) - {"reinforce_plus_plus"})


def step(
    rewards: Sequence[float], lengths: Sequence[int], groups: Sequence[int], **more: object
) -> AdvantageInputs:
    lengths_R = torch.tensor(lengths)
    return AdvantageInputs(
        token_rewards_M=token_rewards(torch.tensor(rewards), lengths_R),
        response_M=torch.repeat_interleave(torch.arange(len(lengths)), lengths_R),
        group_R=torch.tensor(groups),
        **more,  # type: ignore[arg-type]
    )


def per_response(name: str, inputs: AdvantageInputs) -> list[float]:
    """One value per response, having checked that all its tokens share it."""
    values_M = advantages(name, inputs)
    rows = [values_M[inputs.response_M == i] for i in range(inputs.group_R.numel())]
    assert all((row == row[0]).all() for row in rows)
    return [float(row[0]) for row in rows]


# Two groups of ragged size: rewards (1, 0, 0) with lengths (1, 2, 3), and (2, 4) with lengths (1, 3).
RAGGED = step([1.0, 0.0, 0.0, 2.0, 4.0], [1, 2, 3, 1, 3], [0, 0, 0, 1, 1])


def test_table_has_what_needs_neither_critic_nor_greedy_answers() -> None:
    assert set(ADVANTAGES) == {
        "grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
        "opo", "gdpo",
    }  # fmt: skip


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    # mean 1/3, variance ((2/3)^2 + 2 (1/3)^2) / 2 = 1/3; mean 3, variance (1 + 1) / 1 = 2.
    third, root = math.sqrt(1 / 3), math.sqrt(2)
    expected = [(2 / 3) / third, (-1 / 3) / third, (-1 / 3) / third, -1 / root, 1 / root]
    assert per_response("grpo", RAGGED) == pytest.approx(expected, abs=1e-5)
    exact = (2 / 3) / (third + 1e-6)  # the 1e-6 is added to the root, not under it
    assert per_response("grpo", RAGGED)[0] == pytest.approx(exact, rel=1e-7)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert per_response("dr_grpo", RAGGED) == pytest.approx([2 / 3, -1 / 3, -1 / 3, -1.0, 1.0])


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    # 1 - (0 + 0)/2, 0 - (1 + 0)/2, 0 - (1 + 0)/2; 2 - 4, 4 - 2.
    assert per_response("rloo", RAGGED) == pytest.approx([1.0, -0.5, -0.5, -2.0, 2.0])


def test_opo_weighs_the_baseline_by_length() -> None:
    # (1*1 + 2*0 + 3*0) / 6 = 1/6; (1*2 + 3*4) / 4 = 3.5.
    assert per_response("opo", RAGGED) == pytest.approx([5 / 6, -1 / 6, -1 / 6, -1.5, 0.5])


def test_passk_rewards_only_the_best_by_its_margin() -> None:
    # (1 - 0) / sqrt(1/3) and (4 - 2) / sqrt(2).
    expected = [math.sqrt(3), 0.0, 0.0, 0.0, math.sqrt(2)]
    assert per_response("grpo_passk", RAGGED) == pytest.approx(expected, rel=1e-5)
    assert per_response("grpo_passk", step([1.0, 1.0, 0.0], [1, 1, 1], [0, 0, 0])) == [0.0, 0.0, 0.0]


def test_reinforce_plus_plus_whitens_returns_to_go() -> None:
    # One response with rewards (1, 0, 2), gamma 1/2: G = (1 + 0.5*1, 0 + 0.5*2, 2) = (1.5, 1, 2);
    # mean 1.5, variance (0 + 0.25 + 0.25) / 2 = 0.25, so whitened (0, -1, 1).
    inputs = AdvantageInputs(
        token_rewards_M=torch.tensor([1.0, 0.0, 2.0]),
        response_M=torch.zeros(3, dtype=torch.long),
        group_R=torch.tensor([0]),
        gamma=0.5,
    )
    assert advantages("reinforce_plus_plus", inputs).tolist() == pytest.approx([0.0, -1.0, 1.0], abs=1e-6)


def test_returns_do_not_leak_from_one_response_into_the_one_before() -> None:
    # Rewards 1 (length 2) and 3 (length 1): returns (1, 1, 3), mean 5/3, variance 4/3.
    inputs = step([1.0, 3.0], [2, 1], [0, 0])
    low, high = (1 - 5 / 3) / math.sqrt(4 / 3), (3 - 5 / 3) / math.sqrt(4 / 3)
    assert advantages("reinforce_plus_plus", inputs).tolist() == pytest.approx([low, low, high], abs=1e-6)


def test_reinforce_plus_plus_baseline_whitens_over_tokens_not_responses() -> None:
    # Rewards (1, 0), lengths (1, 3): centred (0.5, -0.5 x 3), token mean -0.25,
    # variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25: (0.75 / 0.5, -0.25 / 0.5).
    inputs = step([1.0, 0.0], [1, 3], [0, 0])
    assert per_response("reinforce_plus_plus_baseline", inputs) == pytest.approx([1.5, -0.5], abs=1e-6)


def test_gdpo_weighs_each_reward_after_normalising_it() -> None:
    # In a group of 2 each component normalises to +-1/sqrt(2): a: (+, -), b: (-, +), whatever their scale.
    # Weights 3 and 1: (3 - 1)/sqrt(2) = (+, -) sqrt(2); whitened over two tokens of variance 4: +-1/sqrt(2).
    parts = {"a": torch.tensor([10.0, 0.0]), "b": torch.tensor([0.0, 0.1])}
    inputs = step([1.0, 1.0], [1, 1], [0, 0], components=parts, component_weights={"a": 3.0})
    assert per_response("gdpo", inputs) == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], abs=1e-4)
    even = {"a": torch.tensor([10.0, 0.0]), "b": torch.tensor([0.0, 10.0])}
    assert per_response("gdpo", step([1.0, 1.0], [1, 1], [0, 0], components=even)) == [0.0, 0.0]


def test_gdpo_is_silent_where_only_a_reward_without_weight_differs() -> None:
    parts = {"a": torch.tensor([1.0, 1.0, 1.0, 0.0]), "b": torch.tensor([1.0, 0.0, 0.0, 0.0])}
    inputs = step([1.0] * 4, [1, 1, 3, 1], [0, 0, 1, 1], components=parts, component_weights={"b": 0.0})
    first, second, *_ = per_response("gdpo", inputs)
    assert (first, second) == (0.0, 0.0)


def test_gdpo_learns_from_a_group_whose_rewards_only_sum_to_the_same() -> None:
    parts = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0, 1.0])}
    inputs = step([1.0, 1.0], [1, 1], [0, 0], components=parts, component_weights={"a": 2.0})
    assert per_response("gdpo", inputs)[0] > 0.5
    assert per_response("grpo", inputs) == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, 1 / 3, 1e-30, 1e30, 3e38])
def test_equal_rewards_give_exactly_zero(name: str, value: float) -> None:
    lengths = [1] * 7 if name == "reinforce_plus_plus" else [1, 2, 3, 4, 5, 6, 7]
    inputs = step([value] * 7, lengths, [0] * 7)
    assert (advantages(name, inputs) == 0).all()
    assert degenerate_groups(inputs.rewards_R, inputs.group_R) == 1


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_zero_and_minus_zero_are_equal_rewards(name: str) -> None:
    assert (advantages(name, step([0.0, -0.0, 0.0], [2, 2, 2], [0, 0, 0])) == 0).all()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_silent_and_single_groups_stay_exactly_zero_beside_others(name: str) -> None:
    inputs = step([5.0, 0.1, 0.1, 1.0, 0.0], [2, 3, 1, 4, 1], [2, 0, 0, 1, 1])
    values = per_response(name, inputs)
    assert values[:3] == [0.0, 0.0, 0.0]
    assert values[3] > 0
    assert degenerate_groups(inputs.rewards_R, inputs.group_R) == 2


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e37])
def test_results_are_finite_float32_for_rewards_of_any_size(name: str, scale: float) -> None:
    values_M = advantages(name, step([scale, 0.0, -scale, 0.5 * scale], [1, 3, 2, 1], [0, 0, 1, 1]))
    assert values_M.dtype == torch.float32
    assert values_M.isfinite().all()
    assert (values_M != 0).any()


def test_small_differences_on_large_rewards_survive() -> None:
    assert per_response("grpo", step([4096.0, 4096.001], [1, 1], [0, 0])) == pytest.approx(
        [-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=0.01
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rewards_that_are_no_numbers_are_refused_by_name_of_the_response(bad: float) -> None:
    with pytest.raises(ValueError, match="response 1 is not finite"):
        step([0.0, bad, 1.0], [2, 3, 1], [0, 0, 0])
    with pytest.raises(ValueError, match=r"reward 'format' of response 0 is not finite"):
        step([0.0, 1.0], [1, 1], [0, 0], components={"format": torch.tensor([bad, 0.0])})
    with pytest.raises(ValueError, match="response 1 is not finite"):  # through the KL of a token
        AdvantageInputs(
            token_rewards_M=torch.tensor([0.0, 0.0, bad, 1.0]),
            response_M=torch.tensor([0, 0, 1, 1]),
            group_R=torch.tensor([0, 0]),
        )


def test_shapes_and_names_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="response 1 has no tokens"):
        step([1.0, 1.0], [1, 0], [0, 0])
    with pytest.raises(ValueError, match="2 responses"):
        step([1.0, 1.0, 1.0], [1, 1, 1], [0, 0])
    with pytest.raises(ValueError, match="'a' has 1 values for 2"):
        step([1.0, 1.0], [1, 1], [0, 0], components={"a": torch.tensor([1.0])})
    with pytest.raises(ValueError, match=r"weights of \['b'\]"):
        step([1.0, 1.0], [1, 1], [0, 0], component_weights={"b": 1.0})


def test_kl_in_the_reward_is_taken_off_every_token() -> None:
    # Scores (1, 0) on the last tokens, 0.5 x KL (0.2, 0.4 | 0.6): rewards 1 - 0.3 = 0.7 and -0.3.
    penalty_M = 0.5 * torch.tensor([0.2, 0.4, 0.6])
    rewards_M = token_rewards(torch.tensor([1.0, 0.0]), torch.tensor([2, 1]), penalty_M)
    assert rewards_M.tolist() == pytest.approx([-0.1, 0.8, -0.3])
    inputs = AdvantageInputs(
        token_rewards_M=rewards_M, response_M=torch.tensor([0, 0, 1]), group_R=torch.tensor([0, 0])
    )
    assert inputs.rewards_R.tolist() == pytest.approx([0.7, -0.3])
    assert per_response("rloo", inputs) == pytest.approx([1.0, -1.0])


def test_tokens_that_the_policy_did_not_write_earn_and_learn_nothing() -> None:
    # Response 0 has a hole of reward NaN-free junk 9; lengths count 2 and 1, so opo's baseline is (2*1)/3.
    inputs = AdvantageInputs(
        token_rewards_M=torch.tensor([0.0, 9.0, 1.0, 0.0]),
        response_M=torch.tensor([0, 0, 0, 1]),
        group_R=torch.tensor([0, 0]),
        mask_M=torch.tensor([True, False, True, True]),
    )
    assert advantages("opo", inputs).tolist() == pytest.approx([1 / 3, 0.0, 1 / 3, -2 / 3])
    for name in ADVANTAGES:
        assert advantages(name, inputs)[1] == 0
    # Returns (1, -, 1 | 0): mean 2/3, variance (1/9 + 1/9 + 4/9) / 2 = 1/3.
    expected = [1 / math.sqrt(3), 0.0, 1 / math.sqrt(3), -2 / math.sqrt(3)]
    assert advantages("reinforce_plus_plus", inputs).tolist() == pytest.approx(expected, abs=1e-6)


def test_whitening_one_token_gives_zero() -> None:
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_bf16_rewards_are_computed_in_more_than_bf16(name: str) -> None:
    rewards, lengths, groups = [1.0, 0.5, 0.25, 0.0], [2, 1, 3, 1], [0, 0, 1, 1]
    exact = step(rewards, lengths, groups)
    coarse = AdvantageInputs(
        token_rewards_M=exact.token_rewards_M.bfloat16(), response_M=exact.response_M, group_R=exact.group_R
    )
    assert torch.equal(advantages(name, coarse), advantages(name, exact))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[list[float]]]:
    """Token rewards of some responses, their groups (ids with gaps, interleaved), two further rewards."""
    count = draw(st.integers(1, 9))
    value = st.sampled_from([0.0, -0.0, 0.1, 0.9, 1.0]) | st.floats(-5, 5, width=32)
    rows = [draw(st.lists(value, min_size=1, max_size=5)) for _ in range(count)]
    groups = draw(st.lists(st.sampled_from([0, 1, 4]), min_size=count, max_size=count))
    parts = [draw(st.lists(value, min_size=count, max_size=count)) for _ in range(2)]
    return rows, groups, parts


def almost_equal_but_not(values: Sequence[float]) -> bool:
    """Too near for two ways of adding to agree on whether they are equal, or on their quotient."""
    return any(0 < abs(a - b) < 1e-3 for a in values for b in values)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@settings(max_examples=60, deadline=None)
@given(made=steps(), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_agrees_with_loops_written_from_the_formula(
    name: str, made: tuple[list[list[float]], list[int], list[list[float]]], gamma: float
) -> None:
    rows, groups, (a, b) = made
    sums = [math.fsum(row) for row in rows]
    assume(not any(almost_equal_but_not(v) for v in (sums, a, b, [x for row in rows for x in row])))
    flat = [v for row in rows for v in row]
    components = {"a": a, "b": b} if name == "gdpo" else {}
    inputs = AdvantageInputs(
        token_rewards_M=torch.tensor(flat, dtype=torch.float64),
        response_M=torch.tensor([i for i, row in enumerate(rows) for _ in row]),
        group_R=torch.tensor(groups),
        components={n: torch.tensor(v, dtype=torch.float64) for n, v in components.items()},
        component_weights={"b": 0.5} if components else {},
        gamma=gamma,
    )
    members = [[i for i, g in enumerate(groups) if g == group] for group in sorted(set(groups))]
    expected = loops.advantage(
        name, rows, members, gamma=gamma, components=components or None, weights={"b": 0.5}
    )
    expected_M = [v for row in expected for v in row]
    assert advantages(name, inputs).tolist() == pytest.approx(expected_M, rel=1e-4, abs=1e-4)
