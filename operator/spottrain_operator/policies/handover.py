"""Two attempts at once: the later one's pods wait at the gate of the checkpoints for the earlier one. Pure.

After a notice the next attempt gets its nodes while the old pods save. And an attempt on demand trains on
while the pods of its successor ask for spot: ask first.

The request is a record of `status.attempts` beyond `status.attempt`. Its pods are those of a next attempt,
and wait at the gate of the checkpoints, which the running attempt holds. Once all of them run, the attempt on
demand saves and ends, and they go on from its checkpoint. If they have no nodes in time, they are deleted,
and the training has not noticed.

Where two attempts must not exist at once, the attempt on demand ends before its successor asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.node_pools import CapacityType
from spottrain_operator.api.observed import Ending, Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, Status, with_record
from spottrain_operator.names import Cause
from spottrain_operator.policies import capacity, cheapest, claims, gang, runtime
from spottrain_operator.policies.cause import notice_of
from spottrain_operator.policies.cheapest import Decided
from spottrain_operator.policies.pod_end import pod_ended

STARTS_WITHIN: Final = timedelta(minutes=10)
"""For image and container, once a pod has its node; both nodes are paid meanwhile."""
IMPORTS: Final = timedelta(seconds=20)
"""From a container's start until its script most likely waits at the gate. The training goes on meanwhile."""
GATED_STATE: Final = "Gated"
OPENS: Final = timedelta(seconds=5)
"""For a trainer at an open gate to see that."""


def overlaps(o: Observed) -> bool:
    """Returns whether the next attempt's pods may exist beside those that train or save."""
    spec = o.job.spec
    if spec is None or o.job.queue:  # two would exceed its quota
        return False
    waits = spec.checkpoint.managed and runtime.attached(o.job.status)  # only our runtime waits at the gate
    return waits and not claims.one_node_at_a_time(o)


# --- the gate -------------------------------------------------------------------------------------------
def saving(o: Observed, status: Status) -> tuple[PodView, ...]:
    """Returns the pods of all earlier attempts that may still write checkpoints."""
    return tuple(p for p in o.pods if p.attempt < status.attempt and not pod_ended(p, o))


def gate(o: Observed, status: Status) -> datetime | None:
    """Returns when the last of them has ended, at the latest: until then the attempt's pods wait.

    By the clock of the API server, which the operator's may differ from. None without such pods.
    """
    deadlines = [p.deleted for p in saving(o, status) if p.deleted is not None]
    return max(deadlines) + o.limits.gate_slack if deadlines and not status.terminal else None


# --- whether to return to spot --------------------------------------------------------------------------
def wanted(o: Observed) -> Decided | None:
    """Returns where and why an attempt on demand returns to spot; None while it stays."""
    since, spec, status = capacity.on_demand_since(o), o.job.spec, o.job.status
    if since is None or spec is None or capacity.problem(o):
        return None
    pool, seconds = capacity.pick(o, status, CapacityType.SPOT), spec.capacity.spot_first.return_after_seconds
    after = timedelta(seconds=seconds)
    if cheapest.applies(o):
        reason = cheapest.returns(o, pool) if overlaps(o) or o.now - since >= after else ""
    elif o.now - since >= after and not capacity.all_spot_dry(o, status, after):
        reason = f"after {seconds} s on demand (spotFirst.returnAfterSeconds)"
    else:
        reason = ""
    return Decided(pool=pool, reason=f"back to spot: {reason}") if reason else None


# --- the request ----------------------------------------------------------------------------------------
def begins(o: Observed) -> Status | None:
    """Returns the status with a new request for spot; None where none is to begin."""
    found, status = wanted(o) if overlaps(o) else None, o.job.status
    if found is None:
        return None
    past = (r.started for r in status.asked if r.pool == found.pool.name and r.started is not None)
    if any(o.now - started < capacity.patience(o) for started in past):
        return None  # a request in this pool ended before its time, as one that is rejected does
    number, pool = status.next_number, capacity.choose(o, status, found.pool)
    record = capacity.record_of(
        o, number, pool, f"asked for while attempt {status.attempt} trains; {found.reason}"
    )
    others = tuple(r for r in status.attempts if r.number <= status.attempt or r.pool != pool.name)
    record = replace(record, started=o.now.replace(microsecond=0))
    return with_record(replace(status, attempts=others), record)


