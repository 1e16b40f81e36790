"""What happens to each action of a plan: one that fails stops no other, and is tried again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.training_job import JobKey, Status
from spottrain_operator.api.validation import parse_job
from spottrain_operator.control.actions import (
    ANNOTATE_SECONDS,
    Context,
    Create,
    Delete,
    Plan,
    Provide,
    Release,
)
from spottrain_operator.control.apply import AT_ONCE, SOON, apply
from spottrain_operator.control.service import Service
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError, ApiFailure, Incomplete
from spottrain_operator.names import Reason, pod_name
from spottrain_operator.settings import Settings

from tests.builders import KEY, raw_job, raw_spec, word
from tests.support.virtualtime import run_virtually, virtually
from tests.unit.controller.fake_cluster import Json, World, begun

GONE = ApiError(404, "not found")
AWAY = ApiError(0, "no answer")
BROKEN = ApiError(500, "webhook failed")


async def _running(workers: int = 2) -> World:
    w = await begun({"workers": workers})
    return w


async def _apply(w: World, **plan: Any) -> timedelta | None:
    job = w.caches.jobs.get(KEY)
    assert job is not None
    context = Context(cluster=w.cluster, caches=w.caches, memory=w.memory, now=w.cluster.now)
    return await apply(job, Plan(reason="Test", message="", **plan), context)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AWAY, ApiFailure.UNREACHABLE),
        (ApiError(400, ""), ApiFailure.BAD_REQUEST),
        (ApiError(401, ""), ApiFailure.OTHER),
        (ApiError(403, "no rights"), ApiFailure.FORBIDDEN),
        (ApiError(403, "exceeded quota: pods"), ApiFailure.QUOTA_EXCEEDED),
        (GONE, ApiFailure.NOT_FOUND),
        (ApiError(409, ""), ApiFailure.CONFLICT),
        (ApiError(422, ""), ApiFailure.INVALID),
        (ApiError(429, ""), ApiFailure.TOO_MANY_REQUESTS),
        (ApiError(503, ""), ApiFailure.SERVER_ERROR),
    ],
)
def test_each_status_has_its_kind_of_failure(error: ApiError, kind: ApiFailure) -> None:
    assert error.kind is kind
    assert error.stale == (error.status in (404, 409))


@pytest.mark.parametrize("ended", [0, 1])
async def test_no_status_is_written_once_a_pod_to_delete_has_ended_whatever_happens_to_its_peer(
    ended: int,
) -> None:
    w = await _running()
    pods = w.caches.pods.of(KEY)
    w.cluster.end(pods[ended].name, 0, word(Outcome.DONE))
    w.refuse("delete_pod", ApiError(409, "for a reason of its own"), pods[1 - ended].name)
    before = w.status
    status = replace(before, failures=5)
    assert await _apply(w, before=tuple(Delete(pod=p) for p in pods), status=status) == SOON
    assert w.status == before


async def test_a_failed_delete_does_not_keep_the_status_from_being_written() -> None:
    w = await _running(workers=1)
    (pod,) = w.caches.pods.of(KEY)
    w.refuse("delete_pod", BROKEN, pod.name)
    status = replace(w.status, failures=5)
    with pytest.raises(Incomplete, match=f"could not delete pod {pod.name}: {BROKEN}"):
        await _apply(w, before=(Delete(pod=pod),), status=status)
    assert w.status == status


async def test_a_job_that_was_written_by_another_is_read_again() -> None:
    w = await _running(workers=1)
    w.cluster._bump(w.cluster.jobs[KEY.name])
    assert await _apply(w, status=replace(w.status, failures=5)) == SOON
    job = w.caches.jobs.get(KEY)
    assert (
        job is not None
        and str(job.resource_version) == w.cluster.jobs[KEY.name]["metadata"]["resourceVersion"]
    )


async def test_of_many_failures_some_are_named_and_silence_is_told_apart() -> None:
    w = await _running(workers=3)
    pods = w.caches.pods.of(KEY)
    w.refuse("release_pod", AWAY)
    w.refuse("release_pod", GONE, pods[0].name)
    with pytest.raises(Incomplete) as no:
        await _apply(w, after=tuple(Release(pod=p) for p in pods))
    assert no.value.unreachable and no.value.again == SOON
    assert str(no.value) == "; ".join(
        f"could not remove the finalizer of pod {p.name}: no answer" for p in pods[1:]
    )
    assert pods[0] not in w.caches.pods.of(KEY), "it is gone"
    w.refuse("delete_pod", BROKEN)
    actions = [each(pod=p) for p in pods[1:] for each in (Release, Delete)]
    with pytest.raises(Incomplete, match=r" \(and 1 more\)$") as no:
        await _apply(w, after=tuple(actions))
    assert not no.value.unreachable


@pytest.mark.parametrize("error", [ApiError(422, "invalid"), AWAY])
async def test_no_pod_is_made_without_the_object_that_it_needs(error: ApiError) -> None:
    w = await _running(workers=1)
    meta = {"name": "svc", "namespace": KEY.namespace}
    w.refuse("create_object", error)
    posted = list(w.cluster.posted)
    pod = {"kind": "Pod", "metadata": {"name": "p", "namespace": KEY.namespace}}
    after = (
        Provide(kind="services", manifest={"kind": "Service", "metadata": meta}, generation=1),
        Create(manifest=pod, generation=1, attempt=1),
    )
    if error is AWAY:
        with pytest.raises(Incomplete):
            await _apply(w, after=after)
    else:
        assert await _apply(w, after=after) == AT_ONCE
    assert w.cluster.posted == posted
    if error is not AWAY:
        assert (no := w.memory.of(KEY).refusal) is not None and no.reason is Reason.INVALID_TEMPLATE


# --- one refused or slow action stops no other ----------------------------------------------------------
NO = ApiError(500, 'failed calling webhook "pods.example.com": connection refused')
GANG: dict[str, object] = {"workers": 3}


async def _training(spec: dict[str, object] | None = None) -> World:
    w = await begun(spec)
    w.pass_time(30)
    return w


async def _look(w: World) -> Incomplete | None:
    """One look, which may fail in part."""
    try:
        await w.look()
    except Incomplete as error:
        return error
    return None


def _deleting(w: World) -> list[str]:
    return sorted(n for n, p in w.cluster.pods.items() if "deletionTimestamp" in p["metadata"])


async def test_a_webhook_that_refuses_the_annotation_does_not_hold_back_the_delete() -> None:
    w = await _training()
    w.refuse("annotate_pod", NO)
    w.cluster.give_notice("node-a", 100)
    failed = await _look(w)
    assert failed is not None and "could not annotate pod" in str(failed) and "webhook" in str(failed)
    assert failed.again is not None and failed.again <= timedelta(seconds=1.1), "its DELETE is due by then"
    assert _deleting(w) == []
    w.pass_time(1.0)
    await _look(w)
    assert _deleting(w) == [w.pod(1)]
    assert w.cluster.pods[w.pod(1)]["metadata"]["deletionGracePeriodSeconds"] == 97
    await _look(w)
    assert w.status.attempt == 2, "and the next attempt is made"


@virtually
async def test_nor_does_a_webhook_that_lets_the_annotation_hang() -> None:
    w = await _training()
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()

    async def hang(*_: object, **__: object) -> Json:
        await asyncio.sleep(ANNOTATE_SECONDS)  # the client's own limit
        raise AWAY

    w.cluster.annotate_pod = hang  # type: ignore[method-assign]
    w.cluster.give_notice("node-a", 100)
    await _look(w)
    assert loop.time() - began <= 1.5
    w.pass_time(loop.time() - began)
    await _look(w)
    assert _deleting(w) == [w.pod(1)] and loop.time() - began <= 2.5


@virtually
async def test_in_a_storm_the_annotation_waits_for_its_turn_while_the_delete_can_wait_for_it() -> None:
    w = await _training()
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    real = w.cluster.annotate_pod

    async def slow(*names: str, **more: Any) -> Json:
        await asyncio.sleep(wait)
        return await real(*names, **more)

    w.cluster.annotate_pod = slow  # type: ignore[method-assign]
    wait = 15.0
    w.cluster.give_notice("node-a", 30)
    await _look(w)
    assert w.caches.pods.of(KEY)[0].notice is not None and _deleting(w) == []
    for passed in (loop.time() - began, 1):
        w.pass_time(passed)
        await _look(w)
    assert _deleting(w) == [w.pod(1)]


@virtually
async def test_but_never_until_the_pod_can_only_be_deleted_in_a_hurry() -> None:
    w = await _training()
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()

    async def never(*_: object, **__: object) -> Json:
        await asyncio.sleep(3600)
        raise NO

    w.cluster.annotate_pod = never  # type: ignore[method-assign]
    w.cluster.give_notice("node-a", 30)
    await _look(w)
    assert 19 <= loop.time() - began <= 21, "10 s before the deadline"
    w.pass_time(loop.time() - began)
    await _look(w)
    assert _deleting(w) == [w.pod(1)]


async def test_a_pod_that_is_deleted_and_annotated_at_once_is_deleted_by_one_request() -> None:
    w = await _training()
    w.cluster.give_notice("node-a", 8)
    calls: list[str] = []

    def counted(name: str) -> None:
        real = getattr(w.cluster, name)

        async def call(*names: str, **more: Any) -> Any:
            calls.append(name)
            await asyncio.sleep(0)
            return await real(*names, **more)

        setattr(w.cluster, name, call)

    for name in ("annotate_pod", "delete_pod", "get_pod"):
        counted(name)
    await _look(w)
    assert calls == ["delete_pod", "annotate_pod"]
    assert "spottrain.io/termination-deadline" in w.cluster.pods[w.pod(1)]["metadata"]["annotations"]


async def test_a_status_is_written_in_the_same_plan_as_the_jobs_finalizer() -> None:
    w = World({"deletionPolicy": "Delete"})
    await w.settle()
    job = w.cluster.jobs[KEY.name]
    assert job["metadata"]["finalizers"]
    job["spec"]["deletionPolicy"] = "Retain"
    job["metadata"]["generation"] += 1
    w.cluster._bump(job)
    refused: list[str] = []
    real = w.cluster.write_status

    async def written(*names: str, **more: Any) -> Json:
        try:
            return await real(*names, **more)
        except ApiError as error:
            refused.append(str(error))
            raise

    w.cluster.write_status = written  # type: ignore[method-assign]
    await w.settle()
    assert not job["metadata"]["finalizers"] and w.status.observed_generation == 2
    assert refused == []


async def test_a_refused_delete_of_one_pod_does_not_stop_its_peers_and_is_tried_again() -> None:
    w = await _training(GANG)
    calls = w.refuse("delete_pod", NO, w.pod(1, 0))
    w.cluster.jobs[KEY.name]["spec"]["suspend"] = True
    w.cluster._bump(w.cluster.jobs[KEY.name])
    failed = await _look(w)
    assert failed is not None and f"could not delete pod {w.pod(1, 0)}" in str(failed)
    assert _deleting(w) == [w.pod(1, 1), w.pod(1, 2)]
    await _look(w)
    assert calls.count(w.pod(1, 0)) == 2


async def test_a_release_that_fails_does_not_block_the_next_attempt() -> None:
    w = await _training()
    w.refuse("release_pod", NO)
    w.cluster.end(w.pod(1), 75, word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0))
    for _ in range(3):
        w.pass_time(5)
        await _look(w)
    assert w.pod(2) in w.cluster.pods and w.status.attempt == 2
    assert w.cluster.pods[w.pod(1)]["metadata"]["finalizers"], "it is still to be released"
    del w.cluster.release_pod
    await w.settle()
    assert w.pod(1) not in w.cluster.pods


async def test_no_replacement_is_made_beside_a_pod_that_could_not_be_told_to_end() -> None:
    w = await _training()
    w.refuse("delete_pod", NO)
    w.cluster.give_notice("node-a", 100)
    for _ in range(4):
        w.pass_time(1)
        failed = await _look(w)
    assert failed is not None and w.status.attempt == 1 and w.pod(2) not in w.cluster.pods
    assert failed.again is not None and failed.again <= timedelta(seconds=2), (
        "a growing delay is too long here"
    )


async def test_a_pod_that_cannot_be_made_does_not_stop_its_peers() -> None:
    w, no = World(GANG), pod_name(KEY.name, KEY.uid, 1, 1)
    w.refuse("create_pod", ApiError(0, "no answer"), no)
    for _ in range(4):
        await _look(w)
    assert sorted(w.cluster.pods) == [w.pod(1, 0), w.pod(1, 2)]


async def test_events_of_a_written_status_are_told_though_an_action_after_it_fails() -> None:
    w = await _training()
    w.refuse("release_pod", NO)
    before = len(w.cluster.events)
    w.cluster.end(w.pod(1), 1, "Traceback: boom")
    await _look(w)
    assert w.status.failures == 1 and len(w.cluster.events) > before


async def test_one_orphan_that_cannot_be_released_does_not_hold_its_peers() -> None:
    w = await _training(GANG)
    del w.cluster.jobs[KEY.name]
    w.refuse("release_pod", NO, w.pod(1, 0))
    assert await _look(w) is not None
    held = [n for n, p in w.cluster.pods.items() if p["metadata"].get("finalizers")]
    assert held == [w.pod(1, 0)]


async def test_an_orphan_is_released_once_though_its_event_is_late() -> None:
    w = await _training(GANG)
    w.caches.jobs.remove(KEY)
    calls = w.refuse("release_pod", NO, "no pod")
    for _ in range(2):
        await w.reconciler(KEY)
    assert sorted(calls) == [w.pod(1, rank) for rank in range(3)]


async def test_a_pod_that_the_api_server_does_not_have_leaves_the_cache() -> None:
    """kopf tells of no deletion during a relist; without this each look would delete the ghost again."""
    w = await _training()
    (ghost,) = w.caches.pods.of(KEY)
    del w.cluster.pods[ghost.name]
    job = w.cluster.jobs[KEY.name]
    job["spec"]["suspend"] = True
    w.cluster._bump(job)
    w.caches.jobs.put(parse_job(job))
    await w.reconciler(KEY)
    assert w.caches.pods.of(KEY) == ()


async def test_an_old_definition_in_the_cluster_is_named_with_its_remedy() -> None:
    w = await _running()
    w.refuse("write_status", ApiError(400, 'strict decoding error: unknown field "status.goodput"'))
    job = w.caches.jobs.get(KEY)
    assert job is not None
    with pytest.raises(Incomplete, match="definition is older than this operator: apply its crds/"):
        await _apply(w, status=replace(job.status, failures=7))


async def test_what_another_controller_has_in_the_status_stays_known() -> None:
    w, theirs = await _training(), condition_of("example.com/Theirs")
    real = w.cluster.write_status

    async def write_status(*args: Any, **more: Any) -> Any:
        raw = await real(*args, **more)
        w.cluster.jobs[KEY.name]["status"]["conditions"].append(theirs)
        raw["status"]["conditions"].append(theirs)
        return raw

    w.cluster.write_status = write_status  # type: ignore[method-assign]
    job = w.cluster.jobs[KEY.name]
    job["spec"]["suspend"] = True
    w.cluster._bump(job)
    await _look(w)
    cached = w.caches.jobs.get(KEY)
    assert cached == parse_job(w.cluster.jobs[KEY.name])
    assert cached is not None and cached.status.conditions[-1].type == theirs["type"]


def condition_of(kind: str) -> dict[str, Any]:
    when = "2026-03-01T12:00:00Z"
    return {"type": kind, "status": "True", "reason": "Theirs", "lastTransitionTime": when}


async def test_an_event_of_a_version_that_is_known_enqueues_nothing() -> None:
    service, raw = Service(Settings()), raw_job(resourceVersion="7")
    service.queue.open = True  # it leads
    service.saw_job("ADDED", raw)
    assert await service.queue.take() == KEY
    service.queue.done(KEY)
    known = service.caches.jobs.get(KEY)
    service.saw_job("MODIFIED", raw)
    service.saw_job("MODIFIED", raw_job(resourceVersion="6"))
    assert service.caches.jobs.get(KEY) is known
    service.saw_job("DELETED", raw_job(resourceVersion="8"))
    assert service.caches.jobs.get(KEY) is None
    assert await service.queue.take() == KEY, "of all these, the deletion alone is news"


async def test_an_event_of_nothing_but_a_status_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    service, added = Service(Settings()), list[str]()
    monkeypatch.setattr(service.queue, "add", lambda _: added.append("at once"))
    monkeypatch.setattr(service.queue, "add_soon", lambda _: added.append("soon"))
    service.saw_job("ADDED", raw_job(resourceVersion="7"))
    service.saw_job("MODIFIED", raw_job(status=Status(attempt=1), resourceVersion="8"))
    service.saw_job("MODIFIED", raw_job(raw_spec(suspend=True), generation=2, resourceVersion="9"))
    service.saw_job("DELETED", raw_job(resourceVersion="10"))
    assert added == ["at once", "soon", "at once", "at once"]


async def test_a_finalizer_that_is_refused_is_said_in_the_status() -> None:
    w = World({"deletionPolicy": "Delete"})
    w.refuse("hold_job", ApiError(403, "trainingjobs is forbidden"))
    for _ in range(4):
        await _look(w)
    said = w.status.conditions[0]
    assert (said.type, said.status, said.message) == ("Accepted", "False", "trainingjobs is forbidden")
    assert w.cluster.posted == []
    del w.cluster.hold_job
    await w.after(31)
    assert w.pod(1) in w.cluster.pods


# --- what is logged -------------------------------------------------------------------------------------
def _logged(
    errors: list[Exception], keys: int, seconds: float, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """The log of a queue of so many jobs, whose looks fail with these errors, the last one on and on."""
    names = [JobKey(namespace="ns", name=f"j{n}", uid=f"j{n}") for n in range(keys)]
    left = {key: list(errors) for key in names}

    async def story() -> None:
        queue = WorkQueue()

        async def do(key: JobKey) -> None:
            raise left[key].pop(0) if len(left[key]) > 1 else left[key][0]

        for key in names:
            queue.add(key)
        task = asyncio.create_task(queue.work(do))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        run_virtually(story())
    assert not [r for r in caplog.records if r.exc_info], "no traceback"
    return [r.getMessage() for r in caplog.records]


def test_while_the_api_server_is_away_one_line_a_minute_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lines = _logged([ApiError(0, "GET /api: refused")], 40, 100, caplog)
    assert 1 <= len(lines) <= 2
    assert lines[0] == "the API server does not respond; all jobs are retried: GET /api: refused"


def test_an_action_that_fails_on_and_on_is_one_line_for_each_job_and_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = _logged(
        [Incomplete("could not delete pod a: no"), Incomplete("could not delete pod b: no")], 2, 50, caplog
    )
    assert len(lines) == 4 and "ns/j0/j0: could not delete pod a: no; will be retried" in lines
