"""What a person asks of a job: suspend, resume, deadlines, the end of its object and of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import (
    Create,
    Delete,
    DeleteJob,
    Ended,
    Hold,
    Observed,
    Plan,
    PodView,
    Provide,
    Release,
)
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Phase
from spottrain_operator.policies import cleanup
from spottrain_operator.policies.hang import LEAST_START
from spottrain_operator.status.changes import with_progress

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


def test_a_resumed_job_goes_on_with_the_next_attempt_and_a_deadline_counted_again() -> None:
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
    status = status_of(plan(seen(word)))
    assert status.phase == Phase.SUCCEEDED
    found = condition(status, Condition.SUCCEEDED)
    assert found.reason == "EarlyStopped" and "ended early" in found.message


def test_a_trainer_that_never_answers_hangs_where_a_person_has_set_the_time() -> None:
    o = replace(seen(make_pod(), failurePolicy={"hangTimeoutSeconds": 60}), watched_since=after(-30))
    assert not removed(plan(o)), "this process has not waited so long yet"
    assert not removed(plan(replace(o, now=after(61)))), "imports from a cold disk take their time"
    assert removed(plan(replace(o, now=after(LEAST_START - 29))))
    own = seen(make_pod(), failurePolicy={"hangTimeoutSeconds": 60}, checkpoint={"mode": "Self"})
    assert not removed(plan(replace(own, watched_since=after(-9999)))), "an image of its own need not answer"


# --- deletionPolicy Delete ------------------------------------------------------------------------------
FINALIZER = ["spottrain.io/checkpoints"]


def job(*, gone: float | None = -5, holds: bool = True, policy: str = "Delete", **more: Any) -> Any:
    meta: dict[str, Any] = {"finalizers": FINALIZER if holds else []}
    if gone is not None:
        meta["deletionTimestamp"] = rfc3339(after(gone))
    return make_job(raw_spec(deletionPolicy=policy), status=started(), **meta | more)


def observed(*pods: PodView, cleanup: Ended | None = None, **more: Any) -> Observed:
    return replace(make_observed(*pods, job=job(**more)), cleaning=cleanup is not None, cleanup=cleanup)


def holds(made: Plan) -> list[bool]:
    return [a.on for a in made.before if isinstance(a, Hold)]


def provided(made: Plan) -> list[dict[str, Any]]:
    return [a.manifest for a in made.after if isinstance(a, Provide)]


def test_the_finalizer_is_there_before_anything_is_saved_and_goes_when_a_person_thinks_better() -> None:
    fresh = plan(observed(gone=None, holds=False))
    assert holds(fresh) == [True] and not [a for a in fresh.after if isinstance(a, Create)]
    assert holds(plan(observed(make_pod(), gone=None, policy="Retain"))) == [False]
    assert holds(plan(observed(make_pod(), gone=None))) == []


def test_first_the_trainers_end_for_one_that_saves_would_leave_something() -> None:
    made = plan(observed(make_pod()))
    assert [a for a in made.after if isinstance(a, Delete)] and not provided(made) and not holds(made)


def test_then_a_pod_of_the_jobs_own_image_and_identity_deletes_the_checkpoints() -> None:
    made = plan(observed(told(Outcome.INTERRUPTED, pod=deleted())))
    assert [type(a) for a in made.after if not isinstance(a, Provide)] in ([Release], [Delete, Release])
    (pod,) = provided(made)
    container = pod["spec"]["containers"][0]
    assert container["image"] == "example.com/train:1" and container["command"][:4] == [
        "spottrain", "checkpoints", "delete", "s3://bucket/run",
    ]  # fmt: skip
    assert {"--job-uid", "uid-1"} <= set(container["command"])
    assert "spottrain.io/attempt" not in pod["metadata"]["labels"], "it is no attempt"
    assert pod["spec"]["restartPolicy"] == "OnFailure" and not holds(made)


def test_when_they_are_gone_the_job_goes() -> None:
    assert holds(plan(observed(cleanup=Ended(exit_code=0)))) == [False]


def test_one_that_failed_is_waited_for_and_after_its_time_an_event_says_what_is_left() -> None:
    failed = Ended(exit_code=1, message="spottrain: the store does not answer")
    early = plan(observed(cleanup=failed))
    assert not holds(early) and not provided(early) and early.recheck_after is not None
    late = plan(observed(cleanup=failed, gone=-16 * 60))
    assert holds(late) == [False]
    (event,) = late.events
    assert (
        event.warning and "s3://bucket/run are left" in event.message and "does not answer" in event.message
    )


def test_where_no_pod_can_be_made_the_namespace_is_not_held_up() -> None:
    o = replace(observed(), cleanup_refused="forbidden: the namespace is being terminated")
    made = plan(o)
    assert holds(made) == [False] and not provided(made) and "terminated" in made.events[0].message


@pytest.mark.parametrize("why", ["unreadable", "refused", "failed"])
def test_the_event_names_what_is_left_and_the_command_before_a_long_error(why: str) -> None:
    error = "x" * 5000
    if why == "unreadable":
        status = with_progress(started(), observed(), sample())
        assert status.progress is not None
        status = replace(status, progress=replace(status.progress, checkpoint_uri="s3://bucket/run"))
        o = observed()
        o = replace(o, job=replace(o.job, spec=None, invalid=error, status=status))
    elif why == "refused":
        o = replace(observed(), cleanup_refused=error)
    else:
        o = observed(cleanup=Ended(exit_code=1, message=error), gone=-16 * 60)
    said = cleanup.gives_up(o)
    command = "spottrain checkpoints delete s3://bucket/run --job-uid uid-1"
    assert "at s3://bucket/run are left" in said and command in said
    assert said.endswith("x" * cleanup.CUT) and len(said) < 1000


def test_without_our_finalizer_nothing_is_done() -> None:
    made = plan(observed(make_pod(), holds=False, policy="Retain"))
    assert not provided(made) and not holds(made)


def test_a_pod_that_never_ends_holds_the_job_up_no_longer_than_an_outage() -> None:
    stuck = make_pod(**deleted(seconds_ago=3600))
    assert not holds(plan(observed(stuck)))
    assert holds(plan(observed(stuck, gone=-16 * 60))) == [False]
