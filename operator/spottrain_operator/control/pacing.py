"""When a planned status is written: facts about pods wait a moment, so that several make one write. Pure.

A gang of eight whose pods start one by one would otherwise cause two status writes per pod. Whatever is
decided, has ended, causes an action or an Event, or must precede one, is written at once.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.observed import Limits, Plan
from spottrain_operator.api.training_job import AttemptRecord, ConditionStatus, Status
from spottrain_operator.names import Condition

AT_ONCE: Final = timedelta(0)
TOLD: Final = frozenset(
    {
        Condition.SCHEDULED,
        Condition.RUNNING,
        Condition.CHECKPOINT_DURABLE,
        Condition.RUNTIME_ATTACHED,
        Condition.INTERRUPTED,
    }
)
"""Conditions that follow from pods and trainers. What is urgent in them is an Event as well, and
Interrupted=True comes with the end of an attempt."""
WORDY: Final = frozenset({Condition.SCHEDULED, Condition.RUNNING})
"""Of these, the ones whose message is about pods."""


def paced(
    plan: Plan, old: Status, due: datetime | None, now: datetime, limits: Limits
) -> tuple[Plan, datetime | None]:
    """Returns the plan for now, and when its status must be written if that is not now.

    `due`: what this function returned for the job's previous plan.
    """
    if plan.status is None:
        return plan, None
    acts = plan.before or plan.after or plan.events
    wait = AT_ONCE if acts else patience(old, plan.status, limits)
    due = min(due or now + wait, now + wait)
    if due <= now:
        return plan, None
    again = due - now
    recheck = min(again, plan.recheck_after) if plan.recheck_after is not None else again
    return replace(plan, status=None, recheck_after=recheck), due


def patience(old: Status, new: Status, limits: Limits) -> timedelta:
    """Returns how long a change of the status may wait for further ones."""
    if _decided(old) != _decided(new) or _of_pods(old) == _of_pods(new):
        return AT_ONCE  # what is left are progress and costs, which have intervals of their own
    record = new.current
    gathering = record is not None and record.workers > 1 and record.bound is None
    return limits.counts_delay if gathering and _shown(old) == _shown(new) else limits.facts_delay


def _decided(status: Status) -> Status:
    """Returns the status without the facts that pods, nodes and trainers tell."""
    return replace(
        status,
        phase="",
        ready_workers=0,
        conditions=tuple(_verdict(c) for c in status.conditions if c.type not in TOLD),
        known_durable_step=None,
        attempts=tuple(map(_decided_of, status.attempts)),
        progress=None,
        cost=None,
        goodput=None,
    )


def _verdict(condition: ConditionStatus) -> ConditionStatus:
    return replace(condition, message="")


def _decided_of(record: AttemptRecord) -> AttemptRecord:
    """Returns a record as it was decided, and how its pods have ended."""
    return AttemptRecord(
        number=record.number,
        capacity_type=record.capacity_type,
        pool=record.pool,
        workers=record.workers,
        cause=record.cause,
        stopping=record.stopping,
        evidence=record.evidence,
        charged=record.charged,
        reason=record.reason,
        faulty_node=record.faulty_node,
        ended=record.ended,
        start_error_since=record.start_error_since,
        exit_code=record.exit_code,
        ranks=record.ranks,
    )


def _of_pods(status: Status) -> tuple[object, ...]:
    """Returns what changes when pods come, start and go."""
    record = status.current
    conditions = (
        (c.type, c.status, c.reason, c.message if c.type in WORDY else "") for c in status.conditions
    )
    pods = (record.started, record.bound, record.created_workers) if record is not None else ()
    return status.phase, status.ready_workers, tuple(conditions), *pods


def _shown(status: Status) -> tuple[str, frozenset[str]]:
    """Returns what people wait for: the phase, and which conditions are true."""
    return status.phase, frozenset(c.type for c in status.conditions if c.status == "True")
