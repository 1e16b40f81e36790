"""Which process leads: at most one at any time, whatever fails, and always one in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client
from spottrain_operator.control.leader import Elector, LeaseLock, Times
from spottrain_operator.errors import ApiError, NotLeading
from spottrain_operator.io.cluster import Cluster, Json

from tests.support.virtualtime import run_virtually, virtually

TIMES = Times()
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


# --- the rule -------------------------------------------------------------------------------------------
def lease(holder: str, *, renewal: int = 1, seconds: int = 15, **more: object) -> Json:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": seconds, "leaseTransitions": 3} | more
    spec |= {"acquireTime": "then", "renewTime": renewal}
    return {"metadata": {"resourceVersion": str(renewal)}, "spec": spec}


class One(LeaseLock):
    """A process that looks at a Lease when a test says so, by a clock that the test sets."""

    def __init__(self, identity: str = "a", found: Json | None = None) -> None:
        self.found, self.clock, self.wrote = found, 100.0, list[tuple[Json | None, Json]]()
        lost: Any = pytest.fail
        self.elector = Elector(self, identity, TIMES, lost=lost, now=lambda: BEGAN, clock=lambda: self.clock)

    async def get(self, seconds: float) -> Json | None:
        return self.found

    async def write(self, lease: Json | None, spec: Json, seconds: float) -> Json:
        self.wrote.append((lease, spec))
        self.found = {"metadata": {"resourceVersion": "10"}, "spec": spec}
        return self.found

    async def look(self, at: float, found: Json | None = None) -> bool:
        """Returns whether it leads after a look at this time."""
        self.clock, self.found = at, found if found is not None else self.found
        await self.elector._look()
        return self.elector.time_to_write() > 0


async def test_a_lease_is_free_once_it_has_not_changed_for_as_long_as_it_is_valid() -> None:
    me = One(found=lease("b"))
    assert not await me.look(100.0) and not await me.look(114.0, lease("b", renewal=2))
    assert not await me.look(128.9) and await me.look(129.0)


async def test_a_change_of_another_writers_label_is_no_renewal() -> None:
    me = One(found=lease("b"))
    assert not await me.look(100.0)
    labelled = lease("b") | {"metadata": {"resourceVersion": "9"}}
    assert not await me.look(110.0, labelled) and await me.look(115.0)
    assert me.wrote[0][0] == labelled, "the write names the version that was seen last"


async def test_how_long_a_lease_is_valid_is_what_its_holder_says() -> None:
    long, silent = One(found=lease("b", seconds=60)), One(found=lease("b", seconds=0))
    assert not await long.look(100.0) and not await long.look(150.0)
    assert not await silent.look(100.0) and await silent.look(115.0), "it says nothing"


@pytest.mark.parametrize("found", [None, lease(""), lease("a")], ids=["none", "given up", "our own"])
async def test_a_lease_without_another_holder_is_taken_at_once(found: Json | None) -> None:
    """Our own: the container was restarted in the same pod, and its process before is dead."""
    assert await One(found=found).look(100.0)


async def test_the_leader_stops_writing_before_another_one_may_begin() -> None:
    """It counts from before its request, the other from after it has read the renewal."""
    leader = One()
    assert await leader.look(100.0)
    other = One("b", leader.found)
    assert not await other.look(100.0) and not await other.look(112.0)
    leader.clock = 111.9
    assert leader.elector.time_to_write() > 0
    leader.clock = 112.0
    assert leader.elector.time_to_write() == 0


async def test_a_leader_that_reads_another_holder_stops_at_once() -> None:
    leader = One()
    assert await leader.look(100.0)
    leader.found = lease("b", renewal=2)
    await leader.elector._read()
    assert leader.elector.time_to_write() == 0


async def test_a_renewal_keeps_when_it_began_and_what_others_wrote() -> None:
    ours, taken = One(found=lease("a", preferredHolder="x")), One("b", lease("", preferredHolder="x"))
    assert await ours.look(0.0) and await taken.look(0.0)
    ((_, kept),), ((_, new),) = ours.wrote, taken.wrote
    assert (kept["acquireTime"], kept["leaseTransitions"], kept["preferredHolder"]) == ("then", 3, "x")
    assert (new["holderIdentity"], new["leaseTransitions"]) == ("b", 4)
    assert new["acquireTime"] == "2026-01-01T00:00:00.000000Z"


async def test_a_request_never_outlives_the_leadership() -> None:
    leader = One()
    await leader.look(100.0)
    for at, limit in ((101.0, TIMES.request), (111.0, 1.0)):
        leader.clock = at
        assert leader.elector._time_for_request() == pytest.approx(limit)
    leader.clock = 112.0
    assert leader.elector._time_for_request() > 0, "0 would be no limit"


# --- several processes ----------------------------------------------------------------------------------
@dataclass
class Server:
    """One Lease, with the API server's preconditions."""

    lease: Json | None = None
    writes: int = 0

    def write(self, old: Json | None, spec: Json) -> Json:
        known = self.lease["metadata"] if self.lease is not None else None
        if (old["metadata"] if old is not None else None) != known:
            raise ApiError(409 if known else 404, "the object has been modified")
        self.writes += 1
        self.lease = {"metadata": {"resourceVersion": str(self.writes)}, "spec": spec}
        return self.lease


