"""`file`: metrics.jsonl and generations.jsonl in the run's folder, appended to on resume, never rewritten."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL.Image import Image

from seerl.tracking.text import rgb_images
from seerl.tracking.tracker import RunInfo
from seerl.types import Generation

LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Characters that JSON leaves in a string but that many readers take for the end of a line."""


class FileTracker:
    """One JSON object a line, on the disk when `log` returns. A figure that is not finite is written as null.

    A run that goes on in a folder with figures adds the line {"resumed_from": STEP}: earlier lines of later
    steps are history that was not continued. Lines that cannot be written (a full disk) are kept and written
    with the next ones that can.
    """

    def __init__(self, info: RunInfo) -> None:
        self.run_id: str | None = None
        self._folder = info.run_dir
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = JsonLines(self._folder / "metrics.jsonl")
        self._generations = JsonLines(self._folder / "generations.jsonl")
        if self._metrics.had_lines:
            self._metrics.write({"resumed_from": info.start_step})

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends one line with the step and its figures."""
        self._metrics.write({"step": step, **{k: _finite(v) for k, v in sorted(metrics.items())}})

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Appends a line per answer; its images lie in images/ as PNG files named by their content, so that a
        picture that every validation shows is stored once."""
        for generation in generations:
            self._generations.write(
                {
                    "step": step,
                    "row_id": generation.row_id,
                    "prompt": generation.prompt,
                    "response": generation.response,
                    "ground_truth": generation.ground_truth,
                    "score": _finite(generation.score),
                    "parts": {k: _finite(v) for k, v in generation.parts.items()},
                    "images": [self._stored(image) for image in rgb_images(generation)],
                }
            )

    def finish(self, exit_code: int) -> None:
        """Closes the files; raises OSError where lines are still unwritten."""
        del exit_code
        self._metrics.close()
        self._generations.close()

    def _stored(self, image: Image) -> str:
        """The path, relative to the run's folder, of the image's PNG file, which is whole or absent."""
        name = hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()[:16]
        path = self._folder / "images" / f"{name}.png"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            partial = path.with_suffix(".partial")
            try:
                image.save(partial, "PNG")
                partial.replace(path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
        return f"images/{name}.png"


class JsonLines:
    """A file of JSON objects, one a line, that is only ever appended to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab+", buffering=0)
        self._pending = b""
        self.had_lines = self._end_last_line()

    def write(self, record: Mapping[str, object]) -> None:
        """Appends the record; raises OSError where it cannot be written now, and keeps it for the next
        call."""
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=str).translate(LINE_ENDS)
        self._pending += text.encode("utf-8", "backslashreplace") + b"\n"
        self._flush()

    def close(self) -> None:
        """Writes what is pending and closes."""
        with self._file:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._pending:
                written = self._file.write(self._pending) or 0
                self._pending = self._pending[written:]
        except OSError as error:
            lines = self._pending.count(b"\n")
            raise OSError(
                error.errno,
                f"{error.strerror}: {lines} line(s) wait to be written to {self._path}; once there is room "
                "they follow",
            ) from error

    def _end_last_line(self) -> bool:
        """Ends what a killed run left unfinished: a line that is no whole object is cut off, for no reader
        could get past it. Whether any line is there."""
        size = self._file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        start = self._last_line_start(size)
        self._file.seek(start)
        tail = self._file.read(size - start)
        if tail:
            try:
                json.loads(tail)
                self._pending = b"\n"
            except ValueError:
                self._file.truncate(start)
        return start > 0 or bool(self._pending)

    def _last_line_start(self, size: int, block: int = 65536) -> int:
        """Where what follows the last line end begins."""
        end = size
        while end > 0:
            begin = max(0, end - block)
            self._file.seek(begin)
            found = self._file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0


def read_history(path: Path) -> dict[int, dict[str, float | None]]:
    """The figures of a metrics.jsonl by step, as they count: a step's lines are joined (training and
    validation log one each), later ones win, and steps that a resumed run went back behind are gone."""
    steps: dict[int, dict[str, float | None]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if "resumed_from" in record:
                steps = {step: row for step, row in steps.items() if step <= record["resumed_from"]}
            else:
                steps.setdefault(record.pop("step"), {}).update(record)
    return dict(sorted(steps.items()))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
