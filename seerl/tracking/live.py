"""The live display of `console`: progress and figures at the bottom of a terminal, everything else above."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

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

REFRESH_S = 0.25
FIGURE_WIDTH = 26
"""Columns that one figure with its label gets."""


class LiveDisplay:
    """Redrawn in place; lines that the program prints or logs go above it."""

    def __init__(self, title: str, total_steps: int, start_step: int) -> None:
        self._console = Console(highlight=False)
        self._title = Text(title)
        self._figures: Sequence[tuple[str, str]] = ()
        self._validation: Sequence[tuple[str, str, str]] = ()
        self._progress = Progress(
            # The other spinners are not ASCII, and Rich does not replace them.
            SpinnerColumn("line" if self._console.options.ascii_only else "dots"),
            TextColumn("{task.fields[stage]:<10}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=self._console,
        )
        self._task = self._progress.add_task(
            "train", total=total_steps, completed=start_step, stage="starting", left="-"
        )
        self._live = Live(
            get_renderable=self._view,
            console=self._console,
            auto_refresh=False,
            redirect_stderr=_is_terminal(sys.stderr),  # `2>errors.log` keeps its errors
        )
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._own_handler: logging.Handler | None = None
        before = sys.stdout, sys.stderr
        self._live.start(refresh=True)
        self._redirect_logs({id(old): new for old, new in zip(before, (sys.stdout, sys.stderr), strict=True)})
        # Rich's own refreshing thread may redraw between two halves of a print, which leaves pieces of the
        # display behind where its height has changed. Here that is redrawn under one lock.
        self._lock = threading.RLock()
        self._over = threading.Event()
        threading.Thread(target=self._tick, daemon=True).start()
        atexit.register(self._live.stop)  # an error before `close` must not leave the cursor hidden
        atexit.register(self._over.set)  # runs first

    @staticmethod
    def possible() -> bool:
        """Whether standard output is a terminal that can redraw; colours forced on a file do not make it
        one."""
        return _is_terminal(sys.stdout) and not Console().is_dumb_terminal

    def stage(self, name: str) -> None:
        """Shows what the run is doing."""
        self._progress.update(self._task, stage=name)

    def step(self, step: int, figures: Sequence[tuple[str, str]], left: str) -> None:
        """Moves the bar and replaces the figures."""
        with self._lock:
            self._figures = figures
            self._progress.update(self._task, completed=step, left=left)
            self._live.refresh()

    def validation(self, step: int, rows: Sequence[tuple[str, str, str]]) -> None:
        """Prints a small table above the display, and keeps the newest values in it."""
        table = Table(title=Text(f"validation at step {step}"), title_justify="left", pad_edge=False)
        for heading in ("score", "now", "before"):
            table.add_column(heading, justify="left" if heading == "score" else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        with self._lock:
            self._console.print(table)
            self._validation = rows
            self._live.refresh()

    def line(self, text: str) -> None:
        """Prints a line above the display."""
        self._console.print(Text(text))

    def close(self, exit_code: int) -> None:
        """Leaves the last state on the screen and gives the terminal back."""
        self._over.set()
        with self._lock:
            self._progress.update(self._task, stage="done" if exit_code == 0 else "stopped")
            self._live.stop()
        atexit.unregister(self._live.stop)
        for handler, stream in self._handlers:
            handler.setStream(stream)
        if self._own_handler is not None:
            logging.getLogger().removeHandler(self._own_handler)

    def _tick(self) -> None:
        while not self._over.wait(REFRESH_S):
            with self._lock:
                if not self._over.is_set():
                    self._live.refresh()

    def _view(self) -> Panel:
        """Made anew at every refresh, so that it follows the terminal's size."""
        shown = [(label, value) for label, value in self._figures]
        shown += [(f"validation {name}", value) for name, value, _ in self._validation]
        columns = max(1, (self._console.width - 4) // FIGURE_WIDTH)
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in range(columns):
            table.add_column(ratio=1, no_wrap=True)
        cells = [Text.assemble((label, "dim"), " ", value) for label, value in shown]
        for start in range(0, len(cells), columns):
            table.add_row(*cells[start : start + columns])
        return Panel(Group(self._progress, table), title=self._title, title_align="left")

    def _redirect_logs(self, streams: Mapping[int, TextIO]) -> None:
        """Log handlers that hold one of the streams (by id) get what stands for it while the display is up;
        without any handler on the root, warnings get one of Rich's."""
        loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
        for handler in [h for logger in loggers for h in getattr(logger, "handlers", ())]:
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in streams:
                self._handlers.append((handler, handler.stream))
                handler.setStream(streams[id(handler.stream)])
        if not logging.getLogger().handlers and _is_terminal(sys.stderr):
            self._own_handler = RichHandler(
                console=self._console, show_path=False, show_time=False, level=logging.WARNING
            )
            logging.getLogger().addHandler(self._own_handler)


def _is_terminal(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    try:
        return bool(isatty and isatty())
    except ValueError:  # closed
        return False
