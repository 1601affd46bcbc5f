"""The schema as text: the reference page, `explain`, `describe`, the memory estimate."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from seerl.config import describe, explain, load_config
from seerl.config.estimate import count_parameters, memory_estimate
from seerl.config.explain import constraints, memory_table
from seerl.config.keys import is_section, known_keys
from seerl.config.reference import markdown
from seerl.errors import UserError

ROOT = Path(__file__).parent.parent


def test_the_reference_page_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == markdown(), (
        "run: python -m seerl.config.reference > docs/configuration.md"
    )


def test_the_list_of_keys_changes_only_on_purpose() -> None:
    frozen = (ROOT / "tests" / "config_keys.txt").read_text(encoding="utf-8").split()
    now = [key for key, field in known_keys().items() if not is_section(field)]
    assert now == frozen, "a key was added, renamed or dropped: users' configurations depend on them"


def test_every_key_is_documented_and_explained() -> None:
    for key, field in known_keys().items():
        assert field.description, key
        assert explain(key).startswith(key)
        if not is_section(field):
            assert "allowed: " in explain(key)


def test_a_key_is_explained_with_what_it_allows_and_its_default() -> None:
    assert "allowed: integer > 0\n  default: 1" in explain("worker.rollout.n")
    assert "allowed: number > 0 and <= 1" in explain("worker.rollout.top_p")
    assert "allowed: list of console | file | wandb" in explain("trainer.logger")
    assert "rank" in explain("worker.actor.model.lora")


def test_a_misspelt_key_is_not_explained() -> None:
    with pytest.raises(UserError, match=r"did you mean `worker\.rollout\.temperature`"):
        explain("worker.rollout.temprature")
    with pytest.raises(UserError, match="the sections are data, algorithm, worker, trainer"):
        explain("zzz")


def test_a_key_is_explained_with_what_is_checked_of_it() -> None:
    text = explain("worker.actor.global_batch_size")
    assert "checked: worker.actor.global_batch_size divides data.rollout_batch_size." in text
    assert "checked" not in explain("data.seed")
    assert "not in this version: remax, gae" in explain("algorithm.adv_estimator")
    assert "not in this version: more than 1" in explain("trainer.n_gpus_per_node")
    assert "not in this version: anything but null" in explain("algorithm.off_policy_mask")


def test_what_is_checked_names_real_keys() -> None:
    known = set(known_keys())
    named = {
        word
        for sentence in constraints()
        for word in re.findall(r"\b(?:data|algorithm|worker|trainer)\.[a-z_.]*[a-z_]", sentence)
    }
    assert len(named) > 20
    assert named <= known


def test_a_description_has_the_configuration_and_the_arithmetic() -> None:
    text = describe(
        load_config(
            ["data.rollout_batch_size=32", "worker.actor.global_batch_size=8", "worker.rollout.n=4"]
        ).config
    )
    assert "rollout_batch_size: 32" in text
    assert "32 prompts x 4 responses = 128 samples" in text
    assert "in 4 optimizer steps of 8 prompts (32 samples)" in text
    assert "at most 4096 tokens" in text
    assert "not estimated" in text


def test_two_passes_over_a_batch_are_counted() -> None:
    text = describe(load_config(["worker.actor.ppo_epochs=2", "worker.actor.dynamic_batching=false"]).config)
    assert "in 4 optimizer steps (2 passes over them) of 256 prompts" in text
    assert "micro-batches of 4 samples" in text


def test_the_split_over_devices_is_described() -> None:
    text = describe(load_config(["trainer.n_gpus_per_node=4", "trainer.nnodes=2"]).config)
    assert "each split over 8 devices, cut into" in text


def test_sizes_are_described_in_units_that_show_them(tiny_qwen2: Path) -> None:
    config = load_config(
        [f"worker.actor.model.model_path={tiny_qwen2}", "worker.rollout.name=transformers"]
    ).config
    lines = [line.split() for line in memory_table(config).splitlines()[1:]]
    assert [words[-1] for words in lines] == ["MiB"] * 5 + ["GiB", "MiB", "MiB"]
    assert all(float(words[-2]) > 0 for words in lines if words[0] != "engine")
    assert lines[-1][:3] == ["most", "at", "a"]


def test_vllm_on_the_cpu_keeps_its_memory_while_the_policy_trains(tiny_qwen2: Path) -> None:
    args = [f"worker.actor.model.model_path={tiny_qwen2}", "worker.rollout.name=vllm"]
    on_cpu = memory_estimate(load_config([*args, "trainer.n_gpus_per_node=0"]).config)
    on_gpu = memory_estimate(load_config([*args, "trainer.n_gpus_per_node=1"]).config)
    assert on_cpu is not None
    assert on_gpu is not None
    assert on_gpu.parts["engine"] == on_gpu.parts["weights"] / 2  # bf16 beside fp32
    assert on_cpu.total == sum(on_cpu.parts.values())
    assert on_gpu.total < sum(on_gpu.parts.values())


def test_parameters_are_counted_from_the_shapes() -> None:
    qwen2_5_7b = {  # 7.6 billion, of which the untied embeddings are 1.1
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    counted = count_parameters(qwen2_5_7b)
    assert counted is not None
    assert sum(counted) == pytest.approx(7.6e9, rel=0.02)


def test_the_tiny_model_is_counted_as_it_is(tiny_qwen2_5_vl: Path) -> None:
    from safetensors import safe_open

    shapes = json.loads((tiny_qwen2_5_vl / "config.json").read_text())
    counted = count_parameters(shapes)
    with safe_open(tiny_qwen2_5_vl / "model.safetensors", "pt") as file:
        names = file.keys()
        real = sum(file.get_tensor(name).numel() for name in names)
    assert counted is not None
    assert sum(counted) == pytest.approx(real, rel=0.02)


def test_the_estimate_follows_the_keys_that_cost_memory(tiny_qwen2: Path) -> None:
    def parts(*args: str) -> dict[str, float]:
        fixed = [f"worker.actor.model.model_path={tiny_qwen2}", "worker.rollout.name=transformers"]
        estimate = memory_estimate(load_config([*fixed, "trainer.n_gpus_per_node=0", *args]).config)
        assert estimate is not None
        training = sum(estimate.parts[p] for p in estimate.parts if p not in ("engine", "KV cache"))
        assert estimate.total == max(training, estimate.kept + estimate.parts["KV cache"])
        return estimate.parts

    base = parts()
    assert base["optimizer"] == 2 * base["weights"] == 2 * base["gradients"]
    assert parts("worker.actor.optim.strategy=adamw_bf16")["weights"] == base["weights"] / 2
    assert "reference" not in parts("algorithm.disable_kl=true")
    assert parts("worker.rollout.n=8")["KV cache"] == 8 * base["KV cache"]
    assert base["engine"] == 0
    dense = parts("worker.actor.model.enable_gradient_checkpointing=false")["activations"]
    assert dense > base["activations"]
    longer = parts("worker.actor.micro_batch_size_per_device_for_update=8")["activations"]
    assert longer == 2 * base["activations"]
