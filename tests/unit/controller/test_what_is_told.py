"""Events, conditions and progress: what happened is said once, and only what needs a person is a warning."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from spottrain.contract import Outcome, Reason
from spottrain_operator.api.observed import Ended, Event, Sample
from spottrain_operator.api.training_job import ProgressStatus, Status
from spottrain_operator.control.actions import Plan
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Condition
from spottrain_operator.status.changes import progress_due, with_display

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
    told,
)
from tests.unit.controller.stories import Story, follows

MINUTE = after(60) - NOW
STOPPED = ended_pod(1, 75, **deleted())


def at(seen: Sample, seconds: float) -> Sample:
    return replace(seen, at=after(seconds))


# --- the columns of kubectl get --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("known", "mode", "shown"),
    [
        ((120, 500, "5430.5"), "Runtime", ("120/500", "1h30m")),
        ((120, None, "90061"), "Runtime", ("120", "1d1h")),
        ((3, None, "3605"), "Sync", ("checkpoint 3", "1h")),
        ((500, 500, "0"), "Runtime", ("500/500", "")),
        ((None, None, "65"), "Self", ("", "1m5s")),
    ],
)
def test_step_and_time_left_are_shown_as_one_reads_them(
    known: tuple[int | None, int | None, str], mode: str, shown: tuple[str, str]
) -> None:
    step, total, left = known
    progress = ProgressStatus(step=step, total_steps=total, eta_seconds=Decimal(left))
    folder = {"syncPath": "/out"} if mode == "Sync" else {}
    job = make_job(raw_spec(checkpoint={"uri": "s3://bucket/run", "mode": mode} | folder))
    status = with_display(Status(progress=progress), make_observed(job=job))
    assert status.progress and (status.progress.steps, status.progress.remaining) == shown


# --- interruptions ---------------------------------------------------------------------------------------
def test_an_interruption_is_over_when_the_next_attempt_trains_and_not_before() -> None:
    job, second = Story(), make_pod(2, node="node-b")
    nodes = (make_node(), make_node("node-b"))
    job.look("interrupted warns=PodDeleted", STOPPED)
    job.look("interrupted !warns", second, nodes=nodes)
    job.look("interrupted", second, nodes=nodes, sample=sample(0, 2, state="Restoring"))
    job.look("!interrupted phase=Running", second, nodes=nodes, sample=sample(10, 2, startStep=9))


def test_a_job_that_has_failed_is_not_interrupted_any_more() -> None:
    job = Story()
    job.look("interrupted", STOPPED)
    job.look("!interrupted", told(Outcome.BAD_CONFIGURATION, 2, message="no such bucket"))


def test_where_an_attempt_went_on_from_is_told_once_when_it_is_known() -> None:
    job = Story(replace(started(), known_durable_step=929))
    made = job.look("tells=AttemptStarted", STOPPED)
    assert not any("929" in event.message for event in made.events)
    second = make_pod(2)
    job.look("tells=CheckpointRestored", second, sample=sample(1137, 2, startStep=1137))
    job.look("!tells=CheckpointRestored", second, sample=sample(1200, 2, startStep=1137), at=100)


def test_an_ordinary_wait_is_no_warning() -> None:
    waits = started(2, next_start=after(30), attempts=started(2).attempts[:1])
    Story(waits).look("tells=WaitingForBackoff !warns")
    old = make_pod(1, job=replace(make_pod().job, uid="old"))
    Story(Status()).look("tells=DeletedJobStillSaving !warns", predecessors=(old,))


# --- steps -----------------------------------------------------------------------------------------------
def test_the_first_answer_and_the_first_step_of_each_attempt_are_written_at_once() -> None:
    job = Story()
    for attempt, start in ((1, 0), (2, 300)):
        if attempt == 2:
            job.look("attempt=2", STOPPED)
        for state, step, when, due in (
            ("Restoring", 0, 0, True),
            ("Training", start, 10, True),
            ("Training", start + 5, 20, True),
            ("Training", start + 40, 30, False),
            ("Training", start + 200, 81, True),
        ):
            answer = at(sample(step, attempt, state=state, startStep=start), when)
            assert progress_due(job.status, answer, MINUTE) == due, (attempt, state, step)
            job.look("", make_pod(attempt), sample=answer, at=when)


# --- after the end ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", [Outcome.DONE, Outcome.BAD_CONFIGURATION])
def test_an_edit_of_a_job_that_has_ended_is_answered(end: Outcome) -> None:
    job, pod = Story(), told(end, message="no such bucket" if end is not Outcome.DONE else "")
    job.look("!Running=True", pod)
    job.look("unwritten", pod)
    edited: dict[str, Any] = {"spec": {"suspend": True}, "meta": {"generation": 2}}
    (event,) = job.look("warns=JobHasEnded Running=False", pod, **edited).events
    assert condition(job.status, Condition.RUNNING).message == event.message
    job.look("unwritten !warns", pod, **edited)


# --- what a trainer warns of ----------------------------------------------------------------------------
TIGHT = "a save takes 105 s of the 110 s of grace: raise terminationGracePeriodSeconds"
FITS: dict[str, Any] = {"emergencySeconds": 20.0, "graceSeconds": 110.0}
SHORT: dict[str, Any] = {"emergencySeconds": 105.0, "graceSeconds": 110.0, "warning": TIGHT}


def shown(job: Story) -> ProgressStatus:
    assert job.status.progress is not None
    return job.status.progress


def warnings(made: Plan) -> list[Event]:
    return [e for e in made.events if e.reason in ("CheckpointMayNotFit", "TrainerWarns")]


def test_a_save_that_may_not_fit_is_in_the_status_and_in_an_event() -> None:
    job = Story()
    made = job.look("", make_pod(), sample=sample(saveSeconds=9.0, **SHORT))
    progress = shown(job)
    assert progress.warning == TIGHT
    assert [progress.emergency_seconds, progress.grace_seconds, progress.save_seconds] == [105, 110, 9]
    assert warnings(made) == [Event(warning=True, reason="CheckpointMayNotFit", message=TIGHT)]
    other = sample(warning="the loss is not finite", **FITS)
    Story().look("warns=TrainerWarns !warns=CheckpointMayNotFit", make_pod(), sample=other)


def test_a_warning_is_written_before_its_minute_and_told_once() -> None:
    job, more = Story(), SHORT | {"warning": TIGHT.replace("105", "107.5")}
    job.look("", make_pod(), sample=sample(**FITS))
    first = at(sample(**SHORT), 10)
    assert progress_due(job.status, first, MINUTE)
    job.look("warns=CheckpointMayNotFit", make_pod(), sample=first, at=10)
    assert not progress_due(job.status, at(sample(**more), 20), MINUTE)
    job.look("!warns", make_pod(), sample=at(sample(**more), 120), at=120)
    assert shown(job).warning == more["warning"]
    news = at(sample(**SHORT | {"warning": "lower keep"}), 300)
    assert len(warnings(job.look("", make_pod(), sample=news, at=300))) == 1


def test_what_an_attempt_has_not_measured_yet_is_what_the_one_before_it_had() -> None:
    job = Story()
    job.look("", make_pod(), sample=sample(**SHORT))
    job.status = replace(started(2), progress=job.status.progress)
    job.look("!warns", make_pod(2), sample=at(sample(attempt=2, state="Starting"), 60), at=60)
    assert shown(job).warning == TIGHT
    job.look("", make_pod(2), sample=at(sample(attempt=2, **FITS), 130), at=130)
    assert shown(job).warning == "" and shown(job).emergency_seconds == 20


def test_the_last_word_of_a_trainer_that_nobody_could_ask_is_shown_too_and_does_not_come_back() -> None:
    job, ended = Story(), told(Outcome.INTERRUPTED, **SHORT)
    assert len(warnings(job.look("", ended))) == 1 and shown(job).warning == TIGHT
    job.status = replace(job.status, next_start=None)
    job.look("", ended, make_pod(2), sample=at(sample(attempt=2, **FITS), 60), at=60)
    assert shown(job).warning == ""
    job.look("unwritten", ended, make_pod(2), at=61)
    done = Story()
    done.look("warns=CheckpointMayNotFit", told(Outcome.DONE, step=9, **SHORT))
    assert (shown(done).warning, shown(done).state) == (TIGHT, "Done")
    fits = Story()
    fits.look("!warns=CheckpointMayNotFit !warns=TrainerWarns", told(Outcome.INTERRUPTED, **FITS))
    assert shown(fits).emergency_seconds == 20.0


# --- endings ------------------------------------------------------------------------------------------
LOST = told(Outcome.INTERRUPTED_LOST, reason=Reason.PEER_LOST, message="rank 1 is gone", step=40)


def test_a_rank_that_lost_its_peer_is_charged_only_for_its_own_memory() -> None:
    job = Story()
    job.look("attempt=2 failures=0 interruptions=1 cause1=Interrupted !charged", LOST)
    first = job.status.attempts[0]
    assert (first.exit_code, first.last_step) == (79, 40)
    assert LOST.ended is not None
    end = Ended(exit_code=79, message=LOST.ended.message, reason="OOMKilled", finished=NOW)
    Story().look("failures=1 cause1=OutOfMemory", replace(LOST, ended=end, memory_limit="8Gi"))


@pytest.mark.parametrize("reason", [Reason.CHECKPOINT_ARCHIVED, Reason.OUT_OF_MEMORY, "StoreDenied"])
def test_what_no_restart_mends_is_the_jobs_own_reason_in_the_trainers_words(reason: str) -> None:
    words = "checkpoints/t1-s5-x is archived: run aws s3api restore-object ..."
    pod = told(Outcome.BAD_CONFIGURATION, reason=reason, message=words)
    made = follows(f"Failed=True/{reason} attempt=1", make_observed(pod))
    assert condition(made, Condition.FAILED).message == words


@pytest.mark.parametrize(("said", "shown"), [({"loss": 0.25}, Decimal("0.25")), ({}, None)])
def test_the_loss_beside_the_last_step_is_that_steps_or_none(
    said: dict[str, Any], shown: Decimal | None
) -> None:
    job = Story()
    job.look("", make_pod(), sample=sample(5, loss=2.0))
    job.look("Succeeded=True", told(Outcome.DONE, step=100, **said))
    assert job.status.progress is not None
    assert (job.status.progress.step, job.status.progress.loss) == (100, shown)


OVER = plan(make_observed(told(Outcome.DONE, step=100))).status
TOLD = (
    *(
        make_observed(make_pod(), sample=sample(5, emergencySeconds=seconds, graceSeconds=110.0))
        for seconds in (20.0, 100.0)
    ),
    make_observed(job=make_job(raw_spec(suspend=True), status=OVER, generation=2)),
    make_observed(LOST),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
