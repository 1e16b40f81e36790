"""Events, conditions and progress: what happened is said once, and only what needs a person is a warning."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome, Reason
from spottrain_operator.api.observed import Ended, Event, Observed, Plan, PodView, Sample
from spottrain_operator.api.training_job import ProgressStatus, Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition
from spottrain_operator.status.changes import progress_due

from tests.builders import (
    NOW,
    after,
    condition,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    raw_spec,
    sample,
    started,
    status_of,
    told,
)

MINUTE = timedelta(seconds=60)


def _seen(*pods: PodView, status: Status, **more: Any) -> Observed:
    spec = more.pop("spec", {})
    meta = more.pop("meta", {})
    return make_observed(*pods, job=make_job(raw_spec(**spec), status=status, **meta), **more)


def _reasons(made: Plan, *, warning: bool) -> list[str]:
    return [e.reason for e in made.events if e.warning == warning]


# --- interruptions ---------------------------------------------------------------------------------------
def test_a_suspended_and_resumed_job_was_never_interrupted() -> None:
    saved = told(Outcome.INTERRUPTED, step=40, durableStep=40, pod=deleted())
    stopping = status_of(
        plan(_seen(make_pod(), status=replace(started(), active_since=after(-600)), spec={"suspend": True}))
    )
    made = plan(_seen(saved, status=stopping, spec={"suspend": True}))
    assert status_of(made).condition(Condition.INTERRUPTED) is None
    assert _reasons(made, warning=True) == [] and _reasons(made, warning=False).count("Suspended") == 1
    resumed = plan(_seen(status=status_of(made)))
    assert _reasons(resumed, warning=True) == []
    runs = plan(_seen(make_pod(2), status=status_of(resumed), sample=sample(41, 2, startStep=40)))
    assert status_of(runs).condition(Condition.INTERRUPTED) is None


def test_an_interruption_is_over_when_the_next_attempt_trains_and_not_before() -> None:
    first = status_of(plan(_seen(ended_pod(1, 75, **deleted()), status=started())))
    assert first.is_true(Condition.INTERRUPTED)
    second = make_pod(2, node="node-b")
    nodes = (make_node(), make_node("node-b"))
    runs = status_of(plan(_seen(second, status=first, nodes=nodes)))
    assert runs.is_true(Condition.INTERRUPTED), "it runs, and nobody knows yet whether it trains"
    restoring = sample(0, 2, state="Restoring")
    restores = status_of(plan(_seen(second, status=runs, nodes=nodes, sample=restoring)))
    assert restores.is_true(Condition.INTERRUPTED)
    trains = status_of(plan(_seen(second, status=restores, nodes=nodes, sample=sample(10, 2, startStep=9))))
    over = condition(trains, Condition.INTERRUPTED)
    assert (over.status, over.reason) == ("False", "Recovered")


def test_a_job_that_has_failed_has_not_recovered() -> None:
    status = status_of(plan(_seen(ended_pod(1, 75, **deleted()), status=started())))
    bad = told(Outcome.BAD_CONFIGURATION, 2, message="no such bucket")
    over = status_of(plan(_seen(bad, status=status))).condition(Condition.INTERRUPTED)
    assert over is not None and (over.status, over.reason) == ("False", "Ended")


def test_where_an_attempt_went_on_from_is_told_when_it_is_known() -> None:
    status = replace(started(), known_durable_step=929)
    made = plan(_seen(ended_pod(1, 75, **deleted()), status=status))
    (begun,) = (e for e in made.events if e.reason == "AttemptStarted")
    assert "929" not in begun.message and begun.message.startswith("attempt 2, after attempt 1 (")
    second = make_pod(2)
    later = plan(_seen(second, status=status_of(made), sample=sample(1137, 2, startStep=1137)))
    told_once = Event(
        warning=False, reason="CheckpointRestored", message="attempt 2 continues from step 1137"
    )
    assert told_once in later.events
    more = _seen(second, status=status_of(later), sample=sample(1200, 2, startStep=1137), now=after(100))
    assert told_once not in plan(more).events


@pytest.mark.parametrize("reason", ["WaitingForBackoff", "DeletedJobStillSaving"])
def test_an_ordinary_wait_is_no_warning(reason: str) -> None:
    if reason == "WaitingForBackoff":
        made = plan(_seen(status=started(2, next_start=after(30), attempts=started(2).attempts[:1])))
    else:
        old = make_pod(1, job=replace(make_pod().job, uid="old"))
        made = plan(replace(_seen(status=Status()), predecessors=(old,), nodes={"node-a": make_node()}))
    assert reason in _reasons(made, warning=False) and reason not in _reasons(made, warning=True)


# --- steps -----------------------------------------------------------------------------------------------
def test_the_first_answer_and_the_first_step_of_each_attempt_are_written_at_once() -> None:
    status = started()
    for attempt, start in ((1, 0), (2, 300)):
        status = (
            status if attempt == 1 else status_of(plan(_seen(ended_pod(1, 75, **deleted()), status=status)))
        )
        pod = make_pod(attempt)
        for state, step, at, due in (
            ("Restoring", 0, 0, True),
            ("Training", start, 10, True),
            ("Training", start + 5, 20, True),
            ("Training", start + 40, 30, False),
            ("Training", start + 200, 81, True),
        ):
            answer = replace(sample(step, attempt, state=state, startStep=start), at=after(at))
            assert progress_due(status, answer, MINUTE) == due, (attempt, state, step)
            made = plan(_seen(pod, status=status, sample=answer, now=after(at)))
            status = made.status or status


# --- after the end ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", [Outcome.DONE, Outcome.BAD_CONFIGURATION])
def test_an_edit_of_a_job_that_has_ended_is_answered(end: Outcome) -> None:
    pod = told(end, message="no such bucket" if end is not Outcome.DONE else "")
    status = status_of(plan(_seen(pod, status=started())))
    assert status.terminal
    assert plan(_seen(pod, status=status)).status is None
    made = plan(_seen(pod, status=status, spec={"suspend": True}, meta={"generation": 2}))
    (event,) = made.events
    assert event.warning and event.reason == "JobHasEnded"
    for words in ("the job has ended", "checkpoint.uri: s3://bucket/run", "checkpoint.onExisting: Resume"):
        assert words in event.message
    running = condition(made, Condition.RUNNING)
    assert running.status == "False" and running.message == event.message
    again = plan(_seen(pod, status=status_of(made), spec={"suspend": True}, meta={"generation": 2}))
    assert again.status is None and not again.events


# --- what a trainer warns of ----------------------------------------------------------------------------
TIGHT = "a save takes 105 s of the 110 s of grace: raise terminationGracePeriodSeconds"
FITS: dict[str, Any] = {"emergencySeconds": 20.0, "graceSeconds": 110.0}
SHORT: dict[str, Any] = {"emergencySeconds": 105.0, "graceSeconds": 110.0, "warning": TIGHT}


def _look(seen: Sample | None, status: Status | None = None, *pods: PodView, now: float = 0) -> Plan:
    job = make_job(status=status or started())
    return plan(make_observed(*(pods or (make_pod(),)), job=job, sample=seen, now=after(now)))


def _progress(made: Plan) -> ProgressStatus:
    progress = status_of(made).progress
    assert progress is not None
    return progress


def _warnings(made: Plan) -> list[Event]:
    return [e for e in made.events if e.reason in ("CheckpointMayNotFit", "TrainerWarns")]


def _later(seen: Sample, seconds: float) -> Sample:
    return replace(seen, at=seen.at + timedelta(seconds=seconds))


def test_a_save_that_may_not_fit_is_in_the_status_and_in_an_event() -> None:
    made = _look(sample(saveSeconds=9.0, **SHORT))
    shown = _progress(made)
    assert (shown.warning, shown.emergency_seconds, shown.grace_seconds) == (TIGHT, 105.0, 110.0)
    assert shown.save_seconds == 9.0
    assert _warnings(made) == [Event(warning=True, reason="CheckpointMayNotFit", message=TIGHT)]


def test_a_warning_of_something_else_is_not_called_a_matter_of_fit() -> None:
    made = _look(sample(warning="the loss is not finite", **FITS))
    assert [e.reason for e in _warnings(made)] == ["TrainerWarns"]


def test_a_warning_is_written_before_its_minute_and_told_once() -> None:
    quiet = status_of(_look(sample(**FITS)))
    first = _later(sample(**SHORT), 10)
    assert progress_due(quiet, first, timedelta(seconds=60))
    warned = _look(first, quiet, now=10)
    assert len(_warnings(warned)) == 1
    other = _later(sample(**SHORT | {"warning": TIGHT.replace("105", "107.5")}), 20)
    assert not progress_due(status_of(warned), other, timedelta(seconds=60))
    again = _look(_later(other, 100), status_of(warned), now=120)
    assert _progress(again).warning == TIGHT.replace("105", "107.5") and not _warnings(again)
    news = _later(sample(**SHORT | {"warning": "lower keep"}), 300)
    assert len(_warnings(_look(news, status_of(again), now=300))) == 1


def test_what_an_attempt_has_not_measured_yet_is_what_the_one_before_it_had() -> None:
    warned = status_of(_look(sample(**SHORT)))
    second = replace(started(2), progress=warned.progress)
    pod = make_pod(2)
    starting = _look(_later(sample(attempt=2, state="Starting"), 60), second, pod, now=60)
    assert _progress(starting).warning == TIGHT and not _warnings(starting)
    measured = _look(_later(sample(attempt=2, **FITS), 130), status_of(starting), pod, now=130)
    assert _progress(measured).warning == "" and _progress(measured).emergency_seconds == 20.0


def test_the_last_word_of_a_trainer_that_nobody_could_ask_is_shown_too() -> None:
    made = _look(None, None, told(Outcome.INTERRUPTED, **SHORT))
    assert _progress(made).warning == TIGHT and len(_warnings(made)) == 1
    done = _look(None, None, told(Outcome.DONE, step=9, **SHORT))
    assert _progress(done).warning == TIGHT and _progress(done).state == "Done"


def test_the_last_word_of_an_earlier_attempt_does_not_come_back() -> None:
    ended = told(Outcome.INTERRUPTED, **SHORT)
    known = replace(status_of(_look(None, None, ended)), next_start=None)
    later = _look(_later(sample(attempt=2, **FITS), 60), known, ended, make_pod(2), now=60)
    assert _progress(later).warning == ""
    assert _look(None, status_of(later), ended, make_pod(2), now=61).status is None


# --- endings ------------------------------------------------------------------------------------------
def test_a_rank_that_lost_its_peer_is_not_charged() -> None:
    pod = told(Outcome.INTERRUPTED_LOST, reason=Reason.PEER_LOST, message="rank 1 is gone", step=40)
    status = status_of(_look(None, None, pod))
    assert (status.attempt, status.failures, status.interruptions) == (2, 0, 1)
    first = status.attempts[0]
    assert (first.cause, first.exit_code, first.charged) == (Cause.INTERRUPTED, 79, False)
    assert "rank 1 is gone" in first.evidence and first.last_step == 40


def test_a_peer_that_was_killed_for_memory_is_charged() -> None:
    pod = told(Outcome.INTERRUPTED_LOST, reason=Reason.PEER_LOST, message="rank 1 is gone")
    assert pod.ended is not None
    end = Ended(exit_code=79, message=pod.ended.message, reason="OOMKilled", finished=NOW)
    status = status_of(_look(None, None, replace(pod, ended=end, memory_limit="8Gi")))
    assert (status.failures, status.attempts[0].cause) == (1, Cause.OUT_OF_MEMORY)
    assert "8Gi" in status.attempts[0].evidence


@pytest.mark.parametrize("reason", [Reason.CHECKPOINT_ARCHIVED, Reason.OUT_OF_MEMORY])
def test_what_no_restart_mends_is_the_jobs_own_reason(reason: Reason) -> None:
    words = "checkpoints/t1-s5-x is archived: run aws s3api restore-object ..."
    status = status_of(_look(None, None, told(Outcome.BAD_CONFIGURATION, reason=reason, message=words)))
    failed = condition(status, Condition.FAILED)
    assert (failed.status, failed.reason, failed.message) == ("True", reason, words)
    assert status.attempt == 1


def test_an_emergency_without_a_warning_is_shown_without_an_event() -> None:
    made = _look(None, None, told(Outcome.INTERRUPTED, **FITS))
    assert _progress(made).emergency_seconds == 20.0 and not _warnings(made)


@pytest.mark.parametrize(
    ("seconds", "value", "reason"), [(20.0, "True", "Fits"), (100.0, "False", "CheckpointMayNotFit")]
)
def test_whether_a_save_fits_into_the_notice_is_a_condition_with_the_numbers(
    seconds: float, value: str, reason: str
) -> None:
    seen = sample(5, emergencySeconds=seconds, graceSeconds=110.0)
    status = plan(make_observed(make_pod(), sample=seen)).status
    condition = status.condition(Condition.SAVE_FITS) if status else None
    assert condition and (condition.status, condition.reason) == (value, reason)
    assert f"{seconds:.1f} s of the 110 s" in condition.message
