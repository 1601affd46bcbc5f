"""What reward workers print, brought to the trainer's own output line by line.

Written straight to the terminal it would run through the progress display, which only knows what this process
prints. Consumes: the pipe that is every worker's stdout and stderr. Waits for nothing else, and reads on
whatever becomes of the trainer's output, for a full pipe would hold the workers up.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import TextIO

_LONGEST_LINE = 1 << 16
"""Bytes after which a line without an end is shown as it is."""

_streams: list[TextIO] = []
"""A worker's stdout and stderr."""


class WorkerOutput:
    """A pipe for workers to write to, and the thread that passes on what comes."""

    def __init__(self) -> None:
        self._reader, self.writer = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._pass_on, name="reward-output", daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        rest = b""
        with self._reader:
            while got := os.read(self._reader.fileno(), 1 << 16):
                *lines, rest = (rest + got).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    _show(line)
        if rest:
            _show(rest)

    def close(self) -> None:
        """Shows what is left once the workers have ended; a process they left behind is not awaited."""
        self.writer.close()
        self._thread.join(timeout=1)


def _show(line: bytes) -> None:
    """Prints one line; `sys.stdout` is looked up each time, for a progress display replaces it."""
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]  # a progress bar's last state
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # a reader of the trainer's output that went away
        sys.stdout.write(f"[reward] {text}\n".encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


def print_into(writer: Connection) -> None:
    """In a worker: has everything that is printed, by Python, a library or a crash, go into the pipe."""
    for number in (1, 2):
        os.dup2(writer.fileno(), number)
    writer.close()
    _streams[:] = [
        open(number, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115  (open to the end)
        for number in (1, 2)
    ]
    sys.stdout, sys.stderr = _streams
    faulthandler.enable()


def flush_prints() -> None:
    """In a worker: lets go of a line that has no end yet."""
    for stream in _streams:
        with contextlib.suppress(ValueError):  # the user's function closed it
            stream.flush()
