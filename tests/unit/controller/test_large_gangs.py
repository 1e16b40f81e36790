"""A gang of a hundred pods or more holds up no other job."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, cast

import pytest
from spottrain_operator.api.training_job import Status
from spottrain_operator.control.apply import CHANGED_AT_A_TIME
from spottrain_operator.control.informer import Informers
from spottrain_operator.control.reconcile import LARGE
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.io.cluster import CREATIONS

from tests.builders import KEY, NOW, make_job, make_observed, manifests, raw_spec
from tests.support.virtualtime import virtually
from tests.unit.controller.fake_cluster import KeySet, World, copied, resync


@pytest.mark.parametrize(("workers", "others_run"), [(2, False), (LARGE, True)])
async def test_other_tasks_go_on_while_a_large_gang_is_planned(workers: int, others_run: bool) -> None:
    turns, over = 0, asyncio.Event()

    async def other() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            await asyncio.sleep(0)

    observed = make_observed(job=make_job(raw_spec(workers=workers), status=Status()), nodes=())
    task = asyncio.create_task(other())
    made = await World().reconciler._plan(observed)
    assert (turns > 0) == others_run
    over.set()
    await task
    assert len(manifests(made)) == workers


async def test_pods_of_a_large_gang_are_created_and_deleted_a_few_at_a_time() -> None:
    world = World({"workers": 100})
    created, deleted = at_once(world, "create_pod"), at_once(world, "delete_pod")
    await world.settle()
    assert len(world.cluster.posted) == 100 and max(created) == CREATIONS
    job = world.cluster.jobs[KEY.name]
    job["spec"]["suspend"] = True
    world.cluster._bump(job)
    await world.after(60)
    assert len(deleted) >= 100 and max(deleted) == CHANGED_AT_A_TIME


@virtually
async def test_a_gang_whose_pods_start_one_by_one_writes_its_status_once_a_second_and_when_all_run() -> None:
    world, began = World({"workers": 8, "capacity": {"sameZone": False}}), asyncio.get_running_loop().time()
    cluster, queue = world.cluster, WorkQueue()
    informers = Informers(cast(Any, cluster), world.caches, queue)
    for rank in range(8):
        cluster.add_node(f"n{rank}")
    await resync(cluster, world.caches, KeySet(), ())
    writes = at_once(world, "write_status")

    async def passes(seconds: float) -> None:
        await asyncio.sleep(seconds)
        cluster.now = NOW + timedelta(seconds=asyncio.get_running_loop().time() - began)

    def happens(name: str) -> None:
        informers.pods[0]._apply("MODIFIED", copied(cluster.pods[name]))

    worker = asyncio.create_task(queue.work(world.reconciler))
    queue.add(KEY)
    await passes(0.1)
    for rank in range(8):
        name = world.pod(1, rank)
        cluster.pods[name]["spec"]["nodeName"] = f"n{rank}"
        cluster._bump(cluster.pods[name])
        happens(name)
        await passes(0.1)
        cluster.bind(name, f"n{rank}")
        happens(name)
        await passes(0.2)
    assert world.status.ready_workers == 8, "the last start is waited for by nobody"
    await passes(1.5)
    assert len(writes) <= 6, "one at the start, and one a second"
    cluster.end(world.pod(1, 3), 1, "Traceback: boom")
    happens(world.pod(1, 3))
    await passes(0.01)
    assert world.status.attempts[0].stopping, "an end does not wait"
    worker.cancel()


def at_once(world: World, method: str) -> list[int]:
    """How many requests of this kind were under way, at the start of each."""
    real, counts, under_way = getattr(world.cluster, method), [], 0

    async def call(*args: Any, **more: Any) -> Any:
        nonlocal under_way
        under_way += 1
        counts.append(under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return await real(*args, **more)

    setattr(world.cluster, method, call)
    return counts
