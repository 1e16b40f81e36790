"""The user's lifecycle settings of a job: suspend, the active deadline, the time to live. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.observed import Ending, Observed
from spottrain_operator.api.training_job import Status
from spottrain_operator.names import Cause

FOR_EVER: Final = 2**31 - 1
"""Upper limit in seconds, so that a huge value does not overflow a date."""


def asked_to_stop(o: Observed) -> Ending | None:
    """Returns why the user's settings require the running attempt to save and end."""
    if o.job.spec is not None and o.job.spec.suspend:
        return Ending(cause=Cause.SUSPENDED, evidence="spec.suspend is true")
    return past_deadline(o)


def past_deadline(o: Observed) -> Ending | None:
    until = deadline(o, o.job.status)
    if until is None or o.now < until or o.job.spec is None:
        return None
    words = f"the job was active for activeDeadlineSeconds ({o.job.spec.active_deadline_seconds} s)"
    return Ending(cause=Cause.DEADLINE_EXCEEDED, evidence=words, reason=Cause.DEADLINE_EXCEEDED)


def deadline(o: Observed, status: Status) -> datetime | None:
    """Returns the active deadline, counted from the first start or the latest resume (as for a Job)."""
    seconds = o.job.spec.active_deadline_seconds if o.job.spec is not None else None
    if seconds is None or status.active_since is None:
        return None
    return status.active_since + timedelta(seconds=min(seconds, FOR_EVER))


def completed(o: Observed, status: Status) -> Status:
    return replace(status, completion_time=status.completion_time or o.now.replace(microsecond=0))


def ends_of_life(o: Observed, status: Status) -> datetime | None:
    """Returns when the finished job's object is to be deleted."""
    seconds = o.job.spec.ttl_seconds_after_finished if o.job.spec is not None else None
    if seconds is None or status.completion_time is None:
        return None
    return status.completion_time + timedelta(seconds=min(seconds, FOR_EVER))


def outlived(o: Observed) -> bool:
    end = ends_of_life(o, o.job.status)
    return end is not None and o.now >= end
