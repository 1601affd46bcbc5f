"""The processes reward functions run in.

They are spawned and import neither torch nor this project's data types, so that one starts in a fraction of a
second and stays small; what a user's file imports is its own affair.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import multiprocessing.context
import os
import select
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from pebble import ProcessExpired, ProcessPool

from seerl.errors import UserError
from seerl.reward.forms import call
from seerl.reward.loading import KEY, LOAD_LIMIT_S, Entry, Reward, load_reward
from seerl.reward.outcome import CallFault, Outcome, place, user_traceback
from seerl.reward.output import flush_prints, print_into

log = logging.getLogger(__name__)

SLOW_IMPORT_S = 10.0
_loaded: list[Reward | CallFault] = []
"""This process's rewards, by the number of their entry."""


@contextmanager
def _interrupts_later() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class UninterruptedProcess(multiprocessing.context.SpawnProcess):
    """A terminal sends Ctrl-C to every process; a worker leaves it to the trainer, from its first moment."""

    def start(self) -> None:
        """Starts with SIGINT blocked, which the new process inherits."""
        with _interrupts_later():
            super().start()


class Uninterrupted(multiprocessing.context.SpawnContext):
    """Spawns such processes."""

    Process = UninterruptedProcess


def start_pool(entries: Sequence[Entry], workers: int, output: Connection) -> ProcessPool:
    """Processes that load these rewards before they take a call: loading is not on a call's clock.

    What they print goes into `output`.
    """
    arguments = (list(entries), output)
    return ProcessPool(max_workers=workers, initializer=_start, initargs=arguments, context=Uninterrupted())


def run(entry: int, inputs: Sequence[dict[str, Any]]) -> list[Outcome] | CallFault:
    """In a worker: scores the samples with one of its rewards."""
    reward = _loaded[entry]
    if isinstance(reward, CallFault):
        return reward
    answer = call(reward.function, reward.form, inputs, reward.kwargs)
    flush_prints()
    return answer


def uses_images(entry: int) -> bool | CallFault:
    """In a worker: whether one of its rewards can see the images of its inputs."""
    reward = _loaded[entry]
    return reward if isinstance(reward, CallFault) else reward.uses_images


def check_in_worker(entry: Entry) -> str | None:
    """What keeps a reward from being loaded, told in one message; None if nothing does."""
    waiting = threading.Timer(SLOW_IMPORT_S, log.warning, ["still importing %s ...", entry.source])
    waiting.daemon = True
    waiting.start()
    with ProcessPool(max_workers=1, context=Uninterrupted()) as pool:
        try:
            with (
                _interrupts_later()
            ):  # pebble holds locks while it starts, which an interrupt would leave held
                checking = pool.schedule(_load_fault, args=[entry], timeout=LOAD_LIMIT_S)
            fault = checking.result()
        except TimeoutError:
            return f"{KEY}={entry.source}: importing it took more than {LOAD_LIMIT_S:.0f} s"
        except ProcessExpired as error:
            return f"{KEY}={entry.source}: importing it ended the process (exit code {error.exitcode})"
        except KeyboardInterrupt:
            pool.stop()  # leaving the block alone would wait for the import
            raise
        finally:
            waiting.cancel()
    return fault.detail if fault else None


def _start(entries: Sequence[Entry], output: Connection) -> None:
    _die_with_parent()
    print_into(output)
    # An import that never ends would hold up every call; a process that ends is noticed.
    watchdog = threading.Timer(LOAD_LIMIT_S, os._exit, [1])
    watchdog.daemon = True
    watchdog.start()
    _loaded[:] = [_load(entry) for entry in entries]
    watchdog.cancel()


def _load_fault(entry: Entry) -> CallFault | None:
    loaded = _load(entry)
    return loaded if isinstance(loaded, CallFault) else None


def _load(entry: Entry) -> Reward | CallFault:
    try:
        return load_reward(entry)
    except UserError as error:
        return CallFault("load", str(error), fatal=True)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        return CallFault("load", f"{KEY}={entry.source}: syntax error in {where}: {error.msg}", fatal=True)
    except BaseException as error:  # a file may also raise SystemExit when imported
        told = f"{KEY}={entry.source} cannot be imported. {place(error)}\n{user_traceback(error)}"
        return CallFault("load", told, fatal=True)


def _die_with_parent() -> None:
    """Has the kernel end this process when the trainer is gone, even while a regex holds the interpreter.

    The pipe whose other end the trainer holds is asked to send SIGIO, whose default action ends the process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it was gone before that was arranged
        os._exit(1)
