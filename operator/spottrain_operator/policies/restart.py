"""Budgets and backoff: what an ending costs, and when the next attempt may start. Pure.

Failures are charged and back off. Interruptions have a budget of their own. Unavailable capacity and exceeded
quotas use neither.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Final

from spottrain_operator.api.observed import Ending
from spottrain_operator.api.training_job import AttemptRecord, FailurePolicy, Status
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.names import Cause, Reason

LONGEST_BACKOFF: Final = timedelta(seconds=300)
LONGEST_STORE_BACKOFF: Final = timedelta(seconds=1800)
"""Maximum between two starts while the store does not respond: each occupies a node for some minutes."""
BRIEF: Final = timedelta(seconds=60)
"""A shorter attempt has most likely made no progress, unless it is known to have."""
UNCOUNTED: Final = frozenset(
    {
        Cause.DONE,
        Cause.SUPERSEDED,
        Cause.REPLACED,
        Cause.SCHEDULING_TIMEOUT,
        Cause.START_FAILED,
        Cause.SUSPENDED,
        Cause.MOVED,
        Cause.INTERRUPT_REQUESTED,
        Cause.DEADLINE_EXCEEDED,
    }
)
"""Endings that the operator or the user requested, or that are caused by missing capacity or a registry: they
use none of the job's budgets."""
UNEXPLAINED: Final = frozenset(
    {Cause.POD_REJECTED, Cause.SUPERSEDED, Cause.INTERRUPTED, Cause.SCHEDULING_TIMEOUT, Cause.START_FAILED}
)
"""Endings that nobody requested: they may recur at once and without end, so they back off as well."""
REQUESTED: Final = frozenset({Cause.DONE, Cause.SUSPENDED, Cause.INTERRUPT_REQUESTED})
"""Endings that a person or the trainer decides."""
EXPLAINED: Final = REQUESTED | {Cause.SPOT_NOTICE, Cause.REPLACED, Cause.MOVED}
"""Endings that predict nothing about the next attempt, however early one comes. Those that nobody requested
may recur without end: a node's notice, or a rule of the operator, may meet each next attempt too."""
MAX_FAILED_STARTS: Final = 10
"""Limit of attempts in a row that could not be started; with the longest backoff about 90 minutes."""


def counted(status: Status, ending: Ending, *, reports: bool = True) -> Status:
    """Adds the ending to the status' counters; `status` already includes the ending's record.

    reports: whether a program of ours reports what is saved; otherwise nothing is known.
    """
    failed = status.failed_starts
    if ending.cause is Cause.START_FAILED:
        failed += 1
    elif ending.cause not in (
        Cause.REPLACED,
        Cause.MOVED,
        Cause.SCHEDULING_TIMEOUT,
    ):  # in a row, but for these
        failed = 0
    status = replace(status, failed_starts=failed)
    if ending.charged:
        return replace(status, failures=status.failures + 1)
    # One that only waited for the store does not count. A store that can be read but not written must not
    # cause endless retraining.
    record = status.current
    trained = record is not None and (record.last_step or 0) > (record.start_step or 0)
    if ending.cause in UNCOUNTED or (ending.cause is Cause.STORE_UNREACHABLE and not trained):
        return status
    return replace(
        status,
        interruptions=status.interruptions + 1,
        no_progress=_no_progress(status) if reports else 0,
        interrupted_at_step=status.known_durable_step,
    )


def _no_progress(status: Status) -> int:
    """Counts interruptions in a row without a newly saved step. An attempt that never ran does not count.

    It is compared with the step at the last interruption, because attempts often end before they save.
    """
    record = status.current
    if record is None or not record.node:
        return status.no_progress
    advanced = (status.known_durable_step or 0) > (status.interrupted_at_step or 0)
    return 0 if advanced else status.no_progress + 1


