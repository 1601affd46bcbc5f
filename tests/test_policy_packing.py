"""Packed sequences give each response what it would get alone: the same log-probabilities, the same
gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from seerl.config.schema import FsdpConfig, ModelConfig
from seerl.policy.forward import MicroBatchLimit, PolicyForward
from seerl.policy.model import load_model
from seerl.policy.packing import first_fit, packed_tokens
from seerl.types import TrainingGroup
from tests.groups import mixed_groups, text_prompt, training_group

BANNED = (500, 501)
FP32 = FsdpConfig(mp_param_dtype="fp32")


def forward(folder: Path, *, temperature: float = 1.0, **kwargs: bool) -> PolicyForward:
    config = ModelConfig(model_path=str(folder), enable_gradient_checkpointing=False)
    model = load_model(config, FP32, torch.device("cpu"))
    return PolicyForward(model, banned=BANNED, temperature=temperature, autocast=None, **kwargs)


def plain_logprobs(folder: Path, group: TrainingGroup, temperature: float = 1.0) -> list[np.ndarray]:
    """The definition, with nothing of ours in between: each sequence alone through transformers' own
    model."""
    auto = AutoModelForImageTextToText if "vl" in folder.name else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for completion in group.completions:
        ids = torch.tensor(np.concatenate([group.prompt.token_ids, completion.token_ids]))[None]
        kwargs = dict(group.prompt.media.features) if group.prompt.media else {}
        if group.prompt.media:
            kwargs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        with torch.no_grad():
            logits = model(input_ids=ids, **kwargs).logits[0].float()
        logits[:, list(BANNED)] = float("-inf")
        log_p = torch.log_softmax(logits / temperature, dim=-1)
        start = group.prompt.token_ids.size - 1
        rows = log_p[start : start + completion.token_ids.size]
        out.append(rows.gather(-1, torch.from_numpy(completion.token_ids)[:, None])[:, 0].numpy())
    return out


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_are_those_of_each_sequence_alone(
    tiny_qwen2_5_vl: Path, share_prefix: bool, temperature: float
) -> None:
    groups = mixed_groups(tiny_qwen2_5_vl)
    policy = forward(tiny_qwen2_5_vl, temperature=temperature, share_prefix=share_prefix)
    packed = policy.logprobs_of(groups, MicroBatchLimit(tokens=10_000))
    for group, arrays in zip(groups, packed, strict=True):
        for ours, plain in zip(arrays, plain_logprobs(tiny_qwen2_5_vl, group, temperature), strict=True):
            np.testing.assert_allclose(ours, plain, atol=1e-5)


def test_packed_text_model_equals_plain_forward(tiny_qwen2: Path) -> None:
    group = training_group(text_prompt(tiny_qwen2, "What is 3 + 4?"), [5, 1, 12])
    packed = forward(tiny_qwen2).logprobs_of([group], MicroBatchLimit(tokens=10_000))
    for ours, plain in zip(packed[0], plain_logprobs(tiny_qwen2, group), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)


def gradients(
    policy: PolicyForward, groups: list[TrainingGroup], limit: MicroBatchLimit
) -> dict[str, torch.Tensor]:
    """Gradients of the sum over tokens of advantage x log-probability, however the groups are cut."""
    policy.model.module.zero_grad(set_to_none=True)
    units = policy.units(groups)
    for members in policy.cut(units, limit):
        chosen = [units[i] for i in members]
        batch = policy.pack(chosen)
        logprobs, entropy = policy(batch, entropy_gradient=True)
        advantages = batch.per_token(a for g in chosen for a in g.advantages)
        (advantages * logprobs + 0.1 * entropy).sum().backward()
    named = policy.model.module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize(
    "limit", [MicroBatchLimit(tokens=10_000), MicroBatchLimit(tokens=60), MicroBatchLimit(samples=3)]
)
def test_gradients_do_not_depend_on_packing_sharing_or_cut(
    tiny_qwen2_5_vl: Path, share_prefix: bool, limit: MicroBatchLimit
) -> None:
    groups = mixed_groups(tiny_qwen2_5_vl)
    alone = gradients(forward(tiny_qwen2_5_vl, packing=False), groups, limit)
    packed = gradients(forward(tiny_qwen2_5_vl, share_prefix=share_prefix), groups, limit)
    assert packed.keys() == alone.keys()
    for name, gradient in packed.items():
        scale = alone[name].norm()
        assert (gradient - alone[name]).norm() <= 1e-4 * scale, name


def test_gradient_checkpointing_changes_no_gradient(tiny_qwen2_5_vl: Path) -> None:
    groups = mixed_groups(tiny_qwen2_5_vl)
    limit = MicroBatchLimit(tokens=10_000)
    plain = gradients(forward(tiny_qwen2_5_vl), groups, limit)
    config = ModelConfig(model_path=str(tiny_qwen2_5_vl), enable_gradient_checkpointing=True)
    model = load_model(config, FP32, torch.device("cpu"))
    checkpointed = gradients(
        PolicyForward(model, banned=BANNED, temperature=1.0, autocast=None), groups, limit
    )
    for name, gradient in plain.items():
        assert (gradient - checkpointed[name]).norm() <= 1e-5 * gradient.norm(), name


def test_logprobs_in_chunks_equal_those_in_one_piece(
    tiny_qwen2_5_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = mixed_groups(tiny_qwen2_5_vl)
    limit = MicroBatchLimit(tokens=10_000)
    whole = gradients(forward(tiny_qwen2_5_vl), groups, limit)
    monkeypatch.setattr("seerl.policy.logprobs.CHUNK_ELEMENTS", 7 * 512)
    chunked = gradients(forward(tiny_qwen2_5_vl), groups, limit)
    for name, gradient in whole.items():
        assert (gradient - chunked[name]).norm() <= 1e-5 * gradient.norm(), name


def test_banned_tokens_have_no_probability(tiny_qwen2: Path) -> None:
    group = training_group(text_prompt(tiny_qwen2, "x"), [3])
    policy = forward(tiny_qwen2)
    batch = policy.pack([group])
    hidden = policy.model.body(input_ids=batch.input_ids).last_hidden_state[0]
    log_p = torch.log_softmax(policy.head.logits(hidden), dim=-1)
    assert bool((log_p[:, list(BANNED)] == float("-inf")).all())
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(len(hidden)))


def test_a_frozen_vision_tower_is_frozen_and_the_rest_is_not(tiny_qwen2_5_vl: Path) -> None:
    config = ModelConfig(
        model_path=str(tiny_qwen2_5_vl), freeze_vision_tower=True, enable_gradient_checkpointing=False
    )
    model = load_model(config, FP32, torch.device("cpu"))
    policy = PolicyForward(model, banned=(), temperature=1.0, autocast=None)
    names = gradients(policy, mixed_groups(tiny_qwen2_5_vl), MicroBatchLimit(tokens=10_000)).keys()
    assert names
    assert not any("visual" in name for name in names)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_first_fit_holds_every_index_once_and_no_bin_overflows(sizes: list[int], limit: int) -> None:
    bins = first_fit(sizes, limit)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    assert all(len(members) == 1 or sum(sizes[i] for i in members) <= limit for members in bins)


def test_sharing_takes_the_prompt_once(tiny_qwen2: Path) -> None:
    group = training_group(text_prompt(tiny_qwen2, "What is 3 + 4?"), [5, 6, 7])
    prompt = group.prompt.token_ids.size
    assert packed_tokens(group, share_prefix=True) == prompt + 4 + 5 + 6
    assert packed_tokens(group, share_prefix=False) == 3 * prompt + 4 + 5 + 6
