"""capacity.type Cheapest: what `spot_or_on_demand.choose` is asked, and what follows from its answer. Pure.

It is asked when an attempt is to start, when a request for spot has waited for
cheapest.pendingSeconds, and while an attempt runs on demand. An attempt on spot is kept.

    spot        the attempt's pods request it; only so the operator learns whether there is spot. While
                nothing runs the request stays open: a pod that waits costs nothing
    on-demand   the attempt runs there until a return to spot pays

What an answer may cost is reserved before it: a start on spot that is lost before its first save, the wait
for an on-demand node (pendingTimeoutSeconds). So a job is late only if on-demand cannot be had in that time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.node_pools import CapacityType, Pool
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import Status, with_record
from spottrain_operator.names import Cause
from spottrain_operator.policies import capacity, gang, on_time
from spottrain_operator.policies.spot_or_on_demand import (
    Overheads,
    Place,
    Situation,
    SpotDecision,
    choose,
)

SLOP: Final = 60.0
"""Seconds from the time of a decision until it is made: deletions, watches, a restarted operator."""
RECHECK: Final = timedelta(minutes=1)
"""Interval of deciding again while time alone may change the decision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """The pool where a job is to run next, and a sentence that explains it."""

    pool: Pool
    reason: str


# --- when an attempt is to start ------------------------------------------------------------------------
def applies(o: Observed) -> bool:
    return o.job.spec is not None and o.job.spec.capacity.type is CapacityType.CHEAPEST


def decide(o: Observed, status: Status) -> Decided | None:
    """Decides where the attempt after `status.attempt` runs; None for other capacity types."""
    if not applies(o):
        return None
    spot = capacity.pick(o, status, CapacityType.SPOT)
    ended, deadline = status.current, o.job.valid_spec.capacity.cheapest.deadline
    failed = (ended.capacity_type, ended.cause) if ended is not None else None
    if failed == (CapacityType.ON_DEMAND, Cause.SCHEDULING_TIMEOUT) and deadline is not None:
        # The deadline is no longer a matter of choice, and whichever comes first is best.
        words = "on-demand had no nodes in time, so spot is asked for in turn with it"
        return Decided(pool=spot, reason=words)
    answer = _ask(o, status, spot, "nowhere")
    pool = spot if answer.spot else capacity.pick(o, status, CapacityType.ON_DEMAND)
    return Decided(pool=pool, reason=answer.reason)


def without_backoff(o: Observed, status: Status, decided: Decided) -> bool:
    """Returns whether the next attempt need not wait: a lack of capacity is paced by its own patience."""
    ended = status.current
    if ended is None or ended.charged:
        return False
    if ended.cause == Cause.SCHEDULING_TIMEOUT:
        return True
    on_demand = decided.pool.type is CapacityType.ON_DEMAND
    return on_demand and ended.capacity_type == CapacityType.SPOT and ended.cause in capacity.RECLAIMS


# --- while a request for spot is pending ----------------------------------------------------------------
def keeps_waiting(o: Observed) -> bool:
    """Returns whether pods that have waited long enough wait on: the next attempt would ask for the same.

    A gang gives up where some of its nodes are there, because they are paid for.
    """
    record = o.job.status.current
    if not applies(o) or record is None or any(pod.node for pod in gang.team(o)):
        return False
    over = replace(record, cause=str(Cause.SCHEDULING_TIMEOUT), ended=o.now)
    decided = decide(o, with_record(o.job.status, over))
    return decided is not None and decided.pool.name == record.pool


# --- while an attempt runs on demand --------------------------------------------------------------------
def returns(o: Observed, spot: Pool) -> str:
    """Returns why an attempt on demand is to ask for spot; "" where that does not pay."""
    answer = _ask(o, o.job.status, spot, "on-demand")
    return answer.reason if answer.spot else ""


def due(o: Observed) -> datetime | None:
    """Returns when to decide again, or when the deadline passes."""
    spec = o.job.spec
    if spec is None or not applies(o):
        return None
    pending = capacity.due_pending(o)
    times = (spec.capacity.cheapest.deadline, max(pending, o.now + RECHECK) if pending is not None else None)
    return min((t for t in times if t is not None and t > o.now), default=None)


# --- what is asked --------------------------------------------------------------------------------------
def _ask(o: Observed, status: Status, spot: Pool, running: Place) -> SpotDecision:
    assert o.job.spec is not None
    on_demand = capacity.pick(o, status, CapacityType.ON_DEMAND)
    price, other = (capacity.hourly(o, status, pool) for pool in (spot, on_demand))
    if price is not None and other is not None and price >= other:
        words = f"a node of spot costs {price:.2f} an hour, and one on demand {other:.2f}"
        return SpotDecision(False, words)
    deadline, work = o.job.spec.capacity.cheapest.deadline, on_time.work(o, status)
    if deadline is None:
        return SpotDecision(True, "spot costs less, and there is no capacity.cheapest.deadline")
    if work is None:
        untried = running == "nowhere" and not capacity.all_spot_dry(o, status)
        words = "the remaining work is unknown: each spot pool is asked once, then on-demand"
        return SpotDecision(untried, words)
    on_spot = (r for r in status.attempts if r.capacity_type == CapacityType.SPOT)
    losses = ((r.ended or o.now).timestamp() for r in on_spot if r.cause in capacity.RECLAIMS)
    situation = Situation(
        now=o.now.timestamp(),
        begun=(o.job.created or o.now).timestamp(),
        deadline=deadline.timestamp(),
        work=work.whole,
        work_left=work.left,
        running=running,
        lost=max(losses, default=None),
    )
    overheads = Overheads(
        restart=on_time.restart(status),
        reserve=on_time.reserve(o, status),
        decision=capacity.patience(o).total_seconds() + SLOP,
    )
    return choose(situation, overheads)
