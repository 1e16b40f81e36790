"""How soon the next attempt starts, and in which words a used-up budget is told."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Ending
from spottrain_operator.api.training_job import AttemptRecord, FailurePolicy, Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause
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
    started,
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
        status = restart.counted(status, ending, FailurePolicy(), after(at), managed=False)
        assert restart.exhausted(status, FailurePolicy(), ending, NOW) is None
    assert status.interruptions == 40 and status.no_progress == 0
