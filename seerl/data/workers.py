"""Row preparation, here or in worker processes: results come back in order, whatever a worker does.

Consumes: row numbers. Waits for: the workers, at most `prefetch` prompts ahead. Unblocks: whoever takes the
next.

Workers are forked by torch's DataLoader (a spawned one would import torch and transformers again: seconds).
What makes that safe: each worker runs one torch thread and never touches a device, and they are forked while
the calling thread waits, so no import is half done. Fork early, before engines and Ray are up
(`PromptLoader.start`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from seerl.types import Prompt

_PR_SET_PDEATHSIG = 1
Job = tuple[int, str]
"""(row, uid): which row to prepare, and the uid its prompt gets."""


def default_workers(has_images: bool) -> int:
    """Text takes no time worth a process; images get half the CPUs, at most 8."""
    return min(8, max(1, usable_cpus() // 2)) if has_images else 0


def usable_cpus() -> int:
    """The CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerDied(RuntimeError):
    """A worker process ended without an answer."""


class _Jobs(Dataset[Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, job: Any) -> Any:
        return self._function(job)


class _Order(Sampler[Any]):
    def __init__(self, jobs: Iterable[Any]) -> None:
        self._jobs = jobs

    def __iter__(self) -> Iterator[Any]:
        return iter(self._jobs)


class Prefetcher:
    """function(job) for each job, in order. With workers, up to `depth` results are ready ahead of the
    reader.

    A thread of its own reads the workers and copies what they made out of shared memory at once: a
    container's /dev/shm is small, and each shared tensor holds a file open. Without workers the work is done
    in `next`.
    """

    def __init__(self, function: Callable[[Any], Any], jobs: Iterable[Any], workers: int, depth: int) -> None:
        self._inline = map(function, jobs) if workers == 0 else None
        self._results: queue.Queue[Any] = queue.Queue(maxsize=max(1, depth))
        self._stopped = threading.Event()
        self._forked = threading.Event()
        self._thread: threading.Thread | None = None
        if workers:
            self._thread = threading.Thread(
                target=self._run, args=(_data_loader(function, jobs, workers),), name="prefetch", daemon=True
            )
            self._thread.start()
            self._forked.wait()

    def next(self) -> Any:
        """The next result; raises StopIteration after the last, WorkerDied, or what a worker raised."""
        if self._inline is not None:
            return next(self._inline)
        result = self._results.get()
        if isinstance(result, _Failed):
            self._results.put(result)  # it stays the answer, were it asked again
            raise result.error
        return result

    def stop(self) -> None:
        """Ends the workers; what they prepared is dropped."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self, loader: DataLoader[Any]) -> None:
        # made in this thread on purpose: from the main one, torch would raise a worker's death at any line
        # there
        try:
            results = iter(loader)
            self._forked.set()
            for result in results:
                if not self._put(_copied(result)):
                    return
            self._put(_Failed(StopIteration()))
        except Exception as error:
            self._put(_Failed(_worker_error(error)))  # raised where the result is read
        finally:
            self._forked.set()

    def _put(self, result: Any) -> bool:
        while not self._stopped.is_set():
            try:
                self._results.put(result, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


def _data_loader(function: Callable[[Any], Any], jobs: Iterable[Any], workers: int) -> DataLoader[Any]:
    return DataLoader(
        _Jobs(function),
        sampler=_Order(jobs),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2,
        collate_fn=_as_it_is,
        multiprocessing_context="fork",
        worker_init_fn=_start_worker,
    )


def _start_worker(_worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; the parent may still want prompts to finish its step
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # ends with a trainer that is killed, which torch's own watchdog can miss
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _worker_error(error: Exception) -> Exception:
    message = str(error)
    if (
        not isinstance(error, RuntimeError)
        or "DataLoader worker" not in message
        or message.startswith("Caught")
    ):
        return error
    died = WorkerDied(
        f"A process that prepares data died: {message} Something outside killed it, most often for want of "
        "memory, or of shared memory (give a container a larger --shm-size). A lower data.max_pixels needs "
        "less of both."
    )
    died.__cause__ = error
    return died


def _as_it_is(result: Any) -> Any:
    return result


def _copied(result: Any) -> Any:
    if not isinstance(result, Prompt) or result.media is None:
        return result
    features: dict[str, torch.Tensor] = {name: value.clone() for name, value in result.media.features.items()}
    return dataclasses.replace(result, media=dataclasses.replace(result.media, features=features))
