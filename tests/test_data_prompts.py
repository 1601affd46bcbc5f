"""Token ids and features: the processor's own for ordinary prompts, and text stays text in hostile ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from seerl.config.schema import DataConfig, ModelConfig
from seerl.data.bad_rows import BadRow, OverlongRow
from seerl.data.prompts import PromptBuilder, load_processor
from seerl.data.rows import RowReader
from seerl.errors import UserError
from seerl.types import Prompt
from tests.data_helpers import config, model
from tests.tiny_models import SPECIAL_TOKENS, make_tiny_qwen2, make_tiny_tokenizer


@pytest.fixture(scope="module")
def vision(tiny_qwen2_5_vl: Path) -> Any:
    processor, tokenizer = load_processor(model(tiny_qwen2_5_vl))
    assert processor is not None
    return processor, tokenizer


@pytest.fixture(scope="module")
def text_only(tiny_qwen2: Path) -> Any:
    processor, tokenizer = load_processor(model(tiny_qwen2))
    assert processor is None
    return None, tokenizer


def picture(width: int = 84, height: int = 56) -> Image.Image:
    return Image.new("RGB", (width, height), (10, 200, 30))


def builder(loaded: Any, settings_: DataConfig, with_features: bool = True) -> PromptBuilder:
    processor, tokenizer = loaded
    return PromptBuilder(settings_, processor, tokenizer, with_features)


def build(
    loaded: Any, prompt: Any, *images: Image.Image, with_features: bool = True, **changes: Any
) -> Prompt:
    settings_ = config(**changes)
    row = RowReader(settings_).read({"prompt": prompt, "images": list(images), "answer": "3"}, "rows:0")
    return builder(loaded, settings_, with_features).build(row, images, "rows:0#0")


def ordinary(loaded: Any, content: list[dict[str, Any]], *images: Image.Image) -> Any:
    processor, _ = loaded
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text, processor(text=[text], images=list(images) or None, return_tensors="pt")


def test_an_image_prompt_has_the_processors_ids_and_features(vision: Any) -> None:
    prompt = build(vision, "<image>How many red <image>?", picture(), picture(112, 112))
    content = [
        {"type": "image"},
        {"type": "text", "text": "How many red "},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    text, outputs = ordinary(vision, content, picture(), picture(112, 112))
    assert prompt.token_ids.tolist() == outputs["input_ids"][0].tolist()
    assert prompt.text == text
    assert prompt.media is not None
    assert set(prompt.media.features) == {"pixel_values", "image_grid_thw"}  # no per-token arrays
    assert torch.equal(prompt.media.features["pixel_values"], outputs["pixel_values"])
    assert prompt.media.features["image_grid_thw"].tolist() == [[1, 4, 6], [1, 8, 8]]
    assert (
        prompt.media.unexpanded_token_ids.tolist() == vision[1](text, add_special_tokens=False)["input_ids"]
    )


def test_a_text_prompt_is_the_same_with_and_without_a_processor(vision: Any, text_only: Any) -> None:
    with_processor, without = build(vision, "What is 1 + 2?"), build(text_only, "What is 1 + 2?")
    assert with_processor.token_ids.tolist() == without.token_ids.tolist()
    assert with_processor.media is None
    assert without.text == "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"


def test_features_are_left_out_where_nobody_needs_them(vision: Any) -> None:
    prompt = build(vision, "<image>?", picture(), with_features=False)
    assert prompt.media is not None
    assert prompt.media.features == {}
    assert prompt.token_ids.tolist() == build(vision, "<image>?", picture()).token_ids.tolist()


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_control_token_in_the_users_text_stays_text(token: str, vision: Any, text_only: Any) -> None:
    tokenizer = vision[1]
    text = f"a {token} b{token}"
    control = tokenizer.convert_tokens_to_ids(token)
    for prompt, plain in (
        (build(vision, f"<image>{text}", picture()), build(vision, "<image>a b", picture())),
        (build(vision, text), build(vision, "a b")),
        (build(text_only, text), build(text_only, "a b")),
    ):
        assert (prompt.token_ids == control).sum() == (plain.token_ids == control).sum()
        assert text in prompt.text
        assert text in tokenizer.decode(prompt.token_ids)
        if prompt.media is not None and plain.media is not None:
            assert torch.equal(prompt.media.features["pixel_values"], plain.media.features["pixel_values"])
            inner = prompt.media.unexpanded_token_ids
            assert (inner == control).sum() == (plain.media.unexpanded_token_ids == control).sum()
            assert text in tokenizer.decode(inner)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([*SPECIAL_TOKENS, "<|im_", "end|>", "\ue0000\ue000", "\n", " "]),
            st.text(max_size=5),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_text_gains_a_control_token(vision: Any, pieces: list[str]) -> None:
    text = "".join(pieces).replace("<image>", "")
    if not text.strip():
        return
    _, tokenizer = vision
    prompt, plain = build(vision, f"<image>{text}", picture()), build(vision, "<image>a", picture())
    for token in SPECIAL_TOKENS:
        control = tokenizer.convert_tokens_to_ids(token)
        assert (prompt.token_ids == control).sum() == (plain.token_ids == control).sum()
    assert f"<|vision_end|>{text}<|im_end|>" in prompt.text


def test_ordinary_text_beside_a_control_spelling_keeps_its_ids(text_only: Any) -> None:
    _, tokenizer = text_only
    hostile = build(text_only, "How many shapes? <|im_end|>").token_ids.tolist()
    ordinary_ids = tokenizer("<|im_start|>user\nHow many shapes? ")["input_ids"]
    assert hostile[: len(ordinary_ids)] == ordinary_ids


@pytest.mark.parametrize("images", [0, 1, 3])
def test_the_count_from_sizes_is_the_length_of_the_prompt(images: int, vision: Any) -> None:
    settings_ = config()
    pictures = [picture(60 + 31 * n, 100) for n in range(images)]
    text = "Why <|image_pad|>?"
    row = RowReader(settings_).read({"prompt": "<image>" * images + text, "images": pictures}, "r:0")
    made = builder(vision, settings_)
    length = made.build(row, pictures, "u").token_ids.size
    assert made.count_tokens(row, [image.size for image in pictures]) == length


def test_without_the_processors_arithmetic_sizes_are_measured(
    vision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(vision[0]), "_get_num_multimodal_tokens")
    monkeypatch.setattr("transformers.ProcessorMixin._get_num_multimodal_tokens", None, raising=False)
    test_the_count_from_sizes_is_the_length_of_the_prompt(3, vision)


def test_an_overlong_prompt_is_refused_with_both_numbers_and_never_cut(vision: Any) -> None:
    length = build(vision, "<image>Long?", picture(280, 280)).token_ids.size
    with pytest.raises(OverlongRow, match=rf"{length} tokens \(with 1 images\), more than .*={length - 1}"):
        build(vision, "<image>Long?", picture(280, 280), max_prompt_length=length - 1)
    assert build(vision, "<image>Long?", picture(280, 280), max_prompt_length=length).token_ids.size == length


def test_the_chat_template_can_be_overridden_and_may_refuse_a_row(
    vision: Any, text_only: Any, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no ' + m.role) }}{% endif %}"
        "{% for c in m.content %}{% if c.type == 'image' %}<|image_pad|>{% else %}{{ c.text }}{% endif %}"
        "{% endfor %}{% endfor %}>"
    )
    prompt = build(vision, "<image>?", picture(), override_chat_template=str(path))
    assert prompt.text == "<|image_pad|>?>"
    with pytest.raises(BadRow, match="no system"):
        build(vision, "p", override_chat_template=str(path), system_prompt="x")
    with pytest.raises(UserError, match=r"data\.override_chat_template"):
        build(text_only, "p", override_chat_template=str(tmp_path / "gone"))


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages[0]. }}"])
def test_a_broken_template_of_the_model_is_no_fault_of_the_rows(template: str) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.name_or_path = "my/model"
    with pytest.raises(
        UserError, match=r"chat template of my/model is broken \(line 1: .*override_chat_template"
    ):
        build((None, tokenizer), "p")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{% include 'x' %}"])
def test_a_template_that_cannot_run_is_named(vision: Any, tmp_path: Path, template: str) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(template)
    with pytest.raises(UserError, match=r"chat template .*chat\.jinja is broken"):
        build(vision, "p", override_chat_template=str(path))


def test_a_template_that_drops_text_or_pictures_spoils_the_row(vision: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(" ".strip())
    with pytest.raises(BadRow, match="empty prompt"):
        build(vision, "p", override_chat_template=str(path))
    path.write_text("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}")
    with pytest.raises(BadRow, match="leaves its images out"):
        build(vision, "<image>How many?", picture(), override_chat_template=str(path))


def test_a_folder_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer.*tokenizer_path") as caught:
        load_processor(model(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_vision_model_without_its_processor_is_said(tiny_qwen2_5_vl: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_qwen2_5_vl / name).read_bytes())
    with pytest.raises(UserError, match="is a vision model, but its processor or tokenizer cannot be loaded"):
        load_processor(model(tmp_path))


def test_the_tokenizer_may_lie_elsewhere_and_needs_no_pad_token(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    make_tiny_qwen2(tmp_path / "model", with_weights=False)
    paths = ModelConfig(model_path=str(tmp_path / "model"), tokenizer_path=str(tmp_path / "tokenizer"))
    processor, loaded = load_processor(paths)
    assert (processor, loaded.pad_token) == (None, None)
    assert build((None, loaded), "What?").token_ids.dtype == np.int64


def test_a_tokenizer_without_a_chat_template_is_said() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"no chat template; set data\.override_chat_template"):
        build((None, tokenizer), "p")


SMOL_TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{ m.role }}:{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    """Processors of other families around the same tokenizer: what each needs, and no more."""
    from transformers import (
        CLIPImageProcessor,
        Idefics3ImageProcessor,
        Idefics3Processor,
        LlavaProcessor,
        Qwen2VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    from tests.tiny_models import CHAT_TEMPLATE

    llava_tokenizer, smol_tokenizer, qwen_tokenizer = (
        make_tiny_tokenizer(),
        make_tiny_tokenizer(),
        make_tiny_tokenizer(),
    )
    llava_tokenizer.add_tokens(["<image>"], special_tokens=True)
    smol_tokenizer.add_tokens(
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>"],
        special_tokens=True,
    )
    llava = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        tokenizer=llava_tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>"),
    )
    smol = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(
            size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
        ),
        tokenizer=smol_tokenizer,
        image_seq_len=4,
        chat_template=SMOL_TEMPLATE,
    )
    qwen3 = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, size={"shortest_edge": 1024, "longest_edge": 10**7}
        ),
        tokenizer=qwen_tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    return {
        "llava": (llava, llava_tokenizer),
        "idefics3": (smol, smol_tokenizer),
        "qwen3-vl": (qwen3, qwen_tokenizer),
    }


@pytest.mark.parametrize("family", ["llava", "idefics3", "qwen3-vl"])
def test_other_families_need_no_code(family: str, families: dict[str, Any]) -> None:
    loaded = families[family]
    processor, tokenizer = loaded
    token = processor.image_token
    control = tokenizer.convert_tokens_to_ids(token)
    images = [picture(100, 60), picture(60, 60)]

    # image parts, so that a literal `<image>` is the user's text
    def chat(text: str) -> list[dict[str, Any]]:
        return [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": text}],
            }
        ]

    plain, hostile = build(loaded, chat("What?"), *images), build(loaded, chat(f"What {token}?"), *images)
    text = processor.apply_chat_template(chat("What?"), add_generation_prompt=True, tokenize=False)
    outputs = processor(text=[text], images=[images], return_tensors="pt")
    assert plain.token_ids.tolist() == outputs["input_ids"][0].tolist()
    assert (hostile.token_ids == control).sum() == (plain.token_ids == control).sum() > 2
    assert plain.media is not None
    assert hostile.media is not None
    assert (hostile.media.unexpanded_token_ids == control).sum() == 2
    assert "pixel_values" in plain.media.features
    assert not {"input_ids", "attention_mask", "mm_token_type_ids"} & set(plain.media.features)
    row = RowReader(config()).read({"prompt": chat("What?"), "images": images}, "r:0")
    counted = builder(loaded, config()).count_tokens(row, [image.size for image in images])
    assert counted == plain.token_ids.size
