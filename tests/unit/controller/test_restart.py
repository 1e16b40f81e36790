"""How soon the next attempt starts, and in which words a used-up budget is told."""

from __future__ import annotations

from datetime import timedelta

import pytest
from spottrain_operator.api import AttemptRecord, FailurePolicy, Status
from spottrain_operator.model import Ending
from spottrain_operator.names import Cause
from spottrain_operator.plan import plan
from spottrain_operator.policies import restart

from tests.builders import (
    NOW,
    after,
    deleted,
    ended_pod,
    make_job,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    started,
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
