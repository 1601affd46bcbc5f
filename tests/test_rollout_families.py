"""The transformers engine answers right whatever the layers keep: attention, windows, or a state; and says
no to what cannot be."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from seerl.errors import UserError
from seerl.rollout.collect import collect_groups
from seerl.rollout.engine import Sampling
from seerl.rollout.transformers_engine import TransformersEngine
from seerl.types import Group, Prompt

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "mistral": {**SMALL, "sliding_window": 6},  # every layer sees the last 6 tokens
    "gemma3_text": {**SMALL, "sliding_window": 6},  # windows and full attention by turns
    "qwen3_5_text": {**SMALL, **LINEAR},  # three linear-attention layers to one of full attention
    "lfm2": {**SMALL, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "falcon_h1": {**SMALL, **MAMBA},  # a state and attention in every layer
}
BANNED = [7, 8]
ENDS = list(range(20, 40))


def built(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


def prompts() -> list[Prompt]:
    """Of 3, 11 and 20 tokens: padding, and prompts below and above the window."""
    rng = np.random.default_rng(0)
    return [
        Prompt(uid=str(n), row_id=str(n), text="", token_ids=rng.integers(5, 300, n)) for n in (3, 11, 20)
    ]


def sample(engine: TransformersEngine, **settings: Any) -> list[Group]:
    sampling = Sampling(**{"n": 4, "max_tokens": 14, "seed": 1, **settings})

    async def run() -> list[Group]:
        return [group async for group in collect_groups(engine, prompts(), sampling)]

    return sorted(asyncio.run(run()), key=lambda g: g.prompt.token_ids.size)


def tokens(groups: list[Group]) -> list[list[int]]:
    return [c.token_ids.tolist() for g in groups for c in g.completions]


@torch.no_grad()
def plain_logprobs(module: torch.nn.Module, group: Group, place: int) -> np.ndarray:
    """Of one completion, by a forward pass over it alone, without a cache."""
    answer, start = group.completions[place].token_ids, group.prompt.token_ids.size
    ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, answer]))[None]
    logits = module(input_ids=ids, use_cache=False).logits[0].float()
    logits[:, BANNED] = float("-inf")
    wanted = torch.from_numpy(answer)[:, None]
    return logits.log_softmax(-1)[start - 1 : -1].gather(-1, wanted)[:, 0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_those_of_a_plain_forward_pass(family: str) -> None:
    module = built(family)
    groups = sample(TransformersEngine(module, end_token_ids=ENDS, banned_token_ids=BANNED))
    lengths = {c.token_ids.size for g in groups for c in g.completions}
    assert len(lengths) > 2, "answers of several lengths, so that finished rows leave the batch"
    module.eval()
    for group in groups:
        for place, completion in enumerate(group.completions):
            assert np.abs(completion.logprobs - plain_logprobs(module, group, place)).max() < 1e-4


def test_a_prompt_with_too_many_answers_is_answered_in_turns() -> None:
    module = built("llama")
    whole = TransformersEngine(module, end_token_ids=ENDS, banned_token_ids=BANNED)
    cut = TransformersEngine(module, end_token_ids=ENDS, banned_token_ids=BANNED, max_batch_tokens=40)
    rows: list[int] = []
    forward = cut._forward

    def counting(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(ids.shape[0])
        return forward(ids, *args, **kwargs)

    cut._forward = counting  # type: ignore[method-assign]
    assert tokens(sample(cut, n=5)) == tokens(sample(whole, n=5))
    assert max(rows) == 2  # two answers of 17 tokens are all that 40 hold


def test_sampling_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(built("llama"), end_token_ids=ENDS, banned_token_ids=BANNED)
    whole = sample(engine, top_p=0.9)
    monkeypatch.setattr("seerl.rollout.transformers_engine.SAMPLED_AT_A_TIME", 700)
    assert tokens(sample(engine, top_p=0.9)) == tokens(whole)


def test_weights_that_diverged_are_named() -> None:
    module = built("llama")
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    engine = TransformersEngine(module, end_token_ids=ENDS, banned_token_ids=BANNED)
    with pytest.raises(UserError, match="diverged"):
        sample(engine)


def test_weights_of_another_shape_are_refused_not_broadcast() -> None:
    module = built("llama")
    engine = TransformersEngine(module, end_token_ids=ENDS, banned_token_ids=BANNED)
    with pytest.raises(ValueError, match=r"\(1,\) for \(32,\)"):
        asyncio.run(engine.update_weights([("model.norm.weight", torch.zeros(1))], 1))


def test_prompts_with_one_uid_are_refused() -> None:
    engine = TransformersEngine(built("llama"), end_token_ids=ENDS, banned_token_ids=BANNED)
    twice = prompts()[:1] * 2

    async def run() -> list[Group]:
        return [g async for g in collect_groups(engine, twice, Sampling(n=2, max_tokens=2, seed=1))]

    with pytest.raises(ValueError, match="same uid"):
        asyncio.run(run())
