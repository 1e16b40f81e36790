"""A checkpoint store that does not answer: waited for, neither charged nor without end, and said."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from spottrain.contract import WAITING_FOR_STORE, Outcome
from spottrain_operator.api.observed import PodView
from spottrain_operator.api.training_job import ConditionStatus, Job, ProgressStatus, Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Phase, Reason
from spottrain_operator.policies import restart

from tests.builders import (
    NOW,
    after,
    ended_pod,
    make_job,
    make_observed,
    make_pod,
    raw_spec,
    sample,
    started,
    told,
)

SILENT = "s3://bucket/run at http://minio:9000 does not answer since 11:55:00Z: connection refused"


def _condition(status: Status, kind: Condition = Condition.STORE_REACHABLE) -> ConditionStatus:
    found = status.condition(kind)
    assert found is not None
    return found


def _gave_up(attempt: int, **more: Any) -> PodView:
    return told(Outcome.STORE_UNREACHABLE, attempt, message=SILENT, **more)


def _ended(status: Status, pod: PodView, now: datetime = NOW, job: Job | None = None) -> Status:
    job = job or make_job(status=status)
    made = plan(make_observed(pod, job=replace(job, status=status), now=now))
    assert made.status is not None
    return made.status


def test_an_attempt_that_did_not_find_its_store_is_tried_again_uncharged_and_says_why() -> None:
    status = _ended(started(), _gave_up(1))
    assert (status.attempt, status.failures, status.interruptions, status.no_progress) == (2, 0, 0, 0)
    record = status.record(1)
    assert record is not None and record.cause == Cause.STORE_UNREACHABLE and record.charged is False
    assert "http://minio:9000" in record.evidence
    assert status.next_start == after(10)
    shown = _condition(status)
    assert (shown.status, shown.reason) == ("False", Reason.STORE_UNREACHABLE)
    assert SILENT in shown.message and shown.last_transition_time == NOW
    assert status.condition(Condition.INTERRUPTED) is None, "nothing was interrupted"


def test_the_exit_code_alone_says_it_where_the_runtime_is_ours() -> None:
    assert _ended(started(), ended_pod(1, 69)).attempts[0].cause == Cause.STORE_UNREACHABLE
    foreign = make_job(raw_spec(checkpoint={"mode": "Self"}), status=started())
    status = _ended(started(), ended_pod(1, 69), job=foreign)
    assert status.attempts[0].cause == Cause.FAILED and status.failures == 1


def test_the_pause_grows_with_each_attempt_that_does_not_find_it_up_to_half_an_hour() -> None:
    status, now, waits = started(), NOW, []
    for number in range(1, 12):
        status = _ended(status, _gave_up(number), now)
        assert status.next_start is not None
        waits.append((status.next_start - now).total_seconds())
        now = status.next_start + timedelta(seconds=300)
    assert waits == [10, 20, 40, 80, 160, 320, 640, 1280, 1800, 1800, 1800]
    assert status.failures == status.interruptions == 0
    assert _condition(status).last_transition_time == NOW, "since the first of them"


def test_the_outage_has_a_bound_of_its_own() -> None:
    job = make_job(raw_spec(failurePolicy={"storeOutageSeconds": 3600}), status=started())
    status = _ended(started(), _gave_up(1), NOW, job)
    assert not status.terminal
    status = _ended(status, _gave_up(2), after(3599), job)
    assert not status.terminal
    status = _ended(status, _gave_up(3), after(3600), job)
    failed = _condition(status, Condition.FAILED)
    assert failed.reason == Reason.STORE_UNREACHABLE
    assert "storeOutageSeconds is 3600" in failed.message and "http://minio:9000" in failed.message
    assert status.failures == 0


def test_the_last_try_comes_when_the_bound_does() -> None:
    job = make_job(
        raw_spec(failurePolicy={"storeOutageSeconds": 100, "backoffSeconds": 300}), status=started()
    )
    status = _ended(started(), _gave_up(1), NOW, job)
    assert status.next_start == after(100)


def test_an_interrupted_job_has_not_recovered_while_it_waits_for_its_store() -> None:
    status = _ended(started(), told(Outcome.INTERRUPTED, 1))
    assert _condition(status, Condition.INTERRUPTED).status == "True"
    waits = sample(attempt=2, step=0, state=WAITING_FOR_STORE, waitingFor=SILENT)
    made = plan(make_observed(make_pod(2), job=make_job(status=status), sample=waits)).status
    assert made is not None and _condition(made, Condition.INTERRUPTED).status == "True"


def test_while_a_pod_waits_for_its_store_the_job_says_so_since_when_and_where() -> None:
    waits = sample(step=0, state=WAITING_FOR_STORE, waitingFor=SILENT)
    made = plan(make_observed(make_pod(), sample=waits))
    assert made.status is not None
    shown, running = _condition(made.status), _condition(made.status, Condition.RUNNING)
    assert (shown.status, shown.reason) == ("False", Reason.STORE_UNREACHABLE) and SILENT in shown.message
    assert running.reason == Reason.WAITING_FOR_STORE and SILENT in running.message
    assert made.status.progress is not None and made.status.progress.waiting_for == SILENT
    assert made.status.phase == Phase.RUNNING
    warnings = [event for event in made.events if event.reason == Reason.STORE_UNREACHABLE]
    assert [event.warning for event in warnings] == [True]


def test_an_outage_in_mid_training_is_told_at_once_and_its_end_too() -> None:
    status = started(progress=ProgressStatus(state="Training", step=4, time=NOW))
    trains = sample(step=5, startStep=0, waitingFor=SILENT)
    made = plan(make_observed(make_pod(), job=make_job(status=status), sample=trains)).status
    assert made is not None
    shown = _condition(made)
    assert shown.status == "False" and "trains on, and its saves fail" in shown.message
    assert _condition(made, Condition.RUNNING).reason == Reason.TRAINING
    back = sample(step=6, startStep=0)
    made = plan(make_observed(make_pod(), job=make_job(status=made), sample=back)).status
    assert made is not None and _condition(made).status == "True"


@pytest.mark.parametrize(
    ("state", "start_step", "back"),
    [("Gated", None, False), ("Restoring", None, False), ("Training", 40, True)],
)
def test_the_store_is_back_when_a_start_has_got_past_it(
    state: str, start_step: int | None, back: bool
) -> None:
    """One that answers the first request and no other would else be waited for without end."""
    status = _ended(started(), _gave_up(1))
    now = after(100)
    answers = replace(sample(attempt=2, state=state, startStep=start_step), at=now)
    seen = make_observed(make_pod(2), job=make_job(status=status), sample=answers, now=now)
    made = plan(seen).status
    assert made is not None
    shown = _condition(made)
    assert (shown.status == "True") is back
    assert shown.last_transition_time == (now if back else NOW)


def test_a_job_that_ends_between_two_polls_leaves_no_outage_behind() -> None:
    status = _ended(started(), _gave_up(1))
    done = _ended(status, told(Outcome.DONE, 2, startStep=40, step=200, durableStep=200), after(100))
    assert done.phase is Phase.SUCCEEDED
    shown = _condition(done)
    assert (shown.status, shown.reason) == ("True", Reason.STORE_ANSWERS)


def test_an_attempt_that_trained_and_could_not_store_its_end_counts_as_an_interruption() -> None:
    """Else a store that is read and never written would have it trained again and again."""
    status = _ended(started(), _gave_up(1, startStep=0, step=100, durableStep=0))
    assert (status.failures, status.interruptions, status.no_progress) == (0, 1, 1)


def test_peers_of_a_rank_that_did_not_find_its_store_are_not_charged() -> None:
    job = make_job(raw_spec(workers=2), status=started())
    lost = told(Outcome.INTERRUPTED_LOST, 1, pod={"rank": 1}, reason="PeerLost", message="rank 0 is gone")
    made = plan(make_observed(_gave_up(1), lost, job=job))
    assert made.status is not None
    assert made.status.attempts[0].cause == Cause.STORE_UNREACHABLE
    assert (made.status.failures, made.status.interruptions) == (0, 0)


def test_a_refusal_of_the_store_fails_the_job_at_once() -> None:
    refused = told(Outcome.BAD_CONFIGURATION, reason="StoreDenied", message="the store denied s3://b/p")
    status = _ended(started(), refused)
    assert status.terminal and _condition(status, Condition.FAILED).reason == "StoreDenied"


def test_a_clock_that_was_ahead_does_not_lengthen_the_pause_for_the_store() -> None:
    status = _ended(started(), _gave_up(1))
    policy = make_job().spec
    assert policy is not None
    moved = restart.with_earlier_start(status, policy.failure_policy, after(-7200), "uid-1")
    assert moved is not None and moved.next_start == after(-7190)
