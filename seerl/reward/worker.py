"""The processes reward functions run in.

They are spawned and import neither torch nor this project's data types, so that one starts in a fraction of a
second and stays small; what a user's file imports is its own affair.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import signal
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import TimeoutError
from typing import Any

from pebble import ProcessExpired, ProcessPool

from seerl.errors import UserError
from seerl.reward.forms import call
from seerl.reward.loading import KEY, LOAD_LIMIT_S, Entry, Reward, load_reward
from seerl.reward.outcome import CallFault, Outcome

_loaded: list[Reward | CallFault] = []
"""This process's rewards, by the number of their entry."""


def start_pool(entries: Sequence[Entry], workers: int) -> ProcessPool:
    """Processes that load these rewards before they take a call: loading is not on a call's clock."""
    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=workers, initializer=_start, initargs=(list(entries),), context=context)


def run(entry: int, inputs: Sequence[dict[str, Any]]) -> list[Outcome] | CallFault:
    """In a worker: scores the samples with one of its rewards."""
    reward = _loaded[entry]
    if isinstance(reward, CallFault):
        return reward
    return call(reward.function, reward.form, inputs, reward.kwargs)


def check_in_worker(entry: Entry) -> str | None:
    """What keeps a reward from being loaded, told in one message; None if nothing does."""
    context = multiprocessing.get_context("spawn")
    with ProcessPool(max_workers=1, context=context) as pool:
        try:
            fault = pool.schedule(_load_fault, args=[entry], timeout=LOAD_LIMIT_S).result()
        except TimeoutError:
            return f"{KEY}={entry.source}: importing it took more than {LOAD_LIMIT_S:.0f} s"
        except ProcessExpired as error:
            return f"{KEY}={entry.source}: importing it ended the process (exit code {error.exitcode})"
    return fault.detail if fault else None


def _start(entries: Sequence[Entry]) -> None:
    _die_with_parent()
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
        told = "".join(traceback.format_exception(error))
        return CallFault("load", f"{KEY}={entry.source} cannot be imported:\n{told}", fatal=True)


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
