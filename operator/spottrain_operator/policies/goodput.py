"""Goodput: where the time of a job went. Pure.

The time that a job wants runs from its first start to its end, without suspensions. It has two kinds of
parts:

    waiting     no attempt has all of its nodes
    allocated   from the binding of an attempt's last pod until all of its pods have ended

Rank 0 reports how its seconds are divided, from the start of its process on (`contract.TimeSplit`). What it
has not reported is divided by what Kubernetes knows: the start and the end of its container. Attempts that
overlap during a notice both count.

An attempt stays in `Timesheet.attempts` until it is over, and then moves to `closed`, in the order of the
numbers. Each sum is computed from these two, so it is the same whenever and however often that is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import datetime, timedelta
from decimal import ROUND_DOWN, Decimal
from functools import reduce
from typing import Final

from spottrain.contract import TimeSplit

from spottrain_operator.api.bookkeeping import AttemptTime, Ledger, TimeParts, Timesheet, TimeSums
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, GoodputStatus, Status
from spottrain_operator.api.wire import camel
from spottrain_operator.names import Condition
from spottrain_operator.policies.ledger import CENT_FRACTION, MILLISECOND
from spottrain_operator.policies.pod_end import termination_message_of

UNKNOWN: Final = "Unknown"
NODE_FRACTION: Final = Decimal("0.000001")
LONGEST: Final = 1e9
"""Seconds: no container runs longer, whatever its image reports."""
PARTS: Final = tuple(part.name for part in fields(TimeParts))
REPORTED: Final = {name: camel(name) for name in PARTS if name != "rollback"}
"""The fields of TimeSplit for these parts."""


def updated(o: Observed, status: Status, ledger: Ledger, *, due: bool) -> Timesheet:
    """Returns the timesheet up to now, if that is `due`.

    Time alone counts only while an attempt has its nodes: a job that waits costs no writes.
    """
    old = o.books.times if o.books.times.time is not None else _opened(status, o)
    if old.time is None or not due:
        return o.books.times
    attempts = tuple(_attempts(old, status, ledger, o))
    if not attempts and status == o.job.status:
        return o.books.times
    now = max(o.now.replace(microsecond=0), old.time)
    new = accounted(old, attempts, ledger, _elapsed(old, attempts, o.job.status, status, now), now)
    if replace(new, time=old.time) == old and not _wanted(status, new):
        return old  # it has ended or is suspended: the time of the sums stays
    return new


def _opened(status: Status, o: Observed) -> Timesheet:
    """Returns that of a job that has been started; an empty one before that, and after its end."""
    if not status.attempt or o.job.status.terminal:
        return Timesheet()
    now = o.now.replace(microsecond=0)
    first = status.active_since if o.job.status.attempt <= 1 else None
    begin = min(first or now, now)
    return Timesheet(time=begin, covered_until=begin)


def _wanted(status: Status, times: Timesheet) -> bool:
    """Returns whether the job wants to train, or an attempt that is being stopped still has its nodes."""
    over = status.terminal or status.is_true(Condition.SUSPENDED)
    return any(attempt.ended is None for attempt in times.attempts) or not over


# --- what is known of the attempts ----------------------------------------------------------------------
def _attempts(old: Timesheet, status: Status, ledger: Ledger, o: Observed) -> Iterator[AttemptTime]:
    """Yields the attempts that are not in `closed` and that had all of their nodes, by number."""
    known = {attempt.number: attempt for attempt in old.attempts}
    records = {record.number: record for record in status.attempts if record.number > old.counted}
    for number in sorted(known.keys() | records.keys()):
        pods = [pod for pod in o.pods if pod.attempt == number]
        record = records.get(number)
        attempt = known.get(number) or _bound(record, pods, ledger, o.books.lost)
        if attempt is not None:
            yield _reported(_timed(attempt, record, pods, old.time, o), o)


def _bound(
    record: AttemptRecord | None, pods: list[PodView], ledger: Ledger, since: datetime | None
) -> AttemptTime | None:
    """Returns the account of an attempt once all of its pods have a node."""
    if record is None:
        return None
    bound = [pod.bound for pod in pods if pod.node and pod.bound is not None]
    if not bound or len(bound) < max(record.workers, len(pods)):
        return None
    shares = {node.name: node.share for node in ledger.nodes}
    nodes = sum((shares.get(name, Decimal(1)) for name in {pod.node for pod in pods}), Decimal(0))
    last = max(*bound, since or bound[0])
    return AttemptTime(number=record.number, bound=last, nodes=nodes.quantize(NODE_FRACTION))


def _timed(
    attempt: AttemptTime,
    record: AttemptRecord | None,
    pods: list[PodView],
    seen: datetime | None,
    o: Observed,
) -> AttemptTime:
    """Adds when rank 0's container started and stopped, and when all pods had ended.

    An end that no kubelet reported is an estimate, and was not before `seen`: the attempt ran then.
    """
    ended = record.ended if record else o.now.replace(microsecond=0)  # older than the status keeps
    if ended and seen and not all(pod.ended and pod.ended.finished for pod in pods):
        ended = max(ended, seen)
    first, begun, stopped = o.first(attempt.number), None, None
    if first is not None:
        begun = first.running_since or (first.ended.started if first.ended else None)
        stopped = first.ended.finished if first.ended else None
    return replace(
        attempt,
        started=attempt.started or begun,
        stopped=attempt.stopped or stopped or ended,
        ended=attempt.ended or ended,
    )


def _reported(attempt: AttemptTime, o: Observed) -> AttemptTime:
    """Takes rank 0's last split: that of its termination message, else that of the last poll."""
    if attempt.final:
        return attempt
    first = o.first(attempt.number)
    word = termination_message_of(first) if first is not None else None
    if word is not None and word.timeSplit is not None:
        reported = attempt.stopped or o.now.replace(microsecond=0)
        return replace(attempt, reported=reported, split=word.timeSplit, final=True)
    sample = o.sample
    if sample is None or sample.progress.attempt != attempt.number or sample.progress.timeSplit is None:
        return attempt
    return replace(attempt, reported=sample.at.replace(microsecond=0), split=sample.progress.timeSplit)


