"""How many requests go to the API server at a time, and when none does.

Two priorities, each with a bound of its own: what a termination notice needs never waits behind bulk
creations. Where the API server refuses a request with Retry-After, all requests wait as long as it asks for,
because they are one client to its flow control; urgent ones hardly, because a notice does not wait either.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Final

from spottrain_operator.io.logs import QuietLog
from spottrain_operator.io.metrics import PAUSES

logger = logging.getLogger(__name__)


class Priority(Enum):
    URGENT = auto()
    """Short, and awaited by what a notice or a job's state needs: DELETE, annotation, status, single GETs,
    the LIST of one job's pods."""
    BULK = auto()
    """LISTs, created objects, Events."""


AT_ONCE: Final = {Priority.URGENT: 16, Priority.BULK: 16}
"""Concurrent requests, and so kept connections. As many of each as there are workers by default; together
they are a small part of the 600 that an API server serves at once by default."""
DEFAULT_PAUSE: Final = 1.0
"""Seconds, where Retry-After cannot be read; flow control asks for as much."""
LONGEST_PAUSE: Final = 30.0
"""Seconds; a longer Retry-After is some proxy's, and a notice of two minutes must not pass unused."""
SPREAD: Final = 0.25
"""Requests go on within this part of their wait after its end, not all at the same instant."""
LONGEST_WAIT: Final = {Priority.URGENT: 0.4, Priority.BULK: math.inf}
"""Seconds of a pause that one request waits, counted from when it came; and the spread. What is urgent goes
within half a second: the time of a DELETE and its grace are planned before it waits."""


class Throttle:
    """The requests of one client."""

    def __init__(self, at_once: Mapping[Priority, int] = AT_ONCE) -> None:
        self._slots = {priority: asyncio.Semaphore(number) for priority, number in at_once.items()}
        self._until = 0.0
        self._pause = 0.0
        self._quiet = QuietLog()

    @asynccontextmanager
    async def slot(self, priority: Priority) -> AsyncIterator[None]:
        """Waits for a place among the requests of this priority, and for the end of a pause."""
        came = _now()
        async with self._slots[priority]:
            await self._resume(min(self._until, came + LONGEST_WAIT[priority]))
            yield

    async def resume(self) -> None:
        """Waits for the end of a pause."""
        await self._resume(self._until)

    async def _resume(self, until: float) -> None:
        """Waits once, although the pause may be extended meanwhile: else nothing is ever sent while each
        request that is refused extends it."""
        left = until - _now()
        if left > 0:
            await asyncio.sleep(left + random.uniform(0, SPREAD * min(self._pause, left)))

    def hear(self, status: int, headers: Mapping[str, str]) -> bool:
        """Begins a pause if a response asks for one; returns whether it does.

        Without Retry-After it is not the API server's flow control that refuses, but a webhook for example.
        """
        told = headers.get("Retry-After")
        if told is None or status not in (429, 503):
            return False
        self._pause = pause_seconds(told, datetime.now(UTC))
        self._until = max(self._until, _now() + self._pause)
        PAUSES.inc()
        if self._quiet.due():
            logger.warning(
                "the API server asks for a pause (status %d, Retry-After %s): requests wait %.0f s",
                status,
                told,
                self._pause,
            )
        return True


def pause_seconds(retry_after: str, now: datetime) -> float:
    """Returns how long to pause, from the header's number of seconds or its date."""
    text = retry_after.strip()
    try:
        if text.isdecimal():
            seconds = float(text)
        else:
            seconds = (parsedate_to_datetime(text).astimezone(UTC) - now).total_seconds()
    except (ValueError, OverflowError):
        seconds = DEFAULT_PAUSE
    return min(max(seconds, 0.0), LONGEST_PAUSE)


def _now() -> float:
    return asyncio.get_running_loop().time()
