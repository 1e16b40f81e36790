"""What the operator does when its caches lie: they lag behind, miss a deletion, or are of an older leader."""

from __future__ import annotations

from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.validation import parse_job
from spottrain_operator.control.reconcile import AT_ONCE

from tests.builders import KEY, word
from tests.unit.controller.fake_cluster import Crash, World


async def test_a_pod_that_only_the_cache_has_lost_is_not_lost() -> None:
    w = World()
    await w.begin()
    for pod in tuple(w.caches.pods):
        w.caches.pods.drop(pod)
    await w.reconciler(KEY)
    assert (w.status.attempt, w.status.interruptions) == (1, 0)


async def test_a_paused_operator_that_wakes_up_makes_no_pod_of_an_old_attempt() -> None:
    """It was stopped between the write of attempt 1 and the POST of its pod; another has gone on since."""
    w = World()
    w.cluster.crash_at = 1
    await w.look()
    with pytest.raises(Crash):
        await w.look()
    sleeper = parse_job(w.cluster.jobs[KEY.name])
    assert sleeper.status.attempt == 1 and not w.cluster.pods
    await w.begin()
    w.cluster.end(w.pod(1), 1)
    await w.settle()
    w.pass_time(20)
    await w.settle()
    posted = list(w.cluster.posted)
    assert w.status.attempt == 2 and w.pod(1) not in w.cluster.pods

    w._start()  # empty caches, but for what the sleeper knew
    w.caches.jobs.put(sleeper)
    await w.reconciler(KEY)
    assert w.cluster.posted == posted and w.status.attempt == 2


async def test_a_node_that_only_the_cache_has_lost_is_not_lost() -> None:
    w = World()
    await w.begin()
    node = w.caches.nodes.get("node-a")
    assert node is not None
    w.caches.nodes.drop(node)
    await w.reconciler(KEY)
    assert w.status.attempt == 1


async def test_a_job_that_the_cache_lacks_is_read_once() -> None:
    w = World()
    await w.begin()
    w._start()
    for pod in w.cluster.pods.values():
        w.see_pod(pod)
    await w.reconciler(KEY)
    assert w.caches.jobs.get(KEY) == parse_job(w.cluster.jobs[KEY.name]), "the poller asks for it"


async def test_a_job_that_is_deleted_while_it_is_read_stays_out_of_the_cache() -> None:
    w = World()
    await w.begin()
    job = w.caches.jobs.get(KEY)
    assert job is not None
    w._start()
    read = w.cluster.get_job

    async def late(namespace: str, name: str) -> dict[str, Any] | None:
        raw = await read(namespace, name)
        w.caches.jobs.remove(KEY, job.resource_version + 1)
        return raw

    w.cluster.get_job = late  # type: ignore[method-assign]
    await w.reconciler(KEY)
    assert w.caches.jobs.get(KEY) is None
    assert not w.cluster.pods[w.pod(1)]["metadata"]["finalizers"], "its pods are let go"


async def test_a_pod_of_a_deleted_job_is_let_go() -> None:
    w = World()
    await w.begin()
    w.cluster.jobs.clear()
    w.caches.jobs.remove(KEY)
    await w.reconciler(KEY)
    assert not w.cluster.pods[w.pod(1)]["metadata"]["finalizers"]


async def test_a_write_on_an_outdated_job_is_refused_and_planned_again() -> None:
    w = World()
    await w.begin()
    w.cluster._bump(w.cluster.jobs[KEY.name])  # somebody has labelled the job
    w.cluster.end(w.pod(1), 0, word(Outcome.DONE))
    for raw in await w.cluster.list_pods("", f"spottrain.io/job-uid={KEY.uid}"):
        w.see_pod(raw)
    assert await w.reconciler(KEY) is not None
    await w.reconciler(KEY)
    assert w.status.phase == "Succeeded"


async def test_a_pod_under_notice_is_deleted_in_time_though_the_watch_does_not_tell_of_its_annotation() -> (
    None
):
    w = World()
    await w.begin()
    w.pass_time(60)
    w.cluster.give_notice("node-a", 100)
    again = await w.look()
    annotated = w.cluster.pods[w.pod(1)]["metadata"]
    assert "spottrain.io/termination-deadline" in annotated["annotations"] and again == AT_ONCE
    writes = w.cluster.writes
    again = await w.reconciler(KEY)  # no watch event, no resync
    assert w.cluster.writes == writes and again is not None and again.total_seconds() < 1.2
    w.pass_time(1.1)
    await w.reconciler(KEY)
    assert "deletionTimestamp" in w.cluster.pods[w.pod(1)]["metadata"] and w.status.attempt == 2
