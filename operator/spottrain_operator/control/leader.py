"""Which of several processes is the leader: the only one that writes.

The rule is that of client-go's leader election. The leader renews a Lease; another process takes it once it
has seen no renewal for as long as the Lease is valid. All times are of the process' own clock, which runs on
while the process is stopped or the machine sleeps: the clocks of two nodes are never compared. The leader
counts a renewal from before its request, the others from after they have read it, and the leader gives up
earlier than the others take over.

The Lease cannot stop a request that is already on its way. What makes two writers harmless are the names,
UIDs and versions that every write carries (docs/architecture.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from spottrain_operator.api.wire import rfc3339
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Cluster, Json
from spottrain_operator.io.logs import QuietLog
from spottrain_operator.io.metrics import LEADER

logger = logging.getLogger(__name__)

SHORTEST = 0.01
"""Seconds for a request at the very end of the leadership; 0 would be no limit."""
MOST_SECONDS = 3600
"""A Lease that claims to be valid for longer counts as valid for this long: anyone may have written it."""


def boot_clock() -> float:
    """Returns seconds since the machine's start, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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


class LeaseLock:
    """Reads and writes one Lease. Both raise ApiError on a failure; `seconds` limits the request.

    `cluster` is a client with connections of its own, so that a renewal never waits for other requests.
    """

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name

    async def get(self, seconds: float) -> Json | None:
        """Returns None where there is no Lease."""
        return await self._cluster.get("leases", self._name, self._namespace, seconds=seconds)

    async def write(self, lease: Json | None, spec: Json, seconds: float) -> Json:
        """Writes the spec of the Lease in the version that `lease` has, or creates it where that is None.

        A conflict: it has changed since.
        """
        if lease is not None:
            return await self._cluster.replace("leases", lease | {"spec": spec}, seconds=seconds)
        meta = {"name": self._name, "namespace": self._namespace}
        made = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
        return await self._cluster.create("leases", made, seconds=seconds)


