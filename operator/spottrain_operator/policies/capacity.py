"""Chooses the pool of the next attempt, and how long it may wait there. Pure.

The choice depends only on the spec, the attempts so far and the time. The chosen pool is written to the
attempt's record before a pod is created, so a crash cannot choose twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

from spottrain_operator.api import validation
from spottrain_operator.api.node_pools import LEAST_WINDOW, CapacityType, ChosenPool, Pool, as_chosen, chosen
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import CHOICE_LIMIT, AttemptRecord, Status, TrainingJobSpec
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.errors import InvalidSpec
from spottrain_operator.names import INSTANCE_TYPE_LABEL, ZONE_LABEL, Cause, Platform
from spottrain_operator.policies import claims, gang, lifecycle, placement

RECLAIMS: Final = frozenset({Cause.SPOT_NOTICE, Cause.NODE_LOST, Cause.NODE_SHUTDOWN, Cause.DISRUPTED})
"""Endings that are caused by the pool."""
RECLAIM_WINDOW: Final = timedelta(hours=1)
"""In which spotFirst.interruptions are counted."""
NEVER: Final = datetime.min.replace(tzinfo=UTC)
REST: Final = timedelta(minutes=10)
"""How long a pool that interrupted the job, or had no nodes, ranks after the others."""


def problem(o: Observed) -> str:
    """Returns why no attempt can be started by the spec as it is now; "" where one can."""
    if o.job.spec is None:
        return ""
    if changed := lifecycle.changed(o):
        return changed
    try:
        pools_of(o)
    except InvalidSpec as error:
        return str(error)
    deadline = o.job.spec.capacity.cheapest.deadline
    if (
        deadline is not None and not o.job.status.attempt and o.now >= deadline
    ):  # later condition OnTime tells
        when = rfc3339(deadline)
        return f"spec.capacity.cheapest.deadline ({when}) is in the past; set a later time, or leave it out"
    return validation.place_problem(o.job.spec, o.job.status)


def pools_of(o: Observed) -> tuple[Pool, ...]:
    assert o.job.spec is not None
    defaults = o.applied or o.job.status.defaults
    return validation.pools_of(o.job.spec, o.default_pool, o.pools, defaults.pools if defaults else ())


def choose(o: Observed, status: Status, pool: Pool | None = None) -> ChosenPool:
    """Chooses the pool of the attempt after `status.attempt`; the pools must be valid (`problem`).

    pool: the one that was decided on, if the type is Cheapest.
    """
    pool = pool or pick(o, status, kind(o, status))
    same = (r for r in reversed(status.attempts) if (r.pool, r.capacity_type) == (pool.name, pool.type))
    before = next((r.node_labels for r in same if r.node_labels), ())
    return chosen(pool, o.found, before)


def pick(o: Observed, status: Status, wanted_type: CapacityType) -> Pool:
    """Returns the pool of this type that has not failed lately, or else the one that failed first.

    They are in the order of the spec; for Cheapest in that of their prices, unknown ones last.
    """
    pools = pools_of(o)
    wanted = [p for p in pools if p.type is wanted_type] or list(pools)
    if o.job.spec is not None and o.job.spec.capacity.type is CapacityType.CHEAPEST:
        prices = {pool.name: hourly(o, status, pool) for pool in wanted}
        wanted.sort(key=lambda pool: (prices[pool.name] is None, prices[pool.name] or 0))
    record = status.current
    if (
        record is not None
        and record.cause in RECLAIMS
        and gang.spec_size(o) > 1
        and placement.survivors(o, record)
    ):
        for pool in wanted:
            if pool.name == record.pool:  # where a gang's survivors keep their nodes
                return pool
    return min(wanted, key=lambda pool: _last_failure(o, status, pool, len(wanted)))


def kind(o: Observed, status: Status) -> CapacityType:
    """Returns the capacity type of the next attempt: Spot, OnDemand or Reserved.

    For Cheapest that is decided by `cheapest.decide`; before that, Spot.
    """
    assert o.job.spec is not None
    capacity = o.job.spec.capacity
    if not capacity.type.mixes:
        return capacity.type
    if capacity.type is CapacityType.CHEAPEST:
        return CapacityType.SPOT
    return CapacityType.ON_DEMAND if _falls_back(o.job.spec, status, o) else CapacityType.SPOT


def pool_of(o: Observed, status: Status) -> ChosenPool:
    """Returns the pool of `status`'s attempt, or of the next one where there is none yet.

    If spec or pools no longer parse, the default applies, so that a running attempt continues. What was
    detected when the attempt began is kept in its record, so that all of its pods are alike.
    """
    try:
        pools = pools_of(o) if o.job.spec is not None else ()
    except InvalidSpec:
        pools = ()
    if not pools:
        return chosen(o.default_pool, o.found)
    record = status.current
    pool = next((p for p in pools if record is not None and p.name == record.pool), None)
    if record is None or pool is None:
        return choose(o, status)
    platform = Platform(record.platform) if record.platform in set(Platform) else None
    known = {"labels": record.node_labels, "found_platform": platform}
    return as_chosen(pool, window=record.notice_seconds or LEAST_WINDOW, **known)


def labels_note(status: Status) -> str:
    """Returns a suffix for messages: the node labels that the operator added to the pods' requirements."""
    record = status.current
    if record is None or not record.node_labels:
        return ""
    return f" (capacity {record.capacity_type}: nodes with {' or '.join(record.node_labels)})"


