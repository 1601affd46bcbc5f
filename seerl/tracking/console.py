"""`console`: a live display on a terminal, one plain line per step otherwise."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from seerl.tracking.live import LiveDisplay
from seerl.tracking.tracker import RunInfo
from seerl.types import Generation

SHOWN = (
    ("reward", "reward/overall", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.1%}"),
    ("response tokens", "response_length/mean", "{:.1f}"),
    ("cut off", "response_length/clip_ratio", "{:.1%}"),
    ("entropy", "actor/entropy_loss", "{:.3f}"),
    ("grad norm", "actor/grad_norm", "{:.3f}"),
    ("KL", "actor/kl_loss", "{:.4f}"),
    ("tokens/s", "perf/throughput", "{:,.0f}"),
    ("s/step", "perf/time_per_step", "{:.2f}"),
)
"""What a person watches: label, metric, format. Metrics that a run does not have are left out."""
RECENT = 8
"""Steps whose time the estimate of the time left is made from."""
ANSWERS_SHOWN = 3
ANSWER_LENGTH = 120


class Display(Protocol):
    """Where the console tracker's output appears."""

    def stage(self, name: str) -> None: ...

    def step(self, step: int, figures: Sequence[tuple[str, str]], left: str) -> None: ...

    def validation(self, step: int, rows: Sequence[tuple[str, str, str]]) -> None: ...

    def line(self, text: str) -> None: ...

    def close(self, exit_code: int) -> None: ...


class ConsoleTracker:
    """Shows the run to the person at the terminal, or to the reader of a log file."""

    def __init__(self, info: RunInfo) -> None:
        self.run_id: str | None = None
        self._total = info.total_steps
        self._seconds: list[float] = []
        self._validation: dict[str, float] = {}
        # A terminal of another encoding shows what it can; `?` is better than a run that ends.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and not is_unicode(stream.encoding):
                stream.reconfigure(errors="replace")
        self._display: Display = (
            LiveDisplay(f"{info.project}/{info.experiment}", info.total_steps, info.start_step)
            if LiveDisplay.possible()
            else PlainDisplay(info.total_steps)
        )

    def stage(self, name: str) -> None:
        """Shows what the run is doing."""
        self._display.stage(name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Shows a training step's figures, or a validation's."""
        validation = validation_figures(metrics)
        if validation:
            rows = [
                (name, figure(value), figure(self._validation[name]) if name in self._validation else "-")
                for name, value in validation.items()
            ]
            self._display.validation(step, rows)
            self._validation = validation
        seconds = metrics.get("perf/time_per_step")
        if seconds is None:
            return
        if math.isfinite(seconds):
            self._seconds = [*self._seconds[-RECENT + 1 :], seconds]
        shown = [(label, figure(metrics[name], form)) for label, name, form in SHOWN if name in metrics]
        self._display.step(step, shown, self._time_left(step))

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Prints a few answers."""
        del step
        for generation in generations[:ANSWERS_SHOWN]:
            answer, truth = visible(generation.response), visible(generation.ground_truth)
            self._display.line(
                f"  {visible(generation.row_id)}: {shortened(answer)}  "
                f"(truth {shortened(truth)}, score {figure(generation.score, '{:.2f}')})"
            )

    def finish(self, exit_code: int) -> None:
        """Leaves the last state on the screen."""
        self._display.close(exit_code)

    def _time_left(self, step: int) -> str:
        if not self._seconds:
            return "-"
        seconds = round(max(0, self._total - step) * sum(self._seconds) / len(self._seconds))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        clock = (
            f"{hours:02d}:{minutes:02d}:{seconds:02d}" if days or hours else f"{minutes:02d}:{seconds:02d}"
        )
        return f"{days}d {clock}" if days else clock


class PlainDisplay:
    """One line per event for files, pipes and CI: `step`, `validation` and answers, easy to grep."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps

    def stage(self, name: str) -> None:
        """Not shown: every line of a log stands for a result."""

    def step(self, step: int, figures: Sequence[tuple[str, str]], left: str) -> None:
        """`step 12/300  reward 0.512  ...  left 10:31`, in columns."""
        place = f"{step}/{self._total}"
        cells = "  ".join(f"{label} {value:<7}" for label, value in figures)
        self.line(f"step {place:<{2 * len(str(self._total)) + 1}}  {cells}  left {left}")

    def validation(self, step: int, rows: Sequence[tuple[str, str, str]]) -> None:
        """`validation at step 10/300  reward 0.612  ...`."""
        cells = "  ".join(f"{name} {value}" for name, value, _ in rows)
        self.line(f"validation at step {step}/{self._total}  {cells}")

    def line(self, text: str) -> None:
        """Prints and flushes: a log that is followed shows the step when it is done."""
        try:
            print(text, flush=True)
        except (
            BrokenPipeError
        ):  # `| head` has gone; what follows goes nowhere, or the exit code would be lost
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise

    def close(self, exit_code: int) -> None:
        """Nothing is open."""


def figure(value: float, form: str = "{:.3f}") -> str:
    """The value as text; `nan` and `inf` are said, never formatted as a percentage."""
    return form.format(value) if math.isfinite(value) else str(float(value))


def validation_figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a validation says of the model, in short names: the scores, and the mean length of an answer."""
    names = {}
    for name, value in metrics.items():
        if name == "val/reward_score":
            names["reward"] = value
        elif name.startswith("val/") and (name.endswith("_reward") or "@" in name):
            names[visible(name.removeprefix("val/").removesuffix("_reward"))] = value
        elif name == "val_response_length/mean":
            names["response tokens"] = value
    return names


def visible(text: str) -> str:
    """The text on one line, without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def shortened(text: str) -> str:
    return text if len(text) <= ANSWER_LENGTH else text[: ANSWER_LENGTH - 3] + "..."


def is_unicode(encoding: str) -> bool:
    return encoding.lower().replace("-", "").startswith("utf")
