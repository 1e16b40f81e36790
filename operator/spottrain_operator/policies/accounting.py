"""Brings a job's bookkeeping up to date, and shows its sums in the status. Pure.

    saving = 1 - spent / onDemandIdeal

`onDemandIdeal` is what a run without interruptions would have cost on demand, on the same nodes: the
productive time and the waits for data, which such a run has too. Start-ups, saves, restores, lost steps and
the boot and idle times of nodes are never credited.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Final

from spottrain_operator.api.bookkeeping import (
    AttemptCosts,
    AttemptNodes,
    Bookkeeping,
    CostSums,
    Ledger,
    Timesheet,
    TimeSums,
)
from spottrain_operator.api.observed import Limits, Observed
from spottrain_operator.api.training_job import CostStatus, GoodputStatus, Status
from spottrain_operator.names import Condition
from spottrain_operator.policies import goodput, ledger

KEPT_NODES: Final = 3
"""Number of latest attempts whose nodes are kept."""


def with_nodes(o: Observed) -> Observed:
    """Adds the nodes of the latest attempts' pods, to which their ranks may return."""
    nodes = {each.number: each for each in o.books.nodes}
    by_attempt: dict[int, dict[int, str]] = {}
    for pod in o.pods:
        if pod.node:
            by_attempt.setdefault(pod.attempt, {})[pod.rank] = pod.node
    for number, found in by_attempt.items():
        known = nodes.get(number, AttemptNodes(number=number)).names
        size = max(*found, len(known) - 1) + 1
        old = (*known, *[""] * (size - len(known)))
        names = tuple(old[rank] or found.get(rank, "") for rank in range(size))
        nodes[number] = AttemptNodes(number=number, names=names)
    latest = tuple(nodes[number] for number in sorted(nodes)[-KEPT_NODES:])
    return o if latest == o.books.nodes else replace(o, books=replace(o.books, nodes=latest))


def settled(o: Observed, status: Status) -> tuple[Status, Bookkeeping]:
    """Returns the status with its sums, and the bookkeeping up to now.

    The sums are written with each other change of the status, each `Limits.cost_interval` otherwise, and when
    the last node is gone. The bookkeeping is written at the end of an attempt or of the job, at the begin and
    end of a suspension, and each `books_interval`.
    """
    before, late = o.books, sums_due(status, o.now, o.limits)
    changed = status != o.job.status
    costs = ledger.updated(o, status, due=changed or late)
    times = goodput.updated(o, status, costs, due=changed or late)
    books = replace(before, ledger=costs, times=times)
    if changed or late or not ledger.open_nodes(costs):
        status = with_sums(status, books)
    return status, replace(books, written=o.now) if status.attempt and books.written is None else books


def sums_due(status: Status, now: datetime, limits: Limits) -> bool:
    """Returns whether the status shows no sums, or old ones."""
    shown = status.cost
    return shown is None or shown.update_time is None or now - shown.update_time >= limits.cost_interval


def write_due(o: Observed, status: Status, books: Bookkeeping) -> bool:
    """Returns whether to write the bookkeeping."""
    if _turn(status) != _turn(o.job.status):
        since = books.written.replace(microsecond=0) if books.written is not None else None
        counted = [time for time in (books.ledger.time, books.times.time) if time is not None]
        # Seconds were counted that only this process's memory holds.
        return books != o.books or any(since is None or time >= since for time in counted)
    if books == o.books or o.books.written is None:  # just opened: pods and nodes tell all of it
        return False
    at_rest = status.terminal and not ledger.open_nodes(books.ledger)
    return at_rest or o.now - o.books.written >= o.limits.books_interval


def _turn(status: Status) -> tuple[object, ...]:
    """Returns the latest attempt that has ended, the current one but for the first, whether it is being
    stopped, and whether the job is suspended or has ended."""
    over = max((r.number for r in status.attempts if r.ended is not None and r.cause), default=0)
    stopping = status.current is not None and bool(status.current.stopping)
    return over, max(status.attempt, 1), stopping, status.is_true(Condition.SUSPENDED), status.terminal


def with_sums(status: Status, books: Bookkeeping) -> Status:
    """Returns the status with the sums of the bookkeeping: the job's, and of each attempt."""
    costs, times = books.ledger, books.times
    if times.time is not None and (times.attempts or times.counted):
        status = replace(status, goodput=goodput.shown(times, costs))
    if costs.time is None:
        return status
    records = tuple(
        replace(r, spent=costs.of(r.number).spent, unknown_seconds=costs.of(r.number).unknown_seconds)
        for r in status.attempts
    )
    ideal, sums = goodput.total(times, costs).on_demand_ideal, costs.sums
    known = not (sums.unknown_seconds or sums.on_demand_unknown_seconds)
    cost = CostStatus(
        spent=sums.spent,
        use=sums.use,
        boot=sums.boot,
        idle=sums.idle,
        unknown_seconds=sums.unknown_seconds,
        on_demand_ideal=ideal,
        saving=goodput.percent(ideal - sums.spent if known else None, ideal),
        update_time=costs.time,
        lost_time=books.lost,
    )
    return replace(status, attempts=records, cost=cost)


# --- a lost bookkeeping -----------------------------------------------------------------------------------
def rebuilt(status: Status, now: datetime) -> Bookkeeping:
    """Returns the bookkeeping of a job that has none, from what pods and status tell.

    The pods and nodes of a first attempt tell all of it. Later the sums of the status are continued, and the
    idle time of nodes without pods of the job is lost.
    """
    cost, times = status.cost, status.goodput
    first = status.attempt <= 1 and not any(record.ended for record in status.attempts)
    if first or (cost is None and times is None):
        return Bookkeeping()
    since = (cost.update_time if cost is not None else None) or now.replace(microsecond=0)
    over = max((r.number for r in status.attempts if r.ended is not None), default=0)
    return Bookkeeping(
        ledger=_ledger_of(cost, status, since) if cost is not None else Ledger(),
        times=_times_of(times, cost, over, since) if times is not None else Timesheet(),
        lost=since,
        written=since,
    )


def _ledger_of(cost: CostStatus, status: Status, since: datetime) -> Ledger:
    """Returns a ledger with the sums of the attempts, all as use, and what is left of the job's sums."""
    attempts = tuple(
        AttemptCosts(number=r.number, sums=CostSums(use=r.spent, unknown_seconds=r.unknown_seconds))
        for r in status.attempts
        if r.spent or r.unknown_seconds
    )
    own = sum((attempt.sums for attempt in attempts), CostSums())
    earlier = CostSums(
        use=cost.use - own.use,
        boot=cost.boot,
        idle=cost.idle,
        unknown_seconds=cost.unknown_seconds - own.unknown_seconds,
    )
    return Ledger(time=since, attempts=attempts, earlier=earlier)


def _times_of(shown: GoodputStatus, cost: CostStatus | None, over: int, since: datetime) -> Timesheet:
    """Returns a timesheet in which the time of all attempts until `since` is over."""
    unallocated = shown.wanted - shown.allocated
    parts = {name: getattr(shown, name) for name in goodput.PARTS}
    parts["waiting"] -= unallocated
    ideal = cost.on_demand_ideal if cost is not None else Decimal(0)
    closed = TimeSums(**parts, on_demand_ideal=ideal)
    return Timesheet(time=since, unallocated=unallocated, covered_until=since, counted=over, closed=closed)
