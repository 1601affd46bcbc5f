"""Policy losses: values by hand, gradients, independence of the cut, and a second implementation in loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from seerl.algorithms.losses import (
    LOSSES,
    WHOLE_RESPONSES,
    LossInputs,
    LossOutputs,
    policy_loss,
    token_weights,
)
from tests import algorithm_loops as loops

MODES = ["token", "seq", "seq_sum", "seq_sum_norm"]
BOUNDS = {"low": 0.2, "high": 0.3, "dual": 3.0, "tau_positive": 1.0, "tau_negative": 1.05}


def inputs(
    ratios: Sequence[float], advantages: Sequence[float], owners: Sequence[int], **more: Any
) -> LossInputs:
    """Tokens of p = -1 and the given ratios to q."""
    p_M = torch.full((len(ratios),), -1.0, dtype=torch.float64, requires_grad=True)
    return LossInputs(
        logprobs_M=p_M,
        old_logprobs_M=p_M.detach() - torch.tensor(ratios, dtype=torch.float64).log(),
        advantages_M=torch.tensor(advantages, dtype=torch.float64),
        response_M=torch.tensor(owners),
        num_responses=max(owners) + 1,
        **more,
    )


def outcome(name: str, given: LossInputs) -> tuple[list[float], list[float], LossOutputs]:
    """Token losses, the gradient of their sum, and all of the output."""
    out = policy_loss(name, given)
    (gradient_M,) = torch.autograd.grad(out.token_loss_M.sum(), given.logprobs_M)
    return out.token_loss_M.tolist(), gradient_M.tolist(), out


def test_table_has_the_losses_of_this_version() -> None:
    assert set(LOSSES) == {"default", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "gpg"}


def test_default_clips_above_for_good_below_for_bad_and_twice_for_very_bad() -> None:
    # A = 1: -1 at ratio 1; -1.3 beyond 1.3, no gradient; -0.5 below, unclipped (max keeps the worse).
    # A = -1: 0.8 below 0.8, no gradient; 1.5 above, unclipped; 3 beyond the dual bound, no gradient.
    given = inputs([1.0, 1.5, 0.5, 0.5, 1.5, 5.0], [1, 1, 1, -1, -1, -1], [0] * 6)
    losses, gradient, out = outcome("default", given)
    assert losses == pytest.approx([-1.0, -1.3, -0.5, 0.8, 1.5, 3.0])
    assert gradient == pytest.approx([-1.0, 0.0, -0.5, 0.0, 1.5, 0.0])
    assert out.clipped_high_M.tolist() == [False, True, False, True, False, False]
    assert out.clipped_low_M.tolist() == [False, False, False, False, False, True]


def test_gspo_clips_whole_responses_by_their_geometric_mean() -> None:
    # Response 0: ratios 2 and 0.5, mean log 0: s = 1. Response 1: one token of ratio 2, clipped at 1.3.
    given = inputs([2.0, 0.5, 2.0], [1, 1, 1], [0, 0, 1])
    losses, gradient, out = outcome("gspo", given)
    assert losses == pytest.approx([-1.0, -1.0, -1.3])
    assert gradient == pytest.approx([-1.0, -1.0, 0.0])  # each token: 2 losses x s x 1/2
    assert out.clipped_high_M.tolist() == [False, False, True]


def test_gspo_token_has_gspos_value_and_each_tokens_own_gradient() -> None:
    given = inputs([2.0, 0.5, 2.0], [2, 1, 1], [0, 0, 1])
    losses, gradient, _ = outcome("gspo_token", given)
    assert losses == pytest.approx([-2.0, -1.0, -1.3])
    assert gradient == pytest.approx([-2.0, -1.0, 0.0])
    assert outcome("gspo", given)[1] == pytest.approx([-1.5, -1.5, 0.0])


def test_gspo_bounds_the_mean_not_its_tokens() -> None:
    # p - q = (30, -30): the mean is 0 although each token is beyond the limit of 20; (50,) alone is bounded.
    given = LossInputs(
        logprobs_M=torch.tensor([0.0, -30.0, 0.0], requires_grad=True),
        old_logprobs_M=torch.tensor([-30.0, 0.0, -50.0]),
        advantages_M=torch.tensor([1.0, 1.0, -1.0]),
        response_M=torch.tensor([0, 0, 1]),
        num_responses=2,
    )
    assert outcome("gspo", given)[0] == pytest.approx([-1.0, -1.0, 3.0])


def test_cispo_weighs_by_the_clipped_ratio_and_keeps_every_gradient() -> None:
    # -A p w with p = -1: w = 1, 1.3 (of 2), 0.8 (of 0.5); gradients -A w.
    losses, gradient, out = outcome("cispo", inputs([1.0, 2.0, 0.5], [1, 1, -1], [0] * 3))
    assert losses == pytest.approx([1.0, 1.3, -0.8])
    assert gradient == pytest.approx([-1.0, -1.3, 0.8])
    assert out.clipped_high_M.tolist() == [False, True, True]


def test_sapo_is_a_gate_of_slope_one_on_policy() -> None:
    # sigmoid(0) = 1/2: loss -A x 4/tau x 1/2 = -2 and 2/1.05; slope at ratio 1: -A x 4 x 1/4 = -A.
    losses, gradient, out = outcome("sapo", inputs([1.0, 1.0, 2.0], [1, -1, 1], [0] * 3))
    assert losses == pytest.approx([-2.0, 2 / 1.05, -4 / (1 + math.exp(-1))])
    gate = 1 / (1 + math.exp(-1))
    assert gradient == pytest.approx([-1.0, 1.0, -4 * gate * (1 - gate) * 2])
    assert not out.clipped_high_M.any()


def test_gmpo_clips_tokens_on_the_side_they_are_pushed_to_then_takes_the_geometric_mean() -> None:
    # A = 1: ratios 2 (held at 1.3) and 0.5 (below is free): s = sqrt(1.3 x 0.5).
    # A = -1: ratios 0.5 (held at 0.8) and 2 (above is free): s = sqrt(0.8 x 2).
    up, down = math.sqrt(0.65), math.sqrt(1.6)
    losses, gradient, out = outcome("gmpo", inputs([2.0, 0.5, 0.5, 2.0], [1, 1, -1, -1], [0, 0, 1, 1]))
    assert losses == pytest.approx([-up, -up, down, down])
    assert gradient == pytest.approx([0.0, -up, 0.0, down])  # held tokens get none; 2 losses x s x 1/2
    assert out.clipped_high_M.tolist() == [True, False, True, False]
    assert outcome("gmpo", inputs([9.0], [-2], [0]))[:2] == ([6.0], [0.0])  # the dual clip: 2 x 3


def test_gmpo_without_a_lower_bound_is_finite() -> None:
    losses, gradient, _ = outcome("gmpo", inputs([1e-6], [-1], [0], clip_low=1.0))
    assert losses == pytest.approx([1e-6])
    assert gradient == pytest.approx([1e-6])


def test_gpg_is_the_plain_policy_gradient() -> None:
    losses, gradient, _ = outcome("gpg", inputs([1.0, 7.0], [2, -1], [0, 0]))
    assert losses == pytest.approx([2.0, -1.0])
    assert gradient == pytest.approx([-2.0, 1.0])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    # At p = q each token's gradient is -A (for gspo and gmpo: shared out over the response, same sum).
    given = inputs([1.0, 1.0, 1.0], [0.7, 0.7, -0.4], [0, 0, 1])
    _, gradient, out = outcome(name, given)
    assert gradient == pytest.approx([-0.7, -0.7, 0.4])
    assert not (out.clipped_high_M | out.clipped_low_M).any()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_zero_advantage_gives_zero_loss_and_gradient(name: str) -> None:
    losses, gradient, _ = outcome(name, inputs([0.1, 1.0, 9.0], [0.0, -0.0, 0.0], [0, 0, 1]))
    assert losses == [0.0] * 3
    assert gradient == [0.0] * 3


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("distance", [100.0, -100.0, 1e4, -1e4])
def test_extreme_ratios_stay_finite(name: str, sign: float, distance: float) -> None:
    p_M = torch.tensor([-abs(distance), -1.0], requires_grad=True)
    given = LossInputs(
        logprobs_M=p_M,
        old_logprobs_M=p_M.detach() - torch.tensor([distance, 0.0]),
        advantages_M=torch.full((2,), sign),
        response_M=torch.tensor([0, 1]),
        num_responses=2,
    )
    losses, gradient, _ = outcome(name, given)
    assert all(map(math.isfinite, losses + gradient))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_bf16_is_computed_in_float32(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p_M, q_M, a_M = (torch.randn(6, generator=generator).bfloat16() for _ in range(3))
    shared: dict[str, Any] = {"response_M": torch.tensor([0, 0, 0, 1, 1, 2]), "num_responses": 3}
    coarse = LossInputs(logprobs_M=p_M, old_logprobs_M=q_M, advantages_M=a_M, **shared)
    fine = LossInputs(logprobs_M=p_M.float(), old_logprobs_M=q_M.float(), advantages_M=a_M.float(), **shared)
    got = policy_loss(name, coarse).token_loss_M
    assert got.dtype == torch.float32
    assert torch.equal(got, policy_loss(name, fine).token_loss_M)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_flow_into_the_policy_alone(name: str) -> None:
    given = inputs([1.1, 0.9], [1, -1], [0, 0])
    given.old_logprobs_M.requires_grad_(True)
    policy_loss(name, given).token_loss_M.sum().backward()
    assert given.old_logprobs_M.grad is None


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_what_stands_on_tokens_that_do_not_count_does_not_matter(name: str) -> None:
    """Even NaN there, and the other tokens' losses are as if it had never been there."""
    nan = float("nan")
    p_M = torch.tensor([-1.0, nan, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    q_M = torch.tensor([-1.1, -math.inf, -1.7, -0.5], dtype=torch.float64)
    a_M = torch.tensor([1.0, nan, 1.0, -1.0], dtype=torch.float64)
    keep = torch.tensor([True, False, True, True])
    holed = LossInputs(
        logprobs_M=p_M, old_logprobs_M=q_M, advantages_M=a_M, response_M=torch.tensor([0, 0, 0, 1]),
        num_responses=3, mask_M=keep,  # the third response has no tokens at all
    )  # fmt: skip
    solid_p_M = p_M.detach()[keep].requires_grad_(True)
    solid = LossInputs(
        logprobs_M=solid_p_M, old_logprobs_M=q_M[keep], advantages_M=a_M[keep],
        response_M=torch.tensor([0, 0, 1]), num_responses=2,
    )  # fmt: skip
    out, reference = policy_loss(name, holed), policy_loss(name, solid)
    assert out.token_loss_M[1] == 0
    assert not out.clipped_high_M[1]
    assert torch.allclose(out.token_loss_M[keep], reference.token_loss_M, atol=1e-12)
    (gradient_M,) = torch.autograd.grad(out.token_loss_M.sum(), p_M)
    (reference_M,) = torch.autograd.grad(reference.token_loss_M.sum(), solid_p_M)
    assert gradient_M[1] == 0
    assert torch.allclose(gradient_M[keep], reference_M, atol=1e-12)


@pytest.mark.parametrize("name", ["default", "gspo", "sapo", "gmpo", "gpg"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """gspo_token and cispo are left out: their stopped gradients are on purpose not the loss's derivative."""
    generator = torch.Generator().manual_seed(3)
    q_M = -torch.rand(7, generator=generator, dtype=torch.float64) - 0.5
    a_M = torch.tensor([1.0, -1.0, 0.5, -2.0, 1.5, -0.5, 0.3], dtype=torch.float64)
    # Away from the kinks at 0.8, 1.3 and 3 by far more than the step of gradcheck.
    p_M = (q_M + torch.tensor([0.1, 0.4, -0.5, -0.1, 0.5, 1.5, 0.05]).double()).requires_grad_(True)

    def total(logprobs_M: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            name,
            LossInputs(
                logprobs_M=logprobs_M, old_logprobs_M=q_M, advantages_M=a_M,
                response_M=torch.tensor([0, 0, 0, 1, 1, 2, 3]), num_responses=4,
            ),
        ).token_loss_M  # fmt: skip

    assert torch.autograd.gradcheck(total, (p_M,))


class NoHostSync(TorchFunctionMode):
    """Fails on what makes the host wait for a GPU."""

    FORBIDDEN: ClassVar[set[Any]] = {
        torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__,
        torch.Tensor.__int__, torch.Tensor.nonzero, torch.nonzero, torch.bincount, torch.Tensor.bincount,
        torch.Tensor.cpu, torch.masked_select, torch.Tensor.masked_select, torch.unique, torch.Tensor.unique,
    }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.FORBIDDEN, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("masked", [False, True])
def test_losses_never_make_the_host_wait(name: str, masked: bool) -> None:
    mask_M = torch.tensor([True, True, False]) if masked else None
    given = inputs([1.0, 2.0, 0.5], [1, -1, 1], [0, 0, 1], mask_M=mask_M)
    with NoHostSync():
        losses_M = policy_loss(name, given).token_loss_M
        for mode in MODES:
            weights_M = token_weights(
                mode, given.response_M, torch.tensor([2, 1]), loss_tokens=3, responses=2,
                max_response_length=4, mask_M=mask_M,
            )  # fmt: skip
            losses_M = losses_M * weights_M
        losses_M.sum().backward()
    assert given.logprobs_M.grad is not None


def test_only_the_losses_that_say_so_need_whole_responses() -> None:
    """A response torn in two changes the losses of WHOLE_RESPONSES and of no other."""
    ratios, advantages = [1.1, 0.9, 1.2, 0.7], [1.0, 1.0, 1.0, 1.0]
    for name in LOSSES:
        together = outcome(name, inputs(ratios, advantages, [0, 0, 0, 0]))[0]
        torn = [
            loss
            for part in (slice(0, 2), slice(2, 4))
            for loss in outcome(name, inputs(ratios[part], advantages[part], [0, 0]))[0]
        ]
        assert (torn != pytest.approx(together)) == (name in WHOLE_RESPONSES), name


@st.composite
def batches(draw: st.DrawFn) -> tuple[loops.Values, loops.Values, loops.Values]:
    """p, q and A of ragged responses; A differs within a response, as with per-token estimators."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    q = [[draw(st.floats(-8, 0)) for _ in range(n)] for n in lengths]
    difference = st.floats(-1.5, 1.5) | st.floats(-30, 30) | st.just(0.0)
    p = [[v + draw(difference) for v in row] for row in q]
    a = [[draw(st.floats(-3, 3) | st.sampled_from([0.0, -0.0])) for _ in range(n)] for n in lengths]
    return p, q, a


@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_agrees_with_loops_written_from_the_formula(
    name: str, batch: tuple[loops.Values, loops.Values, loops.Values]
) -> None:
    p, q, a = batch
    p_M, q_M, a_M = (torch.tensor([v for row in rows for v in row], dtype=torch.float64) for rows in batch)
    out = policy_loss(
        name,
        LossInputs(
            logprobs_M=p_M, old_logprobs_M=q_M, advantages_M=a_M,
            response_M=torch.tensor([i for i, row in enumerate(p) for _ in row]), num_responses=len(p),
        ),
    )  # fmt: skip
    expected = [v for row in loops.loss(name, p, q, a, **BOUNDS) for v in row]
    assert out.token_loss_M.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
