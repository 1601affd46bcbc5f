"""Calls of reward functions in worker processes, with a time limit each, whatever becomes of the workers.

Consumes: calls from any number of tasks of one event loop. Waits for: the workers. Unblocks: the caller,
always: an answer, a time-out, or a dead worker, which are all answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from seerl.errors import UserError
from seerl.reward.loading import KEY, LOAD_LIMIT_S, Entry
from seerl.reward.outcome import CallFault, Outcome
from seerl.reward.output import WorkerOutput
from seerl.reward.worker import run, start_pool, uses_images

_LOOK_S = 0.5
"""A broken pool can leave a call without an answer, so one that waits looks after it this often."""
_START_TRIES = 3
_HOPELESS = 20
"""A function that has never returned is given up after this many calls that passed the time limit."""


class RewardPool:
    """Worker processes for the rewards of a configuration; they start beside whatever the caller does."""

    def __init__(self, entries: Sequence[Entry], *, workers: int, timeout_s: float) -> None:
        self._entries = list(entries)
        self._workers = workers
        self._timeout_s = timeout_s
        self._failed_starts = 0
        self._returned: set[int] = set()
        self._timeouts: Counter[int] = Counter()
        self._seeing: dict[int, bool] = {}
        self._output = WorkerOutput()
        self._pool = self._start()

    def _start(self) -> ProcessPool:
        pool = start_pool(self._entries, self._workers, self._output.writer)
        _ = pool.active  # pebble starts its workers when first asked about them
        return pool

    async def call(self, entry: int, inputs: Sequence[dict[str, Any]]) -> list[Outcome] | CallFault:
        """Scores the samples with reward number `entry` in one call of at most `timeout_s` seconds.

        Raises:
            UserError: the function cannot be loaded, its workers do not survive loading it, or it has not
                returned a single time in many calls.
        """
        answer = await self._survive(run, entry, inputs)
        if not isinstance(answer, CallFault) or answer.fault != "timeout":
            self._returned.add(entry)
        elif entry not in self._returned:
            self._timeouts[entry] += 1
            if self._timeouts[entry] >= _HOPELESS:
                raise UserError(
                    f"the reward function {self._entries[entry].name!r} has not returned once: "
                    f"{_HOPELESS} calls passed worker.reward.timeout_s={self._timeout_s:g}. Look for an "
                    "endless loop or a service that does not answer, or raise timeout_s"
                )
        return answer

    async def uses_images(self, entry: int) -> bool:
        """Whether reward number `entry` can see the images of its inputs; asked of a worker once.

        Raises:
            UserError: as `call` does.
        """
        if entry not in self._seeing:
            answer = await self._survive(uses_images, entry)
            self._seeing[entry] = answer if isinstance(answer, bool) else True
        return self._seeing[entry]

    async def _survive(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a worker answers, on a new pool if this one breaks."""
        while True:
            pool = self._pool
            try:
                answer = await self._answer(pool, function, arguments)
            except BrokenProcessPool:
                self._replace(pool)
                continue
            self._failed_starts = 0
            if isinstance(answer, CallFault) and answer.fatal:
                raise UserError(answer.detail)
            return answer

    async def _answer(self, pool: ProcessPool, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        if not pool.active:  # a worker that dies while idle breaks pebble's pool
            raise BrokenProcessPool
        future = asyncio.wrap_future(pool.schedule(function, args=arguments, timeout=self._timeout_s))
        try:
            while not (await asyncio.wait({future}, timeout=_LOOK_S))[0]:
                if not pool.active:
                    raise BrokenProcessPool
        except BaseException:
            future.cancel()
            raise
        try:
            return future.result()
        except TimeoutError:
            limit = f"{self._timeout_s:g} s (worker.reward.timeout_s)"
            return CallFault("timeout", f"the call took more than {limit} and its worker was replaced")
        except ProcessExpired as error:
            told = "the worker process died during the call (exit code"
            return CallFault("worker_died", f"{told} {error.exitcode}; -9: killed, often for want of memory)")

    def _replace(self, broken: ProcessPool) -> None:
        if broken is not self._pool:  # another caller already did
            return
        self._failed_starts += 1
        if self._failed_starts > _START_TRIES:
            raise UserError(
                f"{KEY}: the worker processes died {self._failed_starts} times in a row without finishing a "
                f"call. Loading the reward file may take {LOAD_LIMIT_S:.0f} s and must not end the process; "
                "the machine must have memory for worker.reward.num_workers of them"
            )
        self._end_workers()
        self._pool = self._start()

    def _end_workers(self) -> None:
        self._pool.stop()
        self._pool.join()

    def close(self) -> None:
        """Ends the workers, whatever they are doing, and shows the last of what they printed."""
        self._end_workers()
        self._output.close()
