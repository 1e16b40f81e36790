"""Caches that lag, miss a deletion or are of an older leader; copies of our pods, and pods of a namesake."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord
from spottrain_operator.api.validation import parse_job
from spottrain_operator.api.views import pod_view
from spottrain_operator.control.apply import AT_ONCE
from spottrain_operator.errors import ApiError
from spottrain_operator.names import Condition, Reason

from tests.builders import (
    KEY,
    condition,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    raw_job,
    started,
    word,
)
from tests.unit.controller.fake_cluster import Crash, World, begun
from tests.unit.controller.stories import Story, follows


async def test_a_pod_that_only_the_cache_has_lost_is_not_lost() -> None:
    w = await begun()
    for pod in tuple(w.caches.pods):
        w.caches.pods.drop(pod)
    w.caches.pods._removed.clear()
    await w.reconciler(KEY)
    assert (w.status.attempt, w.status.interruptions) == (1, 0)


async def test_a_paused_operator_that_wakes_up_makes_no_pod_of_an_old_attempt() -> None:
    """It was stopped between the write of attempt 1 and the POST of its pod; another has gone on since."""
    w = World()
    w.cluster.crash_at = 1
    with pytest.raises(Crash):
        await w.look()
    sleeper = parse_job(w.cluster.jobs[KEY.name])
    assert sleeper.status.attempt == 1 and not w.cluster.pods
    await w.begin()
    await w.ends(w.pod(1), 1)
    await w.after(20)
    posted = list(w.cluster.posted)
    assert w.status.attempt == 2 and w.pod(1) not in w.cluster.pods

    w._start()  # empty caches, but for what the sleeper knew
    w.caches.jobs.put(sleeper)
    await w.reconciler(KEY)
    assert w.cluster.posted == posted and w.status.attempt == 2


async def test_a_node_that_only_the_cache_has_lost_is_not_lost() -> None:
    w = await begun()
    node = w.caches.nodes.get("node-a")
    assert node is not None
    w.caches.nodes.drop(node)
    w.caches.nodes._removed.clear()
    await w.reconciler(KEY)
    assert w.status.attempt == 1


async def test_a_job_that_the_cache_lacks_is_read_once() -> None:
    w = await begun()
    w._start()
    for pod in w.cluster.pods.values():
        w.see_pod(pod)
    await w.reconciler(KEY)
    assert w.caches.jobs.get(KEY) == parse_job(w.cluster.jobs[KEY.name]), "the poller asks for it"


async def test_a_job_that_is_deleted_while_it_is_read_stays_out_of_the_cache() -> None:
    w = await begun()
    job = w.caches.jobs.get(KEY)
    assert job is not None
    w._start()
    w.see_pod(w.cluster.pods[w.pod(1)])
    read = w.cluster.get_job

    async def late(name: str) -> dict[str, Any] | None:
        raw = await read(name)
        w.caches.jobs.remove(KEY, job.resource_version + 1)
        return raw

    w.cluster.get_job = late  # type: ignore[method-assign]
    await w.reconciler(KEY)
    assert w.caches.jobs.get(KEY) is None
    assert not w.cluster.pods[w.pod(1)]["metadata"]["finalizers"], "its pods are let go"


async def test_a_pod_of_a_deleted_job_is_let_go() -> None:
    w = await begun()
    w.cluster.jobs.clear()
    w.caches.jobs.remove(KEY)
    await w.reconciler(KEY)
    assert not w.cluster.pods[w.pod(1)]["metadata"]["finalizers"]


async def test_a_deleted_job_is_read_once_however_many_events_its_pods_have() -> None:
    w = await begun({"workers": 3})
    w.cluster.jobs.clear()
    w._start()
    for raw in w.cluster.pods.values():
        w.see_pod(raw)
    asked = w.refuse("get_job", ApiError(404, "gone"), "no job has this name")
    for _ in range(3):
        await w.reconciler(KEY)
    assert asked == [KEY.name]
    assert not any(pod["metadata"]["finalizers"] for pod in w.cluster.pods.values())


async def test_a_write_on_an_outdated_job_is_refused_and_planned_again() -> None:
    w = await begun()
    w.cluster._bump(w.cluster.jobs[KEY.name])  # somebody has labelled the job
    w.cluster.end(w.pod(1), 0, word(Outcome.DONE))
    for raw in await w.cluster.list_pods(KEY.uid):
        w.see_pod(raw)
    assert await w.reconciler(KEY) is not None
    await w.reconciler(KEY)
    assert w.status.phase == "Succeeded"


async def test_a_pod_under_notice_is_deleted_in_time_though_the_watch_does_not_tell_of_its_annotation() -> (
    None
):
    w = await begun()
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
    assert "deletionTimestamp" in w.cluster.pods[w.pod(1)]["metadata"] and w.status.attempt == 1
    for _ in range(2):  # the deletion is not told of either: it is asked for again, and read
        w.pass_time(1.1)
        await w.reconciler(KEY)
    assert w.status.attempt == 2


# --- pods that look like our own ------------------------------------------------------------------------
def _copy(w: World, name: str, *, owner: bool) -> dict[str, Any]:
    """What `kubectl get -o yaml`, an edit and `kubectl create` make of a pod of ours."""
    raw = copy.deepcopy(w.cluster.pods[w.pod(1)])
    raw["metadata"] |= {"name": name, "uid": f"uid-{name}"}
    if not owner:
        del raw["metadata"]["ownerReferences"]
    raw["status"] = {"phase": "Pending"}
    del raw["spec"]["nodeName"]
    w.cluster.pods[name] = raw
    w.cluster._bump(raw)
    return raw


@pytest.mark.parametrize("owner", [True, False])
async def test_a_copy_of_a_pod_is_no_rank(owner: bool) -> None:
    w = await begun({"workers": 2})
    before = w.status
    _copy(w, "copy", owner=owner)
    await w.settle()
    assert w.status == before and "copy" in w.cluster.pods


@pytest.mark.parametrize(
    ("version", "ours"), [("spottrain.io/v1alpha1", True), ("acme.example/v1", False), ("v1", False)]
)
async def test_an_owner_is_known_by_its_group_too(version: str, ours: bool) -> None:
    w = await begun()
    raw = w.cluster.pods[w.pod(1)]
    raw["metadata"]["ownerReferences"][0]["apiVersion"] = version
    assert (pod_view(raw) is not None) == ours


def test_a_pod_that_no_scheduler_takes_is_looked_at_again_though_no_event_comes() -> None:
    """The watch's ADDED tells nothing new of a pod that is known from the reply to its POST."""
    made = Story(started(1, attempts=(AttemptRecord(number=1, pool="default"),))).look("creates=0")
    assert made.recheck_after is not None and made.recheck_after.total_seconds() <= 1.1


