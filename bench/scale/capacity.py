"""What 5,000 jobs with 10,000 pods cost the operator.

All jobs train, and their trainers answer the operator's polls. Then nothing happens for longer than the
operator's interval between two resyncs: that is `rest`. Then the operator is started again, and its leader is
killed while a standby waits.

`reconcile_p99_ms`: 99th percentile from an event, or the time at which a job was due, to the end of its
reconcile, at rest and with a resync in it, by the operator's histogram. `restart_to_synced_s`: from the start
of the process until /readyz says that its caches are filled; the median. `failover_s`: from SIGKILL of the
leader until the first write of the next one in the API server's audit log; `failover_to_pod_s`: until the pod
of a job is made that was applied at the moment of the kill. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

from spottrain_operator.names import FIELD_MANAGER, PLURAL

from bench.scale import options as shared
from bench.scale import world as worlds
from bench.scale.audit import Log, Write, by_verb
from bench.scale.client import Timeout, each, seen, wait
from bench.scale.metrics import labels_of, p99_ms, value
from bench.scale.world import NAMESPACE, Operator, Size, World, jobs_path, load, say, training_job, trains

PATIENCE: Final = 3600.0
BAD: Final = ()
FAILOVER_PATIENCE: Final = 120.0
ELECTED: Final = {"LEASE_NAMESPACE": NAMESPACE}
PROGRAMS: Final = ("operator", "kube-apiserver", "etcd")
WAIT, WORK, BOTH = (f"spottrain_{name}_seconds" for name in ("queue_wait", "reconcile", "reconcile_latency"))


# --- at rest --------------------------------------------------------------------------------------------
async def rest(world: World, seconds: float) -> dict[str, Any]:
    session, operator = world.api.session, world.operator
    before, etcd = await operator.metrics(session), await etcd_bytes(world)
    cpu, began = world.cpu(), time.monotonic()
    with closing(Log(world.server.audit_log)) as log:
        await asyncio.sleep(seconds)
        writes = [w for w in log.writes() if w.operators]
    lasted = time.monotonic() - began
    after, used = await operator.metrics(session), worlds.spent(cpu, world.cpu())
    lanes = labels_of(after, f"{BOTH}_count", "lane")
    return {
        "resident_mib": round(operator.resident_mib, 1),
        "greatest_mib": round(operator.greatest_mib, 1),
        "reconcile_p99_ms": p99_ms(before, after, BOTH),
        "by_lane_p99_ms": {lane: p99_ms(before, after, BOTH, lane=lane) for lane in lanes},
        "queue_wait_p99_ms": p99_ms(before, after, WAIT),
        "reconcile_alone_p99_ms": p99_ms(before, after, WORK),
        "reconciles_a_second": round(
            (value(after, f"{BOTH}_count") - value(before, f"{BOTH}_count")) / lasted, 1
        ),
        "rest_seconds": round(lasted),
        "resyncs": value(after, "spottrain_resyncs_total") - value(before, "spottrain_resyncs_total"),
        "etcd_bytes_a_second": round((await etcd_bytes(world) - etcd) / lasted),
        "writes_a_second": {what: round(n / lasted, 2) for what, n in by_verb(writes, 1).items()},
        "cpu_at_rest": {name: round(used[name] / lasted, 3) for name in PROGRAMS},
    }


async def etcd_bytes(world: World) -> float:
    """That etcd has written to its log."""
    async with world.api.session.get(f"{world.server.etcd}/metrics") as reply:
        return value(await reply.text(), "etcd_disk_wal_write_bytes_total")


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
    standby = Operator(server=world.server, name="standby", settings=world.operator.settings)
    standby.start()
    try:
        yield standby
    finally:
        standby.end()


async def measured_failover(world: World) -> dict[str, float | None]:
    """Null where it failed: the hour's other figures must not be lost."""
    try:
        return {**await failover(world)}
    except Timeout as error:
        say(f"no failover: {error}")
        return {"failover_s": None}


async def failover(world: World) -> dict[str, float]:
    """Seconds. Raises Timeout where the standby writes nothing."""
    api, leader, name = world.api, world.operator, "after-the-leader"
    await leader.leads(api.session)
    with second_process(world) as standby, closing(Log(world.server.audit_log)) as log:
        await standby.ready(api.session, seconds=600)
        killed = time.time()
        leader.end(by=signal.SIGKILL)
        ended = time.time()
        await api.call("POST", jobs_path(PLURAL), training_job(name, 1))
        writes: list[Write] = []

        def first_pod() -> float | None:
            writes.extend(w for w in log.writes() if w.agent == FIELD_MANAGER and w.made and w.at > ended)
            pods = (w for w in writes if (w.verb, w.resource) == ("create", "pods"))
            return next((w.answered for w in pods if w.name.startswith(name)), None)

        await wait(
            lambda: f"no pod of {name} is made", lambda: first_pod() is not None, seconds=FAILOVER_PATIENCE
        )
        first, pod = min(write.answered for write in writes), first_pod()
    assert pod is not None
    return {"failover_s": round(first - killed, 1), "failover_to_pod_s": round(pod - killed, 1)}


# --- the play -------------------------------------------------------------------------------------------
async def all_train(world: World, jobs: int, workers: int) -> float:
    """Applies the jobs; returns the seconds until they all train."""
    path, began = jobs_path(PLURAL), time.monotonic()
    names = [f"job-{number}" for number in range(jobs)]
    async with seen(world.api, path, trains) as found:
        await each(lambda name: world.api.call("POST", path, training_job(name, workers)), names)
        say(f"{jobs} jobs are applied after {time.monotonic() - began:.0f} s")
        count = lambda: f"{len(found.fitting)} of {jobs} jobs train"  # noqa: E731
        telling = asyncio.create_task(tell(count))
        try:
            await wait(count, lambda: len(found.fitting) == jobs, seconds=PATIENCE)
        finally:
            telling.cancel()
    return time.monotonic() - began


async def tell(what: Callable[[], str]) -> None:
    while True:
        await asyncio.sleep(30)
        say(what())


async def play(world: World, options: argparse.Namespace) -> dict[str, Any]:
    started = await all_train(world, options.jobs, options.workers)
    say(f"all train after {started:.0f} s; {options.settle:.0f} s later the rest begins")
    await asyncio.sleep(options.settle)
    found = await rest(world, options.rest)
    say(f"at rest: {found}")
    starts = [round(await restart(world), 1) for _ in range(options.restarts)]
    say(f"restarts: {starts}")
    return {
        "resident_mib": found.pop("resident_mib"),
        "restart_to_synced_s": statistics.median(starts) if starts else None,
        **await measured_failover(world),
        **found,
        "restarts_s": starts,
        "seconds_until_all_train": round(started),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    at_begin, pods = load(), options.jobs * options.workers
    size = Size(nodes=math.ceil(pods / options.gpus), gpus=options.gpus, zones=options.zones)
    async with worlds.world(size) as world:
        world.operator.settings = ELECTED
        world.operator.start()
        await world.operator.ready(world.api.session)
        found = await play(world, options)
    about = {"jobs": options.jobs, "pods": pods, "nodes": size.nodes}
    return about | found | {"load": [at_begin, load()]}


def arguments() -> argparse.ArgumentParser:
    parser = shared.parser(__doc__, jobs=5000, workers=2, gpus=8, zones=1)
    shared.add(parser, "settle", float, 60.0, "seconds from when all train until the rest begins")
    shared.add(parser, "rest", float, 330.0, "seconds; a resync is every 300")
    shared.add(parser, "restarts", int, 3, "of which the median is taken")
    return parser
