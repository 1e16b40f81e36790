"""The work queue: which jobs to reconcile and when; two workers never process the same job.

It has client-go's semantics. A key that is added while it is processed is processed once more afterwards. A
key that fails is retried with exponential backoff of its own. A delayed key is taken as soon as it is due,
however many keys wait: the DELETE at a notice depends on it.
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

from spottrain_operator.api.training_job import JobKey
from spottrain_operator.errors import ApiError, ApiFailure, Incomplete, OperatorError
from spottrain_operator.io.logs import about
from spottrain_operator.io.metrics import QUEUE_DEPTH, RECONCILE_ERRORS, RECONCILE_SECONDS

Work = Callable[[JobKey], Awaitable[timedelta | None]]
"""Processes a key; returns the delay until the next time at the latest, or None."""
logger = logging.getLogger(__name__)

FIRST_DELAY = 0.05
LONGEST_DELAY = 60.0
QUIET_SECONDS = 60.0
"""Seconds before the same error of the same job is logged again."""


class WorkQueue:
    def __init__(self, *, first_delay: float = FIRST_DELAY, longest_delay: float = LONGEST_DELAY) -> None:
        self._first, self._longest = first_delay, longest_delay
        self._ready: deque[JobKey] = deque()
        self._overdue: deque[JobKey] = deque()
        """Delayed keys that are due. They and the ready ones are taken in turn."""
        self._overdue_next = True
        self._dirty: set[JobKey] = set()
        self._working: set[JobKey] = set()
        self._failures: dict[JobKey, int] = {}
        self._due: dict[JobKey, float] = {}
        self._later: list[tuple[float, int, JobKey]] = []
        self._count = itertools.count()
        self._changed = asyncio.Event()
        self._logged: dict[JobKey | None, tuple[float, str]] = {}
        """Time and text of the last logged error, by job; None: the API server does not respond."""

    def add(self, key: JobKey) -> None:
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._working:
            self._ready.append(key)
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
            self._changed.set()

    async def take(self) -> JobKey:
        while (key := self._next()) is None:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._until_next())
        self._dirty.discard(key)
        QUEUE_DEPTH.set(len(self._dirty))
        self._working.add(key)
        return key

    def _next(self) -> JobKey | None:
        """Returns the next key, from the two queues in turn, so that neither can starve the other."""
        self._move_due()
        lines = (self._overdue, self._ready) if self._overdue_next else (self._ready, self._overdue)
        for line in lines:
            while line:
                key = line.popleft()
                # A key may be in both: it was taken from the other one, or done() adds it again.
                if key in self._dirty and key not in self._working:
                    self._overdue_next = line is self._ready
                    return key
        return None

    def _move_due(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._later and self._later[0][0] <= now:
            due, _, key = heapq.heappop(self._later)
            if self._due.get(key) == due:
                del self._due[key]
                self._dirty.add(key)
                if key not in self._working:
                    self._overdue.append(key)

    def _until_next(self) -> float | None:
        """Returns the seconds until the next delayed key is due; None: no key is delayed."""
        return max(0.0, self._later[0][0] - asyncio.get_running_loop().time()) if self._later else None

    def done(self, key: JobKey, *, failed: bool = False) -> None:
        self._working.discard(key)
        if key in self._dirty:
            self._ready.append(key)
            self._changed.set()
        if not failed:
            self._failures.pop(key, None)
            self._logged.pop(key, None)
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
        words, about_what = str(error), None if unreachable else key
        at, said = self._logged.get(about_what, (0.0, ""))
        now = asyncio.get_running_loop().time()
        if said and now < at + QUIET_SECONDS and (unreachable or said == words):
            return
        self._logged[about_what] = (now, words)
        if unreachable:
            logger.warning("the API server does not respond; all jobs are retried: %s", words)
        else:
            logger.warning("%s: %s; will be retried", key, words, extra=about(key))