@dataclass
class Line(LeaseLock):
    """The connection of one process to the server. While it is down, requests time out."""

    server: Server
    up: bool = True
    answers: bool = True
    """Whether replies arrive."""

    async def _pass(self, seconds: float, do: Callable[[], Json | None]) -> Json | None:
        await asyncio.sleep(0.01)
        result = do() if self.up else None
        if not self.up or not self.answers:
            await asyncio.sleep(seconds)
            raise ApiError(0, "no response")
        return result

    async def get(self, seconds: float) -> Json | None:
        return await self._pass(seconds, lambda: self.server.lease)

    async def write(self, lease: Json | None, spec: Json, seconds: float) -> Json:
        made = await self._pass(seconds, lambda: self.server.write(lease, spec))
        assert made is not None
        return made


def clock() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Process:
    """One process: it restarts under a new identity when it has lost the Lease."""

    name: str
    server: Server
    line: Line = field(init=False)
    elector: Elector = field(init=False)
    starts: int = 0
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.line = Line(self.server)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.starts += 1
        me = f"{self.name}-{self.starts}"
        self.elector = Elector(
            self.line, me, TIMES, lost=self._lost, now=lambda: BEGAN + _since(), clock=clock
        )
        self._task = asyncio.create_task(self.elector.run())

    def _lost(self, why: str) -> None:
        self.lost.append(why)
        asyncio.get_running_loop().call_later(1.0, self.start)

    def kill(self) -> None:
        assert self._task is not None
        self._task.cancel()

    async def stop(self) -> None:
        self.kill()
        await self.elector.release()

    async def stand_still(self, seconds: float) -> None:
        """As by SIGSTOP: nothing of it runs, and its clock goes on."""
        was = self.elector
        self.kill()
        await asyncio.sleep(seconds)
        if self.elector is was:
            self._task = asyncio.create_task(was.run())

    @property
    def writes(self) -> bool:
        return self.elector.time_to_write() > 0


def _since() -> timedelta:
    return timedelta(seconds=clock())


async def until(what: str, look: Callable[[], bool], *, within: float) -> float:
    """Returns after how many seconds it was so; `within` is virtual time, and part of the promise."""
    began = clock()
    while not look():
        assert clock() < began + within, f"not within {within:.0f} s: {what}"
        await asyncio.sleep(0.05)
    return clock() - began


async def pair() -> tuple[Process, Process]:
    """A leader and a standby that has seen it."""
    server = Server()
    first, second = Process("first", server), Process("second", server)
    first.start()
    await until("the first leads", lambda: first.writes, within=1)
    second.start()
    await asyncio.sleep(20)
    assert first.writes and not second.writes
    return first, second


@virtually
async def test_a_killed_leader_is_replaced_within_20_seconds() -> None:
    first, second = await pair()
    first.kill()
    first.line.up = False
    waited = await until("the second leads", lambda: second.writes, within=20)
    assert waited >= TIMES.lease - TIMES.retry, "not before the Lease has ended"


@virtually
async def test_a_leader_that_stops_hands_over_within_a_look() -> None:
    first, second = await pair()
    await first.stop()
    assert not first.writes
    await until("the second leads", lambda: second.writes, within=TIMES.retry + 0.1)


@virtually
async def test_a_release_that_meets_a_renewal_of_its_own_still_gives_up() -> None:
    first, second = await pair()
    read = first.line.get

    async def get(seconds: float) -> Json | None:
        """The cancelled renewal arrives after the read."""
        found = await read(seconds)
        first.line.get = read  # type: ignore[method-assign]
        assert found is not None
        first.server.write(found, found["spec"] | {"renewTime": "now"})
        return found

    first.line.get = get  # type: ignore[method-assign]
    await first.stop()
    await until("the second leads", lambda: second.writes, within=TIMES.retry + 0.1)


@virtually
async def test_a_leader_that_is_cut_off_stops_before_another_begins_and_returns_as_a_standby() -> None:
    first, second = await pair()
    first.line.up = False
    stopped = await until("the first stops writing", lambda: not first.writes, within=13)
    assert not second.writes
    await until("the second leads", lambda: second.writes, within=20 - stopped)
    first.line.up = True
    await asyncio.sleep(30)
    assert second.writes and not first.writes
    assert first.lost and "could not renew the Lease for 12 s: no response" in first.lost[0]
    assert first.starts >= 2, "a new process stands by"


