"""Losses, KL estimators, averages and corrections: by hand, by gradcheck, and whatever way a batch is cut."""

from __future__ import annotations

import math

import pytest
import torch

from seerl.algorithms.correction import CORRECTIONS, correct
from seerl.algorithms.filtering import keep_group
from seerl.algorithms.kl import KL_ESTIMATORS, KLController, full_kl, kl_estimate
from seerl.algorithms.losses import LOSSES, LossInputs, policy_loss, token_weights
from seerl.algorithms.schedule import lr_factor

MODES = ("token", "seq", "seq_sum", "seq_sum_norm")


def one(loss: str, ratio: float, advantage: float, **kwargs: float) -> float:
    """The loss of a single token with this ratio."""
    made = LossInputs(
        logprobs_M=torch.tensor([math.log(ratio)]),
        old_logprobs_M=torch.zeros(1),
        advantages_M=torch.tensor([advantage]),
        response_M=torch.zeros(1, dtype=torch.long),
        num_responses=1,
        clip_low=kwargs.get("clip_low", 0.2),
        clip_high=kwargs.get("clip_high", 0.3),
        clip_dual=kwargs.get("clip_dual", 3.0),
    )
    return float(policy_loss(loss, made).token_loss_M)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.6),  # held at 1 + 0.3
        (0.5, 2.0, -1.0),  # a good token may always rise again
        (0.5, -2.0, 1.6),  # held at 1 - 0.2
        (1.5, -2.0, 3.0),  # a bad token may always fall again
        (5.0, -2.0, 6.0),  # but not beyond 3 advantages: the dual clip
    ],
)
def test_default_loss_by_hand(ratio: float, advantage: float, expected: float) -> None:
    assert one("default", ratio, advantage) == pytest.approx(expected, rel=1e-6)


def test_cispo_sapo_gpg_by_hand() -> None:
    assert one("cispo", 1.5, 2.0) == pytest.approx(-2.0 * math.log(1.5) * 1.3, rel=1e-5)
    assert one("gpg", 1.5, 2.0) == pytest.approx(-2.0 * math.log(1.5), rel=1e-5)
    gate = 4 / (1 + math.exp(-0.5))  # tau 1, ratio - 1 = 0.5
    assert one("sapo", 1.5, 2.0) == pytest.approx(-2.0 * gate, rel=1e-5)


def inputs(logprobs: torch.Tensor, seed: int = 0) -> LossInputs:
    """Three responses of 4, 1 and 3 tokens."""
    torch.manual_seed(seed)
    old = logprobs.detach() + 0.3 * torch.randn_like(logprobs)
    return LossInputs(
        logprobs_M=logprobs,
        old_logprobs_M=old,
        advantages_M=torch.tensor([1.0, -0.5, 2.0], dtype=logprobs.dtype)[
            torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])
        ],
        response_M=torch.tensor([0, 0, 0, 0, 1, 2, 2, 2]),
        num_responses=3,
    )


