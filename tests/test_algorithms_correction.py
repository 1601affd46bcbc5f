"""Rollout correction, online filtering, overlong punishment and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seerl.algorithms.correction import CORRECTIONS, Correction, correct
from seerl.algorithms.filtering import keep_group
from seerl.algorithms.schedule import lr_factor


def corrected(name: str, w: Sequence[float], owners: Sequence[int], cap: float = 2.0) -> Correction:
    """The correction where the trainer gives each token w times the engine's probability."""
    b_M = torch.full((len(w),), -3.0, dtype=torch.float64)
    q_M = b_M + torch.tensor(w, dtype=torch.float64).log()
    return correct(name, q_M, b_M, torch.tensor(owners), num_responses=max(owners) + 1, cap=cap)


# Response 0: w = 3 and 0.4, product 1.2, geometric mean 1.095.
# Response 1: w = 1.8 and 1.8, product 3.24, geometric mean 1.8.
W, OWNERS = [3.0, 0.4, 1.8, 1.8], [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("name", "weights", "cut"),
    [
        ("none", [1, 1, 1, 1], [0, 0, 0, 0]),
        ("tis", [2, 0.4, 1.8, 1.8], [1, 0, 0, 0]),
        ("mis", [0, 0, 1, 1], [1, 1, 0, 0]),
        ("seq_tis", [1.2, 1.2, 2, 2], [0, 0, 1, 1]),
        ("seq_mis", [1, 1, 0, 0], [0, 0, 1, 1]),
        ("geo_mis", [1, 1, 1, 1], [0, 0, 0, 0]),
    ],
)
def test_weights_by_hand(name: str, weights: list[float], cut: list[int]) -> None:
    result = corrected(name, W, OWNERS)
    assert result.weights_M.tolist() == pytest.approx(weights)
    assert result.cut_M.tolist() == [bool(c) for c in cut]


def test_geometric_mean_drops_responses_on_either_side() -> None:
    result = corrected("geo_mis", [2.5, 2.5, 0.3, 0.3, 4.0, 0.25], [0, 0, 1, 1, 2, 2])
    assert result.weights_M.tolist() == [0, 0, 0, 0, 1, 1]


def test_disagreement_is_measured_whatever_the_correction() -> None:
    # w = e and 1/e: |q - b| = 1; k3 = e - 1 - 1 and 1/e + 1 - 1.
    for name in CORRECTIONS:
        result = corrected(name, [math.e, 1 / math.e], [0, 0])
        assert result.abs_diff_M.tolist() == pytest.approx([1.0, 1.0])
        assert result.k3_M.tolist() == pytest.approx([math.e - 2, 1 / math.e])


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_agreement_weighs_everything_one(name: str) -> None:
    result = corrected(name, [1.0] * 5, [0, 0, 1, 1, 1])
    assert (result.weights_M == 1).all()
    assert not result.cut_M.any()
    assert (result.k3_M == 0).all()


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_long_responses_and_absurd_differences_stay_finite(name: str) -> None:
    q_M = torch.tensor([-1.0] * 3000 + [-500.0, -1.0])
    b_M = torch.tensor([-1.5] * 3000 + [-1.0, -500.0])
    response_M = torch.tensor([0] * 3000 + [1, 2])
    result = correct(name, q_M, b_M, response_M, num_responses=3, cap=2.0)
    assert result.weights_M.isfinite().all()
    assert result.k3_M.isfinite().all()
    assert result.weights_M.max() <= 2


def test_no_gradient_goes_through_the_weights_and_bf16_is_widened() -> None:
    q_M = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    result = correct("tis", q_M, q_M.detach() + 0.5, torch.tensor([0, 0]), num_responses=1, cap=2.0)
    assert not result.weights_M.requires_grad
    assert result.weights_M.dtype == torch.float32


def test_tokens_that_do_not_count_do_not_move_a_response() -> None:
    q_M = torch.tensor([-1.0, float("nan"), -1.0])
    mask_M = torch.tensor([True, False, True])
    b_M, response_M = torch.full((3,), -1.0), torch.tensor([0, 0, 0])
    result = correct("seq_mis", q_M, b_M, response_M, num_responses=1, cap=2.0, mask_M=mask_M)
    assert result.weights_M.tolist() == [1, 1, 1]
    assert result.abs_diff_M.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=4), min_size=1, max_size=4),
    cap=st.floats(1.1, 8),
)
def test_corrections_agree_with_loops(name: str, rows: list[list[float]], cap: float) -> None:
    expected, near = [], False
    for row in rows:
        total = math.fsum(row)
        log_w = {"seq_tis": total, "seq_mis": total, "geo_mis": total / len(row)}.get(name)
        for d in row:
            w = math.exp(d if log_w is None else log_w)
            near = near or abs(w - cap) < 1e-9 or abs(w - 1 / cap) < 1e-9
            if name == "none":
                expected.append(1.0)
            elif name in ("tis", "seq_tis"):
                expected.append(min(w, cap))
            else:
                expected.append(1.0 if 1 / cap <= w <= cap else 0.0)
    if near:
        return
    d_M = torch.tensor([d for row in rows for d in row], dtype=torch.float64)
    response_M = torch.tensor([i for i, row in enumerate(rows) for _ in row])
    result = correct(name, d_M, torch.zeros_like(d_M), response_M, num_responses=len(rows), cap=cap)
    assert result.weights_M.tolist() == pytest.approx(expected, rel=1e-9)


def test_groups_are_kept_strictly_between_the_bounds_and_else_say_why() -> None:
    assert keep_group([0.0, 1.0], 0.01, 0.99) == (True, "")
    assert keep_group([0.0, -0.0], 0.01, 0.99) == (False, "too_low")
    assert keep_group([1.0, 1.0, 1.0], 0.01, 0.99) == (False, "too_high")
    assert keep_group([0.5], 0.5, 0.99) == (False, "too_low")
    assert keep_group([], 0.01, 0.99) == (False, "empty")
    for bad in (math.nan, math.inf, -math.inf):
        assert keep_group([0.5, bad], 0.01, 0.99) == (False, "not_finite")


@pytest.mark.parametrize("n", range(1, 130))
def test_rounding_does_not_carry_a_group_over_a_bound(n: int) -> None:
    """A plain sum of n times 0.99, divided by n, is below 0.99 for many n."""
    assert keep_group([0.99] * n, 0.01, 0.99) == (False, "too_high")
    assert keep_group([0.1] * n, 0.1, 0.99) == (False, "too_low")


def test_warm_up_moves_from_the_first_step_and_ends_at_one() -> None:
    factors = [lr_factor(s, total_steps=10, kind="constant", warmup_steps=3) for s in range(5)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    by_ratio = [lr_factor(s, total_steps=10, kind="constant", warmup_ratio=0.3) for s in range(5)]
    assert by_ratio == factors
    assert lr_factor(0, total_steps=10, kind="constant", warmup_steps=0, warmup_ratio=0.5) == 1.0


def test_cosine_falls_to_its_floor_and_stays() -> None:
    # Half way: floor + (1 - floor)/2.
    def factor(step: int) -> float:
        return lr_factor(step, total_steps=10, kind="cosine", warmup_steps=2, min_ratio=0.1)

    assert [factor(2), factor(6), factor(10), factor(99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert lr_factor(10, total_steps=10, kind="cosine") == pytest.approx(0.0)
    assert all(factor(s) >= factor(s + 1) for s in range(2, 12))


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="linear"):
        lr_factor(5, total_steps=10, kind="linear")
