"""What an observation reads from the API server, and stores in caches and memory."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from spottrain_operator.api.bookkeeping import Bookkeeping, Ledger, NodeAccount
from spottrain_operator.api.node_pools import NOTHING
from spottrain_operator.api.observed import NodeView, Observed, Refusal, Waiting
from spottrain_operator.api.training_job import Job
from spottrain_operator.control import caches, reconcile
from spottrain_operator.control.observe import Sources, list_pods, observe
from spottrain_operator.errors import ApiError
from spottrain_operator.names import Reason

from tests.builders import KEY, NOW, after, make_node, make_pod, notice
from tests.unit.controller.fake_cluster import KeySet, World, begun, resync
from tests.unit.controller.test_crashes import STORIES, Story
from tests.unit.controller.test_starting import event


async def _twice(job: Job, given: Sources, now: datetime) -> Observed:
    first = await observe(job, given, now)
    assert first == await observe(job, given, now)
    return first


async def _observed(w: World) -> Observed:
    return await _twice(status_job(w), w.sources, w.cluster.now)


async def _running(spec: dict[str, object] | None = None) -> World:
    w = await begun(spec)
    w.pass_time(30)
    return w


@pytest.mark.parametrize(("story", "spec", "expected"), STORIES)
async def test_through_a_jobs_life_a_second_observation_equals_the_first(
    story: Story, spec: dict[str, object], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "observe", _twice)
    await story(World(spec))


async def test_pods_and_nodes_that_the_caches_lack_are_read_and_remembered() -> None:
    w = await _running()
    (pod,) = w.caches.pods.of(KEY)
    ghost = replace(pod, uid="ghost", name="ghost", rank=1)
    w.caches.pods.drop(pod)
    w.caches.pods.put(ghost)
    w.caches.nodes.drop(node_of(w))
    _forget_removals(w)
    o = await _observed(w)
    assert o.pods == (pod,) and set(o.nodes) == {"node-a"}
    assert w.caches.pods.of(KEY) == (pod,) and w.caches.nodes.get("node-a") == o.nodes["node-a"]
    w.refuse("list_pods", ApiError(500, "nothing is missing any more"))
    assert await _observed(w) == o


async def test_lost_nodes_are_asked_for_together_and_then_only_where_a_pod_may_run() -> None:
    w = await _running()
    asked: list[str] = []
    at_once = asyncio.Event()

    async def get_node(name: str) -> None:
        asked.append(name)
        if len(asked) == 21:
            at_once.set()
        async with asyncio.timeout(10):
            await at_once.wait()

    w.cluster.get_node = get_node  # type: ignore[method-assign]
    w.caches.nodes.drop(node_of(w))
    lost = tuple(NodeAccount(name=f"lost-{n}", start=NOW, bound=NOW, accounted=NOW) for n in range(20))
    w.memory.of(KEY).books = Bookkeeping(ledger=Ledger(nodes=lost))
    await observe(status_job(w), w.sources, w.cluster.now)
    assert len(asked) == 21
    asked.clear()
    await observe(status_job(w), w.sources, w.cluster.now)
    assert asked == ["node-a"], "a machine of its pod's node's name may be new"


async def test_nothing_that_was_deleted_during_an_observation_comes_back_to_the_caches() -> None:
    w = await _running()
    (pod,) = w.caches.pods.of(KEY)
    node, read, listed = node_of(w), w.cluster.get_node, w.cluster.list_pods
    w.caches.pods.drop(pod)
    w.caches.nodes.drop(node)
    _forget_removals(w)

    async def list_pods(uid: str) -> list[dict[str, Any]]:
        raws = await listed(uid)
        w.caches.pods.drop(replace(pod, resource_version=pod.resource_version + 1))  # a watch's DELETED
        return raws

    async def get_node(name: str) -> dict[str, Any] | None:
        raw = await read(name)
        w.caches.nodes.drop(replace(node, resource_version=node.resource_version + 1))
        return raw

    w.cluster.list_pods, w.cluster.get_node = list_pods, get_node  # type: ignore[method-assign]
    o = await observe(status_job(w), w.sources, w.cluster.now)
    assert o.pods == () and w.caches.pods.of(KEY) == ()
    w.caches.pods.put(replace(pod, uid="another"))
    o = await observe(status_job(w), w.sources, w.cluster.now)
    assert o.nodes == {} and w.caches.nodes.get(node.name) is None
    again = replace(node, resource_version=node.resource_version + 2)
    assert w.caches.nodes.put(again), "a node may come back under its name"
    w.caches.nodes.drop(node)
    assert w.caches.nodes.get(node.name) == again, "the deletion was its predecessor's"


def test_of_deleted_objects_only_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "REMEMBERED", 10)
    cache = caches.Caches().pods
    for i in range(20):
        cache.drop(make_pod(uid=f"uid-{i}"))
    assert len(cache._removed) == 10 and cache.put(make_pod(uid="uid-0"))
    assert not cache.put(make_pod(uid="uid-19"))


async def test_nodes_that_are_read_count_in_the_same_plan() -> None:
    w = await _running()
    meta = w.cluster.nodes["node-a"]["metadata"]
    meta["labels"] = {"topology.kubernetes.io/zone": "z1", "karpenter.sh/capacity-type": "spot"}
    meta["labels"]["karpenter.sh/nodepool"] = "default"
    w.caches.nodes.drop(node_of(w))
    _forget_removals(w)
    w.caches.nodes.put(make_node("node-b", zone=""))
    o = await _observed(w)
    assert o.zoned and o.karpenter and o.found == node_of(w).found != NOTHING


def status_job(w: World) -> Job:
    job = w.caches.jobs.get(KEY)
    assert job is not None
    return job


def node_of(w: World) -> NodeView:
    node = w.caches.nodes.get("node-a")
    assert node is not None
    return node


def _forget_removals(w: World) -> None:
    """As if the caches had missed the objects' events."""
    w.caches.pods._removed.clear()
    w.caches.nodes._removed.clear()


