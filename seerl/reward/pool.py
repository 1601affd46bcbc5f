"""Calls of reward functions in worker processes, with a time limit each, whatever becomes of the workers.

Consumes: calls from any number of tasks of one event loop. Waits for: the workers. Unblocks: the caller, always: an
answer, a time-out, or a dead worker, which are all answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import TimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from seerl.errors import UserError
from seerl.reward.loading import KEY, LOAD_LIMIT_S, Entry
from seerl.reward.outcome import CallFault, Outcome
from seerl.reward.worker import run, start_pool

_LOOK_S = 0.5
"""A broken pool can leave a call without an answer, so one that waits looks after it this often."""
_START_TRIES = 3


class RewardPool:
    """Worker processes for the rewards of a configuration. They start at once, beside whatever the caller does."""

    def __init__(self, entries: Sequence[Entry], *, workers: int, timeout_s: float) -> None:
        self._entries = list(entries)
        self._workers = workers
        self._timeout_s = timeout_s
        self._failed_starts = 0
        self._pool = self._start()

    def _start(self) -> ProcessPool:
        pool = start_pool(self._entries, self._workers)
        _ = pool.active  # pebble starts its workers when first asked about them
        return pool

    async def call(self, entry: int, inputs: Sequence[dict[str, Any]]) -> list[Outcome] | CallFault:
        """Scores the samples with reward number `entry` in one call of at most `timeout_s` seconds.

        Raises:
            UserError: the function cannot be loaded, or its workers do not survive loading it.
        """
        while True:
            pool = self._pool
            try:
                answer = await self._answer(pool, entry, inputs)
            except BrokenProcessPool:
                self._replace(pool)
                continue
            self._failed_starts = 0
            if isinstance(answer, CallFault) and answer.fatal:
                raise UserError(answer.detail)
            return answer

    async def _answer(
        self, pool: ProcessPool, entry: int, inputs: Sequence[dict[str, Any]]
    ) -> list[Outcome] | CallFault:
        if not pool.active:  # a worker that dies while idle breaks pebble's pool
            raise BrokenProcessPool
        future = asyncio.wrap_future(pool.schedule(run, args=[entry, inputs], timeout=self._timeout_s))
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
            told = f"the worker process died during the call (exit code {error.exitcode}; -9: killed, often for memory)"
            return CallFault("worker_died", told)

    def _replace(self, broken: ProcessPool) -> None:
        if broken is not self._pool:  # another caller already did
            return
        self._failed_starts += 1
        if self._failed_starts > _START_TRIES:
            raise UserError(
                f"{KEY}: the worker processes die while idle or while loading the reward file, {_START_TRIES} times in "
                f"a row without a call in between (loading may take {LOAD_LIMIT_S:.0f} s and must not end the process)"
            )
        self.close()
        self._pool = self._start()

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        self._pool.stop()
        self._pool.join()