# --- sums -----------------------------------------------------------------------------------------------
def accounted(
    old: Timesheet, attempts: tuple[AttemptTime, ...], ledger: Ledger, elapsed: Decimal, now: datetime
) -> Timesheet:
    """Returns the timesheet up to `now`; `elapsed` is how long the job wanted to train since `old.time`."""
    new = replace(old, unallocated=old.unallocated + elapsed, time=now)
    while attempts and attempts[0].ended is not None:
        first, *rest = attempts
        closed, attempts = _plus(new.closed, parts_of(first, ledger, now)), tuple(rest)
        new = _covering(replace(new, closed=closed, counted=first.number), first, now)
    return replace(new, attempts=attempts)


def total(times: Timesheet, ledger: Ledger) -> TimeSums:
    """Returns the sums of all attempts, those that are not over up to the timesheet's time."""
    if times.time is None:
        return times.closed
    parts = (parts_of(attempt, ledger, times.time) for attempt in times.attempts)
    return reduce(_plus, parts, times.closed)


def _elapsed(
    old: Timesheet, attempts: tuple[AttemptTime, ...], before: Status, status: Status, now: datetime
) -> Decimal:
    """Returns how long the job wanted to train since `old.time`.

    If it does not any more because an attempt has ended, then it did until that end, which may have been
    long before the operator saw it.
    """
    if not _wanted(before, old) or old.time is None:
        return Decimal(0)
    ends = [attempt.ended for attempt in attempts if attempt.ended is not None]
    still = _wanted(status, replace(old, attempts=attempts))
    return _signed(old.time, now if still or not ends else min(now, max(ends)))


def _covering(times: Timesheet, attempt: AttemptTime, now: datetime) -> Timesheet:
    """Takes away the time in which this attempt, and none before it, had all of its nodes."""
    end = max(attempt.bound, attempt.ended or now)
    since = max(attempt.bound, times.covered_until or attempt.bound)
    unallocated = times.unallocated - seconds(since, end)
    return replace(times, unallocated=unallocated, covered_until=max(since, end))


def _plus(sums: TimeSums, more: TimeSums) -> TimeSums:
    return TimeSums(**{f.name: getattr(sums, f.name) + getattr(more, f.name) for f in fields(TimeSums)})


