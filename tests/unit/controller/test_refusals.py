"""What the API server's no means, and that each job says at once what becomes of it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Observed, Refusal
from spottrain_operator.api.training_job import ConditionStatus
from spottrain_operator.api.validation import parse_job
from spottrain_operator.control.apply import AT_ONCE
from spottrain_operator.control.memory import ACCEPTED_FOR
from spottrain_operator.control.plan import plan
from spottrain_operator.errors import ApiError, Incomplete
from spottrain_operator.names import Condition, Reason
from spottrain_operator.rendering import trainer_pod

from tests.builders import (
    KEY,
    NOW,
    POOL,
    condition,
    ended_pod,
    make_job,
    make_observed,
    make_pod,
    raw_spec,
    started,
)
from tests.unit.controller.fake_cluster import World, begun
from tests.unit.controller.stories import Story, follows

WEBHOOK = 'Internal error occurred: failed calling webhook "policy.example.com": connection refused'


class Refusing:
    """Puts a no between operator and API server, for dry runs or for real POSTs."""

    def __init__(self, w: World, *, dry_run: bool) -> None:
        self.no: ApiError | None = None
        self.asked = 0
        method = "dry_run_pod" if dry_run else "create_pod"
        self._create = getattr(w.cluster, method)
        setattr(w.cluster, method, self._answer)

    async def _answer(self, manifest: dict[str, Any]) -> Any:
        self.asked += 1
        if self.no is not None:
            raise self.no
        return await self._create(manifest)


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
    await w.after(31)
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
    await w.after(20)
    assert list(w.cluster.pods) == [w.pod(1)] and _accepted(w)[0] == "True"


@pytest.mark.parametrize("code", [0, 429])
async def test_silence_and_too_many_requests_are_no_answer(code: int) -> None:
    w = World()
    Refusing(w, dry_run=False).no = ApiError(code, "later")
    with pytest.raises(Incomplete, match="could not create Pod job-4a49acf8-1-0: later"):
        await _looks(w)
    assert w.memory.of(KEY).refusal is None


async def test_what_was_accepted_lately_is_not_asked_again_until_the_api_server_rejects_a_pod() -> None:
    w = World()
    api = Refusing(w, dry_run=True)

    async def asked_for_another_such_job() -> int:
        w.memory.forget(KEY)
        w.cluster.jobs[KEY.name].pop("status", None)
        w.cluster._bump(w.cluster.jobs[KEY.name])
        await w.settle()
        assert _accepted(w)[0] == "True"
        return api.asked

    assert [await asked_for_another_such_job() for _ in range(2)] == [1, 1]
    no = Refusal(generation=0, reason=Reason.REFUSED, message="", at=NOW, retry=timedelta(0))
    w.memory.reject(KEY, no)
    assert [await asked_for_another_such_job() for _ in range(2)] == [2, 2]
    w.pass_time(ACCEPTED_FOR.total_seconds())
    assert await asked_for_another_such_job() == 3


async def test_a_dry_run_without_an_answer_starts_nothing_and_holds_up_nothing_else() -> None:
    w = World()
    w.refuse("dry_run_pod", ApiError(429, "later"))
    with pytest.raises(ApiError, match="later"):
        await w.look()
    assert w.status.attempt == 0 and w.memory.of(KEY).refusal is None
    del w.cluster.dry_run_pod
    await w.begin()
    w.refuse("dry_run_pod", ApiError(429, "later"))
    w.cluster.jobs[KEY.name]["metadata"]["generation"] = 2
    w.cluster.jobs[KEY.name]["spec"]["capacity"]["pendingTimeoutSeconds"] = 901
    w.cluster._bump(w.cluster.jobs[KEY.name])
    w.cluster.give_notice("node-a", 8)
    with pytest.raises(ApiError, match="later"):
        await w.look()
    assert "deletionTimestamp" in w.cluster.pods[w.pod(1)]["metadata"]


async def test_a_refusal_is_forgotten_when_the_pod_was_made_after_all() -> None:
    """A time-out of the server's own: the POST came through."""
    w = World()
    api = Refusing(w, dry_run=False)
    api.no = ApiError(504, "request did not complete within the requested timeout")
    await _looks(w)
    assert _accepted(w)[0] == "False"
    job = w.caches.jobs.get(KEY)
    assert job is not None
    api.no = None
    await w.cluster.create_pod(trainer_pod.pod(job, job.status, POOL))
    await w.settle()
    assert _accepted(w)[0] == "True" and w.memory.of(KEY).refusal is None


async def test_a_refusal_is_forgotten_when_the_pod_is_adopted() -> None:
    w = World()
    api = Refusing(w, dry_run=False)
    api.no = ApiError(504, "timeout")
    await _looks(w)
    w.pass_time(31)
    job = w.caches.jobs.get(KEY)
    assert job is not None
    api.no = None
    await w.cluster.create_pod(trainer_pod.pod(job, job.status, POOL))
    await w.reconciler(KEY)  # the watch has not told of it: 409
    assert w.memory.of(KEY).refusal is None and len(w.cluster.pods) == 1


async def test_a_new_spec_that_is_refused_beside_a_running_attempt_does_not_spin() -> None:
    w = await begun()
    api = Refusing(w, dry_run=True)
    api.no = ApiError(403, "no")
    w.cluster.jobs[KEY.name]["metadata"]["generation"] = 2
    w.cluster.jobs[KEY.name]["spec"]["capacity"]["pendingTimeoutSeconds"] = 901
    w.cluster._bump(w.cluster.jobs[KEY.name])
    again = await _looks(w)
    assert again != AT_ONCE and api.asked == 1 and _accepted(w)[0] == "False" and w.status.attempt == 1


