"""A job made again under the name of one whose pod still saves: it waits, lest it be refused for ever."""

from __future__ import annotations

from dataclasses import replace

from spottrain_operator.api.observed import Create, Observed, PodView
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Condition, Phase, Reason

from tests.builders import KEY, condition, ended_pod, make_job, make_node, make_observed, make_pod, raw_job
from tests.unit.controller.fake_cluster import World

OLD = replace(KEY, uid="uid-0")
NEW = replace(KEY, uid="uid-2")


def _of_old(pod: PodView) -> PodView:
    return replace(pod, job=OLD, name="job-old-1-0")


def _observed(pod: PodView, *, silent: bool = False) -> Observed:
    o = make_observed(job=make_job(), nodes=() if silent else (make_node(),))
    return replace(o, predecessors=(pod,))


def test_a_job_whose_deleted_namesake_still_saves_says_so_and_makes_no_pod() -> None:
    made = plan(_observed(_of_old(make_pod())))
    assert made.status is not None and made.status.attempt == 0 and not made.after
    found = condition(made, Condition.SCHEDULED)
    assert (found.status, found.reason) == ("False", Reason.PREDECESSOR_SAVES)
    assert found.message == "pod job-old-1-0 of the deleted job of this name is still saving"
    assert made.status.phase == Phase.WAITING
    assert made.recheck_after and 2 <= made.recheck_after.total_seconds() < 2.5
    again = plan(replace(_observed(_of_old(make_pod())), job=make_job(status=made.status)))
    assert again.status is None and not again.events


def test_it_starts_when_the_namesakes_pod_has_ended_or_its_node_is_dead() -> None:
    for observed in (_observed(_of_old(ended_pod(code=75))), _observed(_of_old(make_pod()), silent=True)):
        made = plan(observed)
        assert made.status is not None and made.status.attempt == 1
        assert any(isinstance(a, Create) for a in made.after)


async def test_a_job_that_is_made_again_waits_until_the_old_pod_is_gone() -> None:
    w = World()
    await w.begin()
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
    assert w.caches.pods.other_lives(KEY) == ()
    assert w.caches.pods.other_lives(replace(KEY, name="job-b")) == (other.job,)
    w.caches.pods.drop(other)
    assert w.caches.pods.other_lives(replace(KEY, name="job-b")) == ()
