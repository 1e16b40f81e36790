"""What happens to the actions of a plan is a value, and decides what is done next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Create, Delete, Plan, Provide, Release
from spottrain_operator.control.apply import Changed, Context, Done, Failed, Unfinished, apply
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.names import Reason

from tests.builders import KEY, word
from tests.unit.controller.fake_cluster import World

GONE = ApiError(404, "not found")
AWAY = ApiError(0, "no answer")
BROKEN = ApiError(500, "webhook failed")


async def _running(workers: int = 2) -> World:
    w = World({"workers": workers})
    await w.begin()
    return w


async def _apply(w: World, **plan: Any) -> Done | Changed | Unfinished:
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
    result = await _apply(w, before=tuple(Delete(pod=p) for p in pods), status=status)
    assert result == Changed(why=f"pod {pods[ended].name} has ended meanwhile")
    assert w.status == before


async def test_a_failed_delete_that_the_status_depends_on_keeps_it_from_being_written() -> None:
    w = await _running(workers=1)
    (pod,) = w.caches.pods.of(KEY)
    w.refuse("delete_pod", BROKEN, pod.name)
    before, status = w.status, replace(w.status, failures=5)
    for needed in (True, False):
        result = await _apply(w, before=(Delete(pod=pod, needed=needed),), status=status)
        failed = Failed(what=f"delete pod {pod.name}", error=BROKEN, blocks=needed)
        assert result == Unfinished(failed=(failed,), again=False)
        assert w.status == (before if needed else status)


async def test_a_job_that_was_written_by_another_is_read_again() -> None:
    w = await _running(workers=1)
    w.cluster._bump(w.cluster.jobs[KEY.name])
    result = await _apply(w, status=replace(w.status, failures=5))
    assert result == Changed(why=f"{KEY} has changed: the object has been modified")
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
    result = await _apply(w, after=tuple(Release(pod=p) for p in pods))
    assert isinstance(result, Unfinished) and result.unreachable and result.again
    assert str(result) == "; ".join(
        f"could not remove the finalizer of pod {p.name}: no answer" for p in pods[1:]
    )
    assert pods[0] not in w.caches.pods.of(KEY), "it is gone"
    four = Unfinished(failed=(*result.failed, *result.failed), again=False)
    assert str(four).endswith(" (and 1 more)")
    assert not replace(four, failed=(*result.failed, Failed(what="x", error=BROKEN))).unreachable


@pytest.mark.parametrize("error", [ApiError(422, "invalid"), AWAY])
async def test_no_pod_is_made_without_the_object_that_it_needs(error: ApiError) -> None:
    w = await _running(workers=1)
    meta = {"name": "svc", "namespace": KEY.namespace}
    w.refuse("create", error)
    posted = list(w.cluster.posted)
    pod = {"kind": "Pod", "metadata": {"name": "p", "namespace": KEY.namespace}}
    after = (
        Provide(kind="services", manifest={"kind": "Service", "metadata": meta}, generation=1),
        Create(manifest=pod, generation=1, attempt=1),
    )
    result = await _apply(w, after=after)
    assert w.cluster.posted == posted
    if error is AWAY:
        assert isinstance(result, Unfinished)
    else:
        assert result == Done(again=True)
        assert w.memory.refusals[KEY].reason is Reason.INVALID_TEMPLATE
