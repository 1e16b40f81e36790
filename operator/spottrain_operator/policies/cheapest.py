"""capacity.type Cheapest: what `spot_or_on_demand.choose` is asked, and what follows from its answer. Pure.

It is asked when an attempt is to start, when a request for spot has waited for cheapest.pendingSeconds,
and while an attempt runs on demand, from an hour on. An attempt on spot is kept.

    spot        the attempt's pods request it; only so the operator learns whether there is spot
    wait        the same: a pod that waits costs nothing, and it is what makes an autoscaler look for a node
    on-demand   the attempt runs there until a return to spot pays

What an answer may cost is reserved before it: a refused request, a start on spot that is lost before its
first save, the wait for an on-demand node (pendingTimeoutSeconds). So a job is late only if on-demand cannot
be had in that time.

`choose` may compute a table for some tenths of a second: control/reconcile.py plans such jobs in a thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from spottrain.contract import LONGEST_AUTO_INTERVAL

from spottrain_operator.api.node_pools import CapacityType, Pool
from spottrain_operator.api.observed import Ending, Kept, Observed
from spottrain_operator.api.training_job import AttemptRecord, Status, TrainingJobSpec, with_record
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.names import Cause, Condition, Reason
from spottrain_operator.policies import capacity, gang, node_prices, restart, spot_zones
from spottrain_operator.policies.spot_or_on_demand import (
    Choice,
    Overheads,
    Prices,
    Situation,
    SpotDecision,
    choose,
)
from spottrain_operator.policies.spot_runs import SpotRun
from spottrain_operator.policies.spot_zones import SpotTry, SpotZone

RESTART: Final = 300.0
"""Seconds from a bound pod to its first step, while no attempt of the job has shown them."""
ROUND: Final = 30.0
"""Starts are rounded up to so many seconds, so that few tables are computed."""
SLOP: Final = 60.0
"""Seconds of a refused request beyond its patience: deletions, watches, a restarted operator."""
LOOK: Final = 600.0
"""Seconds for which an attempt on demand is kept after a decision: each may compute a table."""
STOP: Final = 120.0
"""Seconds in which an attempt on demand saves and ends before a return to spot."""
MOST: Final = 1e10
"""Seconds; more work than this is as good as endless."""
INTERVAL: Final = re.compile(r"(\d+)(steps|s|m|h)")
UNIT: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """The pool where the next attempt is to run, and a sentence that explains it."""

    pool: Pool
    reason: str

    @property
    def on_demand(self) -> bool:
        return self.pool.type is CapacityType.ON_DEMAND


# --- when an attempt is to start ------------------------------------------------------------------------
def applies(o: Observed) -> bool:
    return o.job.spec is not None and o.job.spec.capacity.type is CapacityType.CHEAPEST


def decide(o: Observed, status: Status, running: Choice = "wait") -> Decided | None:
    """Decides where the attempt after `status.attempt` runs; None for other capacity types."""
    if not applies(o):
        return None
    ranked = _ranked(o, status)
    asked = capacity.survivors_pool(o, status)
    free = [pool for pool in ranked if pool.name == asked or not _refused(o, status, pool, len(ranked))]
    spot = next((pool for pool in free if pool.name == asked), (free or ranked)[0])
    if words := capacity.stays_on_spot(o, status):
        return Decided(pool=spot, reason=f"on-demand is ruled out: {words}")
    if _takes_turns(o, status):
        return Decided(
            pool=spot, reason="on-demand had no nodes in time, so spot is asked for in turn with it"
        )
    on_demand = capacity.pick(o, status, CapacityType.ON_DEMAND)
    answer = _ask(o, status, spot, on_demand, running, None if free else False)
    return Decided(pool=on_demand if answer.choice == "on-demand" else spot, reason=answer.reason)


def without_backoff(o: Observed, status: Status, decided: Decided) -> bool:
    """Returns whether the next attempt need not wait: a lack of capacity is paced by its own patience."""
    ended = status.current
    if ended is None or ended.charged:
        return False
    if ended.cause == Cause.SCHEDULING_TIMEOUT:
        return True
    return decided.on_demand and ended.capacity_type == CapacityType.SPOT and ended.cause in capacity.RECLAIMS


def spread(o: Observed, status: Status) -> datetime | None:
    """Returns when a gang starts again at the earliest: two partial gangs must not retry at the same time."""
    if gang.spec_size(o) == 1:
        return None
    return o.now + timedelta(seconds=SLOP * restart.spread(o.job.key.uid, status.attempt))


def _ranked(o: Observed, status: Status) -> Sequence[Pool]:
    """Returns the spot pools, the one where an hour of work will cost least first."""
    pools = {pool.name: pool for pool in capacity.pools_of(o) if pool.type is CapacityType.SPOT}
    if len(pools) == 1:
        return tuple(pools.values())
    zones = [
        SpotZone(name=name, price=_dollars(o, status, pool), history=_history(o, status, pool))
        for name, pool in pools.items()
    ]
    value = _dollars(o, status, capacity.pick(o, status, CapacityType.ON_DEMAND))
    ranked = spot_zones.rank(zones, _overheads(o, status), now=o.now.timestamp(), value_of_time=value)
    return tuple(pools[zone.name] for zone in ranked)


def _takes_turns(o: Observed, status: Status) -> bool:
    """Returns whether spot is next because on-demand, which the deadline needs, had no nodes in time.

    Then the deadline is no longer a matter of choice, and whichever comes first is best.
    """
    ended, spec = status.current, o.job.spec
    if ended is None or spec is None or spec.capacity.cheapest.deadline is None:
        return False
    return ended.capacity_type == CapacityType.ON_DEMAND and ended.cause == Cause.SCHEDULING_TIMEOUT


def _refused(o: Observed, status: Status, pool: Pool, pools: int) -> bool:
    """Returns whether a request in this pool has been given up lately.

    That counts until each of the `pools` can have been asked, so that there is a time when all have refused.
    """
    patience = capacity.patience(o, CapacityType.SPOT)
    recent = o.now - timedelta(seconds=patience + (pools - 1) * (patience + SLOP))
    return any(
        r.pool == pool.name and r.cause == Cause.SCHEDULING_TIMEOUT and (r.ended or o.now) > recent
        for r in status.attempts
    )


# --- while a request for spot is pending ----------------------------------------------------------------
def keeps_waiting(o: Observed) -> bool:
    """Returns whether pods that have waited long enough wait on: the next attempt would ask for the same.

    A gang gives up where some of its nodes are there, because they are paid for.
    """
    record = o.job.status.current
    if not applies(o) or record is None or any(pod.node for pod in gang.team(o)):
        return False
    if _kept_until(o) is not None:
        return True
    over = replace(record, cause=str(Cause.SCHEDULING_TIMEOUT), ended=o.now)
    decided = decide(o, with_record(o.job.status, over))
    assert decided is not None
    return decided.pool.name == record.pool


def note(o: Observed, status: Status) -> str:
    """Returns a suffix for messages about a pod that waits for spot: until when it does; "" for others."""
    record, spec = status.current, o.job.spec
    if not applies(o) or spec is None or record is None or record.capacity_type != CapacityType.SPOT:
        return ""
    if capacity.problem(o) or capacity.stays_on_spot(o, status):
        return " (waits for spot, because on-demand is ruled out: see condition CostLimited)"
    deadline, work = spec.capacity.cheapest.deadline, _work_left(o, status)
    if deadline is None:
        return " (waits for spot, which costs less; there is no capacity.cheapest.deadline)"
    if work is None:
        return ""
    overheads = _overheads(o, status)
    latest = deadline - timedelta(seconds=work + overheads.reserve + overheads.decision)
    if latest <= o.now:
        return " (asks for on-demand next)"
    when = rfc3339(latest, timespec="minutes")
    return f" (waits for spot, and asks for on-demand from {when} on at the latest)"


# --- while an attempt runs on demand --------------------------------------------------------------------
def moves(o: Observed) -> Ending | None:
    """Ends an on-demand attempt whose return to spot pays; SIGTERM saves, so no work is lost."""
    until, spec = capacity.due_return(o), o.job.spec
    if not applies(o) or spec is None or until is None or o.now < until or _kept_until(o) is not None:
        return None
    if capacity.stays_on_spot(o, o.job.status):  # it is a reason not to begin on demand
        return None
    if spec.capacity.cheapest.deadline is not None and _work_left(o, o.job.status) is None:
        return None
    decided = decide(o, o.job.status, running="on-demand")
    if decided is None or decided.on_demand:
        return None
    return Ending(cause=Cause.MOVED, evidence=f"back to spot: {decided.reason}")


def due(o: Observed) -> datetime | None:
    """Returns when to decide again, or when the deadline passes."""
    spec = o.job.spec
    if spec is None or not applies(o):
        return None
    times = [spec.capacity.cheapest.deadline]
    if _waited_enough(o):
        times.append(_kept_until(o) or o.now + _interval(o))
    return min((t for t in times if t is not None and t > o.now), default=None)


# --- between two decisions ------------------------------------------------------------------------------
def kept(o: Observed, status: Status) -> Kept | None:
    """Returns what the process is to remember after a plan that led to `status`: that the attempt goes on.

    Until then other looks, such as those at each report of progress, do not decide again.
    """
    record = status.current
    if not applies(o) or record is None or record.stopping or record.cause or not _waited_enough(o):
        return None
    if status.attempt != o.job.status.attempt or _kept_until(o) is not None:
        return None
    return Kept(attempt=status.attempt, generation=o.job.generation, at=o.now)


def _kept_until(o: Observed) -> datetime | None:
    """Returns until when the last decision holds; None where it is time to decide."""
    if o.kept is None or (o.kept.attempt, o.kept.generation) != (o.job.status.attempt, o.job.generation):
        return None
    until = o.kept.at + _interval(o)
    return until if o.kept.at <= o.now < until else None


def _interval(o: Observed) -> timedelta:
    """Returns how long an attempt is kept. A request's is part of `Overheads.decision`."""
    patience = capacity.patience(o, CapacityType.SPOT)
    return timedelta(seconds=patience if capacity.due_return(o) is None else max(LOOK, patience))