# --- each job has a status at once ----------------------------------------------------------------------
def _new(pools: dict[str, Pool] | None = None, **spec: Any) -> Observed:
    return replace(make_observed(job=make_job(raw_spec(**spec)), admitted=False), pools=pools or {})


def _in_pool(**selector: str) -> Observed:
    template = {"spec": {"containers": [{"name": "trainer"}], "nodeSelector": {"zone": "a", "team": "ml"}}}
    pool = {"name": "p", "platform": "AWS", "nodeSelector": selector}
    return _new(template=template, capacity={"pools": [pool]})


def test_a_pool_that_contradicts_the_template_is_refused() -> None:
    follows("Accepted=False/InvalidSpec phase=Invalid warns=InvalidSpec", _in_pool(zone="b"))
    follows("attempt=0 !Accepted", _in_pool(zone="a", gpu="h100"))


@pytest.mark.parametrize("code", [401, 404, 405, 413, 415])
async def test_any_no_of_the_api_server_to_the_first_pod_is_in_the_status(code: int) -> None:
    w = World()
    w.refuse("create_pod", ApiError(code, "no, for a reason of my own"))
    await w.settle()
    accepted = condition(w.status, Condition.ACCEPTED)
    assert (accepted.status, accepted.reason) == ("False", Reason.REFUSED)
    assert accepted.message == "no, for a reason of my own" and w.cluster.events


@pytest.mark.parametrize(
    "broken",
    [
        {"tolerations": [{"key": []}]},
        {"containers": [{"name": "trainer", "env": "x"}]},
        {"containers": [{"name": "trainer", "lifecycle": "x"}]},
        {"containers": "x"},
        {"terminationGracePeriodSeconds": "soon"},
        {"nodeSelector": "x"},
    ],
)
async def test_a_template_that_the_schema_let_through_is_said_and_stops_no_other_job(
    broken: dict[str, Any],
) -> None:
    w = World()
    pod = {"containers": [{"name": "trainer"}]} | broken
    w.cluster.jobs[KEY.name]["spec"]["template"] = {"spec": pod}
    for _ in range(3):
        await w.look()  # lists all jobs as well
    accepted = condition(w.status, Condition.ACCEPTED)
    assert (accepted.status, accepted.reason) == ("False", "InvalidSpec")
    assert accepted.message and w.cluster.events and not w.cluster.posted


# --- what the operator does not know ---------------------------------------------------------------------
THEIRS = ConditionStatus(
    type="AuditedByAcme", status="Unknown", reason="Later", last_transition_time=NOW, message="theirs"
)


def test_a_condition_of_another_controller_stays_as_it_is_and_stops_nothing() -> None:
    job = Story(replace(started(), conditions=(THEIRS,)))
    job.look("attempt=2", ended_pod(1, 1))
    assert job.status.conditions[-1] == THEIRS


def test_an_attempt_that_a_newer_operator_stopped_for_its_own_reason_ends_for_that_reason() -> None:
    stopping: dict[str, Any] = {"stopping": "EclipseOfTheSun", "evidence": "it went dark", "charged": False}
    job = Story(replace(started(), attempts=(replace(started().attempts[0], **stopping),)))
    job.look("attempt=2 cause1=EclipseOfTheSun !stopping", ended_pod(1, 75))
    assert job.status.attempts[0].evidence == "it went dark"


# --- deletion --------------------------------------------------------------------------------------------
def test_a_deleted_job_whose_spec_became_unreadable_says_that_its_checkpoints_are_left() -> None:
    meta = {"finalizers": ["spottrain.io/checkpoints"], "deletionTimestamp": "2026-03-01T11:59:55Z"}
    job = make_job(raw_spec(template={"spec": 5}, deletionPolicy="Delete"), status=started(), **meta)
    assert job.spec is None
    made = plan(make_observed(make_pod(), job=job))
    (event,) = made.events
    assert event.warning and event.reason == "CheckpointsLeft" and job.invalid in event.message
    assert [a.on for a in made.before if hasattr(a, "on")] == [False]


@pytest.mark.parametrize(
    ("error", "for_good"),
    [
        (ApiError(403, "forbidden: being deleted", {"causes": [{"reason": "NamespaceTerminating"}]}), True),
        (ApiError(404, 'namespaces "ns" not found'), True),
        (ApiError(403, 'admission webhook "terminator.acme" denied the request'), False),
        (ApiError(422, "spec.terminationGracePeriodSeconds: Invalid value"), False),
    ],
)
async def test_only_a_namespace_that_goes_too_is_a_no_for_good_to_the_cleanup(
    error: ApiError, for_good: bool
) -> None:
    w = await begun({"deletionPolicy": "Delete"})
    w.cluster.end(w.pod(1), 0)
    job = w.cluster.jobs[KEY.name]
    job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    w.cluster._bump(job)
    w.refuse("create_pod", error)
    for _ in range(4):
        with contextlib.suppress(Incomplete):
            await w.look()
    left = [e for e in w.cluster.events if e["reason"] == "CheckpointsLeft"]
    assert bool(left) == for_good
    said = [e["message"] for e in w.cluster.events if e["reason"] == "CannotDeleteCheckpoints"]
    assert len(said) == (not for_good) and all(str(error) in words for words in said)
    assert parse_job(job).holds_checkpoints != for_good


TOLD = (_in_pool(zone="b"),)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
