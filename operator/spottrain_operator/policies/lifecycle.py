"""The user's limits of a job's life: suspend, the cost limit, the active deadline, the time to live. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.observed import Ending, Observed
from spottrain_operator.api.training_job import Status
from spottrain_operator.names import Cause, Condition, Reason
from spottrain_operator.policies import admission, cost_limit

FOR_EVER: Final = 2**31 - 1
"""Upper limit in seconds, so that a huge value does not overflow a date."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt:
    """Why no attempt may run now."""

    reason: Reason
    why: str
    figures: str = ""
    """What changes with time; "" where nothing does."""
    remedy: str


def halted(o: Observed) -> Halt | None:
    """Returns why no pod may run: the job is to be suspended, or its queue has not admitted it."""
    if (halt := suspended(o)) is not None or not (why := admission.waiting(o)):
        return halt
    evicted = o.admission is not None and o.admission.evicted
    return Halt(reason=Reason.EVICTED if evicted else Reason.WAITING_FOR_QUEUE, why=why, remedy="")


def suspended(o: Observed) -> Halt | None:
    """Returns why the job is to be suspended; None while it may run."""
    if o.job.spec is None:
        return None
    if o.job.spec.suspend:
        return Halt(reason=Reason.SUSPENDED, why="spec.suspend is true", remedy="set it to false")
    if not cost_limit.reached(o):
        return None
    return Halt(
        reason=Reason.MAX_COST_REACHED,
        why=f"the job has reached capacity.maxCostUSD ({o.job.spec.capacity.max_cost_usd:f})",
        figures=f": {o.books.ledger.sums.spent:.2f} US dollars",
        remedy="raise capacity.maxCostUSD",
    )


def may_change(status: Status) -> bool:
    """Returns whether template, training, workers, gpusPerWorker and dataCache may change: nothing runs."""
    return not status.attempt or not status.template_hash or status.is_true(Condition.SUSPENDED)


def changed(o: Observed) -> str:
    """Returns a sentence about a job whose template was changed under its running attempt; "" otherwise."""
    spec, status = o.job.spec, o.job.status
    if spec is None or spec.suspend or status.terminal or may_change(status):
        return ""
    if o.job.template_hash == status.template_hash:
        return ""
    return (
        "spec.template, training, workers, gpusPerWorker or dataCache was changed while the job runs: its "
        "attempt goes on as it is, and no other is started; set suspend to true, and to false again once the "
        "job is suspended, or change it back"
    )


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
