"""Operations are counted as PyTorch's own counter counts them, but for what the figure leaves out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from seerl.cluster.devices import peak_flops
from seerl.config.schema import FsdpConfig, ModelConfig
from seerl.policy.flops import TrainingFlops
from seerl.policy.forward import PolicyForward
from seerl.policy.model import LoadedModel, load_model
from seerl.types import Media
from tests.groups import mixed_groups, text_prompt, training_group

FP32 = FsdpConfig(mp_param_dtype="fp32")


def loaded(folder: Path, *, freeze: bool = False) -> LoadedModel:
    config = ModelConfig(
        model_path=str(folder), enable_gradient_checkpointing=False, freeze_vision_tower=freeze
    )
    return load_model(config, FP32, torch.device("cpu"))


def counted_by_torch(model: LoadedModel, groups: list, share_prefix: bool) -> float:
    """Matrix products and convolutions of a forward and backward pass, without attention."""
    forward = PolicyForward(model, banned=(), temperature=1.0, autocast=None, share_prefix=share_prefix)
    packed = forward.pack(groups)
    with FlopCounterMode(display=False) as counter:
        logprobs, _ = forward(packed)
        logprobs.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    return float(sum(n for op, n in counts.items() if "attention" not in str(op)))


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("freeze", [True, False])
def test_linear_layers_are_counted_as_torch_counts_them(
    tiny_qwen2_5_vl: Path, share_prefix: bool, freeze: bool
) -> None:
    model = loaded(tiny_qwen2_5_vl, freeze=freeze)
    groups = mixed_groups(tiny_qwen2_5_vl)
    flops = TrainingFlops.of(model)
    ours = dataclasses.replace(flops, per_pair=0.0)(groups, share_prefix)
    # Torch also sees the tables of rotary frequencies.
    assert ours == pytest.approx(counted_by_torch(model, groups, share_prefix), rel=0.03)


def test_a_text_model_by_hand(tiny_qwen2: Path) -> None:
    model = loaded(tiny_qwen2)
    text = model.config
    hidden, inner, layers = text.hidden_size, text.intermediate_size, text.num_hidden_layers
    head = hidden // text.num_attention_heads
    attention = 2 * hidden * hidden + 2 * hidden * head * text.num_key_value_heads
    prompt = text_prompt(tiny_qwen2, "How many?")
    group = training_group(prompt, [3, 9])
    size, lengths = prompt.token_ids.size, [c.token_ids.size for c in group.completions]
    tokens = size + sum(lengths) - 2
    pairs = size * (size + 1) // 2
    for own in (n - 1 for n in lengths):
        pairs += sum(size + place for place in range(1, own + 1))
    by_hand = 3 * (
        2 * layers * (attention + 3 * hidden * inner) * tokens
        + 4 * layers * hidden * pairs
        + 2 * text.vocab_size * hidden * sum(lengths)
    )
    assert TrainingFlops.of(model)([group], share_prefix=True) == by_hand


def test_patches_are_counted_in_every_form_that_pictures_come_in(tiny_qwen2_5_vl: Path) -> None:
    flops = dataclasses.replace(
        TrainingFlops.of(loaded(tiny_qwen2_5_vl)), per_patch=1.0, patch_pixels=14 * 14
    )
    group = mixed_groups(tiny_qwen2_5_vl)[0]
    text = dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, media=None))
    without = flops([text], True)
    assert without is not None

    def patches(features: dict[str, torch.Tensor]) -> float | None:
        media = Media(images=(), unexpanded_token_ids=group.prompt.token_ids, features=features)
        counted = flops(
            [dataclasses.replace(text, prompt=dataclasses.replace(text.prompt, media=media))], True
        )
        return None if counted is None else counted - without

    grid = torch.tensor([[1, 4, 6], [1, 2, 2]])
    assert patches({"pixel_values": torch.zeros(28, 1176), "image_grid_thw": grid}) == 28
    assert patches({"pixel_values": torch.zeros(2, 3, 28, 42)}) == 2 * 2 * 3
    assert patches({"pixel_values": torch.zeros(1, 5, 3, 28, 28)}) == 5 * 4
    assert patches({"pixel_values": torch.zeros(28, 588)}) is None
    assert patches({"images": torch.zeros(1)}) is None


def test_of_experts_the_active_ones_count() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(8, 6, 4))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.head = Experts(), nn.Linear(4, 10, bias=False)
            self.config = SimpleNamespace(vision_config=None)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    text = SimpleNamespace(
        hidden_size=4, num_attention_heads=1, num_hidden_layers=1, num_experts=8, num_experts_per_tok=2
    )
    config = SimpleNamespace(get_text_config=lambda: text)
    flops = TrainingFlops.of(LoadedModel(Model(), config, packable=True))  # type: ignore[arg-type]
    assert flops.per_token == 3 * 2 * 2 * (6 * 4)


def test_the_peak_is_above_what_a_product_reaches() -> None:
    peak = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e9 < peak < 1e14


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989.0), ("NVIDIA H20", 148.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L40S", 362.0)],
)
def test_known_gpus_have_their_data_sheets_rate(
    name: str, tflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == tflops * 1e12
