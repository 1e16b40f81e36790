"""What a person asks of a job beside training: suspend and resume, a deadline, an end of its object."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import DeleteJob, Observed, Plan, PodView
from spottrain_operator.api.training_job import Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Phase
from spottrain_operator.policies.hang import LEAST_START

from tests.builders import (
    NOW,
    after,
    condition,
    deleted,
    make_job,
    make_node,
    make_observed,
    make_pod,
    manifests,
    notice,
    raw_spec,
    removed,
    sample,
    started,
    status_of,
    told,
)


def seen(*pods: PodView, status: Status | None = None, now: datetime = NOW, **spec: Any) -> Observed:
    nodes = spec.pop("nodes", (make_node(),))
    job = make_job(raw_spec(**spec), status=status or replace(started(), active_since=after(-600)))
    return make_observed(*pods, job=job, now=now, nodes=nodes)


def makes(made: Plan) -> bool:
    return bool(manifests(made))


# --- suspend --------------------------------------------------------------------------------------------
def test_a_suspended_job_saves_ends_and_makes_no_other_pod() -> None:
    made = plan(seen(make_pod(), suspend=True))
    assert removed(made) and status_of(made).phase == Phase.STOPPING
    ended = told(Outcome.INTERRUPTED, step=40, durableStep=40, pod=deleted())
    last = plan(seen(ended, status=made.status, suspend=True))
    status = status_of(last)
    assert status.phase == Phase.SUSPENDED and not makes(last)
    assert (status.attempt, status.interruptions, status.failures) == (1, 0, 0)
    assert status.attempts[0].cause == Cause.SUSPENDED and status.known_durable_step == 40
    assert plan(seen(status=status, suspend=True)).status is None, "it stays so"


def test_a_resumed_job_goes_on_with_the_next_attempt_and_a_deadline_counted_anew() -> None:
    done = status_of(plan(seen(told(Outcome.INTERRUPTED, pod=deleted()), status=_stopping(), suspend=True)))
    made = plan(seen(status=done, now=after(5000)))
    assert status_of(made).attempt == 2 and makes(made)
    assert status_of(made).active_since == after(5000)
    assert not status_of(made).is_true(Condition.SUSPENDED)


def _stopping() -> Status:
    return status_of(plan(seen(make_pod(), suspend=True)))


def test_a_job_made_suspended_has_no_pod_until_it_is_resumed() -> None:
    made = plan(seen(status=Status(), suspend=True))
    assert status_of(made).phase == Phase.SUSPENDED and not made.after
    assert makes(plan(seen(status=made.status)))


def test_suspended_during_an_interruption_it_ends_by_that_and_no_other_attempt_is_made() -> None:
    pod = make_pod(notice=notice(60), **deleted())
    doomed = (make_node(notice=notice(60)),)
    under_way = plan(seen(pod, suspend=True, nodes=doomed))
    assert not makes(under_way)
    ended = told(Outcome.INTERRUPTED, pod={"notice": notice(60), **deleted()})
    last = plan(seen(ended, suspend=True, nodes=doomed, status=under_way.status))
    assert status_of(last).attempts[0].cause == Cause.SPOT_NOTICE and not makes(last)
    assert status_of(last).phase == Phase.SUSPENDED and status_of(last).interruptions == 1


def test_a_job_that_was_done_before_it_heard_of_the_suspension_is_done() -> None:
    made = plan(seen(told(Outcome.DONE, step=100), status=_stopping(), suspend=True))
    assert status_of(made).phase == Phase.SUCCEEDED


# --- activeDeadlineSeconds ------------------------------------------------------------------------------
def test_past_its_deadline_the_job_saves_ends_and_has_failed() -> None:
    before = plan(seen(make_pod(), activeDeadlineSeconds=601))
    assert not removed(before) and before.recheck_after is not None
    assert before.recheck_after <= timedelta(seconds=2)
    made = plan(seen(make_pod(), activeDeadlineSeconds=600))
    assert removed(made)
    ended = told(Outcome.INTERRUPTED, pod=deleted())
    status = status_of(plan(seen(ended, status=made.status, activeDeadlineSeconds=600)))
    failed = condition(status, Condition.FAILED)
    assert failed.reason == "DeadlineExceeded"
    assert "activeDeadlineSeconds (600 s)" in failed.message
    assert status.failures == 0


def test_a_deadline_that_passes_between_two_attempts_counts_too() -> None:
    waiting = replace(started(2), active_since=after(-600), next_start=after(100))
    unseen = replace(waiting.attempts[1], started=None, ranks=(), node="")
    waiting = replace(waiting, attempts=(waiting.attempts[0], unseen))
    made = plan(seen(status=waiting, activeDeadlineSeconds=600))
    assert status_of(made).phase == Phase.FAILED and not makes(made)


def test_a_suspended_job_has_no_deadline() -> None:
    done = status_of(plan(seen(told(Outcome.INTERRUPTED, pod=deleted()), status=_stopping(), suspend=True)))
    made = plan(seen(status=done, suspend=True, activeDeadlineSeconds=1, now=after(9000)))
    assert made.status is None or not made.status.terminal


# --- ttlSecondsAfterFinished ----------------------------------------------------------------------------
def test_a_finished_jobs_object_is_deleted_when_its_time_is_over_and_not_before() -> None:
    done = status_of(plan(seen(told(Outcome.DONE, step=100), ttlSecondsAfterFinished=60)))
    early = plan(seen(status=done, ttlSecondsAfterFinished=60, now=after(59)))
    assert not early.before and early.recheck_after is not None
    late = plan(seen(status=done, ttlSecondsAfterFinished=60, now=after(61)))
    assert [type(a) for a in late.before] == [DeleteJob] and not makes(late)
    assert not plan(seen(status=done, now=after(10**6))).before, "without a time it stays"


@pytest.mark.parametrize("pods", [(), (make_pod(2),), (make_pod(),)])
def test_a_finished_job_never_starts_again_whatever_is_around_it(pods: tuple[PodView, ...]) -> None:
    done = status_of(plan(seen(told(Outcome.DONE, step=100))))
    for spec in ({}, {"suspend": True}, {"activeDeadlineSeconds": 1}):
        made = plan(seen(*pods, status=done, now=after(5000), nodes=(), **spec))
        assert not makes(made) and (made.status is None or made.status.phase == Phase.SUCCEEDED)


# --- hangs ----------------------------------------------------------------------------------------------
def hanging(idle: float, limit: float | None, **policy: Any) -> Observed:
    progress = sample(7, idleSeconds=idle, hangSeconds=limit)
    return replace(seen(make_pod(), failurePolicy=policy), sample=progress)


def test_an_attempt_without_progress_for_too_long_is_stopped_and_charged() -> None:
    made = plan(hanging(601, 600))
    assert removed(made) and status_of(made).attempts[0].stopping == Cause.STALLED
    ended = told(Outcome.INTERRUPTED, pod=deleted())
    status = status_of(plan(seen(ended, status=made.status)))
    assert (status.attempts[0].cause, status.failures, status.interruptions) == (Cause.STALLED, 1, 0)
    assert "since step 7" in status.attempts[0].evidence


@pytest.mark.parametrize(("idle", "limit"), [(599, 600), (10**6, None)])
def test_what_is_within_its_limit_or_has_none_goes_on(idle: float, limit: float | None) -> None:
    assert not removed(plan(hanging(idle, limit)))


def test_silence_alone_is_no_hang_unless_a_person_has_set_the_time() -> None:
    assert not removed(plan(replace(hanging(0, 600), now=after(10**5))))
    set_by_person = plan(replace(hanging(0, 600, hangTimeoutSeconds=600), now=after(601)))
    assert removed(set_by_person)
    assert plan(hanging(0, 600, hangTimeoutSeconds=600)).recheck_after == timedelta(seconds=600.05)


# --- what a reader with fresh eyes found -----------------------------------------------------------------
@pytest.mark.parametrize("cause", [Cause.STALLED, Cause.DEADLINE_EXCEEDED, Cause.MOVED])
def test_a_notice_while_the_operator_stops_an_attempt_changes_no_verdict(cause: Cause) -> None:
    stopping = replace(
        started().attempts[0], stopping=str(cause), evidence="x", charged=cause is Cause.STALLED
    )
    status = replace(started(), attempts=(stopping,))
    doomed = (make_node(notice=notice(60)),)
    under_way = plan(seen(make_pod(notice=notice(60), **deleted()), status=status, nodes=doomed))
    assert not makes(under_way) and (under_way.status or status).attempts[0].cause == ""
    ended = told(Outcome.INTERRUPTED, pod={"notice": notice(60), **deleted()})
    last = status_of(plan(seen(ended, status=under_way.status or status, nodes=doomed)))
    assert last.attempts[0].cause == cause and last.interruptions == 0


def test_a_job_suspended_while_it_waited_for_its_next_start_has_all_its_time_when_it_is_resumed() -> None:
    unseen = replace(started(2).attempts[1], started=None, ranks=(), node="")
    waiting = replace(started(2), attempts=(started(2).attempts[0], unseen), active_since=after(-600))
    paused = plan(seen(status=waiting, suspend=True, activeDeadlineSeconds=700)).status
    resumed = plan(seen(status=paused, activeDeadlineSeconds=700, now=after(10**5)))
    assert status_of(resumed).active_since == after(10**5) and not status_of(resumed).terminal


@pytest.mark.parametrize("seconds", [10**12, 2**63 - 1])
def test_never_is_not_beyond_all_dates(seconds: int) -> None:
    plan(seen(make_pod(), activeDeadlineSeconds=seconds))
    done = status_of(plan(seen(told(Outcome.DONE, step=100), ttlSecondsAfterFinished=seconds)))
    assert not plan(seen(status=done, ttlSecondsAfterFinished=seconds)).before


def test_a_time_to_live_of_nothing_is_over_at_once() -> None:
    made = plan(seen(told(Outcome.DONE, step=100), ttlSecondsAfterFinished=0))
    assert made.recheck_after is not None and made.recheck_after < timedelta(seconds=2)


def test_ranks_that_wait_for_the_rest_of_their_gang_do_not_hang() -> None:
    pods = (make_pod(), make_pod(rank=1, node="", phase="Pending"))
    o = replace(seen(*pods, workers=2, failurePolicy={"hangTimeoutSeconds": 60}), watched_since=after(-9999))
    assert not removed(plan(replace(o, now=after(200)))), "they wait outside of any collective"


def test_a_training_that_ended_early_is_a_success_with_that_reason() -> None:
    word = told(
        Outcome.DONE, step=50, reason="EarlyStopped", message="Trained 50 steps and ended early: loss"
    )
    status = plan(seen(word)).status
    assert status is not None and status.phase == Phase.SUCCEEDED
    found = condition(status, Condition.SUCCEEDED)
    assert found.reason == "EarlyStopped" and "ended early" in found.message


def test_a_trainer_that_never_answers_hangs_where_a_person_has_set_the_time() -> None:
    o = replace(seen(make_pod(), failurePolicy={"hangTimeoutSeconds": 60}), watched_since=after(-30))
    assert not removed(plan(o)), "this process has not waited so long yet"
    assert not removed(plan(replace(o, now=after(61)))), "imports from a cold disk take their time"
    assert removed(plan(replace(o, now=after(LEAST_START - 29))))
    own = seen(make_pod(), failurePolicy={"hangTimeoutSeconds": 60}, checkpoint={"mode": "Self"})
    assert not removed(plan(replace(own, watched_since=after(-9999)))), "an image of its own need not answer"