def shown(times: Timesheet, ledger: Ledger) -> GoodputStatus:
    """Returns what the status shows of a timesheet."""
    assert times.time is not None
    sums, covered = total(times, ledger), times
    for attempt in times.attempts:
        covered = _covering(covered, attempt, times.time)
    parts = {name: getattr(sums, name) for name in PARTS}
    allocated = sum(parts.values(), Decimal(0))
    parts["waiting"] += max(Decimal(0), covered.unallocated)
    wanted = sum(parts.values(), Decimal(0))
    # Whether any trainer has reported more than its start.
    reported = any((sums.productive, sums.rollback, sums.data_wait, sums.checkpoint_stall, sums.restore))
    productive_nodes = min(ledger.sums.use_seconds, sums.productive_node_seconds)
    return GoodputStatus(
        **parts,
        wanted=wanted,
        allocated=allocated,
        runtime=percent(sums.productive if reported else None, allocated),
        scheduling=percent(allocated, wanted),
        paid=percent(productive_nodes if reported else None, ledger.sums.paid_seconds),
    )


def percent(part: Decimal | None, whole: Decimal) -> str:
    """Returns `part` of `whole` as 93.4%; Unknown where there is no part or no whole."""
    return UNKNOWN if part is None or whole <= 0 else f"{100 * part / whole:.1f}%"


# --- one attempt ----------------------------------------------------------------------------------------
def parts_of(attempt: AttemptTime, ledger: Ledger, now: datetime) -> TimeSums:
    """Returns how the allocated time of an attempt is divided, up to its end or `now`.

        bound         begun                       reported      stopped       end
          |  startup    |  as rank 0 reported it     |  rollback   |   other   |

    Where rank 0 ran before the last pod had its node, that part of its report is waiting time of the job. A
    report cannot claim more than its container's time. While the trainer runs, the time since its last
    report is `other`; so is all of its time if it never reports.
    """
    end = max(attempt.bound, attempt.ended or now)
    stopped = min(end, max(attempt.bound, attempt.stopped or end))
    begun = min(stopped, max(attempt.bound, attempt.started or stopped))
    reported = min(stopped, max(begun, attempt.reported or begun))
    early = seconds(attempt.started, attempt.bound) if attempt.started else Decimal(0)
    parts, unsaved = _fitted(attempt.split or TimeSplit(), early, seconds(begun, reported))
    parts["startup"] += seconds(attempt.bound, begun)
    if attempt.stopped is not None and attempt.split is not None:  # its unsaved work is lost
        parts["productive"] -= unsaved
        parts["rollback"] = unsaved + seconds(reported, stopped)
        parts["other"] += seconds(stopped, end)
    else:
        parts["other"] += seconds(reported, end)
    # What a run without interruptions needs, at the on-demand price of the attempt's nodes.
    ideal, costs = (parts["productive"] + parts["data_wait"]) * attempt.nodes, ledger.of(attempt.number)
    share = min(Decimal(1), ideal / costs.use_seconds) if costs.use_seconds else Decimal(0)
    return TimeSums(
        **parts,
        productive_node_seconds=(parts["productive"] * attempt.nodes).quantize(MILLISECOND),
        on_demand_ideal=(costs.on_demand_use * share).quantize(CENT_FRACTION),
    )


def _fitted(split: TimeSplit, early: Decimal, window: Decimal) -> tuple[dict[str, Decimal], Decimal]:
    """Returns the parts of a report without its first `early` seconds, and its unsaved part.

    They add up to `window`: what it does not name is `other`. One that claims more is scaled down.
    """
    parts = {name: _decimal(getattr(split, field)) for name, field in REPORTED.items()}
    for name in ("waiting", "startup"):  # what a rank does that waits for others
        cut = min(parts[name], early)
        parts[name], early = parts[name] - cut, early - cut
    claimed = sum(parts.values())
    scale = min(Decimal(1), window / claimed) if claimed else Decimal(1)
    parts = {name: (value * scale).quantize(MILLISECOND, ROUND_DOWN) for name, value in parts.items()}
    unsaved = (_decimal(split.unsaved) * scale).quantize(MILLISECOND, ROUND_DOWN)
    parts["other"] += window - sum(parts.values())
    return parts, min(unsaved, parts["productive"])


def _decimal(value: float) -> Decimal:
    return Decimal(min(value, LONGEST)).quantize(MILLISECOND)


def seconds(begin: datetime, end: datetime) -> Decimal:
    """Returns the seconds from `begin` to `end`; 0 where that comes first."""
    return max(Decimal(0), _signed(begin, end))


def _signed(begin: datetime, end: datetime) -> Decimal:
    return Decimal((end - begin) // timedelta(milliseconds=1)) * MILLISECOND