class Elector:
    """Takes the Lease when it is free and renews it.

    Args:
        lock: The Lease.
        identity: This process' name in it.
        lost: Ends the process. Where it returns, `run` returns as well.
        clock: Seconds, never set back, also counted while the process is stopped.
        now: The time that people see in the Lease.
    """

    def __init__(
        self,
        lock: LeaseLock,
        identity: str,
        times: Times,
        *,
        lost: Callable[[str], None],
        now: Callable[[], datetime],
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._lock, self._identity, self._times = lock, identity, times
        self._lost, self._now, self._clock = lost, now, clock
        self._lease: Json | None = None
        """As last seen."""
        self._changed = 0.0
        """When its spec was first seen as it is; labels of others do not count as a renewal."""
        self._renewed: float | None = None
        """When the last renewal that succeeded was begun; None: this process has not led."""
        self._began = asyncio.Event()
        self._failure = ""
        """Why the last look at the Lease failed; "" where it did not."""
        self._quiet = QuietLog(clock)
        LEADER.set(0)

    # --- the rule ---
    @property
    def _spec(self) -> Json:
        return (self._lease or {}).get("spec") or {}

    @property
    def _holder(self) -> str:
        """Identity of the leader; "" where the Lease was given up."""
        return self._spec.get("holderIdentity") or ""

    def time_to_write(self) -> float:
        """Returns for how many seconds this process may still write; 0: not at all."""
        if self._renewed is None or self._holder not in ("", self._identity):
            return 0.0
        return max(0.0, self._renewed + self._times.renew_deadline - self._clock())

    def _time_for_request(self) -> float:
        """Returns the limit of a request that begins now: none outlives the leadership."""
        left = self._times.request if self._renewed is None else self.time_to_write()
        return max(SHORTEST, min(self._times.request, left))

    def _until_free(self) -> float:
        """Returns in how many seconds this process may take the Lease, as it was last seen."""
        if self._holder in ("", self._identity):
            return 0.0
        valid = min(self._spec.get("leaseDurationSeconds") or self._times.lease, MOST_SECONDS)
        return max(0.0, self._changed + valid - self._clock())

    def _why_lost(self) -> str:
        """Returns why this process has lost leadership; "" while it leads, or has not led yet."""
        if self._renewed is None or self.time_to_write():
            return ""
        if self._holder not in ("", self._identity):
            return f"{self._holder} holds the Lease"
        said = f": {self._failure}" if self._failure else ""
        return f"could not renew the Lease for {self._times.renew_deadline:g} s{said}"

    # --- the loop ---
    async def leading(self) -> None:
        """Waits until this process leads."""
        await self._began.wait()

    async def run(self) -> None:
        """Takes the Lease as soon as it is free, and renews it until that fails."""
        while True:
            begun = self._clock()
            if self._renewed is None or self.time_to_write():
                await self._look()
            if why := self._why_lost():
                break
            if self.time_to_write() and not self._began.is_set():
                logger.info("%s leads", self._identity)
                LEADER.set(1)
                self._began.set()
            # The next look comes sooner where the leadership ends before, or may begin.
            rest = max(SHORTEST, begun + self._times.retry - self._clock())
            left = self._until_free() if self._renewed is None else self.time_to_write()
            await asyncio.sleep(min(left, rest) if left else rest)
        LEADER.set(0)
        self._lost(why)

    async def _look(self) -> None:
        """Renews the Lease, reads it, or takes it. A failure is logged, and the next look comes."""
        try:
            if self._renewed is None or not await self._write():
                await self._read()
                if self._until_free() == 0.0:
                    await self._write()
        except ApiError as error:
            self._failure = str(error)
            if self._quiet.due():
                logger.warning("failed to read or write the Lease, retrying: %s", error)
        else:
            self._failure = ""
            self._quiet.reset()

    async def _read(self) -> None:
        spec, holder = self._spec, self._holder
        self._lease = await self._lock.get(self._time_for_request())
        if self._lease is None or self._spec != spec:
            self._changed = self._clock()
        if self._holder not in ("", holder, self._identity):
            logger.info("%s leads; %s stands by", self._holder, self._identity)

    async def _write(self) -> bool:
        """Takes or renews the Lease in the known version; returns False where it has changed since."""
        begun, old = self._clock(), self._spec
        ours = self._holder == self._identity
        acquired = old.get("acquireTime") if ours else ""
        spec = self._claim(self._identity, self._times.lease) | {
            "acquireTime": acquired or rfc3339(self._now(), timespec="microseconds"),
            "leaseTransitions": (old.get("leaseTransitions") or 0) + (not ours and self._lease is not None),
        }
        try:
            self._lease = await self._lock.write(self._lease, spec, self._time_for_request())
        except ApiError as error:
            if not error.stale:
                raise
            return False
        self._changed = self._renewed = begun
        return True

    def _claim(self, holder: str, seconds: int) -> Json:
        """Returns the Lease's spec with another holder; what others have written there stays."""
        renewed = rfc3339(self._now(), timespec="microseconds")
        return self._spec | {
            "holderIdentity": holder,
            "leaseDurationSeconds": seconds,
            "renewTime": renewed,
        }

    async def release(self) -> None:
        """Gives the Lease up, so that another process need not wait for its end. Nothing is written later."""
        if not self.time_to_write():
            return
        seconds = self._time_for_request()
        self._renewed = None
        LEADER.set(0)
        try:
            for last in (False, True):  # a renewal that was under way may change it meanwhile
                self._lease = await self._lock.get(seconds)
                if self._holder != self._identity:
                    return
                try:
                    await self._lock.write(self._lease, self._claim("", 1), seconds)
                    break
                except ApiError as error:
                    if last or not error.stale:
                        raise
        except ApiError as error:
            logger.warning("failed to release the Lease, it will expire: %s", error)
        else:
            logger.info("%s released the Lease", self._identity)
