"""KL estimators and controllers: values by hand, the exact divergence, gradients, hostile inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seerl.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveController,
    FixedController,
    full_kl,
    kl_controller,
    kl_estimate,
)
from tests import algorithm_loops as loops


def test_estimates_by_hand() -> None:
    # p = -1, f = -2: p - f = 1; 1^2 / 2; exp(-1) - (-1) - 1 = exp(-1).
    p, f = torch.tensor([-1.0]), torch.tensor([-2.0])
    expected = {"kl": 1.0, "abs": 1.0, "mse": 0.5, "low_var_kl": math.exp(-1)}
    assert set(expected) == set(KL_ESTIMATORS)
    for name, value in expected.items():
        assert kl_estimate(name, p, f).item() == pytest.approx(value)
    assert kl_estimate("kl", f, p).item() == -1.0
    assert kl_estimate("abs", f, p).item() == 1.0


@pytest.mark.parametrize("distance", [3.0, 30.0, 300.0, -300.0])
def test_low_variance_estimate_is_bounded_by_ten_and_finite_in_its_gradient(distance: float) -> None:
    p = torch.tensor([-1.0], requires_grad=True)
    value = kl_estimate("low_var_kl", p, p.detach() + distance)
    value.backward()
    assert 0 <= value.item() <= 10
    assert p.grad is not None
    assert p.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_equal_policies_are_at_distance_zero(name: str) -> None:
    p = torch.tensor([-0.0, -3.0, -1e4])
    assert (kl_estimate(name, p, p.clone()) == 0).all()


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
@settings(max_examples=100, deadline=None)
@given(p=st.floats(-50, 0), f=st.floats(-50, 0))
def test_estimates_agree_with_the_formula(name: str, p: float, f: float) -> None:
    got = kl_estimate(name, torch.tensor(p, dtype=torch.float64), torch.tensor(f, dtype=torch.float64))
    assert got.item() == pytest.approx(loops.kl(name, p, f), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    p = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64, requires_grad=True)
    f = torch.tensor([-1.5, -1.0, -0.9], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(name, x, f), (p,))


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_bf16_is_computed_in_float32(name: str) -> None:
    p, f = torch.tensor([-1.01, -2.3]).bfloat16(), torch.tensor([-1.0, -2.0]).bfloat16()
    got = kl_estimate(name, p, f)
    assert got.dtype == torch.float32
    assert torch.equal(got, kl_estimate(name, p.float(), f.float()))


def rows(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_full_divergence_by_hand() -> None:
    # p = (1/2, 1/2), f = (1/4, 3/4): (ln 2 + ln(2/3)) / 2 = ln(4/3) / 2; logits may carry any constant.
    assert full_kl(rows([0.5, 0.5]) + 7, rows([0.25, 0.75]) - 3).item() == pytest.approx(math.log(4 / 3) / 2)


def test_full_divergence_skips_what_the_policy_cannot_say() -> None:
    # p = (1/2, 1/2, 0) against f = (1/4, 3/4, 0) and (1/4, 1/2, 1/4): ln(4/3)/2 and (ln 2 + ln 1)/2.
    for f, value in (([0.25, 0.75, 0.0], math.log(4 / 3) / 2), ([0.25, 0.5, 0.25], math.log(2) / 2)):
        logits = rows([0.5, 0.5, 0.0]).requires_grad_(True)
        divergence = full_kl(logits, rows(f))
        assert divergence.item() == pytest.approx(value)
        divergence.sum().backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()


def test_full_divergence_is_the_mean_of_the_estimates_that_are_unbiased() -> None:
    p, f = [0.2, 0.3, 0.5], [0.6, 0.3, 0.1]
    exact = full_kl(rows(p), rows(f)).item()
    for name in ("kl", "low_var_kl"):
        estimates = kl_estimate(name, rows(p)[0], rows(f)[0]).tolist()
        assert math.fsum(w * k for w, k in zip(p, estimates, strict=True)) == pytest.approx(exact)


def test_full_divergence_may_be_taken_in_chunks_and_has_the_right_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    p, f = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    chunks = [full_kl(p[i : i + 2], f[i : i + 2]) for i in range(0, 5, 2)]
    assert torch.allclose(torch.cat(chunks), full_kl(p, f), atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: full_kl(x, f), (p.requires_grad_(True),))


def test_fixed_controller_stays() -> None:
    controller = kl_controller("fixed", coef=0.01, target=0.1, horizon=100)
    controller.update(5.0, 64)
    assert type(controller) is FixedController
    controller.load_state_dict({"value": 0.5})  # a run resumed with another coefficient
    assert controller.value == 0.01


def test_adaptive_controller_moves_by_at_most_a_fifth_times_samples_over_horizon() -> None:
    # kl 0.11 of target 0.1: error 0.1; x 50/100: factor 1.05. kl 10: error clipped to 0.2: 1.1; kl 0: 0.9.
    for kl, factor in ((0.11, 1.05), (10.0, 1.1), (math.inf, 1.1), (0.0, 0.9), (-1.0, 0.9), (0.1, 1.0)):
        controller = kl_controller("adaptive", coef=0.01, target=0.1, horizon=100)
        controller.update(kl, 50)
        assert controller.value == pytest.approx(0.01 * factor)


def test_adaptive_controller_never_turns_negative_and_refuses_nan() -> None:
    controller = AdaptiveController(value=0.01, target=0.1, horizon=1)
    with pytest.raises(ValueError, match="NaN"):
        controller.update(math.nan, 1)
    assert controller.value == 0.01
    controller.update(0.0, 4096)
    assert controller.value == 0.0


def test_controllers_continue_from_their_state() -> None:
    one = AdaptiveController(value=0.01, target=0.1, horizon=100)
    one.update(1.0, 10)
    other = AdaptiveController(value=0.5, target=0.1, horizon=100)
    other.load_state_dict(one.state_dict())
    one.update(0.02, 30)
    other.update(0.02, 30)
    assert one == other