def exhausted(
    status: Status, policy: FailurePolicy, ending: Ending, now: datetime
) -> tuple[Reason, str] | None:
    """Returns the budget that this ending, already counted, has exhausted: reason and sentence."""
    last = f"; the last: {ending.evidence}"
    since = status.store_unreachable_time
    longest = timedelta(seconds=policy.store_outage_seconds)
    if ending.cause is Cause.STORE_UNREACHABLE and since is not None and now - since >= longest:
        limit = f"failurePolicy.storeOutageSeconds ({policy.store_outage_seconds})"
        known = f"the checkpoint store has not responded since {rfc3339(since)}, for longer than {limit}"
        return Reason.STORE_UNREACHABLE, f"{known}; status.attempts has its errors"
    if ending.charged and status.failures > policy.max_failures:
        many = f"failed {status.failures} time(s), and failurePolicy.maxFailures is {policy.max_failures}"
        return Reason.TOO_MANY_FAILURES, many + last
    if ending.cause is Cause.START_FAILED and status.failed_starts >= MAX_FAILED_STARTS:
        return Reason.CANNOT_START, f"{status.failed_starts} attempts in a row could not be started{last}"
    if ending.charged or ending.cause in UNCOUNTED:
        return None
    if status.interruptions > policy.max_interruptions:
        many = f"interrupted {status.interruptions} time(s), and failurePolicy.maxInterruptions is"
        return Reason.TOO_MANY_INTERRUPTIONS, f"{many} {policy.max_interruptions}; the last: {ending.cause}"
    if policy.max_no_progress is not None and status.no_progress > policy.max_no_progress:
        many = f"interrupted {status.no_progress} time(s) in a row before one more step was saved, and"
        limit = f"failurePolicy.maxNoProgress is {policy.max_no_progress}; the last: {ending.cause}"
        return Reason.NO_PROGRESS, f"{many} {limit}; shorten checkpoint.interval"
    return None


def next_start(
    status: Status, policy: FailurePolicy, ending: Ending, now: datetime, uid: str
) -> datetime | None:
    """Returns the earliest next start; None = at once. `status` already includes the ending."""
    wait = _wait(status, policy, ending, now, uid)
    return now + wait if wait else None


def _wait(status: Status, policy: FailurePolicy, ending: Ending, now: datetime, uid: str) -> timedelta:
    if ending.cause is Cause.STORE_UNREACHABLE:
        return _store_wait(status, policy, now)
    times = status.failures if ending.charged else _uncharged_in_a_row(status, ending, now)
    if times <= 0 or policy.backoff_seconds == 0:
        return timedelta(0)
    doubled = timedelta(seconds=policy.backoff_seconds * 2 ** min(times - 1, 16))
    wait = min(doubled, LONGEST_BACKOFF)
    if ending.cause is Cause.SCHEDULING_TIMEOUT:  # two partial gangs must not retry at the same time
        wait *= 1 + spread(uid, status.attempt)
    return wait


def _store_wait(status: Status, policy: FailurePolicy, now: datetime) -> timedelta:
    """Doubles with each attempt in a row without the store; the last attempt starts at the outage limit."""
    times = sum(1 for _ in takewhile(lambda r: r.cause == Cause.STORE_UNREACHABLE, reversed(status.over)))
    doubled = timedelta(seconds=policy.backoff_seconds * 2 ** min(max(times, 1) - 1, 16))
    since = status.store_unreachable_time or now
    left = since + timedelta(seconds=policy.store_outage_seconds) - now
    return min(doubled, LONGEST_STORE_BACKOFF, max(left, timedelta(0)))


def spread(uid: str, attempt: int) -> float:
    """Returns a deterministic value from 0 to 1, different for each job and attempt."""
    return int.from_bytes(hashlib.sha256(f"{uid}/{attempt}".encode()).digest()[:4]) / 2**32


def _uncharged_in_a_row(status: Status, ending: Ending, now: datetime) -> int:
    """Returns how often in a row the job was ended for nothing, so that the wait doubles with each."""
    fruitless = sum(1 for _ in takewhile(lambda r: _fruitless(r, now), reversed(status.over)))
    if ending.cause in EXPLAINED:  # one may be chance, more are a livelock
        fruitless -= 1
    return max(fruitless, status.no_progress - 1 if ending.cause not in UNCOUNTED else 0)


def _fruitless(record: AttemptRecord, now: datetime) -> bool:
    """Returns whether an attempt ended uncharged, and soon or unexplained, and is not known to have saved."""
    saved = record.start_step is not None and (record.durable_step or 0) > record.start_step
    if record.charged or record.cause in REQUESTED or saved:
        return False
    brief = record.started is not None and (record.ended or now) - record.started < BRIEF
    if record.cause in EXPLAINED:
        return brief and (record.last_step or 0) <= (record.start_step or 0)
    return brief or record.cause in UNEXPLAINED or record.started is None or not record.node


def backoff_reason(status: Status) -> str:
    """Returns why the attempt of this status waits for its start, for a message; "" where that is unknown."""
    before = status.previous
    if before is None or not before.cause:
        return ""
    ended = f"attempt {before.number} ended with {before.cause}"
    if before.cause == Cause.STORE_UNREACHABLE:
        return f"{ended}: each attempt without the store doubles the wait"
    if before.charged:
        return f"{ended}, failure {status.failures} of the job: each doubles the wait"
    return f"{ended}, and no newly saved step of it is known: each such attempt in a row doubles the wait"