async def test_a_pod_that_no_scheduler_takes_is_said_to_wait_for_it() -> None:
    w = World()
    while await w.look() is not None and w.pod(1) not in w.cluster.pods:
        pass
    await w.reconciler(KEY)
    w.pass_time(0.5)
    await w.reconciler(KEY)
    scheduled = condition(w.status, Condition.SCHEDULED)
    assert (scheduled.status, scheduled.reason) == ("False", "WaitingForPod")


# --- a job made again under the name of a deleted one ---------------------------------------------------
OLD = replace(KEY, uid="uid-0")
NEW = replace(KEY, uid="uid-2")


def _of_old(pod: PodView) -> PodView:
    return replace(pod, job=OLD, name="job-old-1-0")


def _observed(pod: PodView, *, silent: bool = False) -> Observed:
    o = make_observed(job=make_job(), nodes=() if silent else (make_node(),))
    return replace(o, predecessors=(pod,))


def test_a_job_whose_deleted_namesake_still_saves_says_so_and_makes_no_pod() -> None:
    o = _observed(_of_old(make_pod()))
    expected = f"attempt=0 !creates Scheduled=False/{Reason.PREDECESSOR_SAVES} phase=Waiting again=10"
    made = follows(expected, o)
    follows("unwritten !warns !tells", replace(o, job=make_job(status=made.status)))


def test_it_starts_when_the_namesakes_pod_has_ended_or_its_node_is_dead() -> None:
    for observed in (_observed(_of_old(ended_pod(code=75))), _observed(_of_old(make_pod()), silent=True)):
        follows("attempt=1 creates=0", observed)


async def test_a_job_that_is_made_again_waits_until_the_old_pod_is_gone() -> None:
    w = await begun()
    old = w.cluster.pods[w.pod(1)]
    w.cluster.jobs[KEY.name] = raw_job(uid=NEW.uid, resourceVersion=str(next(w.cluster._version)))
    old["metadata"] |= {"deletionTimestamp": "2026-03-01T12:01:50Z", "deletionGracePeriodSeconds": 110}
    w.cluster._bump(old)
    for _ in range(4):
        await w.look()
        await w.reconciler(NEW)
    assert w.cluster.posted == [w.pod(1)] and w.status.attempt == 0
    assert "finalizers" in old["metadata"] and not old["metadata"]["finalizers"], "it is let go"
    w.cluster.end(w.pod(1), 75)
    assert not w.cluster.pods
    await w.reconciler(NEW)  # the cache does not know yet: the API server does
    assert w.status.attempt == 1 and len(w.cluster.pods) == 1


async def test_pods_of_another_name_are_no_predecessors() -> None:
    w = World()
    await w.settle()
    other = replace(make_pod(), job=replace(KEY, name="job-b", uid="uid-9"), uid="x")
    w.caches.pods.put(other)
    assert w.caches.pods.other_lives(KEY) == set()
    assert w.caches.pods.other_lives(replace(KEY, name="job-b")) == {other.job}
    w.caches.pods.drop(other)
    assert not w.caches.pods.other_lives(replace(KEY, name="job-b"))


TOLD = (_observed(_of_old(make_pod())),)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
