"""Which of several processes is the leader: the only one that writes.

The rule is that of client-go's leader election. The leader renews a Lease; another process takes it once it
has seen no renewal for as long as the Lease is valid. All times are of the process' own clock, which runs on
while the process is stopped or the machine sleeps: the clocks of two nodes are never compared. The leader
counts a renewal from before its request, the others from after they have read it, and the leader gives up
earlier than the others take over.

The Lease cannot stop a request that is already on its way. What makes two writers harmless are the names,
UIDs and versions that every write carries (docs/operator.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from spottrain_operator.api.wire import rfc3339
from spottrain_operator.errors import ApiError
from spottrain_operator.io.lease import Lease, LeaseLock
from spottrain_operator.io.logs import QuietLog
from spottrain_operator.io.metrics import LEADER

logger = logging.getLogger(__name__)

SHORTEST = 0.01
"""Seconds for a request at the very end of the leadership; 0 would be no limit."""


def boot_clock() -> float:
    """Returns seconds since the machine's start, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# --- the rule -------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """In seconds. All keep their ratio to the Lease: a leader has stopped before another process takes over,
    and a write has ended before its process stops being the leader."""

    lease: int = 15
    """How long the others wait after a renewal."""

    @property
    def renew_deadline(self) -> float:
        """How long after its last renewal a leader stops being one: 12."""
        return self.lease * 0.8

    @property
    def retry(self) -> float:
        """Between two looks at the Lease, and between two renewals: 2."""
        return self.lease * 2 / 15

    @property
    def write(self) -> float:
        """Limit of one write: 11. Admission webhooks may take 10 by default."""
        return self.lease * 11 / 15

    @property
    def request(self) -> float:
        """Limit of one request: a connection that hangs leaves time for another one."""
        return self.renew_deadline / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What one process knows of the Lease. Immutable: each observation returns the next state."""

    identity: str
    times: Times = Times()
    lease: Lease | None = None
    """As last seen."""
    changed: float = 0.0
    """When it was first seen in this version."""
    renewed: float | None = None
    """When the last renewal that succeeded was begun; None: this process does not lead."""

    def time_left(self, now: float) -> float:
        """Returns for how many seconds this process leads without a renewal; 0: it does not."""
        if self.renewed is None or self.replaced_by():
            return 0.0
        return max(0.0, self.renewed + self.times.renew_deadline - now)

    def saw(self, lease: Lease | None, now: float) -> Candidate:
        """Returns the state after a read that ended at `now`."""
        same = lease is not None and self.lease is not None and lease.spec == self.lease.spec
        return replace(self, lease=lease, changed=self.changed if same else now)

    def wrote(self, lease: Lease, begun: float) -> Candidate:
        """Returns the state after a write of ours, whose request was begun at `begun`."""
        return replace(self, lease=lease, changed=begun, renewed=begun)

    def free_at(self) -> float | None:
        """Returns when this process may take the Lease, as it was last seen; None: at once."""
        lease = self.lease
        if lease is None or lease.holder in ("", self.identity):
            return None
        return self.changed + (lease.seconds or self.times.lease)

    def may_take(self, now: float) -> bool:
        free_at = self.free_at()
        return free_at is None or now >= free_at

    def replaced_by(self) -> str:
        """Returns who holds the Lease that this process led with; "" where it still does, or none does."""
        taken = self.renewed is not None and self.lease is not None and self.lease.holder != self.identity
        return self.lease.holder if taken and self.lease is not None else ""

    def pause(self, begun: float, now: float) -> float:
        """Returns the seconds until the next look, after one that was begun at `begun`.

        It comes sooner where the leadership ends before, or may begin.
        """
        rest = max(0.0, begun + self.times.retry - now)
        left = self.time_left(now) if self.renewed is not None else (self.free_at() or now) - now
        return min(left, rest) if left > 0 else max(rest, SHORTEST)

    def time_for_request(self, now: float) -> float:
        """Returns the limit of a request that begins now: none outlives the leadership."""
        left = self.time_left(now) if self.renewed is not None else self.times.request
        return max(SHORTEST, min(self.times.request, left))

    def claim(self, now: datetime) -> Lease:
        """Returns the Lease to write: a renewal, or the first one of this process."""
        old = self.lease or Lease()
        ours = old.holder == self.identity
        return replace(
            old,
            holder=self.identity,
            seconds=self.times.lease,
            acquired=old.acquired if ours and old.acquired else rfc3339(now, timespec="microseconds"),
            transitions=old.transitions if ours or self.lease is None else old.transitions + 1,
        )


