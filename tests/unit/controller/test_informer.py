"""The informer: LISTs and watches of a scripted API server, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from spottrain_operator.api.observed import PodView
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.informer import (
    LONGEST_DELAY,
    NODES,
    PODS,
    Informer,
    Informers,
    delay,
    urgent,
)
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Cluster, Json, Page
from spottrain_operator.names import OUTCOME_FINALIZER, pod_name

from tests.builders import KEY, OWNER, deleted, ended_pod, make_pod
from tests.support.virtualtime import run_virtually, virtually

HOUR = 3600.0
Turn = Sequence[Json | float | ApiError]
"""What one watch does: events, seconds of silence, an error. Then the API server ends it."""


def raw_pod(uid: str, version: int, namespace: str = KEY.namespace, **status: Any) -> Json:
    name = pod_name(KEY.name, KEY.uid, 1)
    meta: Json = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version)}
    meta |= {"creationTimestamp": "2026-03-01T11:50:00Z", "finalizers": [OUTCOME_FINALIZER]}
    meta |= {"labels": {"spottrain.io/attempt": "1"}, "ownerReferences": [OWNER]}
    return {"metadata": meta, "spec": {"containers": [{"name": "trainer"}]}, "status": status}


def raw_node(version: int, beat: str = "11:50", **meta: Any) -> Json:
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": f"2026-03-01T{beat}:00Z"}
    metadata = {
        "name": "node-a",
        "uid": "n",
        "resourceVersion": str(version),
        "managedFields": [{"time": beat}],
    }
    return {"metadata": metadata | meta, "spec": {}, "status": {"conditions": [ready], "images": [beat]}}


def event(kind: str, raw: Json) -> Json:
    return {"type": kind, "object": raw}


def bookmark(version: int) -> Json:
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


async def nothing() -> None:
    pass


class Script:
    """The part of `Cluster` that an informer uses."""

    def __init__(self, *turns: Turn, pods: list[Json] | None = None) -> None:
        self.turns = list(turns)
        self.pods, self.version, self.refuse = pods or [], 100, list[ApiError]()
        self.lists = self.watches = 0
        self.since: list[str] = []
        self.refused: dict[str, int] = {}
        """HTTP statuses of the LISTs of these namespaces."""
        self.asked: list[tuple[str, str]] = []
        self.between: Callable[[], Awaitable[None]] = nothing
        """Called between two pages of a LIST."""

    async def pages(self, kind: str, namespace: str) -> AsyncIterator[Page]:
        self.lists += 1
        self.asked.append((kind, namespace))
        if self.refuse:
            raise self.refuse.pop(0)
        if namespace in self.refused:
            raise ApiError(self.refused[namespace], "it is refused")
        snapshot, version = list(self.pods), str(self.version)
        for raw in snapshot:
            yield Page(items=[raw], version=version)
            await self.between()
        yield Page(items=[], version=version)

    async def watch(self, kind: str, namespace: str, version: str) -> AsyncGenerator[Json]:
        self.watches += 1
        self.since.append(version)
        for step in self.turns.pop(0) if self.turns else [HOUR]:
            if isinstance(step, ApiError):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield step


class Followed:
    """An informer of pods that runs, and what it has reported."""

    def __init__(self, script: Script, namespace: str = "") -> None:
        self.script, self.caches = script, Caches()
        self.changed: list[str] = []
        self.informer: Informer[str, PodView] = Informer(
            PODS,
            cluster=as_cluster(script),
            cache=self.caches.pods,
            changed=lambda pod, _: self.changed.append(pod.uid),
            namespace=namespace,
        )

    @property
    def uids(self) -> set[str]:
        return set(self.caches.pods.keys())

    async def run(self, seconds: float) -> Followed:
        task = asyncio.create_task(self.informer.run())
        await asyncio.sleep(seconds)
        assert not task.done(), task
        self.running = task
        return self

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


def as_cluster(script: Script) -> Cluster:
    cluster: Any = script
    return cluster  # type: ignore[no-any-return]


def followed(script: Script, seconds: float = 1.0) -> Followed:
    async def follow() -> Followed:
        found = await Followed(script).run(seconds)
        await found.end()
        return found

    return run_virtually(follow())


# --- LIST, then watch ---------------------------------------------------------------------------------
def test_what_is_listed_and_what_a_watch_reports_is_in_the_cache() -> None:
    turn: Turn = [
        event("ADDED", raw_pod("b", 101)),
        event("MODIFIED", raw_pod("a", 102, phase="Failed")),
        event("DELETED", raw_pod("b", 103)),
        HOUR,
    ]
    found = followed(Script(turn, pods=[raw_pod("a", 90)]))
    assert found.uids == {"a"}
    assert found.caches.pods.of(KEY)[0].phase == "Failed"
    assert found.changed == ["a", "b", "a", "b"]
    assert found.script.since == ["100"], "it watches from the LIST's version on"


def test_a_version_that_the_cache_has_is_not_parsed_again(caplog: pytest.LogCaptureFixture) -> None:
    """Such as the event of our own write, whose reply was stored."""
    unreadable = raw_pod("a", 90)
    unreadable["spec"] = None
    found = followed(Script([event("MODIFIED", unreadable), HOUR], pods=[raw_pod("a", 90)]))
    assert found.changed == ["a"] and "cannot be read" not in caplog.text


def test_a_watch_that_is_ended_goes_on_from_the_last_version_also_a_bookmarks() -> None:
    script = Script([event("ADDED", raw_pod("a", 101))], [bookmark(150)], [HOUR])
    found = followed(script, seconds=5)
    assert script.since == ["100", "101", "150"] and script.lists == 1
    assert found.uids == {"a"}


def test_a_lost_connection_goes_on_from_the_last_version_without_a_list() -> None:
    script = Script(
        [event("ADDED", raw_pod("a", 101)), ApiError(0, "reset")], [ApiError(0, "refused")], [HOUR]
    )
    followed(script, seconds=20)
    assert script.since == ["100", "101", "101"] and script.lists == 1


@pytest.mark.parametrize("status", [410, 500, 403, 400])
@virtually
async def test_after_an_error_of_the_api_server_all_is_listed_again_and_what_is_gone_is_dropped(
    status: int,
) -> None:
    script = Script(
        [event("ADDED", raw_pod("b", 101)), 5.0, ApiError(status, "no")], [HOUR], pods=[raw_pod("a", 90)]
    )
    found = await Followed(script).run(3)
    assert found.uids == {"a", "b"}
    script.pods, script.version = [raw_pod("c", 150)], 200
    await asyncio.sleep(40)
    assert found.uids == {"c"}
    assert found.changed == ["a", "b", "c", "a", "b"], "the jobs of what is gone are woken as well"
    assert script.since == ["100", "200"]
    await found.end()


def test_an_api_server_that_refuses_is_asked_ever_less_often_and_never_in_a_hot_loop() -> None:
    script = Script(*([ApiError(410, "too old")] for _ in range(1000)))
    followed(script, seconds=600)
    assert 20 <= script.lists <= 60
    refused = Script()
    refused.refuse = [ApiError(403, "pods is forbidden") for _ in range(1000)]
    followed(refused, seconds=600)
    assert 20 <= refused.lists <= 60 and refused.watches == 0
    ended = Script(*([] for _ in range(100_000)))
    followed(ended, seconds=600)
    assert 20 <= ended.watches <= 60 and ended.lists == 1


def test_delays_grow_and_are_spread() -> None:
    assert all(0.25 <= delay(1) <= 0.5 for _ in range(20))
    assert all(LONGEST_DELAY / 2 <= delay(n) <= LONGEST_DELAY for n in (10, 10_000))
    assert len({delay(5) for _ in range(5)}) == 5


def test_an_object_that_cannot_be_parsed_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    broken = raw_pod("broken", 101)
    broken["metadata"]["creationTimestamp"] = "yesterday"
    again = raw_pod("broken", 102)
    again["metadata"]["creationTimestamp"] = "yesterday"
    turn: Turn = [event("ADDED", broken), event("MODIFIED", again), event("ADDED", raw_pod("a", 103)), HOUR]
    with caplog.at_level(logging.ERROR):
        found = followed(Script(turn))
    assert found.uids == {"a"}
    assert len(caplog.records) == 1 and "cannot be read" in caplog.text


@pytest.mark.parametrize(
    "raw", [{}, {"metadata": None}, {"metadata": {"uid": "x", "resourceVersion": "new"}}]
)
def test_an_event_without_usable_metadata_does_not_end_the_informer(raw: Json) -> None:
    script = Script(
        *([event(kind, raw)] for kind in ("ADDED", "DELETED")), [event("ADDED", raw_pod("a", 101)), HOUR]
    )
    found = followed(script, seconds=30)
    assert found.uids == {"a"} and script.lists == 1


@virtually
async def test_a_pod_that_becomes_unreadable_keeps_its_last_state_and_is_no_ghost() -> None:
    script = Script([HOUR], pods=[raw_pod("a", 90)])
    found = await Followed(script).run(1)
    broken = raw_pod("a", 95)
    broken["status"] = {"containerStatuses": "none"}
    script.pods = [broken]
    await found.informer.relist()
    assert found.uids == {"a"}
    await found.end()


# --- what was deleted does not come back --------------------------------------------------------------
@virtually
async def test_a_pod_that_is_deleted_while_it_is_being_listed_does_not_come_back() -> None:
    many = [raw_pod(f"p{n}", 50 + n) for n in range(20)]
    turn: Turn = [5.0, *(event("DELETED", raw_pod(f"p{n}", 110 + n)) for n in range(20)), HOUR]
    script = Script(turn, pods=many)
    found = await Followed(script).run(1)
    assert len(found.uids) == 20
    paused = asyncio.Event()

    async def between() -> None:
        await paused.wait()

    script.between = between
    listing = asyncio.create_task(found.informer.relist())
    await asyncio.sleep(10)
    assert found.uids == set(), "the watch has told it, while the LIST is at its first page"
    paused.set()
    await listing
    assert found.uids == set()
    await found.end()


@virtually
async def test_a_late_event_does_not_bring_back_what_a_list_has_dropped() -> None:
    script = Script([5.0, event("MODIFIED", raw_pod("a", 99)), HOUR], pods=[raw_pod("a", 90)])
    found = await Followed(script).run(1)
    script.pods = []
    await found.informer.relist()
    await asyncio.sleep(10)
    assert found.uids == set()
    await found.end()


@virtually
async def test_what_is_created_while_a_list_is_under_way_stays() -> None:
    script = Script([5.0, event("ADDED", raw_pod("new", 150)), HOUR], pods=[raw_pod("a", 90)])
    found = await Followed(script).run(1)

    async def between() -> None:
        await asyncio.sleep(10)

    script.between = between
    await found.informer.relist()
    assert found.uids == {"a", "new"}
    await found.end()


@virtually
async def test_an_informer_of_a_namespace_leaves_the_others_alone() -> None:
    script = Script([HOUR], pods=[raw_pod("a", 90, namespace="ml")])
    found = Followed(script, namespace="ml")
    other = Informer(
        PODS,
        cluster=as_cluster(Script(pods=[raw_pod("z", 91, namespace="vision")])),
        cache=found.caches.pods,
        changed=lambda *_: None,
        namespace="vision",
    )
    await other.relist()
    await found.run(1)
    script.pods = []
    await found.informer.relist()
    assert found.uids == {"z"} and set(script.asked) == {("pods", "ml")}
    await found.end()


# --- nodes --------------------------------------------------------------------------------------------
@virtually
async def test_a_heartbeat_of_a_node_wakes_nobody_and_a_change_does() -> None:
    noted = raw_node(103, annotations={"spottrain.io/save-advised": "2026-03-01T11:50:00Z"})
    turn: Turn = [
        event("MODIFIED", raw_node(101, "11:55")),
        event("MODIFIED", raw_node(102, "11:56")),
        event("MODIFIED", noted),
        event("MODIFIED", raw_node(104, "11:58")),
        HOUR,
    ]
    script, seen = Script(turn, pods=[raw_node(90)]), list[int]()
    caches = Caches()
    informer = Informer(
        NODES,
        cluster=as_cluster(script),
        cache=caches.nodes,
        changed=lambda node, _: seen.append(node.resource_version),
    )
    task = asyncio.create_task(informer.run())
    await asyncio.sleep(1)
    assert (node := caches.nodes.get("node-a")) is not None
    assert seen == [90, 103, 104] and node.resource_version == 104
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# --- all of them --------------------------------------------------------------------------------------
@virtually
async def test_nodes_are_watched_once_and_pods_in_each_namespace_and_their_jobs_are_woken() -> None:
    script, queue, caches = Script(pods=[raw_pod("a", 90, nodeName="node-a")]), WorkQueue(), Caches()
    informers = Informers(as_cluster(script), caches, queue, ("ml", "vision"))
    task = asyncio.create_task(informers.run())
    await informers.synced()
    assert {*script.asked} == {("nodes", ""), ("pods", "ml"), ("pods", "vision")}
    assert await queue.take() == KEY
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@virtually
async def test_of_a_deleted_jobs_pods_only_those_that_are_not_released_wake_it() -> None:
    queue, caches = WorkQueue(), Caches()
    informers = Informers(as_cluster(Script()), caches, queue)
    caches.jobs.remove(KEY)
    released = raw_pod("a", 101)
    released["metadata"]["finalizers"] = []
    informers.pods[0]._apply("MODIFIED", released)
    informers.pods[0]._apply("DELETED", raw_pod("a", 102))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await queue.take()
    informers.pods[0]._apply("ADDED", raw_pod("b", 103))
    assert await queue.take() == KEY


@pytest.mark.parametrize("status", [403, 404])
@virtually
async def test_a_namespace_that_cannot_be_listed_does_not_stop_the_others(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    script, caches = Script(), Caches()
    script.refused = {"gone": status}
    informers = Informers(as_cluster(script), caches, WorkQueue(), ("gone", "ml"))
    task = asyncio.create_task(informers.run())
    async with asyncio.timeout(10):
        await informers.synced()
    await asyncio.sleep(600)
    assert len(caplog.records) == 1 and "pods of gone cannot be listed" in caplog.text
    assert 20 <= script.asked.count(("pods", "gone")) <= 60
    assert script.asked.count(("pods", "ml")) == 1, "it is watched"
    script.pods, script.version = [raw_pod("a", 150, namespace="gone")], 200
    del script.refused["gone"]
    await asyncio.sleep(60)
    assert caches.pods.keys() == ("a",)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@virtually
async def test_the_age_of_a_watch_is_its_silence() -> None:
    found = await Followed(Script([60.0, bookmark(150), HOUR])).run(50)
    assert found.informer.age == pytest.approx(50)
    await asyncio.sleep(20)
    assert found.informer.age == pytest.approx(10)
    await found.end()


@pytest.mark.parametrize(
    ("pod", "before", "gone", "expected"),
    [
        (make_pod(node="", phase="Pending"), None, False, False),
        (make_pod(), make_pod(node="", phase="Pending"), False, False),
        (ended_pod(), make_pod(), False, True),
        (make_pod(**deleted()), make_pod(), False, True),
        (make_pod(**deleted()), None, False, True),
        (make_pod(), None, True, True),
        (ended_pod(holds_outcome=False), None, True, False),
    ],
    ids=["is new", "has a node", "has ended", "is deleted", "is new and deleted", "is gone", "was over"],
)
def test_a_pods_job_is_reconciled_at_once_where_it_has_ended_or_will(
    pod: PodView, before: PodView | None, gone: bool, expected: bool
) -> None:
    assert urgent(pod, before, gone) is expected
