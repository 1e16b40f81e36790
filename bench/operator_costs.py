"""What the operator's own steps cost, in milliseconds of processor time, without a cluster.

    python -m bench.operator_costs [--polls 1000] [--workers 1024] [--rounds 10]

poll    one query of a trainer over a new and over a kept connection: the operator's part and the trainer's
job     a TrainingJob is parsed, planned and its status written as JSON, by the number of recorded attempts
gang    the plan that starts a gang; and the longest that the process computes between two turns of the event
        loop while the gang starts, runs, ends and starts again, with the API server in memory (`held`)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any, Final

import aiohttp
from spottrain.contract import Progress
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import AttemptRecord, Job, Status
from spottrain_operator.api.validation import parse_job
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.plan import plan
from spottrain_operator.control.progress import TIMEOUT, Poller
from spottrain_operator.control.reconcile import AT_ONCE
from spottrain_operator.control.work_queue import WorkQueue

from tests.builders import KEY, NOW, make_job, make_observed, make_pod, raw_job, raw_spec, started
from tests.unit.controller.fake_cluster import ROUNDS, KeySet, World, resync

Json = dict[str, Any]
REPEATS: Final = 20
TRAINER: Final = """
import resource, sys
from spottrain.core.progress import ProgressBoard, serve
board = ProgressBoard(attempt=1)
board.update(state="Training", step=7, total_steps=10, loss=0.5)
print(serve(board, 0), flush=True)
for _ in sys.stdin:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, flush=True)
"""
"""Prints its port, and its processor seconds for each line that it reads."""


def least(step: Callable[[], object], rounds: int) -> float:
    """Returns the milliseconds of a step, from the round with the least: the others had company."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(REPEATS):
            step()
        times.append((time.process_time() - began) / REPEATS)
    return round(min(times) * 1000, 3)


# --- poll ---------------------------------------------------------------------------------------------
async def polls(number: int) -> Json:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdin is not None and trainer.stdout is not None
    try:
        port = int(trainer.stdout.readline())

        def used() -> tuple[float, float]:
            assert trainer.stdin is not None and trainer.stdout is not None
            print(file=trainer.stdin, flush=True)
            mine = resource.getrusage(resource.RUSAGE_SELF)
            return mine.ru_utime + mine.ru_stime, float(trainer.stdout.readline())

        connectors = {
            "new": aiohttp.TCPConnector(force_close=True),
            "kept": aiohttp.TCPConnector(),
        }
        return {name: await _polled(each, port, number, used) for name, each in connectors.items()}
    finally:
        trainer.stdin.close()
        trainer.wait()


async def _polled(
    connector: aiohttp.TCPConnector, port: int, number: int, used: Callable[[], tuple[float, float]]
) -> Json:
    poller = Poller(
        caches=Caches(),
        memory=Memory(),
        queue=WorkQueue(),
        interval=10,
        write_interval=timedelta(seconds=60),
        now=lambda: NOW,
        port=port,
    )
    pod = make_pod(ip="127.0.0.1")
    async with aiohttp.ClientSession(timeout=TIMEOUT, trust_env=False, connector=connector) as session:
        before = used()
        for _ in range(number):
            heard = await poller._poll(session, pod)
            assert isinstance(heard, Progress), heard
        operator, trainer = (round(1000 * (b - a) / number, 3) for a, b in zip(before, used(), strict=True))
    return {"operator": operator, "trainer": trainer}


# --- job ----------------------------------------------------------------------------------------------
def raw_with(attempts: int) -> Json:
    """A running job as the API server has it."""
    ended = AttemptRecord(
        number=1,
        pod="job-0123abcd-1-0",
        node="ip-10-0-0-17.eu-west-1.compute.internal",
        zone="eu-west-1a",
        instance_type="p4d.24xlarge",
        capacity_type="Spot",
        pool="default",
        platform="Karpenter",
        notice_seconds=120,
        workers=1,
        started=NOW,
        bound=NOW,
        stepped=NOW,
        ended=NOW + timedelta(minutes=9),
        cause="SpotNotice",
        evidence="the node had a notice: AWS spot/instance-action",
        charged=False,
        exit_code=75,
        start_step=100,
        last_step=200,
        durable_step=200,
        spent=Decimal("1.2345"),
        use_seconds=Decimal("540.1"),
    )
    old = [replace(ended, number=number) for number in range(1, attempts)]
    last = replace(ended, number=attempts, ended=None, cause="", charged=None, exit_code=None)
    status = replace(started(), attempt=attempts, attempts=(*old, last))
    raw = raw_job(raw_spec(), resourceVersion="7") | {"status": status.to_json()}
    return dict(json.loads(json.dumps(raw)))


def job(attempts: int, rounds: int) -> Json:
    raw = raw_with(attempts)
    parsed = parse_job(raw)
    observed = make_observed(make_pod(attempt=attempts), job=parsed)
    return {
        "parsed": least(lambda: parse_job(raw), rounds),
        "planned": least(lambda: plan(observed), rounds),
        "written": least(parsed.status.to_json, rounds),
    }


# --- gang ---------------------------------------------------------------------------------------------
def start_of(workers: int) -> Observed:
    first: Job = make_job(raw_spec(workers=workers), status=Status())
    return make_observed(job=first, nodes=())


async def held(workers: int) -> float:
    """Plays a gang; returns the longest time between two turns of the loop."""
    world = World({"workers": workers})
    cluster = world.cluster
    for name in ("create_pod", "delete_pod", "release_pod", "apply_status"):
        setattr(cluster, name, a_turn_later(getattr(cluster, name)))
    for number in range(workers):
        cluster.add_node(f"node-{number}")
    await resync(cluster, world.caches, KeySet(), ())
    async with longest() as turns:
        await settle(world)
        for number, name in enumerate(list(cluster.pods)):
            cluster.bind(name, f"node-{number}")
            await see(world, name)
        await settle(world)
        for name in list(cluster.pods):
            cluster.end(name, 75)
            await see(world, name)
        await settle(world)
        world.pass_time(600)  # the wait before the next attempt
        await settle(world)
    assert len(cluster.posted) == 2 * workers, "the next attempt has not started"
    return round(1000 * max(turns), 1)


def a_turn_later(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return await request(*args, **more)

    return call


async def see(world: World, name: str) -> None:
    if name in world.cluster.pods:
        world.see_pod(world.cluster.pods[name])
    await asyncio.sleep(0)


async def settle(world: World) -> None:
    """Reconciles until nothing is left to do."""
    for _ in range(ROUNDS):
        again = await world.reconciler(KEY)
        if (due := world.memory.unwritten.get(KEY)) is not None:
            world.cluster.now = max(world.cluster.now, due)
        elif again != AT_ONCE:
            break
    world.memory.large.clear()


@asynccontextmanager
async def longest() -> AsyncIterator[list[float]]:
    """Within it, the processor seconds of the process between turns of the loop are appended."""
    turns: list[float] = []

    async def watch() -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0)
            turns.append((now := time.process_time()) - last)
            last = now

    task = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        yield turns
    finally:
        task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--polls", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    gc.freeze()
    observed = start_of(given.workers)
    figures = {
        "poll": asyncio.run(polls(given.polls)),
        "job": {str(attempts): job(attempts, given.rounds) for attempts in (1, 20)},
        "gang": {
            "workers": given.workers,
            "planned": least(lambda: plan(observed), given.rounds),
            "held": min(asyncio.run(held(given.workers)) for _ in range(3)),
        },
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
