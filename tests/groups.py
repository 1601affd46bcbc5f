"""Groups made for tests: prompts with and without images, random answers, as the stages hand them on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from seerl.types import Completion, Media, Prompt, TrainingGroup


def picture(seed: int, width: int = 84, height: int = 84) -> Image.Image:
    """A random picture: no two parts alike, so that a wrong position or window shows."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def text_prompt(folder: Path, text: str, uid: str = "t") -> Prompt:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    ids = np.array(tokenizer(rendered)["input_ids"], dtype=np.int64)
    return Prompt(uid=uid, row_id=uid, token_ids=ids, text=rendered)


def image_prompt(folder: Path, text: str, images: list[Image.Image], uid: str = "i") -> Prompt:
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
    rendered = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    out = processor(text=[rendered], images=images, return_tensors="pt")
    return Prompt(
        uid=uid,
        row_id=uid,
        token_ids=out["input_ids"][0].numpy(),
        text=rendered,
        media=Media(
            images=tuple(images),
            unexpanded_token_ids=np.array(processor.tokenizer(rendered)["input_ids"], dtype=np.int64),
            features={k: out[k] for k in ("pixel_values", "image_grid_thw")},
        ),
    )


def training_group(
    prompt: Prompt, lengths: list[int], seed: int = 0, *, vocabulary: int = 256
) -> TrainingGroup:
    """A group with random answers of these lengths, random behaviour log-probabilities and advantages."""
    rng = np.random.default_rng(seed)
    completions = tuple(
        Completion(
            token_ids=rng.integers(0, vocabulary, n).astype(np.int64),
            logprobs=rng.normal(-5, 1, n).astype(np.float32),
            finish_reason="stop",
            weight_version=0,
        )
        for n in lengths
    )
    return TrainingGroup(
        prompt=prompt,
        completions=completions,
        advantages=tuple(rng.normal(0, 1, n).astype(np.float32) for n in lengths),
    )


def mixed_groups(folder: Path, n: int = 3) -> list[TrainingGroup]:
    """Text only, one image, two images of different sizes, and a long and a one-token answer among the
    groups."""
    prompts = [
        text_prompt(folder, "What is 3 + 4?", "text"),
        image_prompt(folder, "Count the shapes.", [picture(1)], "one"),
        image_prompt(folder, "Which is larger?", [picture(2, 56, 112), picture(3, 140, 84)], "two"),
        text_prompt(folder, "Find x.", "short"),
    ]
    lengths = [[5, 9, 7], [1, 4, 12], [8, 1, 3], [2, 30, 6]]
    return [training_group(p, ls[:n], seed=i) for i, (p, ls) in enumerate(zip(prompts, lengths, strict=True))]
