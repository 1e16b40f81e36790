"""What 5,000 jobs with 10,000 pods cost the operator: `make bench-capacity`.

    python -m bench.scale.capacity --jobs 5000 --workers 2

All jobs train, and their trainers answer the operator's polls. Then nothing happens for longer than the
operator's interval between two resyncs: that is `rest`. Then the operator is started again, and its leader is
killed while a standby waits.

`reconcile_p99_ms` is the 99th percentile of the wait in the queue plus that of a reconcile, at rest and with
a resync in it, by the operator's own histograms: never less than the percentile of their sum. `failover_s` is
the time from SIGKILL of the leader until the first pod of a job that is applied at that moment is made; null
where the operator has no Lease. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from spottrain_operator.names import PLURAL
from spottrain_operator.settings import Settings

from bench.scale import world as worlds
from bench.scale.audit import Log, by_verb
from bench.scale.client import each, seen, wait
from bench.scale.storm import counter, trains
from bench.scale.world import NAMESPACE, Operator, Size, World, jobs_path, load, say, training_job

PATIENCE: Final = 3600.0
FAILOVER_PATIENCE: Final = 120.0
HAS_LEASE: Final = "lease_namespace" in {field.name for field in fields(Settings)}
ELECTED: Final = {"LEASE_NAMESPACE": NAMESPACE} if HAS_LEASE else {}
LEADER: Final = "spottrain_leader"
PROGRAMS: Final = ("operator", "kube-apiserver", "etcd")


# --- histograms -----------------------------------------------------------------------------------------
def buckets(metrics: str, name: str, **labels: str) -> dict[float, float]:
    """Observations up to each limit, added up over all other labels."""
    found: dict[float, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                limit = float(sample.labels["le"])
                found[limit] = found.get(limit, 0.0) + sample.value
    return found


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float | None:
    """Of what was observed in between, linear within a bucket, as Prometheus does it. None: nothing was."""
    counts = {limit: after[limit] - before.get(limit, 0.0) for limit in sorted(after)}
    wanted = share * counts.get(math.inf, 0.0)
    if not wanted:
        return None
    below, passed = 0.0, 0.0
    for limit, count in counts.items():
        if count >= wanted:
            return (
                below if limit == math.inf else below + (limit - below) * (wanted - passed) / (count - passed)
            )
        below, passed = limit, count
    raise AssertionError("the last bucket has all")


def lanes(metrics: str) -> set[str]:
    return {
        sample.labels["lane"]
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "spottrain_queue_wait_seconds_count"
    }


def p99_ms(before: str, after: str, name: str, **labels: str) -> float | None:
    found = quantile(buckets(before, name, **labels), buckets(after, name, **labels), 0.99)
    return None if found is None else round(1000 * found, 1)


# --- at rest --------------------------------------------------------------------------------------------
async def rest(world: World, seconds: float) -> dict[str, Any]:
    session, operator = world.api.session, world.operator
    before, etcd = await operator.metrics(session), await etcd_bytes(world)
    cpu, began = world.cpu(), time.monotonic()
    with closing(Log(world.server.audit_log)) as log:
        await asyncio.sleep(seconds)
        writes = [w for w in log.writes() if w.operators]
    lasted = time.monotonic() - began
    after = await operator.metrics(session)
    wait_ms = p99_ms(before, after, "spottrain_queue_wait_seconds")
    work_ms = p99_ms(before, after, "spottrain_reconcile_seconds")
    used = worlds.spent(cpu, world.cpu())
    by_lane = {
        lane: p99_ms(before, after, "spottrain_queue_wait_seconds", lane=lane)
        for lane in sorted(lanes(after))
    }
    return {
        "resident_mib": round(operator.resident_mib, 1),
        "reconcile_p99_ms": None if work_ms is None else round(work_ms + (wait_ms or 0.0), 1),
        "queue_wait_p99_ms": wait_ms,
        "reconcile_alone_p99_ms": work_ms,
        "queue_wait_p99_ms_by_lane": by_lane,
        "rest_seconds": round(lasted),
        "resyncs": counter(after, "spottrain_resyncs_total") - counter(before, "spottrain_resyncs_total"),
        "etcd_bytes_a_second": round((await etcd_bytes(world) - etcd) / lasted),
        "writes_a_second": {what: round(n / lasted, 2) for what, n in by_verb(writes, 1).items()},
        "cpu_at_rest": {
            name: round(used[name] / lasted, 3) for name in ("operator", "kube-apiserver", "etcd")
        },
    }


async def etcd_bytes(world: World) -> float:
    """That etcd has written to its log."""
    async with world.api.session.get(f"{world.server.etcd}/metrics") as reply:
        return counter(await reply.text(), "etcd_disk_wal_write_bytes_total")


# --- starts ---------------------------------------------------------------------------------------------
async def restart(world: World) -> float:
    """Seconds from the start of the process until its caches are filled."""
    world.operator.end()
    began = time.monotonic()
    world.operator.start()
    await world.operator.ready(world.api.session, seconds=600)
    return time.monotonic() - began


@contextmanager
def second_process(world: World) -> Iterator[Operator]:
    standby = Operator(server=world.server, name="standby", settings=ELECTED)
    standby.start()
    try:
        yield standby
    finally:
        standby.end()


async def failover(world: World) -> float | None:
    api, leader = world.api, world.operator
    if not HAS_LEASE or not await leads(leader, api.session):
        return None
    with second_process(world) as standby:
        await standby.ready(api.session, seconds=600)
        if await leads(standby, api.session):
            return None  # both write: nothing would fail over
        with closing(Log(world.server.audit_log)) as log:
            killed = time.time()
            leader.end(by=signal.SIGKILL)
            await api.call("POST", jobs_path(PLURAL), training_job("after-the-leader", 1))
            made: list[float] = []

            def look() -> bool:
                made.extend(
                    write.answered
                    for write in log.writes()
                    if write.operators and write.made and (write.verb, write.resource) == ("create", "pods")
                )
                return bool(made)

            await wait(lambda: "no pod is made after the leader's end", look, seconds=FAILOVER_PATIENCE)
    return made[0] - killed


async def leads(operator: Operator, session: aiohttp.ClientSession) -> bool:
    return counter(await operator.metrics(session), LEADER) == 1


# --- the play -------------------------------------------------------------------------------------------
async def play(world: World, options: argparse.Namespace) -> dict[str, Any]:
    api, path, began = world.api, jobs_path(PLURAL), time.monotonic()
    names = [f"job-{number}" for number in range(options.jobs)]
    async with seen(api, path, trains) as jobs:
        await each(lambda name: api.call("POST", path, training_job(name, options.workers)), names)
        count = lambda: f"{len(jobs.fitting)} of {len(names)} jobs train"  # noqa: E731
        await wait(count, lambda: len(jobs.fitting) == len(names), seconds=PATIENCE)
    started = time.monotonic() - began
    say(f"{len(names)} jobs train after {started:.0f} s; rest")
    found = await rest(world, options.rest)
    say(f"at rest: {found}")
    starts = [await restart(world) for _ in range(options.restarts)]
    synced = round(statistics.median(starts), 1) if starts else None
    say(f"restarts: {starts}")
    over = await failover(world)
    return {
        "resident_mib": found.pop("resident_mib"),
        "restart_to_synced_s": synced,
        "failover_s": None if over is None else round(over, 1),
        **found,
        "seconds_until_all_train": round(started),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    at_begin, pods = load(), options.jobs * options.workers
    size = Size(nodes=math.ceil(pods / options.gpus), gpus=options.gpus, zones=options.zones)
    async with worlds.world(size, profile=options.profile) as world:
        world.operator.settings = ELECTED
        world.operator.start()
        await world.operator.ready(world.api.session)
        found = await play(world, options)
    about = {"jobs": options.jobs, "pods": pods, "nodes": size.nodes}
    return about | found | {"load": [at_begin, load()]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=2, help="of each job")
    parser.add_argument("--gpus", type=int, default=8, help="of each node; all of them are used")
    parser.add_argument("--zones", type=int, default=1)
    parser.add_argument("--rest", type=float, default=330, help="seconds; a resync is every 300")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="file for the operator's profile")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
