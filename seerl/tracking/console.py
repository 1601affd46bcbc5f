"""`console`: a live display on a terminal, one plain line per step otherwise."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from seerl.tracking.fanout import RunInfo
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
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""What a terminal would obey instead of showing it."""
RECENT = 8
"""Steps whose time the estimate of the time left is made from."""


class _Console(Console):
    """Raises when nobody reads any more (`seerl train ... | head`), where rich would end the program."""

    def on_broken_pipe(self) -> None:
        """Sends what is still to come nowhere, and says so once."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError("nobody reads the standard output any more")


class ConsoleTracker:
    """Shows the run to the person at the terminal, or to the reader of a log file."""

    def __init__(self, info: RunInfo) -> None:
        self.run_id: str | None = None
        self._total = info.total_steps
        self._title = f"{info.project}/{info.experiment}"
        self._console = _Console(stderr=False, highlight=False, soft_wrap=False)
        self._seconds: list[float] = []
        self._validation: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._step = 0
        able = self._console.is_terminal and not self._console.is_dumb_terminal
        # The display is drawn with characters that only Unicode has.
        self._live = self._start_live() if able and self._console.encoding.startswith("utf") else None

    def stage(self, name: str) -> None:
        """Shows what the run is doing."""
        if self._live is not None:
            self._progress.update(self._task, stage=name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Shows a training step's figures, or a validation's."""
        self._step = step
        validation = {k: v for k, v in metrics.items() if k.startswith("val")}
        if validation:
            self._validation = validation
            self._print(f"validation at step {step}: {_validation_line(validation)}")
        if "perf/time_per_step" not in metrics:
            return
        self._latest = dict(metrics)
        if math.isfinite(metrics["perf/time_per_step"]):
            self._seconds = [*self._seconds[-RECENT + 1 :], metrics["perf/time_per_step"]]
        if self._live is None:
            self._print(self._plain_line(step))
        else:
            self._progress.update(self._task, completed=step, left=self._time_left(step))
            self._live.update(self._view())

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Prints a few answers."""
        for generation in generations[:3]:
            answer = " ".join(generation.response.split())
            short = answer if len(answer) <= 120 else answer[:117] + "..."
            self._print(
                f"  {generation.row_id}: {short}  (truth {generation.ground_truth}, {generation.score:.2f})"
            )

    def finish(self, exit_code: int) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            self._progress.update(self._task, stage="done" if exit_code == 0 else "stopped")
            self._live.update(self._view())
            self._live.stop()
            logging.getLogger().removeHandler(self._handler)

    def _start_live(self) -> Live:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[stage]:<11}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=self._console,
        )
        self._task = self._progress.add_task("train", total=self._total, stage="starting", left="-")
        # Messages of the program go above the display instead of through it.
        self._handler = RichHandler(
            console=self._console, show_path=False, show_time=False, level=logging.WARNING
        )
        logging.getLogger().addHandler(self._handler)
        live = Live(self._view(), console=self._console, refresh_per_second=8)
        live.start()
        return live

    def _view(self) -> Panel:
        return Panel(Group(self._progress, self._figures()), title=Text(self._title), title_align="left")

    def _figures(self) -> Table:
        table = Table.grid(padding=(0, 2))
        cells = [Text.assemble((label, "dim"), " ", value) for label, value in self._shown()]
        if self._validation:
            cells.append(Text.assemble(("validation", "dim"), " ", _validation_line(self._validation)))
        per_row = max(1, self._console.width // 30)
        for start in range(0, len(cells), per_row):
            table.add_row(*cells[start : start + per_row])
        return table

    def _shown(self) -> list[tuple[str, str]]:
        return [
            (label, _figure(self._latest[name], form)) for label, name, form in SHOWN if name in self._latest
        ]

    def _plain_line(self, step: int) -> str:
        figures = "  ".join(f"{label} {value}" for label, value in self._shown())
        return f"step {step}/{self._total}  {figures}  left {self._time_left(step)}"

    def _time_left(self, step: int) -> str:
        if not self._seconds:
            return "-"
        seconds = round(max(0, self._total - step) * sum(self._seconds) / len(self._seconds))
        form = "%H:%M:%S" if seconds >= 3600 else "%M:%S"
        days, rest = divmod(seconds, 86400)
        return (f"{days}d " if days else "") + time.strftime(
            form if not days else "%H:%M:%S", time.gmtime(rest)
        )

    def _print(self, line: str) -> None:
        """Prints a line, with what the terminal's encoding cannot show, or would obey, replaced."""
        line = CONTROL.sub("?", line)
        encoding = self._console.encoding or "utf-8"
        self._console.print(
            Text(line.encode(encoding, "replace").decode(encoding)), soft_wrap=self._live is None
        )


def _figure(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else str(value)


def _validation_line(metrics: Mapping[str, float]) -> str:
    parts = {
        name.removeprefix("val/").removesuffix("_reward"): value
        for name, value in metrics.items()
        if name == "val/reward_score" or name.endswith("_reward") or "@" in name
    }
    return "  ".join(f"{name} {_figure(value, '{:.3f}')}" for name, value in parts.items())
