"""A gang of a hundred pods or more holds up no other job."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from spottrain_operator.api.training_job import Status
from spottrain_operator.control.apply import CHANGED_AT_A_TIME, CREATED_AT_A_TIME
from spottrain_operator.control.reconcile import LARGE, PAUSE_PER_POD

from tests.builders import KEY, make_job, make_observed, manifests, raw_spec
from tests.unit.controller.fake_cluster import World


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


async def test_events_of_a_large_gang_wait_a_moment_after_each_reconcile() -> None:
    world = World({"workers": 200})
    pause = 200 * PAUSE_PER_POD
    again: object = timedelta(0)
    while again == timedelta(0):
        again = await world.look()
    assert len(world.cluster.posted) == 200, "the start itself does not wait"
    world.pass_time(pause.total_seconds() / 4)
    job = world.cluster.jobs[KEY.name]
    job["spec"]["suspend"] = True
    world.cluster._bump(job)
    assert await world.look() == pause * 3 / 4
    assert world.status.attempts[0].stopping == ""
    world.pass_time(pause.total_seconds())
    await world.look()
    assert world.status.attempts[0].stopping == "Suspended"
    world.cluster.now -= timedelta(hours=1)
    again = await world.look()
    waits = isinstance(again, timedelta) and timedelta(0) < again <= pause
    assert not waits, "a clock that was set back pauses nothing"


async def test_pods_of_a_large_gang_are_created_and_deleted_a_few_at_a_time() -> None:
    world = World({"workers": 100})
    created, deleted = at_once(world, "create_pod"), at_once(world, "delete_pod")
    await world.settle()
    assert len(world.cluster.posted) == 100 and max(created) == CREATED_AT_A_TIME
    job = world.cluster.jobs[KEY.name]
    job["spec"]["suspend"] = True
    world.cluster._bump(job)
    await world.after(60)
    assert len(deleted) >= 100 and max(deleted) == CHANGED_AT_A_TIME


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
