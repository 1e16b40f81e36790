"""Churn of jobs in compressed time, for memory, ghosts and stuck jobs: `make bench-soak`.

    python -m bench.scale.soak --jobs 300      # some minutes
    python -m bench.scale.soak --jobs 2400     # a day of a team that starts a hundred jobs an hour

So many lanes each play one job after the other, of one to four workers: it trains for some seconds and is
done, or is deleted midway, or suspended and resumed. Meanwhile nodes get notices and go, or vanish without
one, and new ones come. Each job is deleted in the end. Resyncs are every 15 s.

The last line is JSON; exit code 1 where one of these is not 0: stuck_jobs (that were not done, or not gone,
in time), failed_jobs (all should succeed), leaks (pods, Services and jobs that are left once all are gone).
`ghosts`: objects that a resync found in the operator's caches and nowhere else.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from localcluster.fakepods import FINISHES
from spottrain_operator.names import PLURAL

from bench.scale import world as worlds
from bench.scale.client import MERGE, Json, Refused, Timeout, key, wait
from bench.scale.storm import Places, counter, give_notice, places
from bench.scale.world import NAMESPACE, PODS, Size, World, jobs_path, load, node, say, training_job

SETTINGS: Final = {"RESYNC_SECONDS": "15"}
PATIENCE: Final = 600.0
"""Seconds in which a job must be done, or gone; under load a tenth of it is normal."""
SAMPLE: Final = 2.0
DONE, DELETED, SUSPENDED = "done", "deleted midway", "suspended"
FATES: Final = {DONE: 0.7, DELETED: 0.15, SUSPENDED: 0.15}


@dataclass(kw_only=True)
class Soak:
    world: World
    random: Random
    jobs: int
    there: Places
    status: dict[str, Json] = field(default_factory=dict)
    """Of each job that exists, as the watch last saw it."""
    began: int = 0
    over: int = 0
    count: Counter[str] = field(default_factory=Counter)
    stuck: list[str] = field(default_factory=list)
    samples: list[tuple[int, float]] = field(default_factory=list)
    """(jobs that are over, resident MiB)."""

    # --- jobs ---
    async def watch(self) -> None:
        async for kind, job in self.world.api.watch(jobs_path(PLURAL), table=False):
            name = key(job).partition("/")[2]
            if kind == "DELETED":
                self.status.pop(name, None)
            else:
                self.status[name] = job.get("status") or {}

    async def lane(self) -> None:
        while self.began < self.jobs:
            self.began += 1
            name = f"soak-{self.began}"
            try:
                await self._live(name)
            except Timeout as error:
                say(str(error))
                self.stuck.append(name)
            self.over += 1
            if self.over % 50 == 0:
                say(f"{self.over} of {self.jobs} jobs are over; {dict(self.count)}; {self.samples[-1:]}")

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
            await wait(
                lambda: f"{name} is not done: {self._phase(name)}",
                lambda: self._ended(name),
                seconds=PATIENCE,
            )
            self.count["failed"] += self._phase(name) != "Succeeded"
        self.count["interruptions"] += self.status.get(name, {}).get("interruptions", 0)
        self.count[fate] += 1
        await api.delete(f"{jobs_path(PLURAL)}/{name}")
        await wait(lambda: f"{name} is not gone", lambda: name not in self.status, seconds=PATIENCE)

    async def _suspend(self, name: str, *, on: bool) -> None:
        with suppress(Refused):  # it has ended
            await self.world.api.call(
                "PATCH", f"{jobs_path(PLURAL)}/{name}", {"spec": {"suspend": on}}, kind=MERGE
            )

    def _phase(self, name: str) -> str:
        return str(self.status.get(name, {}).get("phase", ""))

    def _ended(self, name: str) -> bool:
        return self._phase(name) in ("Succeeded", "Failed")

    # --- the cloud ---
    async def cloud(self, every: float, lost: float) -> None:
        """Takes nodes back, with a notice or, in the share `lost`, without one."""
        for number in itertools.count():
            await asyncio.sleep(self.random.uniform(0, 2 * every))
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

    async def sample(self) -> None:
        while True:
            self.samples.append((self.over, self.world.operator.resident_mib))
            await asyncio.sleep(SAMPLE)

    # --- the end ---
    async def left(self) -> dict[str, int]:
        """Objects of the operator's that are still there a while after the last job has gone."""
        found: dict[str, int] = {}

        async def count() -> bool:
            for kind, path in _KINDS.items():
                found[kind] = len((await self.world.api.call("GET", path))["items"])
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


def slope(samples: Sequence[tuple[int, float]]) -> float | None:
    """MiB for each 1,000 jobs, by least squares over the second half. None: too few samples."""
    half = samples[len(samples) // 2 :]
    if len({jobs for jobs, _ in half}) < 2:
        return None
    mean_x, mean_y = sum(x for x, _ in half) / len(half), sum(y for _, y in half) / len(half)
    spread = sum((x - mean_x) ** 2 for x, _ in half)
    return round(1000 * sum((x - mean_x) * (y - mean_y) for x, y in half) / spread, 2)


async def play(world: World, options: argparse.Namespace) -> dict[str, Any]:
    async with places(world.api) as there:
        soak = Soak(world=world, random=Random(options.seed), jobs=options.jobs, there=there)
        work = (soak.watch(), soak.cloud(options.notice_every, options.lost), soak.sample())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.gather(*(soak.lane() for _ in range(options.lanes)))
            left = await soak.left()
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in _errors(ended):
        raise error
    metrics = await world.operator.metrics(world.api.session)
    mib = [resident for _, resident in soak.samples]
    return {
        "leaks": sum(left.values()),
        "stuck_jobs": len(soak.stuck),
        "failed_jobs": soak.count.pop("failed", 0),
        "ghosts": counter(metrics, "spottrain_ghosts_dropped_total"),
        "resident_mib": {
            "first": round(mib[0], 1),
            "last": round(mib[-1], 1),
            "greatest": round(max(mib), 1),
        },
        "mib_per_1000_jobs": slope(soak.samples),
        "played": dict(soak.count),
        "left": left,
        "stuck": soak.stuck[:20],
    }


def _errors(ended: Sequence[object]) -> Iterator[Exception]:
    return (result for result in ended if isinstance(result, Exception))


async def run(options: argparse.Namespace) -> dict[str, Any]:
    at_begin, began = load(), time.monotonic()
    async with worlds.world(Size(nodes=options.nodes, stop_seconds=1.0)) as world:
        world.operator.settings = SETTINGS
        world.operator.start()
        await world.operator.ready(world.api.session)
        found = await play(world, options)
    about = {"jobs": options.jobs, "lanes": options.lanes, "nodes": options.nodes, "seed": options.seed}
    return found | about | {"seconds": round(time.monotonic() - began), "load": [at_begin, load()]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--lanes", type=int, default=30, help="jobs at the same time")
    parser.add_argument("--nodes", type=int, default=30, help="of 8 GPUs each")
    parser.add_argument("--notice-every", type=float, default=8, help="seconds between two nodes that go")
    parser.add_argument("--lost", type=float, default=0.1, help="share of them that go without a notice")
    parser.add_argument("--seed", type=int, default=1)
    figures = asyncio.run(run(parser.parse_args()))
    print(json.dumps(figures))
    return 1 if figures["leaks"] or figures["stuck_jobs"] or figures["failed_jobs"] else 0


if __name__ == "__main__":
    sys.exit(main())
