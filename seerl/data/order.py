"""In which order an epoch takes the rows: a function of (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class EpochOrder:
    """Each epoch has as many rows as the sources together; with weights, each source's share is its weight's.

    A source that is too small for its share is repeated, one that is too large is drawn from, anew every
    epoch.
    """

    def __init__(
        self, rows: Sequence[Rows], weights: Sequence[float | None], seed: int, shuffle: bool
    ) -> None:
        """`rows`: the usable rows of each source. A weight left out among weights is 1."""
        self._rows = rows
        self._counts = _shares([len(part) for part in rows], weights)
        self._seed = seed
        self._shuffle = shuffle
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def __len__(self) -> int:
        return sum(self._counts)

    def _epoch(self, epoch: int) -> tuple[Rows, Rows]:
        """(row, repetition) at each position; the repetition is above 0 where a row comes again."""
        generator = np.random.default_rng([self._seed, epoch])
        rows, repeats = [], []
        for part, count in zip(self._rows, self._counts, strict=True):
            whole, rest = divmod(count, max(1, len(part)))
            drawn = np.sort(generator.permutation(len(part))[:rest])
            rows += [np.tile(part, whole), part[drawn]]
            repeats += [np.repeat(np.arange(whole), len(part)), np.full(rest, whole)]
        all_rows, all_repeats = np.concatenate(rows), np.concatenate(repeats)
        if self._shuffle:
            order = generator.permutation(len(all_rows))
            all_rows, all_repeats = all_rows[order], all_repeats[order]
        return all_rows, all_repeats


def _shares(sizes: list[int], weights: Sequence[float | None]) -> list[int]:
    """How many rows of each source an epoch takes; they sum to the number of all rows."""
    if all(weight is None for weight in weights):
        return sizes
    # a source without a usable row cannot take a share
    numbers = np.array(
        [0.0 if size == 0 else 1.0 if w is None else w for size, w in zip(sizes, weights, strict=True)]
    )
    exact = sum(sizes) * numbers / numbers.sum()
    counts = np.floor(exact).astype(int)
    for source in np.argsort(counts - exact, kind="stable")[: sum(sizes) - counts.sum()]:
        counts[source] += 1
    return counts.tolist()
