"""Averages over an optimizer step: by hand, by loops, and the same gradient however the step is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seerl.algorithms.losses import LOSSES, LossInputs, policy_loss, token_weights
from tests import algorithm_loops as loops

MODES = ["token", "seq", "seq_sum", "seq_sum_norm"]


def test_averaging_by_hand() -> None:
    # Losses (6 | 1, 2, 3): token 12/4; seq (6 + 2)/2; seq_sum (6 + 6)/2; norm 12/(2 x 10).
    losses_M = torch.tensor([6.0, 1.0, 2.0, 3.0])
    expected = {"token": 3.0, "seq": 4.0, "seq_sum": 6.0, "seq_sum_norm": 0.6}
    for mode, value in expected.items():
        weights_M = token_weights(
            mode, torch.tensor([0, 1, 1, 1]), torch.tensor([1, 3]), loss_tokens=4, responses=2,
            max_response_length=10,
        )  # fmt: skip
        assert float((losses_M * weights_M).sum()) == pytest.approx(value)


def test_an_unknown_average_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'sequence'.*seq_sum_norm"):
        token_weights(
            "sequence",
            torch.tensor([0]),
            torch.tensor([1]),
            loss_tokens=1,
            responses=1,
            max_response_length=1,
        )


LENGTHS = [1, 5, 3, 8, 2, 1, 4, 6, 2, 3]


def whole_step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten ragged responses: hidden states (M, 4) of a small linear policy, q, A and a mask with holes."""
    generator = torch.Generator().manual_seed(11)
    total = sum(LENGTHS)
    hidden_MD = torch.randn(total, 4, generator=generator, dtype=torch.float64)
    q_M = -torch.rand(total, generator=generator, dtype=torch.float64) * 2
    a_R = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    a_M = torch.repeat_interleave(a_R, torch.tensor(LENGTHS))
    mask_M = torch.rand(total, generator=generator) > 0.2
    mask_M[0] = False  # a response none of whose tokens counts
    return hidden_MD, q_M, a_M, mask_M


def gradient_cut_into(name: str, mode: str, sizes: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """The accumulated gradient with the responses, in `order`, cut into micro-batches of `sizes`."""
    hidden_MD, q_M, a_M, mask_M = whole_step()
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    weight_D = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64, requires_grad=True)
    first = 0
    for size in sizes:
        chosen = order[first : first + size]
        first += size
        at_M = torch.cat([torch.arange(starts[i], starts[i] + LENGTHS[i]) for i in chosen])
        response_M = torch.repeat_interleave(torch.arange(size), torch.tensor([LENGTHS[i] for i in chosen]))
        p_M = q_M[at_M] + 0.5 * (hidden_MD[at_M] @ weight_D)
        out = policy_loss(
            name,
            LossInputs(
                logprobs_M=p_M, old_logprobs_M=q_M[at_M], advantages_M=a_M[at_M], response_M=response_M,
                num_responses=size, mask_M=mask_M[at_M],
            ),
        )  # fmt: skip
        counted_R = torch.zeros(size, dtype=torch.long).index_add(0, response_M, mask_M[at_M].long())
        weights_M = token_weights(
            mode, response_M, counted_R, loss_tokens=int(mask_M.sum()), responses=len(LENGTHS),
            max_response_length=8, mask_M=mask_M[at_M],
        )  # fmt: skip
        (out.token_loss_M * weights_M).sum().backward()
    assert weight_D.grad is not None
    return weight_D.grad


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_does_not_depend_on_the_cut(name: str, mode: str) -> None:
    straight, shuffled = list(range(10)), [7, 2, 9, 0, 4, 1, 8, 3, 6, 5]
    whole = gradient_cut_into(name, mode, [10], straight)
    assert whole.abs().max() > 1e-3
    for sizes in ([4, 6], [2, 2, 2, 2, 2], [1, 3, 1, 4, 1]):
        for order in (straight, shuffled):
            assert torch.allclose(gradient_cut_into(name, mode, sizes, order), whole, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=5
    )
)
def test_averages_agree_with_loops(mode: str, rows: list[list[tuple[float, bool]]]) -> None:
    losses, masks = [[v for v, _ in row] for row in rows], [[m for _, m in row] for row in rows]
    counted = [sum(mask) for mask in masks]
    assume(sum(counted))
    mask_M = torch.tensor([m for mask in masks for m in mask])
    weights_M = token_weights(
        mode, torch.tensor([i for i, row in enumerate(rows) for _ in row]), torch.tensor(counted),
        loss_tokens=sum(counted), responses=len(rows), max_response_length=7, mask_M=mask_M,
        dtype=torch.float64,
    )  # fmt: skip
    losses_M = torch.tensor([v for row in losses for v in row], dtype=torch.float64)
    got = float((losses_M * weights_M).sum())
    assert got == pytest.approx(loops.average(mode, losses, masks, 7), rel=1e-9, abs=1e-9)
