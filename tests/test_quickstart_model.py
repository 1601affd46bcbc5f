"""The small model that the examples make from nothing, its warm-up, and what is read from a finished run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from examples.quickstart.make_base import RIGHT_SHARE, TAGS, make_base, response, unsure
from examples.quickstart.results import accuracy_by_kind, read_generations, read_metrics, summarise
from examples.quickstart.tiny_model import make_model, make_tokenizer, save
from examples.quickstart.training import plain, question
from examples.quickstart.warm_up import Classroom, Progress, lessons, read_rows, warm_up
from seerl.config.schema import DataConfig
from seerl.data.loader import PromptLoader
from seerl.data.synthetic import write_data


@pytest.fixture(scope="module")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_data(tmp_path_factory.mktemp("data"), train_rows=640, validation_rows=40)
    return folder / "train.parquet"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, train_file: Path) -> tuple[Path, list[Progress]]:
    """A base model after a few steps, and how they went."""
    seen: list[Progress] = []
    folder = tmp_path_factory.mktemp("base")
    make_base(folder, train_file, steps=6, batch_size=16, report=seen.append)
    return folder, seen


def test_the_folder_loads_as_any_hub_model_and_has_at_most_5m_parameters(
    base: tuple[Path, list[Progress]],
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(base[0])
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 5_000_000
    assert model.generation_config.eos_token_id == [
        model.config.text_config.eos_token_id,
        model.config.text_config.bos_token_id,
    ]


def test_processor_round_trip_and_a_generated_answer(
    base: tuple[Path, list[Progress]], train_file: Path
) -> None:
    processor = AutoProcessor.from_pretrained(base[0])
    lesson = next(lessons(read_rows(train_file), unsure, seed=0))
    words = lesson.problem.removeprefix("<image>")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=[lesson.image], return_tensors="pt")
    image_token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert int((inputs["input_ids"] == image_token).sum()) == 9  # 3 x 3 cells, a token each
    decoded = processor.tokenizer.decode(inputs["input_ids"][0])
    assert decoded.replace("<|image_pad|>" * 9, "<|image_pad|>") == text
    assert question(decoded) == words
    model: Any = AutoModelForImageTextToText.from_pretrained(base[0])
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > inputs["input_ids"].shape[1]


def test_any_text_survives_the_tokenizer_and_answers_are_short(base: tuple[Path, list[Progress]]) -> None:
    tokenizer = AutoProcessor.from_pretrained(base[0]).tokenizer
    for text in ("What colour is the ring?", "naïve 你好 \\frac{1}{2} 🙂\n\t", "<think>a</think>\\boxed{12}"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for problem, answer in (
        ("<image>How many shapes are there?", "3"),
        ("<image>What shape is red?", "triangle"),
    ):
        ids = tokenizer.encode(response(problem, answer))
        assert 8 <= len(ids) + 1 <= 16
        assert answer in [tokenizer.decode([i]) for i in ids]


def test_warm_up_learns(base: tuple[Path, list[Progress]]) -> None:
    losses = [p.loss for p in base[1]]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
    assert base[1][-1].probability > base[1][0].probability


def test_warm_up_is_the_same_for_the_same_seed(
    base: tuple[Path, list[Progress]], train_file: Path, tmp_path: Path
) -> None:
    def losses(seed: int) -> list[float]:
        seen: list[Progress] = []
        folder = tmp_path / str(seed)
        make_base(folder, train_file, steps=3, batch_size=16, seed=seed, report=seen.append)
        return [p.loss for p in seen]

    assert losses(0) == pytest.approx([p.loss for p in base[1][:3]], rel=1e-5)
    assert losses(1) != pytest.approx([p.loss for p in base[1][:3]], rel=1e-5)


def test_warm_up_ends_once_right_answers_are_likely_enough(
    base: tuple[Path, list[Progress]], train_file: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(base[0], tmp_path / "model")
    taught = lessons(read_rows(train_file), unsure, seed=0)
    progress = warm_up(folder, taught, until=0.0, most_steps=20, batch_size=4)
    assert progress.step == 4  # as many as the average is taken over


def test_the_right_answer_is_believed_most_and_shares_add_up(train_file: Path) -> None:
    for row in read_rows(train_file)[:40]:
        right, *others = unsure(row)
        assert right.answer == row["answer"]
        assert right.share == RIGHT_SHARE[1 + len(others)]
        assert all(other.share < right.share for other in others)
        assert sum(choice.share for choice in (right, *others)) == pytest.approx(1)


def test_the_shipped_base_model_is_small_and_answers_in_the_taught_form(train_file: Path) -> None:
    folder = Path(__file__).parent.parent / "examples" / "quickstart" / "base"
    assert sum(f.stat().st_size for f in folder.iterdir()) < 8e6
    processor = AutoProcessor.from_pretrained(folder)
    assert all(len(processor.tokenizer.encode(tag)) == 1 for tag in TAGS)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    lesson = next(lessons(read_rows(train_file), unsure, seed=0))
    words = lesson.problem.removeprefix("<image>")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=[lesson.image], return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert plain(answer) in {choice.response for choice in lesson.choices}


def test_lessons_are_the_prompts_that_training_uses(
    base: tuple[Path, list[Progress]], train_file: Path
) -> None:
    rows = read_rows(train_file)
    processor = AutoProcessor.from_pretrained(base[0])
    config = DataConfig(
        train_files=str(train_file),
        prompt_key="problem",
        answer_key="answer",
        rollout_batch_size=8,
        shuffle=False,
        min_pixels=784,
        max_pixels=7056,
        filter_overlong_prompts=False,
    )
    loader = PromptLoader(config, processor=processor, tokenizer=processor.tokenizer, workers=0)
    taught = Classroom(base[0]).groups(list(_in_order(rows[:8])))
    for prompt, group in zip(loader.take(8), taught, strict=True):
        assert np.array_equal(prompt.token_ids, group.prompt.token_ids)
        assert prompt.text == group.prompt.text
        assert prompt.media is not None
        assert group.prompt.media is not None
        for name, tensor in prompt.media.features.items():
            assert torch.equal(tensor, group.prompt.media.features[name]), name
    loader.close()


def _in_order(rows):  # type: ignore[no-untyped-def]
    for row in rows:
        yield next(lessons([row], unsure, seed=0))


def test_a_response_weighs_its_answer_most(base: tuple[Path, list[Progress]], train_file: Path) -> None:
    (group,) = Classroom(base[0]).groups([next(lessons(read_rows(train_file), unsure, seed=0))])
    weights, completion = group.advantages[0], group.completions[0]
    tokenizer = AutoProcessor.from_pretrained(base[0]).tokenizer
    heavy = completion.token_ids[weights > 2 * weights.min()]
    assert heavy.size == 1
    assert tokenizer.decode(completion.token_ids).count(tokenizer.decode(heavy)) == 1
    assert completion.token_ids[-1] == tokenizer.eos_token_id


def test_a_model_of_other_patches_reads_pictures_of_64(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["is there a red shape? yes no"])
    save(tmp_path, make_model(tokenizer, patch=8), tokenizer)
    features = AutoProcessor.from_pretrained(tmp_path).image_processor(
        torch.zeros(3, 64, 64, dtype=torch.uint8), return_tensors="pt"
    )
    assert features["image_grid_thw"].tolist() == [[1, 8, 8]]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert model.config.vision_config.patch_size == 8


def test_results_are_read_from_what_a_run_logged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    metrics = [
        {"step": 0, "val/accuracy_reward": 0.25, "timing_s/val": 9.0},
        {"step": 1, "timing_s/step": 99.0},
        {"step": 1, "timing_s/step": 1.0},  # done again after a resume
        {"step": 2, "val/accuracy_reward": 0.5, "timing_s/val": 2.0},
        {"step": 2, "timing_s/step": 3.0},
        {"step": 3, "timing_s/step": 5.0},
        {"step": 3, "val/accuracy_reward": 1.0, "timing_s/val": 9.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    answers = [
        {"step": step, "row_id": f"validation.parquet:{row}", "parts": {"accuracy": accuracy}}
        for step, by_row in ((0, (0, 0, 0, 1)), (3, (1, 1, 1, 1)))
        for row, accuracy in reversed(list(enumerate(by_row)))
    ]
    (run / "generations.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    kinds = ["count", "colour", "count", "colour"]
    assert accuracy_by_kind(read_generations(run, 0), kinds) == {"count": 0.0, "colour": 0.5}
    assert read_metrics(run)[1]["timing_s/step"] == 1.0
    assert summarise(run, tmp_path / "model", kinds) == {
        "accuracy_before": 0.25,
        "accuracy_after": 1.0,
        "accuracy_before_by_kind": {"count": 0.0, "colour": 0.5},
        "accuracy_after_by_kind": {"count": 1.0, "colour": 1.0},
        "train_seconds": 11.0,
        "step_seconds_median": 3.0,
        "steps": 3,
        "checkpoint": str(run / "global_step_3"),
        "export": str(tmp_path / "model"),
        "metrics": str(run / "metrics.jsonl"),
    }


def test_answers_are_shown_without_end_tokens_and_control_characters() -> None:
    assert plain("\\boxed{3}<|im_end|>") == "\\boxed{3}"
    assert plain("a\x1b[31mb") == "a\N{REPLACEMENT CHARACTER}[31mb"