def _falls_back(spec: TrainingJobSpec, status: Status, o: Observed) -> bool:
    """Returns whether to use on-demand: too many recent reclaims, or every spot pool recently timed out."""
    rule = spec.capacity.spot_first
    since, last = o.now - RECLAIM_WINDOW, 0
    for record in status.attempts:
        if record.cause == Cause.MOVED:  # back to spot: earlier reclaims no longer count
            last = record.number
    spot = (r for r in status.attempts if r.capacity_type == CapacityType.SPOT and r.number > last)
    reclaims = [r for r in spot if r.cause in RECLAIMS and (r.ended or o.now) >= since]
    all_dry = all_spot_dry(o, status, timedelta(seconds=rule.return_after_seconds))
    return all_dry or len(reclaims) >= rule.interruptions


def all_spot_dry(o: Observed, status: Status, recent: timedelta = REST) -> bool:
    """Returns whether all spot pools have timed out recently, one after the other."""
    spots = {p.name for p in pools_of(o) if p.type is CapacityType.SPOT}
    latest = {r.pool: r for r in status.attempts if r.cause and r.cause != Cause.REPLACED}
    dry = (r for r in latest.values() if r.cause == Cause.SCHEDULING_TIMEOUT and r.pool in spots)
    ends = [r.ended or o.now for r in dry]
    if len(ends) < len(spots):
        return False
    return max(ends) > o.now - recent and min(ends) > o.now - recent - _others_turn(o, len(spots))


def _others_turn(o: Observed, pools: int) -> timedelta:
    """Returns how long the other ones of so many spot pools are waited for, one after the other."""
    return (pools - 1) * (patience(o) + REST)


def _last_failure(o: Observed, status: Status, pool: Pool, pools: int) -> datetime:
    """Returns when a pool last interrupted the job or had no nodes; NEVER where that is long ago.

    It is not while the other pools, of so many in all, are asked in turn.
    """
    reclaimed = [r.ended or o.now for r in status.attempts if r.pool == pool.name and r.cause in RECLAIMS]
    timed_out = (r for r in status.attempts if r.pool == pool.name and r.cause == Cause.SCHEDULING_TIMEOUT)
    dry_since = o.now - REST - _others_turn(o, pools)
    dry = [end for r in timed_out if (end := r.ended or o.now) > dry_since]
    return max((*dry, *(end for end in reclaimed if end > o.now - REST)), default=NEVER)


# --- waiting for nodes ----------------------------------------------------------------------------------
def gives_up_waiting(o: Observed) -> str:
    """Returns a sentence about why the attempt releases its nodes and retries; "" while it waits.

    In the only pool, pods wait without limit while none has a node, because they block no resources of other
    jobs, and none has to be in the zone of earlier ones.
    """
    until = due_pending(o)
    if until is None or o.now < until:
        return ""
    team, size = gang.team(o), gang.size(o)
    bound = sum(bool(p.node) for p in team)
    name, seconds = _limit_of_wait(o)
    words = f"{bound} of {size} pods have a node after {name} ({seconds} s)"
    waits = next((p for p in team if not p.node), None)
    if waits is None:
        refused = f": {o.refusal.message}" if o.refusal is not None else ""
        return f"{words}; {size - len(team)} could not be created{refused}"
    why = f": {waits.unschedulable}{placement.zone_note(o, waits)}" if waits.unschedulable else ""
    return f"{words}; pod {waits.name} has none{why}"