def _waited_enough(o: Observed) -> bool:
    """Returns whether the attempt has waited, or run on demand, for as long as it does in any case."""
    times = [t for t in (capacity.due_pending(o), capacity.due_return(o)) if t is not None]
    return bool(times) and max(times) <= o.now


# --- what is asked --------------------------------------------------------------------------------------
def _ask(
    o: Observed, status: Status, spot: Pool, on_demand: Pool, running: Choice, available: bool | None
) -> SpotDecision:
    assert o.job.spec is not None
    moving = running == "on-demand"
    deadline = o.job.spec.capacity.cheapest.deadline
    situation = Situation(
        now=o.now.timestamp(),
        deadline=deadline.timestamp() if deadline is not None else None,
        work_left=_work_left(o, status),
        running=running,
        spot=available,
        history=_history(o, status, spot),
    )
    overheads = _overheads(o, status, moving=moving)
    price, dearer = _dollars(o, status, spot), _dollars(o, status, on_demand)
    if price is not None and dearer is not None and price >= dearer:
        return SpotDecision("on-demand", f"spot costs {price:.2f} an hour, and on-demand {dearer:.2f}")
    if price is not None and dearer is not None:
        return choose(situation, Prices(spot=price, on_demand=dearer), overheads)
    unknown = spot if price is None else on_demand
    words = f"the price of {node_prices.words(o, status, unknown)} is unknown, so costs cannot be compared"
    return _without_prices(situation, overheads, words)