async def test_a_pod_whose_event_arrives_during_the_list_is_kept() -> None:
    w = await _running()
    (pod,) = w.caches.pods.of(KEY)
    newer = replace(pod, resource_version=pod.resource_version + 1, unhealthy="GPU-1")
    born = make_pod(rank=1, uid="born", resource_version=1)
    real = w.cluster.list_pods

    async def late(uid: str) -> list[dict[str, Any]]:
        raws = await real(uid)
        w.caches.pods.put(newer)
        w.caches.pods.put(born)
        return raws

    w.cluster.list_pods = late  # type: ignore[method-assign]
    assert set(await list_pods(KEY, w.caches, w.cluster)) == {newer, born}


async def test_the_pods_of_deleted_jobs_of_the_same_name_are_listed() -> None:
    w = World()
    w.caches.pods.put(make_pod(job=replace(KEY, uid="older")))
    await w.settle()
    w.cluster.jobs[KEY.name].pop("status")
    w.caches.pods.put(make_pod(job=replace(KEY, uid="older"), uid="another"))
    job = w.caches.jobs.get(KEY)
    assert job is not None
    again = replace(job, resource_version=job.resource_version + 1)
    w.caches.jobs.put(replace(again, status=replace(job.status, attempt=0)))
    assert (await _observed(w)).predecessors == ()
    assert w.caches.pods.other_lives(KEY) == set()


async def test_polling_began_with_the_first_observation() -> None:
    w = World()
    await w.look()
    w._start()
    await resync(w.cluster, w.caches, KeySet(), ())
    first = (await _observed(w)).now
    w.pass_time(5)
    assert (await _observed(w)).watched_since == first < w.cluster.now


async def test_when_a_deadline_was_first_seen_is_remembered() -> None:
    w = await _running()
    (pod,) = w.caches.pods.of(KEY)
    w.caches.pods.put(replace(pod, notice=notice(), resource_version=pod.resource_version + 1))
    seen = w.cluster.now
    o = await _observed(w)
    w.pass_time(5)
    assert (await _observed(w)).annotated_at == o.annotated_at == {pod.uid: seen}


async def test_since_when_no_earlier_attempt_saves_is_by_this_processs_clock() -> None:
    w = await _running()
    since = (await _observed(w)).alone_since
    assert since is not None
    w.saved[1] = 9
    await w.noticed("node-a", 100)
    await w.after(2)
    await w.after(2)
    assert w.status.attempt == 2 and (await _observed(w)).alone_since is None
    w.pass_time(10)
    w.cluster.end(w.pod(1), 75)
    await w.settle()
    assert (await _observed(w)).alone_since == w.cluster.now


async def test_events_and_their_absence_are_remembered_and_a_failure_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    w = await _running()
    (pod,) = w.caches.pods.of(KEY)
    starting = replace(pod, phase="Pending", running_since=None, bound=NOW, waiting=Waiting(reason=""))
    w.caches.pods.put(replace(starting, resource_version=pod.resource_version + 1))
    w.cluster.told_of[pod.uid] = [event("FailedMount", "no such share", at=2)]
    o = await _observed(w)
    assert o.heard[pod.uid].trouble == Waiting(reason="FailedMount", message="no such share")
    w.refuse("pod_events", ApiError(403, "events is forbidden"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            w.pass_time(10)
            later = await _observed(w)
            assert later.heard == o.heard, "the last result is kept"
    assert [r.getMessage() for r in caplog.records] == [
        f"{KEY}: Events of pod {pod.name} cannot be read: events is forbidden"
    ]


async def test_a_refusal_is_forgotten_once_all_that_it_was_about_exists() -> None:
    w = await _running()
    refusal = Refusal(generation=1, reason=Reason.REFUSED, message="no", at=NOW, retry=after(1) - NOW)
    w.memory.of(KEY).refusal = refusal
    assert (await _observed(w)).refusal is None and w.memory.of(KEY).refusal is None


async def test_pods_of_other_jobs_are_observed_on_nodes_whose_idle_time_the_job_pays() -> None:
    w = await _running()
    (pod,) = w.caches.pods.of(KEY)
    other = replace(pod, uid="other", name="other", job=replace(KEY, name="other", uid="other"))
    w.caches.pods.put(other)
    assert (await _observed(w)).others == (), "only then"
    account = NodeAccount(name=pod.node, start=NOW, bound=NOW, accounted=NOW, ended=NOW)
    for nodes, found in (((account,), (other,)), ((replace(account, closed=True),), ())):
        w.memory.of(KEY).books = Bookkeeping(ledger=Ledger(nodes=nodes))
        assert (await _observed(w)).others == found