def due_pending(o: Observed) -> datetime | None:
    """Returns when the pending timeout expires; None where it does not apply.

    It does not apply while a pod is gated, nor while pods wait for a claim: then no pool has a suitable node.
    """
    team = gang.team(o)
    if o.job.spec is None or not team:
        return None
    waiting = [p for p in team if not p.node and p.deleted is None]
    if claims.wait_for_volume(o):
        return None
    if any(p.queued for p in waiting) or not (waiting or gang.missing(o, o.job.status)):
        return None
    follows = gang.in_one_zone(o) and placement.predecessor(o, o.job.status) is not None
    if not (follows or any(p.node for p in team) or _others(o)):
        return None
    return min(p.created for p in team) + timedelta(seconds=_limit_of_wait(o)[1])


def patience(o: Observed) -> timedelta:
    """Returns for how long a request for spot waits for its nodes."""
    assert o.job.spec is not None
    capacity = o.job.spec.capacity
    if capacity.type is CapacityType.SPOT_FIRST:
        return timedelta(seconds=capacity.spot_first.pending_seconds)
    if capacity.type is CapacityType.CHEAPEST:
        return timedelta(seconds=capacity.cheapest.pending_seconds)
    return timedelta(seconds=capacity.pending_timeout_seconds)


def _limit_of_wait(o: Observed) -> tuple[str, int]:
    """Returns the field that limits how long the attempt waits for nodes, and its seconds."""
    assert o.job.spec is not None
    record, capacity = o.job.status.current, o.job.spec.capacity
    if not capacity.type.mixes or record is None or record.capacity_type != CapacityType.SPOT:
        return "pendingTimeoutSeconds", capacity.pending_timeout_seconds
    policy = "spotFirst" if capacity.type is CapacityType.SPOT_FIRST else "cheapest"
    return f"{policy}.pendingSeconds", int(patience(o).total_seconds())


def _others(o: Observed) -> Sequence[Pool]:
    """Returns the pools that the job could try instead."""
    assert o.job.spec is not None
    if problem(o):
        return []
    here = pool_of(o, o.job.status)
    pools = [p for p in pools_of(o) if p.name != here.name]
    return [p for p in pools if o.job.spec.capacity.type.mixes or p.type == here.type]


# --- what nodes cost ------------------------------------------------------------------------------------
def hourly(o: Observed, status: Status, pool: Pool) -> Decimal | None:
    """Returns what a node of the pool costs per hour now; None where that is not known.

    Its type is that of labels, else of the job's last node. In an unknown zone it is the least rate of all:
    autoscalers prefer cheap ones.
    """
    newest = tuple(reversed(status.attempts))
    here = [r for r in newest if r.pool == pool.name]
    before = (r.instance_type for r in (*here, *newest) if r.instance_type)
    kind = _required(o, pool, INSTANCE_TYPE_LABEL) or next(before, "")
    zone = _required(o, pool, ZONE_LABEL) or next((r.zone for r in here if r.zone), "")
    zones = {zone} if zone else {place for type_, _, place in o.prices.rates if type_ == kind}
    rates = (o.prices.rate(kind, pool.type, place, o.now) for place in zones)
    return min((rate.usd_per_hour for rate in rates if rate is not None), default=None)


def _required(o: Observed, pool: Pool, label: str) -> str:
    """Returns the value that the pool or the template requires of a label; "" where any fits."""
    template = o.job.spec.template["spec"].get("nodeSelector") if o.job.spec is not None else None
    return pool.selector.get(label) or str((template or {}).get(label, ""))


# --- back to spot ---------------------------------------------------------------------------------------
def on_demand_since(o: Observed) -> datetime | None:
    """Returns since when an attempt on demand runs; None for others, and before its first save."""
    record = o.job.status.current
    if record is None or o.job.spec is None or not o.job.spec.capacity.type.mixes:
        return None
    team, going = gang.team(o), not (record.cause or record.stopping)
    runs = [p.running_since for p in team if p.running_since is not None]
    saved = o.job.status.known_durable_step is not None and record.durable_step is not None
    if record.capacity_type != CapacityType.ON_DEMAND or not (going and saved and runs):
        return None
    return min(runs)


def record_of(o: Observed, number: int, pool: ChosenPool, choice: str) -> AttemptRecord:
    """Returns the record of an attempt that is to start in this pool."""
    assert o.job.spec is not None
    return AttemptRecord(
        number=number,
        pod=o.job.pod_name(number),
        capacity_type=pool.type,
        choice=choice[:CHOICE_LIMIT],
        pool=pool.name,
        platform=str(pool.found_platform or ""),
        notice_seconds=pool.window,
        node_labels=pool.labels,
        workers=o.job.spec.workers,
    )
