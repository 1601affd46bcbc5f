"""A new model's first lessons: what to believe of an answer, until it gives the right one now and then.

The measure that ends it is the probability of the right answer word for word, known from the forward pass on
pictures not yet learned from. Sampled at temperature 1 the model then is right about that often.
"""

from __future__ import annotations

import io
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from seerl.config.schema import DataConfig, FsdpConfig, ModelConfig
from seerl.data.prompts import PromptBuilder, load_processor
from seerl.data.rows import RowReader
from seerl.policy.forward import PolicyForward
from seerl.policy.model import load_model
from seerl.types import Completion, FloatArray, Media, Prompt, TrainingGroup

Row = dict[str, Any]
ANSWER_WEIGHT = 40.0
"""How much more the answer proper counts than the words around it, which are learned soon enough."""
RECENT = 4
"""Batches over which the probability of right answers is averaged."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One response to a problem, in which `answer` stands last, and the share of belief it is taught with."""

    response: str
    answer: str
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A picture, a problem with `<image>`, and what to believe of its answer; the right choice comes
    first."""

    image: Image.Image
    problem: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one step: the mean loss of a token, and the mean probability of the right response as a whole."""

    step: int
    loss: float
    probability: float


def read_rows(file: Path) -> list[Row]:
    """The rows of a parquet file, pictures still encoded."""
    from pyarrow import parquet

    return parquet.read_table(file).to_pylist()


def lessons(rows: Sequence[Row], teach: Callable[[Row], tuple[Choice, ...]], seed: int) -> Iterator[Lesson]:
    """Rows with what is taught of them, endlessly; every pass in another order, a function of the seed."""
    rng = random.Random(seed)
    while True:
        for row in rng.sample(rows, len(rows)):
            yield Lesson(
                image=Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB"),
                problem=row["problem"],
                choices=teach(row),
            )


class Classroom:
    """Turns lessons into what the policy's forward pass takes, a batch at a time.

    Prompts come from the ordinary data path, built once for each problem and picture size.
    """

    def __init__(self, folder: Path) -> None:
        config = DataConfig(prompt_key="problem", answer_key="answer")
        self._processor, self._tokenizer = load_processor(ModelConfig(model_path=str(folder)))
        self._reader = RowReader(config)
        self._builder = PromptBuilder(config, self._processor, self._tokenizer, with_features=False)
        self._prompts: dict[tuple[str, tuple[int, int]], Prompt] = {}
        self._responses: dict[tuple[str, str], tuple[Completion, FloatArray]] = {}

    def groups(self, lessons: Sequence[Lesson]) -> list[TrainingGroup]:
        """One group per lesson, a completion for each choice; tokens' weights as advantages."""
        features = self._processor.image_processor([x.image for x in lessons], return_tensors="pt")  # type: ignore[union-attr]
        grids = features["image_grid_thw"]
        patches = features["pixel_values"].split(grids.prod(dim=1).tolist())
        return [
            self._group(lesson, {"pixel_values": pixels, "image_grid_thw": grid[None]})
            for lesson, pixels, grid in zip(lessons, patches, grids, strict=True)
        ]

    def _group(self, lesson: Lesson, features: dict[str, torch.Tensor]) -> TrainingGroup:
        key = (lesson.problem, lesson.image.size)
        if key not in self._prompts:
            row = self._reader.read({"problem": lesson.problem, "images": [lesson.image]}, lesson.problem)
            self._prompts[key] = self._builder.build(row, [lesson.image], lesson.problem)
        known = self._prompts[key]
        assert known.media is not None
        media = Media(
            images=(lesson.image,),
            unexpanded_token_ids=known.media.unexpanded_token_ids,
            features=features,
        )
        taught = [self._response(choice) for choice in lesson.choices]
        return TrainingGroup(
            prompt=replace(known, media=media),
            completions=tuple(completion for completion, _ in taught),
            advantages=tuple(c.share * w for c, (_, w) in zip(lesson.choices, taught, strict=True)),
        )

    def _response(self, choice: Choice) -> tuple[Completion, FloatArray]:
        key = (choice.response, choice.answer)
        if key not in self._responses:
            encoded = self._tokenizer(choice.response, return_offsets_mapping=True)
            start = choice.response.rindex(choice.answer)
            stop = start + len(choice.answer)
            weights = [
                ANSWER_WEIGHT if first < stop and last > start else 1.0
                for first, last in encoded["offset_mapping"]
            ]
            ids = [*encoded["input_ids"], self._tokenizer.eos_token_id]
            completion = Completion(
                token_ids=np.array(ids, dtype=np.int64), logprobs=None, finish_reason="stop", weight_version=0
            )
            self._responses[key] = completion, np.array([*weights, 1.0], dtype=np.float32)
        return self._responses[key]


def warm_up(
    folder: Path,
    lessons: Iterator[Lesson],
    *,
    until: float = 1.0,
    most_steps: int,
    batch_size: int = 64,
    lr: float = 1e-3,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Trains the model in `folder` on the lessons, `batch_size` a step, and saves it there.

    The learning rate falls over the second half of `most_steps`. Ends after these, or as soon as the
    probability of the right response, averaged over the last few batches (each looked at before it is learned
    from), has reached `until`. No dropout, no randomness of its own: the same folder and lessons give the
    same model on the same machine.
    """
    classroom = Classroom(folder)
    loading = ModelConfig(model_path=str(folder), enable_gradient_checkpointing=False)
    model = load_model(loading, FsdpConfig(), torch.device("cpu"))
    forward = PolicyForward(model, banned=(), temperature=1.0, autocast=None)
    parameters = list(model.module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 8, max(0.1, 2 * (1 - step / most_steps)))
    )
    recent: deque[float] = deque(maxlen=RECENT)
    progress = Progress(0, float("nan"), 0.0)
    for step in range(1, most_steps + 1):
        groups = classroom.groups(list(itertools.islice(lessons, batch_size)))
        batch = forward.pack(groups)
        logprobs_M, _ = forward(batch)
        weights_M = batch.per_token(a for g in groups for a in g.advantages)
        loss = -(weights_M * logprobs_M).sum() / weights_M.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        whole_R = torch.zeros(len(batch.lengths_R)).index_add_(0, batch.response_M, logprobs_M.detach())
        firsts = np.cumsum([0, *(len(g.completions) for g in groups[:-1])])
        recent.append(float(whole_R[firsts].exp().mean()))
        progress = Progress(step, float(loss.detach()), sum(recent) / len(recent))
        if report is not None:
            report(progress)
        if len(recent) == RECENT and progress.probability >= until:
            break
    model.module.save_pretrained(folder)  # type: ignore[operator]
    return progress
