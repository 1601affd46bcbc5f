"""Model folders small enough to build in a test: real tokenizer and processor, random weights.

Everything is made here from nothing, so that no test needs a network. Same seed, same folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
LEARNED_VOCABULARY = 490  # 256 bytes and the merges

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = [
    "You are a helpful assistant. user system assistant",
    "What is the answer? How many red circles are there in the picture? Count the shapes.",
    "Which colour is the largest square: blue, green, yellow or red? The left one is larger.",
    "<think> I count three shapes, so the answer is 3. </think> \\boxed{3} \\boxed{7} \\boxed{12}",
    "Find the length of side AB in the triangle ABC. If angle A is 60 degrees, then x = 10 / 2 + 4 = 9.",
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 20 30 40 50 100",
]


def make_tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE of about 460 tokens with the control tokens of Qwen2.5-VL; any text round-trips."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED_VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    vocab, merges = _vocab_and_merges(trained.to_str())
    for token in SPECIAL_TOKENS:
        vocab[token] = len(vocab)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,  # type: ignore[arg-type]  # pairs are what the BPE model takes
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=SPECIAL_TOKENS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _vocab_and_merges(tokenizer_json: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer_json)["model"]
    return dict(model["vocab"]), [tuple(merge) for merge in model["merges"]]


def make_tiny_qwen2_5_vl(folder: str | Path, with_weights: bool = True) -> Path:
    """A Qwen2.5-VL of about half a million parameters: patch 14, merge 2, hidden 64, 2 + 2 layers."""
    folder = Path(folder)
    tokenizer = make_tiny_tokenizer()
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=14,
            merge_size=2,
            temporal_patch_size=2,
            size={"shortest_edge": 28 * 28, "longest_edge": 12845056},
        ),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=14, merge_size=2, temporal_patch_size=2),
        chat_template=CHAT_TEMPLATE,
    )
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "hidden_act": "silu",
        "initializer_range": 0.1,
    }
    config = Qwen2_5_VLConfig(
        text_config=_text_config(tokenizer, mrope_section=[4, 6, 6]),
        vision_config=vision,
        image_token_id=_id(tokenizer, "<|image_pad|>"),
        video_token_id=_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=_id(tokenizer, "<|vision_end|>"),
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    _save(folder, config, Qwen2_5_VLForConditionalGeneration, with_weights)
    processor.save_pretrained(folder)
    _save_generation_config(folder, tokenizer)
    return folder


def make_tiny_qwen2(folder: str | Path, with_weights: bool = True) -> Path:
    """A text-only Qwen2 with the same tokenizer: hidden 64, 2 layers."""
    folder = Path(folder)
    tokenizer = make_tiny_tokenizer()
    config = Qwen2Config(**_text_config(tokenizer))
    config.architectures = ["Qwen2ForCausalLM"]
    _save(folder, config, Qwen2ForCausalLM, with_weights)
    tokenizer.save_pretrained(folder)
    _save_generation_config(folder, tokenizer)
    return folder


def _id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    return tokenizer.get_added_vocab()[token]


def _text_config(
    tokenizer: PreTrainedTokenizerBase, mrope_section: list[int] | None = None
) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if mrope_section is not None:
        rope["mrope_section"] = mrope_section
    return {
        "vocab_size": 512,  # a few rows more than the tokenizer has, as in the real models
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "bos_token_id": _id(tokenizer, "<|endoftext|>"),
        "eos_token_id": _id(tokenizer, "<|im_end|>"),
        # the default of 0.02 is so weak at this width that a wrong mask or position would hardly show
        "initializer_range": 0.1,
    }


def _save(folder: Path, config: Any, model_class: Any, with_weights: bool) -> None:
    config.dtype = "float32"
    config.save_pretrained(folder)
    if with_weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model_class(config).save_pretrained(folder)


def _save_generation_config(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    end, pad = _id(tokenizer, "<|im_end|>"), _id(tokenizer, "<|endoftext|>")
    GenerationConfig(bos_token_id=pad, eos_token_id=[end, pad], pad_token_id=pad).save_pretrained(folder)
