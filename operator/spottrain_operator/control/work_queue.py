"""The work queue: which jobs to reconcile and when; two workers never process the same job.

It has client-go's semantics. A key that is added while it is processed is processed once more afterwards. A
key that fails is retried with exponential backoff of its own. Keys wait in three lanes. What is due and what
has an event alternate, so a delayed key waits for one other at most, however many wait: the DELETE at a
notice depends on it. A resync's keys are taken when nothing else waits, and as every eighth in any case.
Facts that nothing depends on wait a second for others (`add_soon`), as in Kubernetes' Job controller.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from datetime import timedelta
from enum import StrEnum

from spottrain_operator.api.training_job import JobKey
from spottrain_operator.errors import ApiError, ApiFailure, Incomplete, OperatorError
from spottrain_operator.io.logs import QuietLog, about
from spottrain_operator.io.metrics import (
    QUEUE_DEPTH,
    QUEUE_WAIT,
    RECONCILE_ERRORS,
    RECONCILE_LATENCY,
    RECONCILE_SECONDS,
)

Work = Callable[[JobKey], Awaitable[timedelta | None]]
"""Processes a key; returns the delay until the next time at the latest. None: only an event changes it."""
logger = logging.getLogger(__name__)

FIRST_DELAY = 0.05
LONGEST_DELAY = 60.0
TOGETHER_SECONDS = 1.0
RESYNC_SHARE = 8
"""Of so many keys, one is a resync's, if any of these wait."""


class Lane(StrEnum):
    """Why a key waits."""

    DUE = "due"
    EVENT = "event"
    RESYNC = "resync"


class WorkQueue:
    def __init__(
        self,
        *,
        first_delay: float = FIRST_DELAY,
        longest_delay: float = LONGEST_DELAY,
        resync: float = math.inf,
        open: bool = True,
    ) -> None:
        """`resync`: seconds after which a key is processed again, whatever longer delay the work returned."""
        self._first, self._longest, self._resync = first_delay, longest_delay, resync
        self.open = open
        """While it is not, keys are not kept: a standby would collect them for months."""
        self._waiting: dict[Lane, dict[JobKey, float]] = {lane: {} for lane in Lane}
        """Keys that are to be processed, and since when. One may be in several lanes; the first counts."""
        self._working: dict[JobKey, tuple[Lane, float]] = {}
        """Keys that are processed: the lane that they came from, and since when they had waited there."""
        self._taken = 0
        """Number of keys that were taken; which lane goes first follows from it."""
        self._ready = asyncio.Semaphore(0)
        """Wakes one worker for each key that it may take."""
        self._failures: dict[JobKey, int] = {}
        self._timers: dict[JobKey, asyncio.TimerHandle] = {}
        self._quiet = QuietLog()
        """By job; None: the API server does not respond."""
        QUEUE_DEPTH.set_function(lambda: len(set().union(*self._waiting.values())))

    def add(self, key: JobKey, lane: Lane = Lane.EVENT) -> None:
        """Enqueues a key. One that waits in this lane keeps its place."""
        self._enqueue(key, lane, asyncio.get_running_loop().time())

    def add_soon(self, key: JobKey) -> None:
        """Enqueues a key after a moment: all that comes meanwhile makes one reconcile."""
        self.add_after(key, TOGETHER_SECONDS, Lane.EVENT)

    def add_after(self, key: JobKey, seconds: float, lane: Lane = Lane.DUE) -> None:
        """Enqueues a key after a delay; the earliest of several delays applies."""
        if seconds <= 0:
            return self.add(key)  # without priority: only keys that were delayed go first
        loop = asyncio.get_running_loop()
        due, timer = loop.time() + seconds, self._timers.get(key)
        if not self.open or (timer is not None and timer.when() <= due):
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._enqueue, key, lane, due)

    def _enqueue(self, key: JobKey, lane: Lane, since: float) -> None:
        if self.open and key not in self._waiting[lane]:
            self._waiting[lane][key] = since
            self._ready.release()

    async def take(self) -> JobKey:
        """Waits for a key. Its delay is dropped: the work says when the next one is due."""
        while (found := self._next()) is None:
            await self._ready.acquire()
        key, lane, since = found
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        self._taken += 1
        self._working[key] = lane, since
        QUEUE_WAIT.labels(lane).observe(asyncio.get_running_loop().time() - since)
        return key

    def _next(self) -> tuple[JobKey, Lane, float] | None:
        """Takes a key out of the lanes, from these in turn, so that none can starve another."""
        for lane in _order(self._taken):
            for key, since in self._waiting[lane].items():
                if key not in self._working:
                    for waiting in self._waiting.values():
                        waiting.pop(key, None)
                    return key, lane, since
        return None

    def done(self, key: JobKey, *, failed: bool = False) -> None:
        lane, since = self._working.pop(key)
        RECONCILE_LATENCY.labels(lane).observe(asyncio.get_running_loop().time() - since)
        self._ready.release()  # it may have been added meanwhile
        if not failed:
            self._failures.pop(key, None)
            self._quiet.reset(key)
            return
        times = self._failures[key] = self._failures.get(key, 0) + 1
        self.add_after(key, min(self._longest, self._first * 2 ** min(times - 1, 20)))

    async def work(self, do: Work) -> None:
        """One worker; runs until cancelled."""
        while True:
            key = await self.take()
            failed = True
            try:
                with RECONCILE_SECONDS.time():
                    again = await do(key)
                failed = False
                if again is not None:
                    seconds = again.total_seconds()
                    lane = Lane.DUE if seconds < self._resync else Lane.RESYNC
                    self.add_after(key, min(seconds, self._resync), lane)
            except OperatorError as error:
                RECONCILE_ERRORS.inc()
                self._log(key, error)
                if isinstance(error, Incomplete) and error.again is not None:
                    self.add_after(key, error.again.total_seconds())
            except Exception:
                RECONCILE_ERRORS.inc()
                logger.exception("%s: reconcile failed, will be retried", key, extra=about(key))
            finally:
                self.done(key, failed=failed)

    def _log(self, key: JobKey, error: OperatorError) -> None:
        """Logs an error once a minute or when it changes; an unreachable API server once for all jobs."""
        unreachable = (isinstance(error, ApiError) and error.kind is ApiFailure.UNREACHABLE) or (
            isinstance(error, Incomplete) and error.unreachable
        )
        if unreachable:
            if self._quiet.due():
                logger.warning("the API server does not respond; all jobs are retried: %s", error)
        elif self._quiet.due(key, str(error)):
            logger.warning("%s: %s; will be retried", key, error, extra=about(key))


def _order(taken: int) -> tuple[Lane, ...]:
    """Returns the lanes in the order in which the next key is looked for."""
    first, second = (Lane.DUE, Lane.EVENT) if taken % 2 == 0 else (Lane.EVENT, Lane.DUE)
    if taken % RESYNC_SHARE == RESYNC_SHARE - 1:
        return Lane.RESYNC, first, second
    return first, second, Lane.RESYNC