def _without_prices(situation: Situation, overheads: Overheads, words: str) -> SpotDecision:
    """Decides by time alone: spot if the slack allows it, else a wait if it allows that, else on-demand."""
    cheap: Choice = "wait" if situation.spot is False else "spot"
    if situation.deadline is None:
        return SpotDecision(cheap, words)
    if situation.work_left is None:
        known: Choice = "on-demand" if situation.spot is False else "spot"
        return SpotDecision(known, f"{words}; the remaining work is unknown too, so it never waits")
    slack = situation.deadline - situation.now - situation.work_left - overheads.reserve
    choice: Choice = cheap if slack >= overheads.decision else "on-demand"
    return SpotDecision(choice, f"{words}; slack {slack / 3600:.2f} h")


def _history(o: Observed, status: Status, pool: Pool) -> tuple[SpotRun, ...]:
    now = o.now.timestamp()
    tries = (_try(r, now) for r in status.attempts if r.pool == pool.name and r.started is not None)
    return spot_zones.observed(tries, now)


def _try(record: AttemptRecord, now: float) -> SpotTry:
    """Returns what an attempt has seen of spot. Other machines' clocks may be ahead of ours."""
    assert record.started is not None
    requested = min(record.started.timestamp(), now)
    bound = min(max(record.bound.timestamp(), requested), now) if record.bound else None
    ended = min(max(record.ended.timestamp(), bound or requested), now) if record.ended else None
    return SpotTry(requested=requested, bound=bound, ended=ended, reclaimed=record.cause in capacity.RECLAIMS)


def _dollars(o: Observed, status: Status, pool: Pool) -> float | None:
    """Returns what the job would cost per hour in this pool; None where a price is unknown."""
    hourly = node_prices.hourly(o, status, pool)
    if hourly is None:
        return None
    kind = node_prices.instance_type(o, status, pool)
    nodes = status.cost.nodes if status.cost else ()
    share = next((node.share for node in reversed(nodes) if node.instance_type == kind), 1)
    return float(hourly * share * gang.spec_size(o))


