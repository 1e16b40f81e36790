"""Which jobs are looked at again without an event, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from spottrain_operator.api.observed import PodView
from spottrain_operator.api.training_job import ConditionStatus, Job, JobKey
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.informer import Informers
from spottrain_operator.control.service import Service
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Page
from spottrain_operator.names import Condition
from spottrain_operator.settings import Settings

from tests.builders import (
    KEY,
    NOW,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_pod,
    notice,
    raw_spec,
    started,
)
from tests.support.virtualtime import virtually
from tests.unit.controller.fake_cluster import FakeCluster, KeySet, World


def _job(uid: str, **more: Any) -> Job:
    return replace(make_job(status=started()), key=_key(uid), **more)


def _key(uid: str) -> JobKey:
    return JobKey(namespace="ns", name=f"job-{uid}", uid=uid)


def _ended(kind: Condition) -> Any:
    end = ConditionStatus(type=kind, status="True", reason="R", last_transition_time=NOW)
    return started(conditions=(end,))


@pytest.mark.parametrize(
    ("name", "job", "rests"),
    [
        ("runs", {}, False),
        ("waits", {"status": replace(started(), attempts=())}, False),
        ("succeeded", {"status": _ended(Condition.SUCCEEDED)}, True),
        ("ended, being deleted", {"status": _ended(Condition.FAILED), "deleted": NOW}, False),
        ("suspended", {"spec": make_job(raw_spec(suspend=True)).spec}, True),
        ("suspended, still saving", {"spec": make_job(raw_spec(suspend=True)).spec}, False),
        ("invalid", {"spec": None}, False),
    ],
)
async def test_what_rests_is_not_looked_at_again(name: str, job: dict[str, Any], rests: bool) -> None:
    w = World()
    w.caches.jobs.put(_job(name, **job))
    if name in ("runs", "suspended, still saving"):
        w.caches.pods.put(replace(make_pod(), job=_key(name)))
    assert w.reconciler._rests(_key(name)) is rests
    assert w.reconciler._rests(_key("deleted"))


class Namespaced(FakeCluster):
    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, int] = {}

    async def pages(self, kind: str, namespace: str) -> AsyncIterator[Page]:
        if namespace in self.refused:
            raise ApiError(self.refused[namespace], "it is refused")
        async for page in super().pages(kind, namespace):
            here = [raw for raw in page.items if raw["metadata"]["namespace"] == namespace]
            yield replace(page, items=here)


@pytest.mark.parametrize("status", [403, 404])
async def test_a_namespace_whose_jobs_cannot_be_listed_does_not_stop_the_others(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, caches = Namespaced(), Caches()
    cluster.add_job()
    cluster.refused = {"gone": status}
    informers = Informers(cluster, caches, KeySet(), ("gone", KEY.namespace))  # type: ignore[arg-type]
    for _ in range(2):
        await informers.list_jobs()
    assert caches.jobs.keys() == (KEY,)
    assert len(caplog.records) == 1 and "trainingjobs of gone cannot be listed" in caplog.text
    cluster.refused = {KEY.namespace: status}
    await informers.list_jobs()
    assert caches.jobs.keys() == (KEY,), "a refusal that may pass drops nothing"
    assert len(caplog.records) == 2, "it is told again, for it could be read meanwhile"


@virtually
async def test_a_list_that_fails_is_tried_again() -> None:
    cluster, caches = Namespaced(), Caches()
    cluster.add_job()
    cluster.refused = {KEY.namespace: 500}
    informers = Informers(cluster, caches, KeySet(), ("other", KEY.namespace))  # type: ignore[arg-type]
    listing = asyncio.create_task(informers.list_jobs())
    await asyncio.sleep(5)
    assert not listing.done()
    cluster.refused.clear()
    await listing
    assert caches.jobs.keys() == (KEY,)


async def test_a_list_enqueues_the_jobs_that_the_watch_has_missed() -> None:
    cluster, caches, queue = FakeCluster(), Caches(), KeySet()
    cluster.add_job()
    informers = Informers(cluster, caches, queue)  # type: ignore[arg-type]

    async def listed() -> set[JobKey]:
        queue.keys.clear()
        await informers.list_jobs()
        return queue.keys

    assert await listed() == {KEY}
    assert await listed() == set()
    cluster._bump(cluster.jobs[KEY.name])
    assert await listed() == {KEY}
    del cluster.jobs[KEY.name]
    assert await listed() == {KEY} and caches.jobs.get(KEY) is None
    assert await listed() == set()


async def test_a_new_leader_begins_with_what_has_happened_while_nobody_led() -> None:
    service = Service(Settings())
    rests = started(observed_generation=1)

    def put(uid: str, *pods: PodView, **job: Any) -> None:
        service.caches.jobs.put(_job(uid, status=rests, **job))
        for pod in pods:
            service.caches.pods.put(replace(pod, uid=f"pod-of-{uid}", job=_key(uid)))

    for number in range(5):
        put(f"rests-{number}", make_pod(node="node-z"))
    put("is-over", ended_pod(node="node-z", holds_outcome=False))
    put("changed", make_pod(node="node-z"), generation=2)
    put("goes", make_pod(node="node-z"), deleted=NOW)
    put("ended", ended_pod(node="node-z"))
    put("pod-goes", make_pod(node="node-z", **deleted()))
    put("noticed", make_pod(node="node-a"))
    service.caches.nodes.put(make_node("node-a", notice=notice()))
    service._lead()
    first = {(await service.queue.take()).uid for _ in range(5)}
    assert first == {"changed", "goes", "ended", "pod-goes", "noticed"}