def ready_at(o: Observed, asked: AttemptRecord) -> datetime | None:
    """Returns when the pods of the request wait at the gate; None while one does not run.

    With checkpoint.mode Sync the sidecar waits there, before the trainer starts.
    """
    pods = pods_of(o, asked)
    running = [p for p in pods if p.running_since is not None or (p.sync is not None and p.sync.running)]
    if not pods or len(running) < asked.workers:
        return None
    return max((p.running_since + IMPORTS for p in running if p.running_since is not None), default=o.now)


def gives_up(o: Observed, asked: AttemptRecord) -> str:
    """Returns a sentence about why a request is given up; "" while it goes on."""
    pods = pods_of(o, asked)
    for pod in pods:
        if pod_ended(pod, o) or pod.deleted is not None or notice_of(pod, o) is not None:
            return f"pod {pod.name} has ended, or its node is about to"
    if o.refusal is not None and len(pods) < asked.workers:
        return f"a pod of the request was rejected: {o.refusal.message}"
    if wanted(o) is None:
        return "spot does not pay any more"
    if o.now >= _until(o, asked):
        bound = sum(bool(p.node) for p in pods)
        waited = int(capacity.patience(o).total_seconds())
        return f"{bound} of {asked.workers} pods have a node after {waited} s"
    return ""


def _until(o: Observed, asked: AttemptRecord) -> datetime:
    """Returns when the request is given up: later for pods that all have nodes, and start there."""
    pods = pods_of(o, asked)
    until = (asked.started or o.now) + capacity.patience(o)
    bound = len(pods) == asked.workers and all(p.node for p in pods)
    return until + STARTS_WITHIN if bound else until


def pods_of(o: Observed, asked: AttemptRecord) -> tuple[PodView, ...]:
    return tuple(sorted((p for p in o.pods if p.attempt == asked.number), key=lambda p: p.rank))


def ahead(o: Observed, status: Status, asked: AttemptRecord) -> Status:
    """Returns the status from which the pods of a request are made.

    Their gate stays closed until the request must have been given up, or the attempt on demand has ended. If
    no operator lives until then, they take the checkpoints over: the work since the last save is done again.
    """
    saves = timedelta(seconds=max((p.grace for p in gang.team(o)), default=0)) + o.limits.gate_slack
    return replace(
        status, attempt=asked.number, gate_until=o.now + capacity.patience(o) + STARTS_WITHIN + saves
    )


def withdrawn(o: Observed, status: Status) -> Status:
    """Ends a request whose attempt on demand does not simply go on."""
    asked, record = status.asking, status.current
    if asked is None or record is None:
        return status
    ended = record.cause or record.stopping or status.terminal or o.job.deleting
    if not ended and not capacity.problem(o) and o.job.spec is not None:
        return status
    words = f"attempt {record.number} does not go on"
    return with_record(status, replace(asked, cause=str(Cause.REPLACED), evidence=words, charged=False))


def unreleased(o: Observed) -> Ending | None:
    """Ends an attempt that waits at its gate although the one that handed over to it has ended.

    That one was killed before it released the checkpoints. The gate would open only when the request must
    have been given up.
    """
    at, before = _gate_opens(o), o.job.status.previous
    if at is None or before is None or o.sample is None or o.sample.at < at:
        return None
    words = f"attempt {before.number} ended before it released the checkpoints, for which this one waits"
    return Ending(cause=Cause.REPLACED, evidence=words)


def _gate_opens(o: Observed) -> datetime | None:
    """Returns when an attempt at its gate sees that the one that handed over to it has ended; None where no
    attempt has, or it has not ended."""
    before, sample = o.job.status.previous, o.sample.progress if o.sample is not None else None
    waits = sample is not None and (sample.attempt, sample.state) == (o.job.status.attempt, GATED_STATE)
    handed_over = before is not None and before.cause == Cause.MOVED
    return o.alone_since + OPENS if waits and handed_over and o.alone_since is not None else None


# --- when to decide again -------------------------------------------------------------------------------
def due(o: Observed) -> datetime | None:
    """Returns when time alone changes what happens to an attempt on demand, or to the one after it."""
    return min((t for t in _times(o) if t > o.now), default=None)


def _times(o: Observed) -> Iterator[datetime]:
    if (opens := _gate_opens(o)) is not None:
        yield max(opens, o.now) + OPENS
    since, spec = capacity.on_demand_since(o), o.job.spec
    if since is None or spec is None:
        return
    if (asked := o.job.status.asking) is not None:
        yield _until(o, asked)
        yield ready_at(o, asked) or o.now
    returns = since + timedelta(seconds=spec.capacity.spot_first.return_after_seconds)
    yield o.now + cheapest.RECHECK if cheapest.applies(o) else max(returns, o.now + cheapest.RECHECK)
