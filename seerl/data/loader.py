"""The prompts of a run, in order: an endless, exactly resumable stream for training, and the validation rows.

Consumes: rows (preparation.py), prepared by worker processes ahead of time (workers.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seerl.config.schema import DataConfig
from seerl.data.bad_rows import BadRowLog, Refusal
from seerl.data.order import EpochOrder
from seerl.data.preparation import PromptSet, usable_rows
from seerl.data.workers import Job, Prefetcher, default_workers
from seerl.errors import UserError
from seerl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


class PromptLoader:
    """The training prompts: an endless iterator of batches of `data.rollout_batch_size`, or `take` any
    number.

    An epoch hands out the first `steps_per_epoch` x batch rows of its order. A row found bad when it is
    prepared is replaced by the next of those left over; once these are used up the epoch is shorter by a row.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        processor: ProcessorMixin | None,
        tokenizer: PreTrainedTokenizerBase,
        with_features: bool = True,
        run_folder: str | Path | None = None,
        workers: int | None = None,
    ) -> None:
        """Opens the data and, with `data.filter_overlong_prompts`, checks every row.

        `with_features`: whether prompts carry what the processor makes for the model's forward.
        `run_folder`: where bad_rows.jsonl goes. `workers`: processes that prepare prompts; 0 prepares them
        here; None decides by the data and the CPUs. Raises UserError: data that cannot be read, or that is
        smaller than a batch.
        """
        self.batch_size = config.rollout_batch_size
        self.bad_rows = BadRowLog(run_folder, config.on_bad_row)
        self._prompts = PromptSet(config, "train_files", processor, tokenizer, with_features)
        usable, self.max_images = usable_rows(self._prompts, self.bad_rows)
        parts = [self._prompts.rows_of(number) for number in range(len(self._prompts.sources))]
        self._order = EpochOrder(
            [usable[(usable >= part.start) & (usable < part.stop)] for part in parts],
            [source.weight for source in self._prompts.sources],
            config.seed,
            config.shuffle,
        )
        if len(self._order) < self.batch_size:
            raise UserError(
                f"data.train_files has {len(self._order)} usable rows (of {len(self._prompts)}), fewer "
                f"than one batch of data.rollout_batch_size={self.batch_size} prompts. Lower "
                "data.rollout_batch_size or give more data."
            )
        self._identity = {"rows": len(self._order), "seed": config.seed, "shuffle": config.shuffle}
        self._workers = default_workers(self._prompts.has_images) if workers is None else workers
        self._epoch, self._position, self._spares = 0, 0, 0
        self._taken = self._epoch, self._position, self._spares
        self._pending: list[tuple[Prompt, tuple[int, int, int]]] = []
        self._refused_in_a_row = 0
        self._prepared: Prefetcher | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch; what remains is left out, another remainder every epoch."""
        return len(self._order) // self.batch_size

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the row handed out last."""
        return self._taken[0]

    def __iter__(self) -> Iterator[tuple[Prompt, ...]]:
        return self

    def __next__(self) -> tuple[Prompt, ...]:
        return self.take(self.batch_size)

    def take(self, count: int) -> tuple[Prompt, ...]:
        """The next `count` prompts. Raises UserError for a bad row under on_bad_row=raise; WorkerDied."""
        # an interrupted call leaves what it had to the next one, and the state where it was
        while len(self._pending) < count:
            prompt = self._next_prompt()
            if prompt is not None:
                self._pending.append((prompt, (self._epoch, self._position, self._spares)))
        taken, self._pending = self._pending[:count], self._pending[count:]
        if taken:
            self._taken = taken[-1][1]
        return tuple(prompt for prompt, _ in taken)

    def start(self) -> None:
        """Starts the workers; best before engines are built (see workers.py). `take` does it otherwise."""
        if self._prepared is None:
            jobs = self._jobs(self._epoch, self._position)
            self._prepared = Prefetcher(self._prompts.prepare, jobs, self._workers, self.batch_size)

    def close(self) -> None:
        """Ends the workers. The loader can go on afterwards, from where it stood."""
        if self._prepared is not None:
            self._prepared.stop()
            self._prepared = None

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, exact to the row, whatever has been prepared ahead."""
        epoch, position, spares = self._taken
        return {"epoch": epoch, "position": position, "spares": spares, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there. Raises UserError if the data or its order is not what it was."""
        lost = {"epoch", "position", "spares", *self._identity} - state.keys()
        if lost:
            raise UserError(
                f"The checkpoint's place in the data lacks {', '.join(sorted(lost))}: it is damaged. Name an "
                "earlier one by trainer.load_checkpoint_path, or start a new run from its model."
            )
        differences = [
            f"{name} {state[name]} then, {value} now"
            for name, value in self._identity.items()
            if state[name] != value
        ]
        if differences:
            raise UserError(
                "The checkpoint's place in the data does not fit data.train_files any more: "
                f"{'; '.join(differences)} (usable rows, data.seed, data.shuffle). Restore them, or start a "
                "new run from the checkpoint's model."
            )
        self.close()
        self._epoch, self._position, self._spares = state["epoch"], state["position"], state["spares"]
        self._taken = self._epoch, self._position, self._spares
        self._pending = []

    @property
    def _epoch_length(self) -> int:
        return self.steps_per_epoch * self.batch_size

    def _jobs(self, epoch: int, position: int) -> Iterator[Job]:
        while True:
            for place in range(position, self._epoch_length):
                yield self._job(epoch, place)
            epoch, position = epoch + 1, 0

    def _job(self, epoch: int, position: int) -> Job:
        rows, repeats = self._order.epoch(epoch)
        again = f".{repeats[position]}" if repeats[position] else ""
        row = int(rows[position])
        return row, f"{self._prompts.row_id(row)}#{epoch}{again}"

    def _next_prompt(self) -> Prompt | None:
        """The prompt of the next place; None where its row is bad and no other is left in the epoch."""
        self.start()
        assert self._prepared is not None
        if self._position >= self._epoch_length:
            self._epoch, self._position, self._spares = self._epoch + 1, 0, 0
        result: Prompt | Refusal = self._prepared.next()
        self._position += 1
        while isinstance(result, Refusal):
            self._refused(result)
            spare = self._epoch_length + self._spares
            if spare >= len(self._order):
                return None
            self._spares += 1
            result = self._prompts.prepare(self._job(self._epoch, spare))
        self._refused_in_a_row = 0
        return result

    def _refused(self, refusal: Refusal) -> None:
        self.bad_rows.add(refusal)
        self._refused_in_a_row += 1
        if self._refused_in_a_row > len(self._order):
            raise UserError(
                f"data.train_files: no row can be used. The last, {refusal.row_id}: {refusal.reason}"
            )


