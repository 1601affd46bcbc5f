"""`file`: metrics.jsonl and generations.jsonl in the run's folder, appended to on resume, never rewritten."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from seerl.tracking.fanout import RunInfo
from seerl.types import Generation


class FileTracker:
    """One JSON object a line, flushed as written. A figure that is not finite is written as null.

    After a resume from an earlier step some steps stand twice: the later line is the one that counts.
    """

    def __init__(self, info: RunInfo) -> None:
        self.run_id: str | None = None
        self._folder = info.run_dir
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _open(self._folder / "metrics.jsonl")
        self._generations = _open(self._folder / "generations.jsonl")

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends one line with the step and its figures."""
        _write(self._metrics, {"step": step, **{k: _finite(v) for k, v in sorted(metrics.items())}})

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Appends a line per answer; its images lie beside it as PNG files."""
        for number, generation in enumerate(generations):
            images = []
            for place, image in enumerate(generation.images):
                path = Path("images") / f"step{step}-{number}-{place}.png"
                (self._folder / "images").mkdir(exist_ok=True)
                image.save(self._folder / path)
                images.append(str(path))
            _write(
                self._generations,
                {
                    "step": step,
                    "row_id": generation.row_id,
                    "prompt": generation.prompt,
                    "response": generation.response,
                    "ground_truth": generation.ground_truth,
                    "score": _finite(generation.score),
                    "parts": {k: _finite(v) for k, v in generation.parts.items()},
                    "images": images,
                },
            )

    def finish(self, exit_code: int) -> None:
        """Closes the files."""
        self._metrics.close()
        self._generations.close()


def _open(path: Path) -> TextIO:
    """Opens for appending, after whatever a killed run may have left of an unfinished line."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
    # A lone surrogate in a data set's text is written as \uXXXX, which is how JSON spells it.
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def _write(file: TextIO, record: Mapping[str, object]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
