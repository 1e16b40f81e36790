"""What the API server's no to a pod means: words for people, a time to ask again, and an end of both."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from spottrain_operator.control.reconcile import AT_ONCE
from spottrain_operator.errors import ApiError, Incomplete
from spottrain_operator.names import Condition, Reason
from spottrain_operator.rendering import trainer_pod

from tests.builders import KEY, POOL
from tests.unit.controller.fake_cluster import World

WEBHOOK = 'Internal error occurred: failed calling webhook "policy.example.com": connection refused'


class Refusing:
    """Puts a no between operator and API server, for dry runs or for real POSTs."""

    def __init__(self, w: World, *, dry_run: bool) -> None:
        self.no: ApiError | None = None
        self.asked = 0
        self._dry_run, self._create = dry_run, w.cluster.create_pod
        w.cluster.create_pod = self._answer  # type: ignore[method-assign]

    async def _answer(self, manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        if dry_run == self._dry_run:
            self.asked += 1
            if self.no is not None:
                raise self.no
        return await self._create(manifest, dry_run=dry_run)


async def _looks(w: World) -> object:
    """Until it comes to rest: when to look again."""
    for _ in range(10):
        again = await w.look()
        if again != AT_ONCE:
            return again
    raise AssertionError("it spins")


def _accepted(w: World) -> tuple[str, str, str]:
    found = w.status.condition(Condition.ACCEPTED)
    assert found is not None
    return found.status, found.reason, found.message


@pytest.mark.parametrize("dry_run", [True, False], ids=["dry run", "POST"])
@pytest.mark.parametrize("code", [500, 503, 403])
async def test_a_webhook_that_does_not_answer_is_told_and_asked_again(code: int, dry_run: bool) -> None:
    w = World()
    api = Refusing(w, dry_run=dry_run)
    api.no = ApiError(code, WEBHOOK)
    again = await _looks(w)
    assert _accepted(w) == ("False", Reason.REFUSED, WEBHOOK)
    assert isinstance(again, timedelta) and 25 < again.total_seconds() < 31 and api.asked == 1
    api.no = None
    w.pass_time(31)
    await w.settle()
    assert _accepted(w)[0] == "True" and list(w.cluster.pods) == [w.pod(1)]
    assert (w.status.attempt, w.status.failures, w.status.interruptions) == (1, 0, 0)


@pytest.mark.parametrize("code", [400, 422])
async def test_an_invalid_pod_is_tried_again_after_five_minutes(code: int) -> None:
    w = World()
    api = Refusing(w, dry_run=True)
    api.no = ApiError(code, "spec.containers[0]: Invalid value")
    await _looks(w)
    assert (
        _accepted(w)[1] == Reason.INVALID_TEMPLATE and "spec.template: spec.containers[0]" in _accepted(w)[2]
    )
    w.pass_time(290)
    await _looks(w)
    assert api.asked == 1
    api.no = None
    w.pass_time(20)
    await w.settle()
    assert list(w.cluster.pods) == [w.pod(1)] and _accepted(w)[0] == "True"


@pytest.mark.parametrize("code", [0, 429])
async def test_silence_and_too_many_requests_are_no_answer(code: int) -> None:
    w = World()
    Refusing(w, dry_run=False).no = ApiError(code, "later")
    with pytest.raises(Incomplete, match="could not create Pod job-4a49a-1-0: later"):
        await _looks(w)
    assert w.reconciler.memory.refusals == {}


async def test_a_refusal_is_forgotten_when_the_pod_was_made_after_all() -> None:
    """A time-out of the server's own: the POST came through."""
    w = World()
    await w.look()
    api = Refusing(w, dry_run=False)
    api.no = ApiError(504, "request did not complete within the requested timeout")
    await _looks(w)
    assert _accepted(w)[0] == "False"
    job = w.caches.jobs.get(KEY)
    assert job is not None
    api.no = None
    await w.cluster.create_pod(trainer_pod.pod(job, job.status, POOL))
    await w.settle()
    assert _accepted(w)[0] == "True" and w.reconciler.memory.refusals == {}


async def test_a_refusal_is_forgotten_when_the_pod_is_adopted() -> None:
    w = World()
    await w.look()
    api = Refusing(w, dry_run=False)
    api.no = ApiError(504, "timeout")
    await _looks(w)
    w.pass_time(31)
    job = w.caches.jobs.get(KEY)
    assert job is not None
    api.no = None
    await w.cluster.create_pod(trainer_pod.pod(job, job.status, POOL))
    await w.reconciler(KEY)  # the watch has not told of it: 409
    assert w.reconciler.memory.refusals == {} and len(w.cluster.pods) == 1


async def test_a_new_spec_that_is_refused_beside_a_running_attempt_does_not_spin() -> None:
    w = World()
    await w.begin()
    api = Refusing(w, dry_run=True)
    api.no = ApiError(403, "no")
    w.cluster.jobs[KEY.name]["metadata"]["generation"] = 2
    w.cluster._bump(w.cluster.jobs[KEY.name])
    again = await _looks(w)
    assert again != AT_ONCE and api.asked == 1 and _accepted(w)[0] == "False" and w.status.attempt == 1