@virtually
async def test_renewals_whose_replies_are_lost_keep_the_others_away_and_end_the_leadership() -> None:
    """They have arrived, so nobody else leads; and nobody can know that they have."""
    first, second = await pair()
    first.line.answers = False
    await until("the first stops writing", lambda: not first.writes, within=13)
    assert not second.writes
    first.line.answers = True
    await until("someone leads", lambda: first.writes or second.writes, within=20)


@virtually
async def test_a_short_failure_of_the_api_server_ends_no_leadership() -> None:
    first, second = await pair()
    first.line.up = second.line.up = False
    await asyncio.sleep(7)
    first.line.up = second.line.up = True
    await asyncio.sleep(30)
    assert first.writes and first.starts == 1 and not second.writes


@virtually
async def test_a_lease_that_is_deleted_or_emptied_by_hand_has_one_holder_again() -> None:
    first, second = await pair()
    server = first.server
    for by_hand in (None, {"metadata": {"resourceVersion": "0"}, "spec": {}}):
        server.lease = by_hand
        await asyncio.sleep(10)
        assert [first.writes, second.writes].count(True) == 1
        assert server.lease is not None and server.lease["spec"]["holderIdentity"].startswith(
            ("first-", "second-")
        )


def test_a_standby_that_may_not_read_the_lease_says_so_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        process = Process("first", Server())
        process.line.up = False
        process.start()
        await asyncio.sleep(100)
        process.kill()

    run_virtually(scene())
    assert len([r for r in caplog.records if "retrying: no response" in r.message]) == 2


async def disturb(process: Process, random: Random) -> None:
    """Cuts it off, takes its replies, kills it, stops it for a while, or asks it to end; for 400 s."""
    while clock() < 400:
        await asyncio.sleep(random.uniform(1, 40))
        match random.randrange(5):
            case 0:
                process.line.up = False
                await asyncio.sleep(random.uniform(1, 30))
                process.line.up = True
            case 1:
                process.line.answers = False
                await asyncio.sleep(random.uniform(1, 30))
                process.line.answers = True
            case 2:
                process.kill()
                await asyncio.sleep(random.uniform(0, 5))
                process.start()
            case 3:
                await process.stand_still(random.uniform(1, 40))
            case 4:
                await process.stop()
                process.start()


@pytest.mark.parametrize("seed", range(20))
@virtually
async def test_under_random_faults_never_two_write_and_in_the_end_one_does(seed: int) -> None:
    server, random = Server(), Random(seed)
    processes = [Process(name, server) for name in ("first", "second", "third")]
    for process in processes:
        process.start()
    works = [asyncio.create_task(disturb(process, random)) for process in processes]
    while not all(work.done() for work in works):
        await asyncio.sleep(0.1)
        now = [p.name for p in processes if p.writes]
        assert len(now) <= 1, f"at {clock():.1f} s: {now}"
    await asyncio.gather(*works)
    await until("one leads", lambda: any(p.writes for p in processes), within=40)


# --- settings and requests ------------------------------------------------------------------------------
@pytest.mark.parametrize("lease", [2, 4, 15, 60, 3600])
def test_a_leader_has_stopped_and_its_writes_have_ended_before_another_takes_over(lease: int) -> None:
    times = Times(lease=lease)
    assert 0 < times.retry < times.request < times.write < times.renew_deadline < times.lease
    assert (TIMES.retry, TIMES.write, TIMES.renew_deadline, TIMES.lease) == (2, 11, 12, 15)


async def test_each_write_asks_whether_this_process_leads_and_ends_while_it_does() -> None:
    """Against a server that receives everything, and answers a DELETE late."""
    received: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        received.append(request.method)
        await asyncio.sleep(5 if request.method == "DELETE" else 0)
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        host = f"http://127.0.0.1:{server.port}"
        api = client.ApiClient(client.Configuration(host=host))
        left = [0.0]
        cluster = Cluster(api, write_timeout=60, time_to_write=lambda: left[0])
        with pytest.raises(NotLeading, match="is not sent"):
            await cluster.delete("pods", "pod", "ns", uid="u")
        with pytest.raises(NotLeading):
            await cluster.create("events", {"metadata": {"namespace": "ns"}})
        assert await cluster.list("pods", "ns") == [] and received == ["GET"]
        left[0] = 0.3
        with pytest.raises(ApiError, match="TimeoutError"):
            await cluster.delete("pods", "pod", "ns", uid="u")
        await cluster.create("events", {"metadata": {"namespace": "ns"}})
        assert received == ["GET", "DELETE", "POST"]
        await cluster.close()
