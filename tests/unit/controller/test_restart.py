"""How soon the next attempt starts, what uses up a budget, and how a silent store is waited for."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from spottrain.contract import WAITING_FOR_STORE, Outcome
from spottrain_operator.api.observed import Ending, PodView
from spottrain_operator.api.training_job import AttemptRecord, FailurePolicy, ProgressStatus, Status
from spottrain_operator.names import Cause, Condition, Reason
from spottrain_operator.policies import restart

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
    manifests,
    notice,
    raw_spec,
    sample,
    started,
    told,
)
from tests.unit.controller.stories import Story

BRIEF_CAUSES = (Cause.POD_DELETED, Cause.DISRUPTED, Cause.NODE_LOST, Cause.NODE_SHUTDOWN)


def _history(*attempts: tuple[Cause, float]) -> Status:
    """Causes, and how many seconds each attempt lasted."""
    records = (
        AttemptRecord(
            number=n,
            node="node-a",
            cause=cause,
            charged=False,
            started=NOW - timedelta(seconds=lasted),
            ended=NOW,
        )
        for n, (cause, lasted) in enumerate(attempts, 1)
    )
    return Status(attempt=len(attempts), attempts=tuple(records), interruptions=len(attempts))


def _wait(status: Status) -> float:
    cause = Cause(status.attempts[-1].cause)
    start = restart.next_start(status, FailurePolicy(), Ending(cause=cause, evidence="x"), NOW, "uid")
    return (start - NOW).total_seconds() if start else 0


@pytest.mark.parametrize("cause", BRIEF_CAUSES)
def test_attempts_that_are_interrupted_within_a_minute_back_off(cause: Cause) -> None:
    assert [_wait(_history(*[(cause, 5)] * n)) for n in (1, 2, 3, 9)] == [10, 20, 40, 300]


@pytest.mark.parametrize("cause", BRIEF_CAUSES)
def test_an_attempt_that_has_lasted_a_minute_is_followed_at_once_and_ends_the_row(cause: Cause) -> None:
    assert _wait(_history((cause, 5), (cause, 61))) == 0
    assert _wait(_history((cause, 5), (cause, 61), (cause, 5))) == 10


def test_a_spot_notice_is_followed_at_once_however_soon_it_came() -> None:
    assert _wait(_history((Cause.SPOT_NOTICE, 5))) == 0
    assert _wait(_history(*[(Cause.SPOT_NOTICE, 61)] * 4)) == 0


@pytest.mark.parametrize("cause", [Cause.SPOT_NOTICE, Cause.REPLACED, Cause.MOVED])
def test_attempts_that_end_one_after_the_other_without_a_step_back_off_whatever_ends_them(
    cause: Cause,
) -> None:
    """As on a node that a template pins and that has a notice."""
    assert [_wait(_history(*[(cause, 5)] * n)) for n in (1, 2, 3, 4, 9)] == [0, 10, 20, 40, 300]
    asked = _history((cause, 5), (Cause.SUSPENDED, 5), (cause, 5))
    assert _wait(asked) == 0, "what a person asks for ends the row"


def test_the_same_without_a_word_of_what_is_saved() -> None:
    """checkpoint.mode Self, whose pods may all come to a node that ends."""
    job, doomed = Story(_alone(started=None), checkpoint={"mode": "Self"}), (make_node(notice=notice(60)),)
    for attempt, start in ((1, "now"), (2, "+10"), (3, "+20")):
        pod = ended_pod(attempt, 143, created=after(-2), notice=notice(60), **deleted(1))
        job.look(f"cause{attempt}=SpotNotice start={start}", pod, nodes=doomed)


@pytest.mark.parametrize("cause", BRIEF_CAUSES)
def test_an_attempt_that_has_saved_more_steps_is_followed_at_once_however_short_it_was(cause: Cause) -> None:
    status = _history(*[(cause, 5)] * 4)
    saved = [
        replace(r, start_step=n * 10, durable_step=n * 10 + 7, last_step=n * 10 + 7)
        for n, r in enumerate(status.attempts)
    ]
    assert _wait(replace(status, attempts=tuple(saved))) == 0
    none_saved = (*saved[:3], replace(saved[3], durable_step=30))
    assert _wait(replace(status, attempts=none_saved)) == 10, "and it ends the row"


def _alone(**record: Any) -> Status:
    first = started().attempts[0]
    return replace(started(), attempts=(replace(first, **record),))


def test_a_step_that_the_trainer_has_told_and_no_status_has_yet_counts_too() -> None:
    """The status has the progress once a minute, and a pod that is killed leaves no message."""
    heard = sample(40, startStep=0, durableStep=36)
    gone = ended_pod(code=137, created=after(-40), **deleted())
    job = Story(_alone(started=after(-40)))
    made = job.look("attempt=2 durable=36 start=now", gone, sample=heard)
    (pod,) = manifests(made)
    env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert env["SPOTTRAIN_KNOWN_DURABLE_STEP"] == "36", "and is handed to the next pod"


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        (ended_pod(code=1), "attempt 1 ended with Failed, failure 1 of the job"),
        (
            ended_pod(code=143, created=after(-20), **deleted()),
            "ended with PodDeleted, and no newly saved step",
        ),
        (told(Outcome.STORE_UNREACHABLE), "attempt 1 ended with StoreUnreachable: each"),
    ],
)
def test_a_job_that_waits_for_its_next_start_says_why(pod: PodView, why: str) -> None:
    job = Story(_alone(started=None))
    made = job.look("Scheduled=False/WaitingForBackoff start=+10", pod)
    assert why in condition(made, Condition.SCHEDULED).message


@pytest.mark.parametrize(("created", "began"), [(-1, None), (-600, -600)])
def test_a_pod_that_is_deleted_before_it_has_a_node_backs_off_however_long_it_waited(
    created: float, began: float | None
) -> None:
    pod = make_pod(node="", phase="Pending", created=after(created), **deleted(1, 0))
    record = AttemptRecord(number=1, started=after(began) if began else None)
    Story(Status(attempt=1, attempts=(record,))).look("attempt=2 start=+10", pod)


# --- steps that were not saved --------------------------------------------------------------------------
LOST = {"step": 57, "durableStep": 40, "startStep": 0}


def test_steps_that_are_lost_are_said_by_an_event_and_until_they_are_done_again() -> None:
    job = Story()
    end = told(Outcome.INTERRUPTED_LOST, pod=deleted(), **LOST)
    made = job.look("attempt=2 durable=40 warns=StepsLost", end)
    said = "attempt 1 ended at step 57, and its last 17 step(s) are lost, and will be repeated"
    assert [e.message for e in made.events if e.reason == "StepsLost"] == [said]
    assert condition(made, Condition.CHECKPOINT_DURABLE).message == f"step 40 is in the store; {said}"
    assert job.status.progress is not None and job.status.progress.step == 40
    again = replace(sample(41, 2, startStep=40, durableStep=40), at=after(10))
    job.look("!warns=StepsLost", make_pod(2), at=10, sample=again)
    assert said in condition(job.status, Condition.CHECKPOINT_DURABLE).message
    done_again = replace(sample(57, 2, startStep=40, durableStep=40), at=after(90))
    job.look("", make_pod(2), at=90, sample=done_again)
    assert "lost" not in condition(job.status, Condition.CHECKPOINT_DURABLE).message


@pytest.mark.parametrize(
    ("outcome", "facts"),
    [
        (Outcome.INTERRUPTED, LOST | {"durableStep": 57}),
        (Outcome.INTERRUPTED, {"startStep": 40, "step": 40, "durableStep": 40}),
        (Outcome.DONE, LOST),
    ],
)
def test_where_nothing_is_lost_nothing_is_said(outcome: Outcome, facts: dict[str, Any]) -> None:
    Story().look("!warns=StepsLost", told(outcome, **facts))
    own = Story(checkpoint={"mode": "Self"})
    own.look("!warns=StepsLost", told(Outcome.INTERRUPTED_LOST, step=57, startStep=0))


@pytest.mark.parametrize("end", [ended_pod(code=137, **deleted()), make_pod(phase="Failed", **deleted())])
@pytest.mark.parametrize(("found", "lost"), [(40, 17), (50, 7), (57, 0), (90, 0)])
def test_what_a_killed_trainer_has_lost_is_said_when_the_next_one_has_read_the_newest_checkpoint(
    end: PodView, found: int, lost: int
) -> None:
    """What it did after its last response is not known, and it may have saved it."""
    job = Story()
    job.look("!warns=StepsLost durable=40", end, sample=sample(57, startStep=0, durableStep=40))
    said = condition(job.status, Condition.CHECKPOINT_DURABLE).message
    assert said.endswith("attempt 1 ended at step 57, and its last 17 step(s) are not known to be saved")
    resumed = replace(sample(found, 2, startStep=found, durableStep=found), at=after(20))
    made = job.look(f"durable={found}", make_pod(2), at=20, sample=resumed)
    said_then = [e.message for e in made.events if e.reason == "StepsLost"]
    words = f"attempt 1 ended at step 57, and its last {lost} step(s) are lost, and will be repeated"
    assert said_then == [words] * (lost > 0)


def test_a_failure_the_end_of_the_job_and_a_suspension_lose_steps_aloud_too() -> None:
    heard = sample(57, startStep=0, durableStep=40)
    Story().look("warns=StepsLost durable=40", ended_pod(code=1), sample=heard)
    last = Story(failurePolicy={"maxInterruptions": 0})
    last.look("phase=Failed warns=StepsLost", ended_pod(code=137, **deleted()), sample=heard)
    suspended = Story(replace(started(), active_since=after(-600)), suspend=True)
    suspended.look("deletes=0", make_pod(), sample=heard)
    end = told(Outcome.INTERRUPTED_LOST, pod=deleted(), **LOST)
    suspended.look("phase=Suspended warns=StepsLost", end, at=5, sample=heard)
    suspended.look("", end, at=9, sample=heard, spec={"activeDeadlineSeconds": 9})
    shown = suspended.status.progress
    assert shown is not None and (shown.step, shown.state) == (40, ""), "whatever was heard before its end"


def test_the_first_checkpoint_of_an_attempt_is_written_at_once() -> None:
    job = Story()
    job.look("CheckpointDurable=False", make_pod(), sample=sample(5, startStep=0))
    job.look("unwritten", make_pod(), at=5, sample=replace(sample(9, startStep=0), at=after(5)))
    saved = replace(sample(14, startStep=0, durableStep=14), at=after(10))
    job.look("CheckpointDurable=True durable=14", make_pod(), at=10, sample=saved)


# --- budgets --------------------------------------------------------------------------------------------
def _counted(status: Status, *, steps: tuple[int, int], at: float) -> Status:
    """One more interruption, of an attempt that went from the first step to the second, both saved."""
    number = status.attempt + 1
    record = AttemptRecord(
        number=number,
        cause=Cause.NODE_LOST,
        node="n",
        started=after(at - 600),
        ended=after(at),
        start_step=steps[0],
        durable_step=steps[1],
    )
    known = max(steps[1], status.known_durable_step or 0)
    grown = replace(status, attempt=number, attempts=(*status.attempts, record), known_durable_step=known)
    return restart.counted(grown, Ending(cause=Cause.NODE_LOST, evidence="x"))


def test_interruptions_that_save_nothing_wait_longer_each_time_and_end_at_last() -> None:
    policy, ending, status = (
        FailurePolicy(max_no_progress=3),
        Ending(cause=Cause.NODE_LOST, evidence="x"),
        Status(known_durable_step=7),
    )
    waits = []
    for n in range(4):
        status = _counted(status, steps=(7, 7), at=n * 1000)
        start = restart.next_start(status, policy, ending, after(n * 1000), "uid")
        waits.append((start - after(n * 1000)).total_seconds() if start else 0)
    assert waits == [0, 0, 10, 20]
    assert restart.exhausted(status, policy, ending, NOW) is None, "the first says nothing yet"
    status = _counted(status, steps=(7, 7), at=5000)
    found = restart.exhausted(status, policy, ending, NOW)
    assert found is not None and found[0] == Reason.NO_PROGRESS
    saved = _counted(status, steps=(7, 8), at=9000)
    assert saved.no_progress == 0 and restart.exhausted(saved, policy, ending, NOW) is None


def test_an_attempt_that_is_given_up_before_it_has_saved_is_no_livelock() -> None:
    """As under each notice, where the successor is made while the old one still saves."""
    job = Story()
    for attempt in range(1, 8):
        pod = make_pod(attempt, notice=notice(60), **deleted())
        job.look(f"attempt={attempt + 1} start=now", pod, nodes=(make_node(notice=notice(60)),))
        saved = told(Outcome.INTERRUPTED, attempt, step=9 * attempt, durableStep=9 * attempt, pod=deleted())
        job.look(f"durable={9 * attempt}", saved, make_pod(attempt + 1))
    job.look("interruptions=7 noProgress=0", make_pod(8))


def test_while_no_next_attempt_is_made_its_wait_stays() -> None:
    """As of a suspended job: the wait is that of the ending just judged, not of the one before."""
    first = AttemptRecord(number=1, cause=Cause.SPOT_NOTICE)
    failed = AttemptRecord(number=2, cause=Cause.FAILED, charged=True)
    status = Status(attempt=2, attempts=(first, failed), failures=5, next_start=after(150))
    Story(status, suspend=True).look("start=+150")


def test_two_half_gangs_that_let_go_at_once_do_not_come_back_at_once() -> None:
    ending = Ending(cause=Cause.SCHEDULING_TIMEOUT, evidence="x")
    record = AttemptRecord(number=1, cause=Cause.SCHEDULING_TIMEOUT, started=NOW, ended=NOW)
    status = Status(attempt=1, attempts=(record,))
    starts = {restart.next_start(status, FailurePolicy(), ending, NOW, f"uid-{n}") for n in range(20)}
    assert len(starts) == 20 and all(s is not None and after(10) <= s <= after(20) for s in starts)


def test_of_an_image_that_keeps_its_own_checkpoints_no_lack_of_progress_is_known() -> None:
    status = Status()
    for at in range(40):
        record = AttemptRecord(
            number=at + 1, cause=Cause.SPOT_NOTICE, node="n", started=after(at), ended=after(at)
        )
        status = replace(status, attempt=at + 1, attempts=(record,))
        ending = Ending(cause=Cause.SPOT_NOTICE, evidence="x")
        status = restart.counted(status, ending, reports=False)
        assert restart.exhausted(status, FailurePolicy(), ending, NOW) is None
    assert status.interruptions == 40 and status.no_progress == 0


# --- a store that does not answer -----------------------------------------------------------------------
SILENT = "s3://bucket/run at http://minio:9000 does not answer since 11:55:00Z: connection refused"
WAITS: dict[str, Any] = {"state": WAITING_FOR_STORE, "waitingFor": SILENT}


def _gave_up(attempt: int, **more: Any) -> PodView:
    return told(Outcome.STORE_UNREACHABLE, attempt, message=SILENT, **more)


def _without_store(**policy: Any) -> Story:
    """Its first attempt did not find its store."""
    job = Story(failurePolicy=policy)
    job.look("attempt=2 failures=0 interruptions=0 noProgress=0 !charged !interrupted outage", _gave_up(1))
    return job


def _since(job: Story) -> datetime:
    assert job.status.store_unreachable_time is not None
    return job.status.store_unreachable_time


def test_an_attempt_that_did_not_find_its_store_is_tried_again_uncharged_and_says_why() -> None:
    job = Story()
    job.look("outage warns=StoreUnreachable tells=AttemptStarted", _gave_up(1))
    job.look("cause1=StoreUnreachable start=+10 outage !warns")
    assert _since(job) == NOW


def test_the_exit_code_alone_says_it_where_the_runtime_is_ours() -> None:
    Story().look("cause1=StoreUnreachable", ended_pod(1, 69))
    Story(checkpoint={"mode": "Self"}).look("cause1=Failed failures=1", ended_pod(1, 69))


def test_the_pause_grows_with_each_attempt_that_does_not_find_it_up_to_half_an_hour() -> None:
    job, now = Story(), 0.0
    for number, wait in enumerate([10, 20, 40, 80, 160, 320, 640, 1280, 1800, 1800, 1800], 1):
        job.look(f"start=+{wait} failures=0 interruptions=0", _gave_up(number), at=now)
        now += wait + 300
    assert _since(job) == NOW, "since the first of them"


def test_the_outage_has_a_bound_of_its_own_and_the_last_try_comes_when_that_does() -> None:
    job = _without_store(storeOutageSeconds=3600)
    job.look("!Failed", _gave_up(2), at=3599)
    job.look("Failed=True/StoreUnreachable failures=0", _gave_up(3), at=3600)
    _without_store(storeOutageSeconds=100, backoffSeconds=300).look("start=+100")


def test_while_a_pod_waits_for_its_store_the_job_says_so_and_has_not_recovered() -> None:
    job = Story()
    job.look("interrupted", told(Outcome.INTERRUPTED, 1))
    expected = "interrupted Running=True/WaitingForStore phase=Running outage"
    job.look(f"{expected} warns=StoreUnreachable", make_pod(2), sample=sample(0, 2, **WAITS))
    assert job.status.progress is not None and job.status.progress.waiting_for == SILENT
    job.look("attempt=3 outage", _gave_up(2))
    job.look("Running=True/WaitingForRuntime outage !warns", make_pod(3), at=100)  # has not said it yet


def test_an_outage_in_mid_training_is_told_at_once_and_its_end_too() -> None:
    job = Story(started(progress=ProgressStatus(state="Training", step=4, poll_time=NOW)))
    trains = sample(step=5, startStep=0, waitingFor=SILENT)
    job.look("Running=True/StoreUnreachable outage warns=StoreUnreachable", make_pod(), sample=trains)
    job.look("Running=True/Training !outage", make_pod(), sample=sample(step=6, startStep=0))


@pytest.mark.parametrize(
    ("state", "start_step", "back"),
    [("Gated", None, False), ("Restoring", None, False), ("Training", 40, True)],
)
def test_the_store_is_back_when_a_start_has_got_past_it(
    state: str, start_step: int | None, back: bool
) -> None:
    """One that answers the first request and no other would else be waited for without end."""
    job = _without_store()
    answers = replace(sample(attempt=2, state=state, startStep=start_step), at=after(100))
    job.look("!outage" if back else "outage", make_pod(2), at=100, sample=answers)
    assert back or _since(job) == NOW


def test_a_job_that_ends_between_two_polls_leaves_no_outage_behind() -> None:
    done = told(Outcome.DONE, 2, startStep=40, step=200, durableStep=200)
    _without_store().look("phase=Succeeded !outage", done, at=100)


def test_an_attempt_that_trained_and_could_not_store_its_end_counts_as_an_interruption() -> None:
    """Else a store that is read and never written would have it trained again and again."""
    Story().look("failures=0 interruptions=1 noProgress=1", _gave_up(1, startStep=0, step=100, durableStep=0))


def test_peers_of_a_rank_that_did_not_find_its_store_are_not_charged() -> None:
    lost = told(Outcome.INTERRUPTED_LOST, 1, pod={"rank": 1}, reason="PeerLost", message="rank 0 is gone")
    Story(workers=2).look("cause1=StoreUnreachable failures=0 interruptions=0", _gave_up(1), lost)


TOLD = (
    make_observed(make_pod(), sample=sample(0, **WAITS)),
    make_observed(make_pod(), sample=sample(step=5, startStep=0, waitingFor=SILENT)),
    make_observed(_gave_up(1)),
    make_observed(
        _gave_up(1), job=make_job(raw_spec(failurePolicy={"storeOutageSeconds": 0}), status=started())
    ),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