def _overheads(o: Observed, status: Status, *, moving: bool = False) -> Overheads:
    assert o.job.spec is not None
    start = _restart(status)
    request = capacity.patience(o, CapacityType.SPOT) + SLOP + (STOP if moving else 0.0)
    return Overheads(
        restart=start,
        on_demand_p99=float(o.job.spec.capacity.pending_timeout_seconds),
        decision=request + start,  # a request that is granted late, and lost before its first save
        lost_work=_lost_work(o.job.spec, status),
        request=request,
    )


def _restart(status: Status) -> float:
    """Returns the seconds from bound pods to the first step."""
    known = status.progress.start_seconds if status.progress is not None else None
    return RESTART if known is None else max(1, math.ceil(known / ROUND)) * ROUND


def _lost_work(spec: TrainingJobSpec, status: Status) -> float:
    """Returns the seconds of work that an interruption can lose: since the last save became durable."""
    shown = status.progress
    step_seconds = (shown.step_seconds if shown else None) or 0.0
    save = min((shown.save_seconds if shown else None) or 0.0, LONGEST_AUTO_INTERVAL)
    found = INTERVAL.fullmatch(spec.checkpoint.interval)
    if found is None:
        return LONGEST_AUTO_INTERVAL + save
    count, unit = float(found[1]), found[2]
    return min(count * (step_seconds if unit == "steps" else UNIT[unit]), MOST) + save


# --- the remaining work ---------------------------------------------------------------------------------
def _work_left(o: Observed, status: Status) -> float | None:
    """Returns the seconds of training that remain; None where they are not known."""
    shown, spec = status.progress, o.job.spec
    limit = spec.training.get("maxSteps") if spec is not None else None
    total = limit if isinstance(limit, int) else shown.total_steps if shown is not None else None
    if not total or shown is None or shown.step_seconds is None:
        return None
    return min(max(0, total - (_step(status) or 0)) * shown.step_seconds, MOST)


def verdict(o: Observed, status: Status) -> tuple[bool | None, Reason, str] | None:
    """Returns the condition OnTime; its value None stands for Unknown."""
    deadline = o.job.spec.capacity.cheapest.deadline if o.job.spec is not None else None
    if deadline is None:
        known = o.job.spec is not None and status.condition(Condition.ON_TIME) is not None
        return (None, Reason.NO_DEADLINE, "capacity.cheapest.deadline is not set") if known else None
    when = rfc3339(deadline, timespec="seconds")
    if status.terminal:
        return _judged(status, deadline, when)
    if o.now >= deadline:
        return (
            False,
            Reason.DEADLINE_MISSED,
            f"capacity.cheapest.deadline ({when}) has passed, and the job is not done",
        )
    work = _work_left(o, status)
    if work is None:
        words = "it is known once a trainer has reported its number of steps and its speed"
        return (
            None,
            Reason.WORK_UNKNOWN,
            f"the remaining work is unknown, so {when} cannot be planned: {words}",
        )
    spare = (deadline - o.now).total_seconds() - work - _start_left(o, status)
    left = f"{work / 3600:.1f} h of work are left"
    if spare < 0:
        return False, Reason.BEHIND_SCHEDULE, f"{left}, {-spare / 3600:.1f} h more than fit before {when}"
    return True, Reason.ON_SCHEDULE, f"{left}, with {spare / 3600:.1f} h to spare before {when}"


def _judged(status: Status, deadline: datetime, when: str) -> tuple[bool | None, Reason, str] | None:
    if status.completion_time is None or not status.is_true(Condition.SUCCEEDED):
        return None
    if status.completion_time <= deadline:
        return True, Reason.ON_SCHEDULE, f"the job was done before {when}"
    late = (status.completion_time - deadline).total_seconds() / 3600
    return False, Reason.DEADLINE_MISSED, f"the job was done {late:.1f} h after {when}"


def _step(status: Status) -> int | None:
    """Returns the step from which the work goes on: of a training attempt its own, else the durable one."""
    record = status.current
    if record is None or record.cause or record.stepped is None:
        return status.known_durable_step
    return record.last_step


def _start_left(o: Observed, status: Status) -> float:
    """Returns the seconds until training goes on, at worst."""
    record = status.current
    if record is not None and not record.cause and record.stepped is not None:
        return 0.0
    start = _restart(status)
    if record is not None and not record.cause and record.bound is not None:
        return max(0.0, start - (o.now - record.bound).total_seconds())
    assert o.job.spec is not None
    return start + o.job.spec.capacity.pending_timeout_seconds
