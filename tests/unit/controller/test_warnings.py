"""What a trainer warns of reaches the job's status at once, and an event once; new endings."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome, Reason
from spottrain_operator.api.observed import Ended, Event, Plan, PodView, Sample
from spottrain_operator.api.training_job import ProgressStatus, Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition
from spottrain_operator.status.changes import progress_due

from tests.builders import (
    NOW,
    after,
    condition,
    make_job,
    make_observed,
    make_pod,
    sample,
    started,
    status_of,
    told,
)

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
