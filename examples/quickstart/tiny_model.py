"""A vision-language model of Qwen2.5-VL's architecture, two million parameters, tokenizer and all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

CONTROL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGE, HEAD = 2, 32
INITIAL_SCALE = 0.08
"""About 1 / sqrt(width). With the usual 0.02 so narrow a model takes three times as long to learn to see."""
ON_WHITE = {"image_mean": [1.0, 1.0, 1.0], "image_std": [0.5, 0.5, 0.5]}
"""White becomes zero: on an empty background all that a patch holds is its piece of a shape."""


def make_tokenizer(
    texts: Iterable[str], vocabulary: int = 512, tags: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """A byte-level BPE trained on `texts`, of at most `vocabulary` tokens with Qwen's control tokens;
    `tags` become single tokens beside them."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator([*texts, *_around_a_message()], trainer)
    model = json.loads(learned.to_str())["model"]
    vocab: dict[str, int] = dict(model["vocab"])
    for token in CONTROL_TOKENS:
        vocab[token] = len(vocab)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(pair) for pair in model["merges"]],  # type: ignore[misc]
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=CONTROL_TOKENS,
    )
    tokenizer.add_tokens(list(tags))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _around_a_message() -> list[str]:
    """What the chat template puts beside its control tokens, often enough to become single tokens."""
    return ["system", "user", "assistant"] * 100


def make_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    patch: int = 14,
    hidden: int = 128,
    vision_layers: int = 4,
    text_layers: int = 4,
    seed: int = 0,
) -> Qwen2_5_VLForConditionalGeneration:
    """The model with random weights; an image token stands for 2 x 2 patches of `patch` pixels."""
    ids = tokenizer.get_added_vocab()
    vision = {
        "depth": vision_layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": hidden // HEAD,
        "out_hidden_size": hidden,
        "patch_size": patch,
        "spatial_patch_size": patch,
        "spatial_merge_size": MERGE,
        "window_size": 8 * patch,
        "fullatt_block_indexes": list(range(1, vision_layers, 2)),
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "hidden_act": "silu",
        "initializer_range": INITIAL_SCALE,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": text_layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD // 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "initializer_range": INITIAL_SCALE,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    config.initializer_range = INITIAL_SCALE
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.dtype = "float32"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config)


def save(folder: Path, model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Writes an ordinary Hugging Face folder: weights, configuration, tokenizer and processor."""
    ids = tokenizer.get_added_vocab()
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    model.generation_config = GenerationConfig(bos_token_id=pad, eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder)
    patch = int(model.base_model.visual.patch_size)  # type: ignore[union-attr, arg-type]
    pixels = {"patch_size": patch, "merge_size": MERGE, "temporal_patch_size": 2, **ON_WHITE}
    size = {"shortest_edge": (MERGE * patch) ** 2, "longest_edge": 1 << 20}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    return folder
