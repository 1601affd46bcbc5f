"""From the number of a row to its prompt, or to why it cannot be used: what the worker processes do."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from seerl.config.schema import DataConfig
from seerl.data.bad_rows import BadRow, BadRowLog, OverlongRow, Refusal
from seerl.data.images import image_size, load_image
from seerl.data.prompts import PromptBuilder
from seerl.data.rows import Row, RowReader
from seerl.data.sources import Source, load_sources, require_columns
from seerl.data.workers import Prefetcher, usable_cpus
from seerl.errors import UserError
from seerl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

log = logging.getLogger(__name__)

ROWS_PER_CHECK = 32
"""Rows that a worker checks at a time."""

Rows = npt.NDArray[np.int64]


class PromptSet:
    """The rows of all sources, numbered through, each of which can be checked and made into a Prompt."""

    def __init__(
        self,
        config: DataConfig,
        key: str,
        processor: ProcessorMixin | None,
        tokenizer: PreTrainedTokenizerBase,
        with_features: bool,
    ) -> None:
        """`key` is `train_files` or `val_files`. Raises UserError for what the sources or templates lack."""
        self.config = config
        self.name = f"data.{key}"
        self.sources: list[Source] = load_sources(getattr(config, key), self.name)
        require_columns(
            self.sources, {"data.prompt_key": config.prompt_key, "data.answer_key": config.answer_key}
        )
        self._starts = np.cumsum([0, *(len(source) for source in self.sources)])
        self._reader = RowReader(config)
        self._builder = PromptBuilder(config, processor, tokenizer, with_features)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def has_images(self) -> bool:
        """Whether any source has the image column."""
        return any(self.config.image_key in source.columns for source in self.sources)

    def rows_of(self, source: int) -> range:
        """The numbers of a source's rows."""
        return range(int(self._starts[source]), int(self._starts[source + 1]))

    def row_id(self, row: int) -> str:
        """Names the row to a person: file and index."""
        source = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.sources[source].row_id(row - int(self._starts[source]))

    def prepare(self, job: tuple[int, str]) -> Prompt | Refusal:
        """The prompt of (row, uid)."""
        number, uid = job
        try:
            row = self._read(number)
            bounds = (self.config.image_dir, self.config.min_pixels, self.config.max_pixels)
            images = [load_image(source, *bounds) for source in row.images]
            return self._builder.build(row, images, uid)
        except BadRow as error:
            return self._refusal(number, error)

    def check(self, numbers: Sequence[int]) -> list[Refusal | int]:
        """For each row its number of images, or why it cannot be used; images are read no further than their
        headers."""
        return [self._check(number) for number in numbers]

    def _check(self, number: int) -> Refusal | int:
        try:
            row = self._read(number)
            bounds = (self.config.image_dir, self.config.min_pixels, self.config.max_pixels)
            sizes = [image_size(source, *bounds) for source in row.images]
            self._builder.check_length(self._builder.count_tokens(row, sizes), len(sizes))
            return len(sizes)
        except BadRow as error:
            return self._refusal(number, error)

    def _read(self, number: int) -> Row:
        source = int(np.searchsorted(self._starts, number, side="right")) - 1
        columns = self.sources[source].row(number - int(self._starts[source]))
        row = self._reader.read(columns, self.row_id(number))
        if row.images and not self._builder.reads_images:
            raise _NotAVisionModel(
                "the row has images, but the model (worker.actor.model.model_path) reads text alone"
            )
        return row

    def _refusal(self, number: int, error: BadRow) -> Refusal:
        return Refusal(
            row_id=self.row_id(number),
            reason=str(error),
            overlong=isinstance(error, OverlongRow),
            fatal=isinstance(error, _NotAVisionModel),
        )


class _NotAVisionModel(BadRow):
    """No row with images can be used with this model."""


def usable_rows(prompts: PromptSet, bad_rows: BadRowLog) -> tuple[Rows, int]:
    """(the rows to use, the most images that one of them has).

    With filter_overlong_prompts the rows that pass the check; else all, to be checked at use, and the
    images are those of the image column (a chat prompt's own are not counted). Raises UserError if no row is
    left.
    """
    total = len(prompts)
    if not prompts.config.filter_overlong_prompts:
        most_images = max(source.longest_list(prompts.config.image_key) for source in prompts.sources)
        return np.arange(total), most_images
    most_images = 0
    usable = np.ones(total, dtype=bool)
    overlong = 0
    for number, answer in enumerate(_checked(prompts, total)):
        if isinstance(answer, Refusal):
            bad_rows.add(answer, filtering=True)
            usable[number] = False
            overlong += answer.overlong
        else:
            most_images = max(most_images, answer)
    bad = total - int(usable.sum()) - overlong
    if overlong or bad:
        where = f"; listed in {bad_rows.path}" if bad_rows.path else ""
        log.warning(
            "%s: of %d rows, %d are longer than data.max_prompt_length=%d and %d cannot be used%s",
            prompts.name, total, overlong, prompts.config.max_prompt_length, bad, where,
        )  # fmt: skip
    if not usable.any():
        row_id, reason = next(iter(bad_rows.reasons.items()))
        raise UserError(f"{prompts.name}: none of {total} rows can be used. The first, {row_id}: {reason}")
    return np.flatnonzero(usable), most_images


def _checked(prompts: PromptSet, total: int) -> Iterator[Refusal | int]:
    chunks = [range(first, min(first + ROWS_PER_CHECK, total)) for first in range(0, total, ROWS_PER_CHECK)]
    workers = min(prompts.config.filter_overlong_prompts_workers, usable_cpus(), len(chunks) // 4)
    results = Prefetcher(prompts.check, chunks, workers, depth=2 * workers)
    try:
        for _ in chunks:
            yield from results.next()
    finally:
        results.stop()