def test_gspo_has_one_ratio_per_response() -> None:
    made = inputs(torch.zeros(8))
    ratio = [(made.logprobs_M - made.old_logprobs_M)[made.response_M == r].mean().exp() for r in range(3)]
    clipped = [min(max(float(r), 0.8), 1.3) for r in ratio]
    a = [1.0, -0.5, 2.0]
    expected = [max(-a[i] * float(ratio[i]), -a[i] * clipped[i]) for i in range(3)]
    torch.testing.assert_close(
        policy_loss("gspo", made).token_loss_M, torch.tensor(expected)[made.response_M], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        policy_loss("gspo_token", made).token_loss_M, policy_loss("gspo", made).token_loss_M
    )


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    """Where the ratio is 1 all of them push each token by its advantage (gspo and gmpo: the response's
    mean)."""
    p = torch.full((8,), -1.0, requires_grad=True)
    made = inputs(p)
    on_policy = LossInputs(
        logprobs_M=p,
        old_logprobs_M=p.detach(),
        advantages_M=made.advantages_M,
        response_M=made.response_M,
        num_responses=3,
    )
    policy_loss(name, on_policy).token_loss_M.sum().backward()
    assert p.grad is not None
    torch.testing.assert_close(p.grad, -made.advantages_M, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sapo", "gpg", "gmpo"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    made = inputs(torch.randn(8, dtype=torch.float64))

    def loss(p: torch.Tensor) -> torch.Tensor:
        varied = LossInputs(
            logprobs_M=p,
            old_logprobs_M=made.old_logprobs_M,
            advantages_M=made.advantages_M,
            response_M=made.response_M,
            num_responses=3,
            clip_low=0.99,
            clip_high=50.0,
        )
        return policy_loss(name, varied).token_loss_M.sum()

    p = made.logprobs_M.clone().requires_grad_()
    analytic = torch.autograd.grad(loss(p), p)[0]
    step = 1e-2  # the losses compute in float32
    for i in range(8):
        bump = torch.zeros(8, dtype=torch.float64)
        bump[i] = step
        numeric = float(loss(p.detach() + bump) - loss(p.detach() - bump)) / (2 * step)
        assert float(analytic[i]) == pytest.approx(numeric, rel=2e-2, abs=2e-3)


def test_averages_by_hand() -> None:
    response, lengths = torch.tensor([0, 0, 0, 1]), torch.tensor([3, 1])
    losses = torch.tensor([1.0, 2.0, 3.0, 10.0])

    def average(mode: str) -> float:
        weights = token_weights(mode, response, lengths, loss_tokens=4, responses=2, max_response_length=5)
        return float((weights * losses).sum())

    assert average("token") == pytest.approx(16 / 4)
    assert average("seq") == pytest.approx((2 + 10) / 2)
    assert average("seq_sum") == pytest.approx((6 + 10) / 2)
    assert average("seq_sum_norm") == pytest.approx(16 / (2 * 5))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", [[[0, 1, 2]], [[0], [1, 2]], [[2], [0], [1]]])
def test_the_cut_into_micro_batches_changes_no_gradient(name: str, mode: str, cut: list[list[int]]) -> None:
    p = torch.linspace(-2, -0.5, 8, dtype=torch.float64, requires_grad=True)
    whole = inputs(p)
    for responses in cut:
        rows = torch.cat([(whole.response_M == r).nonzero()[:, 0] for r in responses])
        lengths = torch.bincount(whole.response_M)[torch.tensor(responses)]
        local = torch.repeat_interleave(torch.arange(len(responses)), lengths)
        part = LossInputs(
            logprobs_M=p[rows],
            old_logprobs_M=whole.old_logprobs_M[rows],
            advantages_M=whole.advantages_M[rows],
            response_M=local,
            num_responses=len(responses),
        )
        weights = token_weights(mode, local, lengths, loss_tokens=8, responses=3, max_response_length=6)
        (weights * policy_loss(name, part).token_loss_M).sum().backward()
    assert p.grad is not None
    reference = torch.linspace(-2, -0.5, 8, dtype=torch.float64, requires_grad=True)
    one_piece = LossInputs(
        logprobs_M=reference,
        old_logprobs_M=whole.old_logprobs_M,
        advantages_M=whole.advantages_M,
        response_M=whole.response_M,
        num_responses=3,
    )
    weights = token_weights(
        mode,
        whole.response_M,
        torch.bincount(whole.response_M),
        loss_tokens=8,
        responses=3,
        max_response_length=6,
    )
    (weights * policy_loss(name, one_piece).token_loss_M).sum().backward()
    torch.testing.assert_close(p.grad, reference.grad, atol=1e-6, rtol=1e-6)


def test_kl_estimators_by_hand() -> None:
    p, f = torch.tensor([-1.0]), torch.tensor([-1.5])
    expected = {"kl": 0.5, "abs": 0.5, "mse": 0.125, "low_var_kl": math.exp(-0.5) + 0.5 - 1}
    assert expected.keys() == KL_ESTIMATORS.keys()
    for name, value in expected.items():
        assert float(kl_estimate(name, p, f)) == pytest.approx(value, rel=1e-6)
    assert float(kl_estimate("low_var_kl", torch.tensor([-100.0]), torch.tensor([0.0]))) == 10.0


def test_full_kl_is_the_sum_over_the_vocabulary_and_ignores_banned_tokens() -> None:
    torch.manual_seed(0)
    p, f = torch.randn(3, 7), torch.randn(3, 7)
    by_hand = [
        sum(
            math.exp(a) * (a - b)
            for a, b in zip(x.log_softmax(0).tolist(), y.log_softmax(0).tolist(), strict=True)
        )
        for x, y in zip(p, f, strict=True)
    ]
    torch.testing.assert_close(full_kl(p, f), torch.tensor(by_hand), atol=1e-5, rtol=1e-5)
    p[:, 3] = f[:, 3] = float("-inf")
    assert torch.isfinite(full_kl(p, f)).all()


def test_the_adaptive_controller_moves_towards_its_target() -> None:
    controller = KLController(value=0.1, adaptive=True, target=0.05, horizon=1000)
    controller.update(0.2, samples=100)  # 4 x the target: the error is clipped at 0.2
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))
    controller.update(0.0, samples=100)
    assert controller.value == pytest.approx(0.1 * 1.02 * 0.98)
    again = KLController(value=0.0, adaptive=True)
    again.load_state_dict(controller.state_dict())
    assert again.value == controller.value


def test_corrections_by_hand() -> None:
    old, behaviour = torch.log(torch.tensor([3.0, 0.1, 1.0])), torch.zeros(3)
    response = torch.tensor([0, 0, 1])

    def weights(name: str) -> list[float]:
        return correct(name, old, behaviour, response, num_responses=2, cap=2.0).weights_M.tolist()

    assert weights("none") == [1, 1, 1]
    assert weights("tis") == pytest.approx([2.0, 0.1, 1.0], rel=1e-5)
    assert weights("mis") == pytest.approx([0.0, 0.0, 1.0])
    assert weights("seq_tis") == pytest.approx([0.3, 0.3, 1.0], rel=1e-5)
    assert weights("seq_mis") == pytest.approx([0.0, 0.0, 1.0])
    # geometric mean of the first response: sqrt(0.3) = 0.548, within [0.5, 2]
    assert weights("geo_mis") == [1, 1, 1]
    assert set(CORRECTIONS) == {"none", "tis", "mis", "seq_tis", "seq_mis", "geo_mis"}


def test_filtering_keeps_what_lies_between_and_says_why_not() -> None:
    assert keep_group([0, 1], 0.01, 0.99) == (True, "")
    assert keep_group([0, 0], 0.01, 0.99) == (False, "too_low")
    assert keep_group([1, 1], 0.01, 0.99) == (False, "too_high")


def test_learning_rate_by_hand() -> None:
    def factor(step: int, **kwargs: float | int | None) -> float:
        return lr_factor(step, total_steps=10, kind=str(kwargs.pop("kind", "cosine")), **kwargs)  # type: ignore[arg-type]

    assert [factor(s, kind="constant", warmup_steps=4) for s in range(5)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1]
    )
    assert factor(0) == 1.0
    assert factor(5) == pytest.approx(0.5)
    assert factor(10, min_ratio=0.1) == pytest.approx(0.1)
    assert factor(25, min_ratio=0.1) == pytest.approx(0.1)
    assert factor(1, warmup_ratio=0.2, kind="constant") == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="linear"):
        factor(3, kind="linear")
