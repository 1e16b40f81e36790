"""How soon the next attempt starts, what uses up a budget, and how a silent store is waited for."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from spottrain.contract import WAITING_FOR_STORE, Outcome
from spottrain_operator.api.observed import Ending, PodView
from spottrain_operator.api.training_job import (
    AttemptRecord,
    ConditionStatus,
    FailurePolicy,
    Job,
    ProgressStatus,
    Status,
)
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Phase, Reason
from spottrain_operator.policies import restart

from tests.builders import (
    NOW,
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
    status_of,
    told,
)

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
    assert _wait(_history(*[(Cause.SPOT_NOTICE, 5)] * 4)) == 0


def test_a_pod_that_somebody_keeps_deleting_before_it_runs_does_not_spin() -> None:
    pod = make_pod(node="", phase="Pending", created=after(-1), **deleted(1, 0))
    status = started()
    fresh = Status(attempt=1, attempts=(AttemptRecord(number=1, pod=status.attempts[0].pod),))
    made = plan(make_observed(pod, job=make_job(status=fresh)))
    assert made.status is not None and made.status.attempt == 2 and made.status.next_start == after(10)


def test_a_pod_that_is_deleted_before_it_has_a_node_backs_off_however_long_it_waited() -> None:
    pod = make_pod(node="", phase="Pending", **deleted(1, 0))
    fresh = Status(attempt=1, attempts=(AttemptRecord(number=1, started=pod.created),))
    made = plan(make_observed(pod, job=make_job(status=fresh)))
    assert made.status is not None and made.status.next_start == after(10)


def test_a_used_up_budget_is_told_in_a_sentence() -> None:
    spec = raw_spec(failurePolicy={"maxFailures": 0, "maxInterruptions": 0})
    failed = plan(make_observed(ended_pod(code=1, message="boom"), job=make_job(spec, status=started())))
    assert (
        failed.message == "failed 1 time(s), and failurePolicy.maxFailures is 0; the last: exit code 1: boom"
    )
    pod = ended_pod(code=75, notice=notice())
    stopped = plan(make_observed(pod, job=make_job(spec, status=started())))
    assert stopped.message.startswith(
        "interrupted 1 time(s), and failurePolicy.maxInterruptions is 0; the last: "
    )


# --- budgets --------------------------------------------------------------------------------------------
def _counted(status: Status, policy: FailurePolicy, *, steps: tuple[int, int], at: float) -> Status:
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
    return restart.counted(grown, Ending(cause=Cause.NODE_LOST, evidence="x"), policy, after(at))


def test_interruptions_are_counted_within_their_window_alone() -> None:
    policy = FailurePolicy(max_interruptions=2, within_seconds=3600)
    ending, status = Ending(cause=Cause.NODE_LOST, evidence="x"), Status()
    for at in (0, 2000, 4000, 6000):
        status = _counted(status, policy, steps=(0, 5), at=at)
        assert restart.exhausted(status, policy, ending, NOW) is None
    status = _counted(status, policy, steps=(0, 5), at=6100)
    found = restart.exhausted(status, policy, ending, NOW)
    assert found is not None and "interrupted 3 time(s) within 3600 s" in found[1]
    assert status.interruptions == 5 and len(status.interruption_times) == 3


def test_interruptions_that_save_nothing_wait_longer_each_time_and_end_at_last() -> None:
    policy, ending, status = (
        FailurePolicy(max_no_progress=3),
        Ending(cause=Cause.NODE_LOST, evidence="x"),
        Status(known_durable_step=7),
    )
    waits = []
    for n in range(4):
        status = _counted(status, policy, steps=(7, 7), at=n * 1000)
        start = restart.next_start(status, policy, ending, after(n * 1000), "uid")
        waits.append((start - after(n * 1000)).total_seconds() if start else 0)
    assert waits == [0, 0, 10, 20]
    assert restart.exhausted(status, policy, ending, NOW) is None, "the first says nothing yet"
    status = _counted(status, policy, steps=(7, 7), at=5000)
    found = restart.exhausted(status, policy, ending, NOW)
    assert found is not None and found[0] == "NoProgress" and "maxNoProgress is 3" in found[1]
    saved = _counted(status, policy, steps=(7, 8), at=9000)
    assert saved.no_progress == 0 and restart.exhausted(saved, policy, ending, NOW) is None


def test_an_attempt_that_is_given_up_before_it_has_saved_is_no_livelock() -> None:
    """As under each notice, where the successor is made while the old one still saves."""
    status = replace(started(), attempts=(replace(started().attempts[0], durable_step=None),))
    for attempt in range(1, 8):
        pod = make_pod(attempt, notice=notice(60), **deleted())
        o = make_observed(pod, job=make_job(status=status), nodes=(make_node(notice=notice(60)),))
        made = plan(o).status
        assert made is not None and made.attempt == attempt + 1 and made.next_start is None
        saved = told(Outcome.INTERRUPTED, attempt, step=9 * attempt, durableStep=9 * attempt, pod=deleted())
        later = plan(make_observed(saved, make_pod(attempt + 1), job=make_job(status=made))).status
        assert later is not None and later.known_durable_step == 9 * attempt
        status = later
    assert status.no_progress == 0 and status.interruptions == 7


def test_a_start_reckoned_by_a_clock_that_was_ahead_is_brought_forward() -> None:
    policy = FailurePolicy(backoff_seconds=10)
    failed = AttemptRecord(number=1, cause=Cause.FAILED, charged=True)
    unmade = AttemptRecord(number=2)
    status = Status(attempt=2, attempts=(failed, unmade), failures=1, next_start=after(300), active_since=NOW)
    o = make_observed(job=make_job(raw_spec(failurePolicy={"backoffSeconds": 10}), status=status))
    made = plan(o)
    assert made.status is not None and made.status.next_start == after(10)
    assert plan(replace(o, job=replace(o.job, status=made.status))).status is None, "once"
    assert restart.with_earlier_start(replace(status, next_start=after(12)), policy, NOW, "uid") is None
    assert restart.with_earlier_start(replace(status, failures=0), policy, NOW, "uid") == replace(
        status, failures=0, next_start=NOW
    ), "by a policy that would not have waited at all"


def test_while_no_next_attempt_is_made_its_wait_stays() -> None:
    """As of a suspended job: the wait is that of the ending just judged, not of the one before."""
    first = AttemptRecord(number=1, cause=Cause.SPOT_NOTICE)
    failed = AttemptRecord(number=2, cause=Cause.FAILED, charged=True)
    status = Status(attempt=2, attempts=(first, failed), failures=5, next_start=after(150))
    made = plan(make_observed(job=make_job(raw_spec(suspend=True), status=status)))
    assert made.status is None or made.status.next_start == after(150)


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
        status = restart.counted(status, ending, FailurePolicy(), after(at), reports=False)
        assert restart.exhausted(status, FailurePolicy(), ending, NOW) is None
    assert status.interruptions == 40 and status.no_progress == 0


# --- a store that does not answer -----------------------------------------------------------------------
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
    made = status_of(plan(make_observed(make_pod(2), job=make_job(status=status), sample=waits)))
    assert _condition(made, Condition.INTERRUPTED).status == "True"


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
    made = status_of(plan(make_observed(make_pod(), job=make_job(status=status), sample=trains)))
    shown = _condition(made)
    assert shown.status == "False" and "trains on, and its saves fail" in shown.message
    assert _condition(made, Condition.RUNNING).reason == Reason.TRAINING
    back = sample(step=6, startStep=0)
    made = status_of(plan(make_observed(make_pod(), job=make_job(status=made), sample=back)))
    assert _condition(made).status == "True"


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
    made = status_of(plan(seen))
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


def test_a_clock_that_was_ahead_does_not_lengthen_the_pause_for_the_store() -> None:
    status = _ended(started(), _gave_up(1))
    policy = make_job().spec
    assert policy is not None
    moved = restart.with_earlier_start(status, policy.failure_policy, after(-7200), "uid-1")
    assert moved is not None and moved.next_start == after(-7190)
