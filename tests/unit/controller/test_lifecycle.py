"""What a person asks of a job: suspend, resume, deadlines, the end of its object and of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Ended, Observed, Plan, PodView, Provide
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.names import Cause
from spottrain_operator.policies import cleanup
from spottrain_operator.policies.hang import LEAST_START
from spottrain_operator.status.changes import with_progress

from tests.builders import (
    after,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    sample,
    started,
    told,
)
from tests.unit.controller.stories import Story, follows

SAVED = told(Outcome.INTERRUPTED, step=40, durableStep=40, pod=deleted())
DONE = told(Outcome.DONE, step=100)


def running(**spec: Any) -> Story:
    """A job that is active since ten minutes."""
    return Story(replace(started(), active_since=after(-600)), **spec)


def between_attempts(**more: Any) -> Status:
    """The second attempt has its record, and no pod yet."""
    first, second = started(2).attempts
    unseen = replace(second, started=None, ranks=(), node="")
    return replace(started(2), attempts=(first, unseen), active_since=after(-600), **more)


# --- suspend --------------------------------------------------------------------------------------------
def test_a_suspended_job_saves_ends_and_goes_on_when_it_is_resumed_with_all_of_its_time() -> None:
    job = running(suspend=True)
    job.look("deletes=0 phase=Stopping stopping1=Suspended", make_pod())
    over = "phase=Suspended !creates attempt=1 failures=0 interruptions=0 cause1=Suspended !Interrupted"
    job.look(f"{over} tells=Suspended !warns", SAVED)
    assert job.status.known_durable_step == 40
    job.look("unwritten", at=1)
    job.look("!Failed unwritten", at=9000, spec={"activeDeadlineSeconds": 1})
    job.look("attempt=2 creates=0 Suspended=False !warns", at=9001, spec={"suspend": False})
    assert job.status.active_since == after(9001)
    trains = replace(sample(41, 2, startStep=40), at=after(9002))
    job.look("!Interrupted", make_pod(2), at=9002, sample=trains, spec={"activeDeadlineSeconds": 9000})


def test_a_job_made_suspended_has_no_pod_until_it_is_resumed() -> None:
    job = Story(Status(), suspend=True)
    job.look("phase=Suspended !creates")
    job.look("creates=0", spec={"suspend": False})


def test_suspended_during_an_interruption_it_ends_by_that_and_no_other_attempt_is_made() -> None:
    job, doomed = running(suspend=True), (make_node(notice=notice(60)),)
    going: dict[str, Any] = {"notice": notice(60), **deleted()}
    job.look("!creates", make_pod(**going), nodes=doomed)
    end = told(Outcome.INTERRUPTED, pod=going)
    job.look("cause1=SpotNotice !creates phase=Suspended interruptions=1", end, nodes=doomed)


def test_a_job_that_was_done_before_it_heard_of_the_suspension_is_done() -> None:
    job = running(suspend=True)
    job.look("deletes=0", make_pod())
    job.look("phase=Succeeded", DONE)


def test_a_job_suspended_while_it_waited_for_its_next_start_has_all_its_time_when_it_is_resumed() -> None:
    job = Story(between_attempts(), suspend=True, activeDeadlineSeconds=700)
    job.look("!creates")
    job.look("!Failed", at=10**5, spec={"suspend": False})
    assert job.status.active_since == after(10**5)


# --- activeDeadlineSeconds ------------------------------------------------------------------------------
def test_past_its_deadline_the_job_saves_ends_and_has_failed() -> None:
    running(activeDeadlineSeconds=601).look("!deletes again=1", make_pod())
    job = running(activeDeadlineSeconds=600)
    job.look("deletes=0", make_pod())
    job.look("Failed=True/DeadlineExceeded failures=0", SAVED)


def test_a_deadline_that_passes_between_two_attempts_counts_too() -> None:
    job = Story(between_attempts(next_start=after(100)), activeDeadlineSeconds=600)
    job.look("phase=Failed !creates")


@pytest.mark.parametrize("seconds", [10**12, 2**63 - 1])
def test_never_is_not_beyond_all_dates(seconds: int) -> None:
    running(activeDeadlineSeconds=seconds).look("!deletes", make_pod())
    done = running(ttlSecondsAfterFinished=seconds)
    done.look("phase=Succeeded", DONE)
    done.look("!ends")


# --- ttlSecondsAfterFinished ----------------------------------------------------------------------------
def test_a_finished_jobs_object_is_deleted_when_its_time_is_over_and_not_before() -> None:
    running(ttlSecondsAfterFinished=0).look("again=1", DONE)
    job = running(ttlSecondsAfterFinished=60)
    job.look("phase=Succeeded", DONE)
    job.look("!ends again=1", at=59)
    job.look("ends !creates", at=61)
    job.spec.clear()
    job.look("!ends", at=10**6)


@pytest.mark.parametrize(
    "pods", [(), (make_pod(2),), (make_pod(),), (ended_pod(code=1),), (make_pod(notice=notice()),)]
)
def test_a_finished_job_never_starts_again_whatever_is_around_it(pods: tuple[PodView, ...]) -> None:
    for spec in ({}, {"suspend": True}, {"activeDeadlineSeconds": 1}):
        job = running(**spec)
        job.look("phase=Succeeded", DONE)
        rest = "phase=Succeeded attempt=1 failures=0 interruptions=0"
        job.look(f"!creates !checks {rest}", *pods, at=5000, nodes=())


# --- hangs ----------------------------------------------------------------------------------------------
def idle(seconds: float, limit: float | None) -> dict[str, Any]:
    return {"sample": sample(7, idleSeconds=seconds, hangSeconds=limit)}


def test_an_attempt_without_progress_for_too_long_is_stopped_and_charged() -> None:
    job = running()
    job.look("!deletes", make_pod(), **idle(599, 600))
    job.look("!deletes", make_pod(), **idle(10**6, None))
    job.look("deletes=0 stopping1=Stalled", make_pod(), **idle(601, 600))
    job.look("cause1=Stalled failures=1 interruptions=0", SAVED)


def test_silence_alone_is_no_hang_unless_a_person_has_set_the_time() -> None:
    running().look("!deletes", make_pod(), at=10**5, **idle(0, 600))
    set_by_person = running(failurePolicy={"hangTimeoutSeconds": 600})
    set_by_person.look("!deletes again=600", make_pod(), **idle(0, 600))
    set_by_person.look("deletes=0", make_pod(), at=601, **idle(0, 600))


def test_ranks_that_wait_for_the_rest_of_their_gang_do_not_hang() -> None:
    pods = (make_pod(), make_pod(rank=1, node="", phase="Pending"))
    job = running(workers=2, failurePolicy={"hangTimeoutSeconds": 60})
    job.look("!deletes", *pods, at=200, watched_since=after(-9999))


def test_a_trainer_that_never_answers_hangs_where_a_person_has_set_the_time() -> None:
    """Not before this process has waited so long; and imports from a cold disk take their time."""
    job = running(failurePolicy={"hangTimeoutSeconds": 60})
    for at, expected in ((0, "!deletes"), (61, "!deletes"), (LEAST_START - 29, "deletes=0")):
        job.look(expected, make_pod(), at=at, watched_since=after(-30))
    own = running(failurePolicy={"hangTimeoutSeconds": 60}, checkpoint={"mode": "Self"})
    own.look("!deletes", make_pod(), watched_since=after(-9999))


@pytest.mark.parametrize("cause", [Cause.STALLED, Cause.DEADLINE_EXCEEDED, Cause.MOVED])
def test_a_notice_while_the_operator_stops_an_attempt_changes_no_verdict(cause: Cause) -> None:
    stopping: dict[str, Any] = {"stopping": str(cause), "evidence": "x", "charged": cause is Cause.STALLED}
    job = Story(replace(started(), attempts=(replace(started().attempts[0], **stopping),)))
    going: dict[str, Any] = {"notice": notice(60), **deleted()}
    doomed = (make_node(notice=notice(60)),)
    job.look("!creates !cause1", make_pod(**going), nodes=doomed)
    job.look(f"cause1={cause} interruptions=0", told(Outcome.INTERRUPTED, pod=going), nodes=doomed)


# --- deletionPolicy Delete ------------------------------------------------------------------------------
FINALIZER = ["spottrain.io/checkpoints"]
LATE = -16 * 60
"""When its object was deleted, where an outage has lasted too long."""


def going(
    *pods: PodView, gone: float | None = -5, holds: bool = True, policy: str = "Delete", **more: Any
) -> Observed:
    """A job whose object was deleted so many seconds ago."""
    meta: dict[str, Any] = {"finalizers": FINALIZER if holds else []}
    if gone is not None:
        meta["deletionTimestamp"] = rfc3339(after(gone))
    job = make_job(raw_spec(deletionPolicy=policy), status=started(), **meta)
    return replace(make_observed(*pods, job=job), cleaning=more.get("cleanup") is not None, **more)


def cleanup_pods(made: Plan) -> list[dict[str, Any]]:
    return [a.manifest for a in made.after if isinstance(a, Provide)]


STUCK = make_pod(**deleted(seconds_ago=3600))
FAILED = Ended(exit_code=1, message="spottrain: the store does not answer")
CLEANUPS: dict[str, tuple[Observed, str]] = {
    "the finalizer is there before anything is saved": (going(gone=None, holds=False), "holds=True !creates"),
    "it goes when a person thinks better of it": (
        going(make_pod(), gone=None, policy="Retain"),
        "holds=False",
    ),
    "it stays while the job runs": (going(make_pod(), gone=None), "!holds"),
    "without our finalizer nothing is done": (
        going(make_pod(), holds=False, policy="Retain"),
        "!provides !holds",
    ),
    "a trainer that saves would leave something": (going(make_pod()), "deletes=0 !provides !holds"),
    "then its checkpoints are deleted": (going(SAVED), "provides=pods releases=0 !holds !creates"),
    "when they are gone the job goes": (going(cleanup=Ended(exit_code=0)), "holds=False !warns"),
    "a cleanup that failed is waited for": (going(cleanup=FAILED), "!holds !provides again"),
    "after its time what is left is said": (
        going(cleanup=FAILED, gone=LATE),
        "holds=False warns=CheckpointsLeft",
    ),
    "the end of the namespace is not held up": (
        going(cleanup_refused="forbidden: the namespace is being terminated"),
        "holds=False !provides warns=CheckpointsLeft",
    ),
    "a pod that never ends is waited for": (going(STUCK), "!holds"),
    "no longer than an outage": (going(STUCK, gone=LATE), "holds=False"),
}


@pytest.mark.parametrize("name", CLEANUPS)
def test_checkpoints_are_deleted_with_their_job(name: str) -> None:
    observed, expected = CLEANUPS[name]
    follows(expected, observed)


def test_the_pod_that_deletes_the_checkpoints_has_the_jobs_own_image_and_identity() -> None:
    (pod,) = cleanup_pods(follows("", going(SAVED)))
    container = pod["spec"]["containers"][0]
    assert container["image"] == "example.com/train:1"
    assert container["command"][:4] == ["spottrain", "checkpoints", "delete", "s3://bucket/run"]
    assert {"--job-uid", "uid-1"} <= set(container["command"])
    assert "spottrain.io/attempt" not in pod["metadata"]["labels"], "it is no attempt"
    assert pod["spec"]["restartPolicy"] == "OnFailure"


@pytest.mark.parametrize("why", ["unreadable", "refused", "failed"])
def test_the_event_names_what_is_left_and_the_command_before_a_long_error(why: str) -> None:
    error = "x" * 5000
    if why == "unreadable":
        status = with_progress(started(), going(), sample())
        assert status.progress is not None
        status = replace(status, progress=replace(status.progress, checkpoint_uri="s3://bucket/run"))
        o = replace(going(), job=replace(going().job, spec=None, invalid=error, status=status))
    elif why == "refused":
        o = going(cleanup_refused=error)
    else:
        o = going(cleanup=Ended(exit_code=1, message=error), gone=LATE)
    said = cleanup.gives_up(o)
    assert "spottrain checkpoints delete s3://bucket/run --job-uid uid-1" in said
    assert said.endswith("x" * cleanup.CUT) and len(said) < 1000


def of_a_person(*pods: PodView, **spec: Any) -> Observed:
    status = replace(started(), active_since=after(-600))
    return make_observed(*pods, job=make_job(raw_spec(**spec), status=status))


TOLD = (
    *(observed for observed, _ in CLEANUPS.values()),
    of_a_person(make_pod(), suspend=True),
    make_observed(job=make_job(raw_spec(suspend=True), status=Status())),
    of_a_person(make_pod(), activeDeadlineSeconds=600),
    make_observed(job=make_job(raw_spec(activeDeadlineSeconds=600), status=between_attempts())),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
