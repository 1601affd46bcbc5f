"""Both engines sample from the trainer's distribution, reproducibly, and never a placeholder."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoTokenizer

from seerl.config.schema import Config, DataConfig, FsdpConfig, ModelConfig
from seerl.errors import UserError
from seerl.models.banned import banned_token_ids
from seerl.policy.forward import MicroBatchLimit, PolicyForward
from seerl.policy.model import LoadedModel, load_model, named_weights
from seerl.rollout.build import chosen_engine
from seerl.rollout.collect import collect_groups
from seerl.rollout.engine import RolloutEngine, Sampling
from seerl.rollout.transformers_engine import TransformersEngine
from seerl.types import Group, Prompt
from tests.groups import image_prompt, picture, text_prompt


def load(folder: Path) -> LoadedModel:
    config = ModelConfig(model_path=str(folder), enable_gradient_checkpointing=False)
    return load_model(config, FsdpConfig(), torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tiny_qwen2_5_vl: Path) -> LoadedModel:
    return load(tiny_qwen2_5_vl)


@pytest.fixture(scope="module")
def banned(model: LoadedModel, tiny_qwen2_5_vl: Path) -> tuple[int, ...]:
    return banned_token_ids(model.config, len(AutoTokenizer.from_pretrained(tiny_qwen2_5_vl)))


@pytest.fixture(scope="module")
def ends(tiny_qwen2_5_vl: Path) -> list[int]:
    added = AutoTokenizer.from_pretrained(tiny_qwen2_5_vl).get_added_vocab()
    return [added["<|im_end|>"], added["<|endoftext|>"]]


@pytest.fixture(scope="module")
def vllm(tiny_qwen2_5_vl: Path, banned: tuple[int, ...], ends: list[int]) -> Iterator[RolloutEngine]:
    from seerl.rollout.vllm_engine import VllmEngine

    config = Config.model_validate(
        {
            "data": {"max_prompt_length": 128, "max_response_length": 32},
            "worker": {
                "actor": {"model": {"model_path": str(tiny_qwen2_5_vl)}},
                "rollout": {"dtype": "fp32", "n": 4, "max_num_batched_tokens": 64},
            },
        }
    )
    threads = torch.get_num_threads()
    engine = VllmEngine(
        config, device=torch.device("cpu"), end_token_ids=ends, banned_token_ids=banned, max_images=2
    )
    assert torch.get_num_threads() == threads
    yield engine
    engine.close()


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, model: LoadedModel, banned: tuple[int, ...], ends: list[int]
) -> RolloutEngine:
    if request.param == "vllm":
        chosen: RolloutEngine = request.getfixturevalue("vllm")
    else:
        chosen = TransformersEngine(model.module, end_token_ids=ends, banned_token_ids=banned)
    asyncio.run(chosen.update_weights(named_weights(model.module), 1))
    return chosen


both = pytest.mark.parametrize("engine", ["transformers", "vllm"], indirect=True)


@pytest.fixture(scope="module")
def prompts(tiny_qwen2_5_vl: Path) -> list[Prompt]:
    return [
        text_prompt(tiny_qwen2_5_vl, "What is 3 + 4?", "text"),
        image_prompt(tiny_qwen2_5_vl, "Count.", [picture(1)], "one"),
        image_prompt(tiny_qwen2_5_vl, "Which is larger?", [picture(2, 56, 112), picture(3)], "two"),
    ]


def sample(engine: RolloutEngine, prompts: Sequence[Prompt], **sampling: object) -> dict[str, Group]:
    settings = Sampling(**{"n": 3, "max_tokens": 12, "seed": 5, **sampling})  # type: ignore[arg-type]

    async def run() -> dict[str, Group]:
        return {g.prompt.uid: g async for g in collect_groups(engine, prompts, settings)}

    return asyncio.run(run())


def trainer_logprobs(
    model: LoadedModel, banned: Sequence[int], groups: dict[str, Group], temperature: float = 1.0
) -> dict[str, tuple[np.ndarray, ...]]:
    forward = PolicyForward(model, banned=banned, temperature=temperature, autocast=None)
    arrays = forward.logprobs_of(list(groups.values()), MicroBatchLimit(tokens=4000))
    return dict(zip(groups, arrays, strict=True))


def largest_difference(groups: dict[str, Group], logprobs: dict[str, tuple[np.ndarray, ...]]) -> float:
    return max(
        float(np.abs(c.logprobs - ours).max())
        for uid, group in groups.items()
        for c, ours in zip(group.completions, logprobs[uid], strict=True)
    )


@both
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers(
    engine: RolloutEngine,
    model: LoadedModel,
    banned: tuple[int, ...],
    prompts: list[Prompt],
    temperature: float,
) -> None:
    groups = sample(engine, prompts, temperature=temperature)
    assert largest_difference(groups, trainer_logprobs(model, banned, groups, temperature)) < 1e-4


@both
def test_a_weight_update_reaches_every_part_of_the_engine(
    engine: RolloutEngine,
    tiny_qwen2_5_vl: Path,
    banned: tuple[int, ...],
    prompts: list[Prompt],
    model: LoadedModel,
) -> None:
    before = sample(engine, prompts)  # fills every cache with the old weights
    changed = load(tiny_qwen2_5_vl)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in changed.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    old = {name: tensor.clone() for name, tensor in named_weights(model.module)}
    asyncio.run(engine.update_weights(named_weights(changed.module), 7))
    try:
        after = sample(engine, prompts)
        assert largest_difference(after, trainer_logprobs(changed, banned, after)) < 1e-4
        assert {c.weight_version for g in after.values() for c in g.completions} == {7}
        assert {c.weight_version for g in before.values() for c in g.completions} == {1}
    finally:
        asyncio.run(engine.update_weights(old.items(), 1))


@both
def test_unknown_weights_are_an_error(engine: RolloutEngine, model: LoadedModel) -> None:
    with pytest.raises((KeyError, ValueError)):
        asyncio.run(engine.update_weights([("model.nowhere.weight", torch.zeros(3))], 2))
    asyncio.run(engine.update_weights(named_weights(model.module), 1))


def test_vllm_refuses_an_update_that_leaves_parameters_behind(
    vllm: RolloutEngine, model: LoadedModel
) -> None:
    some = [(name, t) for name, t in named_weights(model.module) if "layers.0" not in name]
    with pytest.raises(RuntimeError, match="got no weights"):
        asyncio.run(vllm.update_weights(some, 2))
    asyncio.run(vllm.update_weights(named_weights(model.module), 1))


@both
def test_truncated_sampling_never_mixes_distributions(
    engine: RolloutEngine, model: LoadedModel, banned: tuple[int, ...], prompts: list[Prompt]
) -> None:
    for settings in ({"top_p": 0.8}, {"top_k": 5}):
        groups = sample(engine, prompts, **settings)
        given = [c.logprobs for g in groups.values() for c in g.completions]
        if all(logprobs is None for logprobs in given):
            continue  # vLLM knows only the truncated distribution's
        assert largest_difference(groups, trainer_logprobs(model, banned, groups)) < 1e-4


@both
def test_the_same_seed_gives_the_same_answers_whatever_else_is_asked(
    engine: RolloutEngine, prompts: list[Prompt]
) -> None:
    together = sample(engine, prompts)
    again = sample(engine, prompts)
    alone = sample(engine, prompts[1:2])
    for uid, group in together.items():
        for a, b in zip(group.completions, again[uid].completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
    for a, b in zip(alone["one"].completions, together["one"].completions, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
    other = sample(engine, prompts, seed=6)
    assert any(
        a.token_ids.tolist() != b.token_ids.tolist()
        for a, b in zip(other["one"].completions, together["one"].completions, strict=True)
    )
    answers = {tuple(c.token_ids.tolist()) for c in together["text"].completions}
    assert len(answers) > 1


@both
def test_greedy_answers_are_the_most_likely_tokens(
    engine: RolloutEngine, model: LoadedModel, banned: tuple[int, ...], prompts: list[Prompt]
) -> None:
    groups = sample(engine, prompts, temperature=0.0, n=1)
    assert largest_difference(groups, trainer_logprobs(model, banned, groups)) < 1e-4
    first = groups["text"].completions[0]
    with torch.no_grad():
        ids = torch.from_numpy(groups["text"].prompt.token_ids)[None]
        logits = model.module(input_ids=ids).logits[0, -1]
    logits[list(banned)] = float("-inf")
    assert int(logits.argmax()) == int(first.token_ids[0])


@both
def test_answers_end_at_any_end_token_or_are_cut(
    engine: RolloutEngine, prompts: list[Prompt], ends: list[int]
) -> None:
    groups = sample(engine, prompts, n=16, max_tokens=32)
    seen = set()
    for group in groups.values():
        for completion in group.completions:
            ids = completion.token_ids.tolist()
            assert not set(ids[:-1]) & set(ends)
            ended = ids[-1] in ends
            assert completion.finish_reason == ("stop" if ended else "length")
            assert ended or len(ids) == 32
            seen |= {ids[-1]} & set(ends)
    assert seen, "a random model meets an end token now and then"
    whole = sample(engine, prompts[:1], max_tokens=20, ignore_eos=True)
    assert [c.token_ids.size for c in whole["text"].completions] == [20, 20, 20]
    single = sample(engine, prompts[:1], max_tokens=1)
    assert [c.token_ids.size for c in single["text"].completions] == [1, 1, 1]


@both
def test_placeholders_are_never_sampled_even_when_they_are_all_the_model_wants(
    engine: RolloutEngine,
    tiny_qwen2_5_vl: Path,
    banned: tuple[int, ...],
    prompts: list[Prompt],
    model: LoadedModel,
) -> None:
    eager = load(tiny_qwen2_5_vl)
    image = eager.config.image_token_id
    assert {image, eager.config.video_token_id} <= set(banned)
    with torch.no_grad():
        ids = torch.from_numpy(prompts[0].token_ids)[None]
        wanted = eager.module.base_model(input_ids=ids).last_hidden_state[0, -1]
        eager.module.get_input_embeddings().weight[list(banned)] = wanted  # tied: also the output layer
        assert int(eager.module(input_ids=ids).logits[0, -1].argmax()) in banned
    old = {name: tensor.clone() for name, tensor in named_weights(model.module)}
    asyncio.run(engine.update_weights(named_weights(eager.module), 2))
    try:
        groups = sample(engine, prompts[:1], n=8)
        sampled = {int(t) for c in groups["text"].completions for t in c.token_ids}
        assert not sampled & set(banned)
        assert all(np.isfinite(c.logprobs).all() for c in groups["text"].completions)
    finally:
        asyncio.run(engine.update_weights(old.items(), 1))


def test_sampled_frequencies_are_the_distributions(
    model: LoadedModel, banned: tuple[int, ...], ends: list[int], prompts: list[Prompt]
) -> None:
    engine = TransformersEngine(model.module, end_token_ids=ends, banned_token_ids=banned)
    group = sample(engine, prompts[:1], n=4000, max_tokens=1, temperature=0.5)["text"]
    counts = Counter(int(c.token_ids[0]) for c in group.completions)
    with torch.no_grad():
        logits = model.module(input_ids=torch.from_numpy(group.prompt.token_ids)[None]).logits[0, -1]
    logits[list(banned)] = float("-inf")
    p = torch.softmax(logits / 0.5, -1).double().numpy()
    usual = [t for t in range(len(p)) if 4000 * p[t] >= 5]
    expected = np.array([4000 * p[t] for t in usual])
    observed = np.array([counts[t] for t in usual])
    rest = 4000 - expected.sum(), 4000 - observed.sum()
    statistic = (((observed - expected) ** 2) / expected).sum() + (rest[1] - rest[0]) ** 2 / max(
        rest[0], 1e-9
    )
    degrees = len(usual)
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)  # four standard deviations of chi-squared


def test_waves_bound_the_cache_and_change_no_answer(
    model: LoadedModel, banned: tuple[int, ...], ends: list[int], prompts: list[Prompt]
) -> None:
    wide = TransformersEngine(model.module, end_token_ids=ends, banned_token_ids=banned)
    narrow = TransformersEngine(model.module, end_token_ids=ends, banned_token_ids=banned, max_batch_tokens=1)
    for uid, group in sample(wide, prompts).items():
        for a, b in zip(group.completions, sample(narrow, prompts)[uid].completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()


def test_the_module_is_left_as_it_was(
    model: LoadedModel, banned: tuple[int, ...], ends: list[int], prompts: list[Prompt]
) -> None:
    engine = TransformersEngine(model.module, end_token_ids=ends, banned_token_ids=banned)
    assert model.module.training
    sample(engine, prompts)
    assert model.module.training
    assert all(not p.is_inference() for p in model.module.parameters())


def test_vllm_memory_stays_flat_over_steps_with_images(
    vllm: RolloutEngine, model: LoadedModel, tiny_qwen2_5_vl: Path
) -> None:
    asyncio.run(vllm.update_weights(named_weights(model.module), 1))
    process = psutil.Process()
    sizes = []
    for step in range(16):
        fresh = [
            image_prompt(tiny_qwen2_5_vl, "Count.", [picture(1000 * step + i, 224, 224)], f"{step}-{i}")
            for i in range(8)
        ]
        sample(vllm, fresh, n=2, max_tokens=2)
        asyncio.run(vllm.update_weights(named_weights(model.module), step))
        sizes.append(process.memory_info().rss / 2**20)
    grown = np.median(sizes[-4:]) - np.median(sizes[4:8])
    assert grown < 40, f"grew by {grown:.0f} MiB: {sizes}"


def test_the_engine_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Config(data=DataConfig()).worker.rollout
    assert chosen_engine(rollout) == "vllm"
    monkeypatch.setattr("seerl.rollout.build.find_spec", lambda _: None)
    assert chosen_engine(rollout) == "transformers"
    with pytest.raises(UserError, match=r"seerl\[vllm\]"):
        chosen_engine(rollout.model_copy(update={"name": "vllm"}))