class ValidationSet:
    """The validation prompts: every usable row once, in file order, `data.val_batch_size` of them a batch."""

    def __init__(
        self,
        config: DataConfig,
        *,
        processor: ProcessorMixin | None,
        tokenizer: PreTrainedTokenizerBase,
        run_folder: str | Path | None = None,
        with_features: bool = False,
        workers: int | None = None,
    ) -> None:
        """As PromptLoader, from `data.val_files`."""
        if config.val_batch_size == 0 or config.val_batch_size < -1:
            raise UserError(
                f"data.val_batch_size={config.val_batch_size}: must be above 0, or -1 for all at once."
            )
        self.bad_rows = BadRowLog(run_folder, config.on_bad_row)
        self._prompts = PromptSet(config, "val_files", processor, tokenizer, with_features)
        weighted = [source.row_id(0) for source in self._prompts.sources if source.weight is not None]
        if weighted:
            raise UserError(
                f"data.val_files: {weighted[0][:-2]} has a weight, but validation takes every row once."
            )
        self._rows, self.max_images = usable_rows(self._prompts, self.bad_rows)
        self.batch_size = len(self._rows) if config.val_batch_size == -1 else config.val_batch_size
        self._workers = default_workers(self._prompts.has_images) if workers is None else workers
        self._prepared: Prefetcher | None = None

    def __len__(self) -> int:
        """The number of rows (those found bad later included)."""
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[Prompt, ...]]:
        """One pass. Rows found bad are left out; raises UserError if none is left."""
        self.start()
        assert self._prepared is not None
        batch: list[Prompt] = []
        finished, usable = False, 0
        try:
            for _ in self._rows:
                result: Prompt | Refusal = self._prepared.next()
                if isinstance(result, Refusal):
                    self.bad_rows.add(result)
                    last = result
                    continue
                usable += 1
                batch.append(result)
                if len(batch) == self.batch_size:
                    yield tuple(batch)
                    batch = []
            if not usable:
                raise UserError(f"data.val_files: no row can be used. The last, {last.row_id}: {last.reason}")
            finished = True
        finally:
            if not finished:  # the workers stand in the middle of a pass
                self.close()
        if batch:
            yield tuple(batch)

    def start(self) -> None:
        """Starts the workers; they stay for later passes, with a few prompts ready."""
        if self._prepared is None:
            depth = min(self.batch_size, 4 * self._workers)
            self._prepared = Prefetcher(self._prompts.prepare, self._jobs(), self._workers, depth)

    def close(self) -> None:
        """Ends the workers."""
        if self._prepared is not None:
            self._prepared.stop()
            self._prepared = None

    def _jobs(self) -> Iterator[Job]:
        while True:
            for row in np.asarray(self._rows):
                yield int(row), f"{self._prompts.row_id(int(row))}#val"
