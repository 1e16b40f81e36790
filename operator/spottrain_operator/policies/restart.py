"""What an ending costs, and when the next attempt may start: budgets and backoff. Pure.

Called by plan.py. Failures are charged and back off; interruptions have a budget of their own; dry
capacity and full quotas use neither.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Final

from spottrain_operator.api import AttemptRecord, FailurePolicy, Status
from spottrain_operator.model import Ending
from spottrain_operator.names import Cause, Reason

LONGEST_BACKOFF: Final = timedelta(seconds=300)
BRIEF: Final = timedelta(seconds=60)
"""An attempt that is over so soon has most likely not been worth its start."""
UNCOUNTED: Final = frozenset({Cause.DONE, Cause.SUPERSEDED, Cause.REPLACED})
UNEXPLAINED: Final = frozenset({Cause.POD_REJECTED, Cause.SUPERSEDED, Cause.INTERRUPTED})
"""Endings that nobody asked for: they may come back at once and for ever, so they too are slowed down."""
EXPLAINED: Final = frozenset({Cause.DONE, Cause.SPOT_NOTICE, Cause.REPLACED})
"""Endings that say nothing of the next attempt, however soon they come."""


def counted(status: Status, ending: Ending) -> Status:
    if ending.charged:
        return replace(status, failures=status.failures + 1)
    if ending.cause in UNCOUNTED:
        return status
    return replace(status, interruptions=status.interruptions + 1)


def exhausted(status: Status, policy: FailurePolicy, ending: Ending) -> tuple[Reason, str] | None:
    """The budget that this ending, counted already, has used up: reason and sentence."""
    if ending.charged and status.failures > policy.max_failures:
        many = f"failed {status.failures} time(s), and failurePolicy.maxFailures is {policy.max_failures}"
        return Reason.TOO_MANY_FAILURES, f"{many}; the last: {ending.evidence}"
    if not ending.charged and status.interruptions > policy.max_interruptions:
        many = f"interrupted {status.interruptions} time(s), and failurePolicy.maxInterruptions is"
        return (
            Reason.TOO_MANY_INTERRUPTIONS,
            f"{many} {policy.max_interruptions}; the last: {ending.evidence}",
        )
    return None


def next_start(status: Status, policy: FailurePolicy, ending: Ending, now: datetime) -> datetime | None:
    """Not before then; None = at once. `status` holds the ending already."""
    times = status.failures if ending.charged else _unexplained_in_a_row(status, now)
    if times == 0 or policy.backoff_seconds == 0:
        return None
    doubled = timedelta(seconds=policy.backoff_seconds * 2 ** min(times - 1, 16))
    return now + min(doubled, LONGEST_BACKOFF)


def _unexplained_in_a_row(status: Status, now: datetime) -> int:
    ended = [r for r in status.attempts if r.cause]
    return sum(1 for _ in takewhile(lambda r: _unexplained(r, now), reversed(ended)))


def _unexplained(record: AttemptRecord, now: datetime) -> bool:
    if record.charged or record.cause in EXPLAINED:
        return False
    if record.cause in UNEXPLAINED or record.started is None or not record.node:
        return True
    return (record.ended or now) - record.started < BRIEF
