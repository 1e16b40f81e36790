"""The work queue: which jobs to reconcile and when; two workers never process the same job.

It has client-go's semantics. A key that is added while it is processed is processed once more afterwards. A
key that fails is retried with exponential backoff of its own. Keys wait in three lanes. What is due and what
has an event alternate, so a delayed key waits for one other at most, however many wait: the DELETE at a
notice depends on it. A resync's keys are taken when nothing else waits, and as every eighth in any case.
Facts that nothing depends on wait a second for others (`add_soon`), as in Kubernetes' Job controller.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
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
"""Processes a key; returns the delay until the next time at the latest, or None."""
logger = logging.getLogger(__name__)

FIRST_DELAY = 0.05
LONGEST_DELAY = 60.0
TOGETHER_SECONDS = 1.0
RESYNC_SHARE = 8
"""Of so many keys, one is a resync's, if any of these wait."""
FEW = 100
"""Delays that an earlier one has replaced are dropped where they are so many more than the others."""


class Lane(StrEnum):
    """Why a key waits."""

    DUE = "due"
    EVENT = "event"
    RESYNC = "resync"


class WorkQueue:
    def __init__(
        self, *, first_delay: float = FIRST_DELAY, longest_delay: float = LONGEST_DELAY, open: bool = True
    ) -> None:
        self._first, self._longest = first_delay, longest_delay
        self.open = open
        """While it is not, keys are not kept: a standby would collect them for months."""
        self._lines: dict[Lane, deque[JobKey]] = {lane: deque() for lane in Lane}
        """A key may be in several, and more than once; it is processed while it is dirty."""
        self._taken = 0
        """Number of keys that were taken; which lane goes first follows from it."""
        self._dirty: dict[JobKey, tuple[Lane, float]] = {}
        """Keys that wait, or are to be processed once more: their lane, and since when."""
        self._working: dict[JobKey, tuple[Lane, float]] = {}
        """Keys that are processed: the lane that they came from, and since when they had waited there."""
        self._failures: dict[JobKey, int] = {}
        self._due: dict[JobKey, float] = {}
        self._later: list[tuple[float, int, JobKey]] = []
        """A heap of these delays, and of some that do not apply any more."""
        self._count = itertools.count()
        self._soon: dict[JobKey, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._quiet = QuietLog()
        """By job; None: the API server does not respond."""

    def add(self, key: JobKey, lane: Lane = Lane.EVENT) -> None:
        """Enqueues a key. One that waits keeps its place, unless only a resync had added it."""
        known = self._dirty.get(key)
        if not self.open:
            return
        if known is None or (known[0] is Lane.RESYNC and lane is not Lane.RESYNC):
            self._enqueue(key, lane, asyncio.get_running_loop().time())

    def add_soon(self, key: JobKey) -> None:
        """Enqueues a key after a moment: all that comes meanwhile makes one reconcile."""
        if self.open and key not in self._soon:
            loop = asyncio.get_running_loop()
            self._soon[key] = loop.call_later(TOGETHER_SECONDS, self.add, key)

    def _enqueue(self, key: JobKey, lane: Lane, since: float) -> None:
        self._dirty[key] = lane, since
        if key not in self._working:  # else done() adds it
            self._lines[lane].append(key)
            self._changed.set()
        QUEUE_DEPTH.set(len(self._dirty))

    def add_after(self, key: JobKey, seconds: float) -> None:
        """Enqueues a key after a delay; the earliest of several delays applies."""
        if seconds <= 0:
            return self.add(key)  # without priority: only keys that were delayed go first
        due = asyncio.get_running_loop().time() + seconds
        if self._due.get(key, due + 1) > due:
            self._due[key] = due
            heapq.heappush(self._later, (due, next(self._count), key))
            if len(self._later) > 2 * len(self._due) + FEW:
                self._later = [(at, next(self._count), waits) for waits, at in self._due.items()]
                heapq.heapify(self._later)
            self._changed.set()

    async def take(self) -> JobKey:
        while (key := self._next()) is None:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._until_next())
        lane, since = self._dirty.pop(key)
        if (timer := self._soon.pop(key, None)) is not None:
            timer.cancel()
        QUEUE_DEPTH.set(len(self._dirty))
        QUEUE_WAIT.labels(lane).observe(asyncio.get_running_loop().time() - since)
        self._working[key] = lane, since
        return key

    def _next(self) -> JobKey | None:
        """Returns the next key, from the lanes in turn, so that none can starve another."""
        self._move_due()
        for lane in _order(self._taken):
            line = self._lines[lane]
            while line:
                key = line.popleft()
                # It may have been taken from another lane, or done() adds it again.
                if key in self._dirty and key not in self._working:
                    self._taken += 1
                    return key
        return None

    def _move_due(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._later and self._later[0][0] <= now:
            due, _, key = heapq.heappop(self._later)
            if self._due.get(key) != due:
                continue
            del self._due[key]
            lane, since = self._dirty.get(key, (Lane.RESYNC, due))
            # Also one that waits already: it goes on in the lane that is faster.
            self._enqueue(key, Lane.DUE, due if lane is Lane.RESYNC else since)

    def _until_next(self) -> float | None:
        """Returns the seconds until the next delayed key is due; None: no key is delayed."""
        return max(0.0, self._later[0][0] - asyncio.get_running_loop().time()) if self._later else None

    def done(self, key: JobKey, *, failed: bool = False) -> None:
        lane, since = self._working.pop(key)
        RECONCILE_LATENCY.labels(lane).observe(asyncio.get_running_loop().time() - since)
        if key in self._dirty:
            self._lines[self._dirty[key][0]].append(key)
            self._changed.set()
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
                    self.add_after(key, again.total_seconds())
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
