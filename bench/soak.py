"""A day of churn in minutes, for memory, ghosts and stuck jobs.

So many lanes each play one job after the other, of one to four workers: it trains for some seconds and is
done, or is deleted midway, or suspended and resumed. Meanwhile nodes get notices and go, or vanish without
one, and new ones come. Two operators share a Lease, and resync as often as in a day (288 times). In the last
third of the time the leader is killed, asked to end, or killed and started again, in turn. Memory is that of
the time before, for which both processes live; a fifth of it is the warm-up, which does not count.

The last line is JSON; exit code 1 where one of these is not 0, by what the API server has: stuck_jobs (that
were not done, or not gone, in time), failed_jobs (all should succeed), charged_failures (no trainer fails by
itself), duplicate_ranks (created more than once), operator_deaths (that nobody asked for), leaks (pods,
Services and jobs that are left once all are gone, and jobs that the leader still counts then). `ghosts`:
objects that resyncs dropped from the operators' caches because the API server did not have them; one whose
deletion the watch reports only after the resync's LIST is among them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from localcluster.fakepods import FINISHES
from spottrain_operator.names import PLURAL, Phase

from bench.scale import options as shared
from bench.scale import world as worlds
from bench.scale.__main__ import play as play_scenario
from bench.scale.audit import Log, Write
from bench.scale.client import MERGE, Json, Refused, Seen, Timeout, seen, wait
from bench.scale.cloud import Places, give_notice, places
from bench.scale.metrics import value
from bench.scale.storm import duplicates
from bench.scale.world import NAMESPACE, PODS, Operator, World, jobs_path, load, node, say, training_job

DAY_MINUTES, RESYNC_SECONDS = 24 * 60, 300
QUIET_SHARE: Final = 2 / 3
"""Of the time, in which no operator is ended."""
WARM_UP: Final = 0.2
"""Share of that in which memory may grow."""
PATIENCE: Final = 600.0
"""Seconds in which a job must be done, or gone; under load a tenth of it is normal."""
TAKEOVER: Final = 60.0
SAMPLE: Final = 2.0
DONE, DELETED, SUSPENDED = "done", "deleted midway", "suspended"
FATES: Final = {DONE: 0.7, DELETED: 0.15, SUSPENDED: 0.15}
LEASE: Final = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/spottrain-operator"
BAD: Final = (
    *("stuck_jobs", "failed_jobs", "charged_failures", "duplicate_ranks", "leaks"),
    "operator_deaths",
)


@dataclass(frozen=True, slots=True)
class Sample:
    over: int
    """Jobs that are over."""
    mib: float


@dataclass(kw_only=True)
class Soak:
    world: World
    random: Random
    until: float
    """By `time.monotonic`, when no more jobs are applied."""
    operators: tuple[Operator, Operator]
    there: Places
    seen: Seen
    """The jobs."""
    began: int = 0
    over: int = 0
    count: Counter[str] = field(default_factory=Counter)
    stuck: list[str] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """By operator."""
    ghosts: float = 0.0
    """Of operators that were ended."""

    # --- jobs ---
    async def lane(self) -> None:
        while time.monotonic() < self.until:
            self.began += 1
            name = f"soak-{self.began}"
            try:
                await self._live(name)
            except Timeout as error:
                say(str(error))
                self.stuck.append(name)
            self.over += 1
            if self.over % 100 == 0:
                say(f"{self.over} jobs are over; {dict(self.count)}")

    async def _live(self, name: str) -> None:
        random, api = self.random, self.world.api
        fate = random.choices(list(FATES), list(FATES.values()))[0]
        lasts = random.uniform(5, 40)
        job = training_job(name, random.choice((1, 1, 1, 2, 4)), annotations={FINISHES: f"{lasts:.1f}s"})
        await api.call("POST", jobs_path(PLURAL), job)
        if fate == DELETED:
            await asyncio.sleep(random.uniform(0, lasts))
        if fate == SUSPENDED:
            await asyncio.sleep(random.uniform(0, lasts))
            await self._suspend(name, on=True)
            await asyncio.sleep(random.uniform(0, lasts))
            await self._suspend(name, on=False)
        if fate != DELETED:
            said = lambda: f"{name} is not done: {self._status(name).get('phase')}"  # noqa: E731
            await wait(said, lambda: self._ended(name), seconds=PATIENCE)
            self.count["failed"] += self._status(name)["phase"] != Phase.SUCCEEDED
        self.count["charged"] += self._status(name).get("failures", 0)
        self.count["interruptions"] += self._status(name).get("interruptions", 0)
        self.count[fate] += 1
        await api.delete(f"{jobs_path(PLURAL)}/{name}")
        await wait(lambda: f"{name} is not gone", lambda: name not in self.seen.live, seconds=PATIENCE)

    async def _suspend(self, name: str, *, on: bool) -> None:
        with suppress(Refused):  # it has ended
            await self.world.api.call(
                "PATCH", f"{jobs_path(PLURAL)}/{name}", {"spec": {"suspend": on}}, kind=MERGE
            )

    def _status(self, name: str) -> Json:
        status: Json = self.seen.live.get(name, {}).get("status") or {}
        return status

    def _ended(self, name: str) -> bool:
        return self._status(name).get("phase") in (Phase.SUCCEEDED, Phase.FAILED)

    # --- the cloud ---
    async def cloud(self, every: float, lost: float) -> None:
        """Takes nodes back, with a notice or, in the share `lost`, without one, while jobs are applied."""
        for number in itertools.count():
            await asyncio.sleep(self.random.uniform(0, 2 * every))
            if time.monotonic() > self.until:
                return
            name = self.random.choice(self.world.nodes)
            self.world.nodes.remove(name)
            await self._take(name, notice=self.random.random() >= lost)
            fresh = f"fresh-{number}"
            await self.world.api.call("POST", "/api/v1/nodes", node(fresh, 8, 0))
            self.world.nodes.append(fresh)

    async def _take(self, name: str, *, notice: bool) -> None:
        self.count["notices" if notice else "lost nodes"] += 1
        if notice:
            await give_notice(self.world.api, name, self.there)
            with suppress(Timeout):
                await wait(lambda: name, lambda: not self.there.on(name), seconds=30)
        await self.world.api.delete(f"/api/v1/nodes/{name}")

    # --- the operators ---
    async def sample(self, until: float) -> None:
        while time.monotonic() < until:
            for operator in self.operators:
                if operator.alive:
                    found = Sample(self.over, operator.resident_mib)
                    self.samples.setdefault(operator.name, []).append(found)
            await asyncio.sleep(SAMPLE)

    async def keep_alive(self) -> None:
        """Starts an operator again that has ended by itself, as a kubelet would."""
        while True:
            for operator in self.operators:
                if operator.process is not None and not operator.alive:
                    say(f"{operator.name} has ended by itself:\n{operator.log.read_text()[-1000:]}")
                    self.count["operator deaths"] += 1
                    operator.start()
            await asyncio.sleep(SAMPLE)

    async def unrest(self, begin: float, every: float) -> None:
        """From `begin` on the leader goes, each time in another way, until no more jobs are applied."""
        await asyncio.sleep(begin - time.monotonic())
        ways: dict[str, Callable[[Operator, Operator], Awaitable[None]]] = {
            "killed leader": self._killed,
            "leader asked to end": self._asked_to_end,
            "leader killed and started again": self._started_again,
        }
        for what, go in itertools.cycle(ways.items()):
            await asyncio.sleep(every)
            if time.monotonic() > self.until:
                return
            leader, other = await self.leader_and_standby()
            self.ghosts += await self._ghosts_of(leader)
            self.count[what] += 1
            await go(leader, other)
            for operator in self.operators:
                await operator.ready(self.world.api.session)

    async def _killed(self, leader: Operator, other: Operator) -> None:
        leader.end(by=signal.SIGKILL)
        await self._takes_over(other)
        leader.start()

    async def _asked_to_end(self, leader: Operator, other: Operator) -> None:
        await asyncio.to_thread(leader.end)
        await self._takes_over(other)
        leader.start()

    async def _started_again(self, leader: Operator, _: Operator) -> None:
        """As by a kubelet: under its name it goes on with its Lease."""
        leader.end(by=signal.SIGKILL)
        leader.start()

    async def _takes_over(self, other: Operator) -> None:
        end = time.monotonic() + TAKEOVER
        while await self.holder() != other.name:
            if time.monotonic() > end:
                raise Timeout(f"{other.name} does not take the Lease over")
            await asyncio.sleep(0.2)

    async def leader_and_standby(self) -> tuple[Operator, Operator]:
        one, other = self.operators
        return (one, other) if await self.holder() == one.name else (other, one)

    async def holder(self) -> str:
        """Name of the operator that the Lease names."""
        lease = await self.world.api.call("GET", LEASE)
        return str(lease["spec"].get("holderIdentity") or "")

    async def _ghosts_of(self, operator: Operator) -> float:
        metrics = await operator.metrics(self.world.api.session)
        return value(metrics, "spottrain_ghosts_dropped_total")

    async def all_ghosts(self) -> float:
        return self.ghosts + sum([await self._ghosts_of(operator) for operator in self.operators])

    # --- the end ---
    async def left(self) -> dict[str, int]:
        """What is still there a while after the last job has gone, and jobs that the leader counts."""
        found: dict[str, int] = {}

        async def count() -> bool:
            for kind, path in _KINDS.items():
                found[kind] = len((await self.world.api.call("GET", path))["items"])
            leader, _ = await self.leader_and_standby()
            metrics = await leader.metrics(self.world.api.session)
            found["jobs of the leader's"] = int(value(metrics, "spottrain_jobs"))
            return not any(found.values())

        end = time.monotonic() + PATIENCE / 5
        while not await count() and time.monotonic() < end:
            await asyncio.sleep(1)
        return {kind: number for kind, number in found.items() if number}


_KINDS: Final = {
    PLURAL: jobs_path(PLURAL),
    "pods": PODS,
    "services": f"/api/v1/namespaces/{NAMESPACE}/services",
}


# --- memory ---------------------------------------------------------------------------------------------
def memory(samples: Sequence[Sample]) -> dict[str, float | None]:
    """After the warm-up: medians of the first and of the last tenth, and how it grew with the jobs."""
    warm = samples[int(WARM_UP * len(samples)) :]
    tenth = max(1, len(warm) // 10)
    return {
        "begin_mib": round(statistics.median(s.mib for s in warm[:tenth]), 1),
        "end_mib": round(statistics.median(s.mib for s in warm[-tenth:]), 1),
        "greatest_mib": round(max(s.mib for s in warm), 1),
        "mib_per_1000_jobs": slope(warm),
    }


def slope(samples: Sequence[Sample]) -> float | None:
    """MiB for each 1,000 jobs, by least squares. None: too few samples."""
    if len({sample.over for sample in samples}) < 2:
        return None
    jobs, mib = [s.over for s in samples], [s.mib for s in samples]
    return round(1000 * statistics.linear_regression(jobs, mib).slope, 2)


# --- the play -------------------------------------------------------------------------------------------
async def play(world: World, standby: Operator, options: argparse.Namespace) -> dict[str, Any]:
    api, seconds, began = world.api, 60 * options.minutes, time.monotonic()
    quiet = began + QUIET_SHARE * seconds
    async with places(api) as there, seen(api, jobs_path(PLURAL), lambda _: True) as jobs:
        soak = Soak(
            world=world,
            random=Random(options.seed),
            until=began + seconds,
            operators=(world.operator, standby),
            there=there,
            seen=jobs,
        )
        with closing(Log(world.server.audit_log)) as log:
            first = await soak.holder()
            unrest = asyncio.create_task(soak.unrest(quiet, options.leader_every))
            cloud = soak.cloud(options.notice_every, options.lost)
            tasks = [asyncio.create_task(work) for work in (cloud, soak.sample(quiet), soak.keep_alive())]
            try:
                await asyncio.gather(*(soak.lane() for _ in range(options.lanes)))
                await unrest  # the last one that went is back
                left = await soak.left()
            finally:
                for task in (unrest, *tasks):
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            writes = log.writes()
    for error in _errors(ended):
        raise error
    return await figures(soak, first, left, writes)


def _errors(ended: Sequence[object]) -> Iterator[Exception]:
    return (result for result in ended if isinstance(result, Exception))


async def figures(soak: Soak, first: str, left: dict[str, int], writes: Sequence[Write]) -> dict[str, Any]:
    lease = await soak.world.api.call("GET", LEASE)
    return {
        "leaks": sum(left.values()),
        "stuck_jobs": len(soak.stuck),
        "failed_jobs": soak.count.pop("failed", 0),
        "charged_failures": soak.count.pop("charged", 0),
        "duplicate_ranks": duplicates(writes),
        "operator_deaths": soak.count.pop("operator deaths", 0),
        "ghosts": await soak.all_ghosts(),
        "jobs": soak.over,
        "leader_changes": lease["spec"].get("leaseTransitions", 0),
        "memory": {
            "leader" if name == first else "standby": memory(samples)
            for name, samples in sorted(soak.samples.items(), key=lambda item: item[0] != first)
        },
        "played": dict(soak.count),
        "left": left,
        "stuck": soak.stuck[:20],
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    at_begin, began = load(), time.monotonic()
    resync = max(1.0, RESYNC_SECONDS * options.minutes / DAY_MINUTES)
    async with worlds.world(shared.size(options)) as world:
        settings = {"LEASE_NAMESPACE": NAMESPACE, "RESYNC_SECONDS": f"{resync:g}"}
        standby = Operator(server=world.server, name="standby")
        try:
            for operator in (world.operator, standby):
                operator.settings = settings | {"IDENTITY": operator.name}
                operator.start()
                await operator.ready(world.api.session)
            await world.operator.leads(world.api.session)
            found = await play(world, standby, options)
        finally:
            standby.end()
    about = {"minutes": options.minutes, "lanes": options.lanes, "nodes": options.nodes, "seed": options.seed}
    return found | about | {"seconds": round(time.monotonic() - began), "load": [at_begin, load()]}


def arguments() -> argparse.ArgumentParser:
    parser = shared.parser(__doc__, nodes=40, stop_seconds=1.0, seed=1)
    shared.add(parser, "minutes", float, 15.0, "in which jobs are applied")
    shared.add(parser, "lanes", int, 60, "jobs at the same time")
    shared.add(parser, "notice_every", float, 8.0, "seconds between two nodes that go")
    shared.add(parser, "lost", float, 0.1, "share of them that go without a notice")
    shared.add(parser, "leader_every", float, 20.0, "seconds between two ends of a leader")
    return parser


if __name__ == "__main__":
    sys.exit(play_scenario(sys.modules[__name__], sys.argv[1:]))