# --- the loop -------------------------------------------------------------------------------------------
class Elector:
    """Takes the Lease when it is free and renews it.

    Args:
        lock: The Lease.
        candidate: This process' identity and times.
        lost: Ends the process. Where it returns, `run` returns as well.
        clock: Seconds, never set back, also counted while the process is stopped.
        now: The time that people see in the Lease.
    """

    def __init__(
        self,
        lock: LeaseLock,
        candidate: Candidate,
        *,
        lost: Callable[[str], None],
        now: Callable[[], datetime],
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._lock, self._me = lock, candidate
        self._lost, self._now, self._clock = lost, now, clock
        self._began = asyncio.Event()
        self._failure = ""
        """Why the last look at the Lease failed; "" where it did not."""
        self._quiet = QuietLog(clock)
        self._holder = ""
        LEADER.set(0)

    def time_to_write(self) -> float:
        """Returns for how many seconds this process may still write; 0: not at all."""
        return self._me.time_left(self._clock())

    async def leading(self) -> None:
        """Waits until this process leads."""
        await self._began.wait()

    async def run(self) -> None:
        """Takes the Lease as soon as it is free, and renews it until that fails."""
        while True:
            begun = self._clock()
            if self._me.renewed is None or self.time_to_write():
                await self._look()
            if why := self._why_lost():
                break
            if self.time_to_write() and not self._began.is_set():
                logger.info("%s leads", self._me.identity)
                LEADER.set(1)
                self._began.set()
            await asyncio.sleep(self._me.pause(begun, self._clock()))
        LEADER.set(0)
        self._lost(why)

    async def release(self) -> None:
        """Gives the Lease up, so that another process need not wait for its end. Nothing is written later."""
        if not self.time_to_write():
            return
        seconds = self._me.time_for_request(self._clock())
        self._me = replace(self._me, renewed=None)
        LEADER.set(0)
        try:
            await self._give_up(seconds)
        except ApiError as error:
            logger.warning("failed to release the Lease, it will expire: %s", error)
        else:
            logger.info("%s released the Lease", self._me.identity)

    async def _give_up(self, seconds: float) -> None:
        """Empties the Lease. A renewal that was under way may change it meanwhile."""
        for last in (False, True):
            lease = await self._lock.get(seconds)
            if lease is None or lease.holder != self._me.identity:
                return
            try:
                await self._lock.replace(replace(lease, holder="", seconds=1), self._now(), seconds)
                return
            except ApiError as error:
                if last or not error.stale:
                    raise

    async def _look(self) -> None:
        """Renews the Lease, reads it, or takes it. A failure is logged, and the next look comes."""
        try:
            if self._me.renewed is not None and await self._renewed():
                return
            lease = await self._lock.get(self._me.time_for_request(self._clock()))
            self._me = self._me.saw(lease, self._clock())
            self._tell_holder()
            if not self._me.replaced_by() and self._me.may_take(self._clock()):
                await self._write()
        except ApiError as error:
            self._tell(str(error))
        else:
            self._failure = ""
            self._quiet.reset()

    async def _renewed(self) -> bool:
        """Renews the Lease in the version that is known; returns whether it still had that one."""
        if self._me.lease is None:
            return False
        try:
            await self._write()
        except ApiError as error:
            if not error.stale:
                raise
            return False
        return True

    async def _write(self) -> None:
        begun = self._clock()
        claim, seconds = self._me.claim(self._now()), self._me.time_for_request(begun)
        write = self._lock.replace if claim.version else self._lock.create
        self._me = self._me.wrote(await write(claim, self._now(), seconds), begun)

    def _why_lost(self) -> str:
        """Returns why this process has lost leadership; "" while it leads, or has not led yet."""
        if self._me.renewed is None:
            return ""
        if other := self._me.replaced_by():
            return f"{other} holds the Lease"
        if not self.time_to_write():
            said = f": {self._failure}" if self._failure else ""
            return f"could not renew the Lease for {self._me.times.renew_deadline:g} s{said}"
        return ""

    def _tell_holder(self) -> None:
        holder = self._me.lease.holder if self._me.lease is not None else ""
        if holder not in ("", self._holder, self._me.identity):
            logger.info("%s leads; %s stands by", holder, self._me.identity)
        self._holder = holder

    def _tell(self, words: str) -> None:
        """Logs a failure once a minute."""
        if self._quiet.due():
            logger.warning("failed to read or write the Lease, retrying: %s", words)
        self._failure = words
