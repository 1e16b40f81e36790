"""The ledger: what the nodes of a job cost, summed in status.cost. Pure.

A node is paid for from its creation to its deletion. Its time for a job has three parts:

    boot    from its creation until the job's first pod is on it, if it was created for that pod
    use     until all of the job's pods there have ended
    idle    until it is deleted, or a next pod of this or another job is on it, or IDLE_LIMIT has passed;
            only if it was created for the job, because others are kept for somebody else

How far each node is accounted stands in the status, so an operator that was down adds the time that it
missed, once. A node that pods of other jobs may use too is paid for by the share of its GPUs. A job without
GPUs pays by the share of CPU or memory that it requests, the larger of both; where it requests neither, the
jobs there pay the same. `wholeNodes` is the sum without shares.

Each part goes to an attempt as well: the one whose pod was bound to the node last.

AWS does not bill a spot instance that EC2 itself interrupts in its first hour (AWS: "Billing for interrupted
Spot Instances"). What such a node had cost moves to `refunded`, and is taken off the attempts that had paid
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from decimal import ROUND_UP, Decimal
from functools import cache
from typing import Final, TypeVar

from spottrain_operator.api import resources
from spottrain_operator.api.node_pools import CapacityType
from spottrain_operator.api.observed import NodeView, Observed, PodView
from spottrain_operator.api.prices import Amount, PriceList
from spottrain_operator.api.training_job import (
    KEPT_ATTEMPTS,
    AttemptRecord,
    AttemptShare,
    CostStatus,
    NodeCost,
    Status,
    with_record,
)
from spottrain_operator.names import Platform
from spottrain_operator.policies.pod_end import NODE_MISSED, end_time, pod_ended

ESTIMATED: Final = "Estimated"
"""Every second has a price. Estimated, because only the cloud's bill is exact."""
UNKNOWN: Final = "Unknown"
IDLE_LIMIT: Final = timedelta(hours=1)
"""A node that stays longer than this after the job is kept for something else."""
IDLE_RECHECK: Final = timedelta(seconds=30)
MOST_NODES: Final = 1024
"""As many as a gang may have pods."""
FREE_FIRST_HOUR: Final = timedelta(hours=1)
CENT_FRACTION: Final = Decimal("0.000001")
"""Dollars are kept to a millionth, so that sums of many seconds stay right to the cent."""
MILLISECOND: Final = Decimal("0.001")

Machine = tuple[str, datetime | None]
"""Name and creation of a node: a next machine may have the same name."""
Cost = Callable[[str, str, str, datetime, datetime], Amount]
"""`PriceList.cost`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What is observed of a node that has, or had, pods of the job."""

    name: str
    created: datetime | None
    """None: it was gone before it was seen."""
    instance_type: str
    zone: str
    capacity_type: str
    platform: str
    gpus: int
    """GPUs of the node."""
    used: int
    """GPUs of the pods there of the attempt that was bound last, ended or not."""
    pod_created: datetime
    """Creation of the job's first pod there."""
    bound: datetime
    """When that pod was bound to the node."""
    last_bound: datetime
    """When the job's last pod there was bound."""
    fraction: Decimal | None = None
    """The job's share of the node, where it uses no GPUs; None: unknown."""
    first_attempt: int = 1
    """The attempt of the job's first pod there."""
    attempt: int = 1
    """The attempt of the last one."""
    pods: int = 1
    """How many of the job's pods there still exist as objects, ended or not."""
    ended: datetime | None = None
    """When the last of the job's pods there ended; None while one runs."""
    gone: datetime | None = None
    """When the node was deleted."""
    taken: datetime | None = None
    """Since when a pod of another job is there."""
    reclaimed: bool = False
    """Whether EC2 has announced to take this spot instance back."""


Paid = TypeVar("Paid", AttemptRecord, "AttemptCost")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptCost:
    """What an attempt has paid in addition."""

    spent: Decimal = Decimal(0)
    unknown_seconds: Decimal = Decimal(0)
    use_seconds: Decimal = Decimal(0)
    on_demand_use: Decimal = Decimal(0)

    def added_to(self, paid: Paid) -> Paid:
        """Returns `paid` with these sums in addition; AttemptRecord has fields of the same names."""
        sums = {f.name: getattr(paid, f.name) + getattr(self, f.name) for f in fields(self)}
        return replace(paid, **sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    costs: CostStatus
    attempts: Mapping[int, AttemptCost] = field(default_factory=dict)
    """By number: what is new in `costs`."""

    def plus(self, attempt: int, more: AttemptCost) -> Sums:
        known = self.attempts.get(attempt, AttemptCost())
        return replace(self, attempts={**self.attempts, attempt: more.added_to(known)})


def with_costs(status: Status, o: Observed) -> Status:
    """Adds to status.cost and status.attempts what the job's nodes have cost since they were last written.

    Time alone makes it due only each `Limits.cost_interval`, because each change is a write.
    """
    facts = list(_facts(status, o))
    old = o.job.status.cost or CostStatus()
    late = old.time is None or o.now - old.time >= o.limits.cost_interval
    if not facts or not (late or status != o.job.status or _news(facts, old)):
        return status  # most reconciles: no sum is computed
    sums = accounted(old, facts, o.prices, o.now.replace(microsecond=0))
    if replace(sums.costs, time=old.time) == old:
        return status  # every node is accounted to its end
    return replace(_with_attempts(status, sums.attempts), cost=sums.costs)


def _with_attempts(status: Status, costs: Mapping[int, AttemptCost]) -> Status:
    for number, more in costs.items():
        if (record := status.record(number)) is not None:
            status = with_record(status, more.added_to(record))
    return status


def sums_until(o: Observed, *times: datetime) -> list[CostStatus]:
    """Returns the sums up to each of these times, if nothing changes until then. Nothing is written."""
    facts, old = list(_facts(o.job.status, o)), o.job.status.cost or CostStatus()
    return [accounted(old, facts, o.prices, at).costs for at in times]


def recheck(status: Status, o: Observed) -> datetime | None:
    """Returns when to look again at idle nodes: their events do not enqueue a job without pods there."""
    nodes = status.cost.nodes if status.cost else ()
    idle = any(node.ended is not None and _followed(node) for node in nodes)
    return o.now + IDLE_RECHECK if idle else None


def open_nodes(status: Status) -> set[str]:
    """Returns the names of the nodes that are not accounted to their end."""
    return {node.name for node in status.cost.nodes if _followed(node)} if status.cost else set()


def idle_nodes(status: Status) -> set[str]:
    """Returns the names of those whose idle time the job pays."""
    nodes = status.cost.nodes if status.cost else ()
    return {node.name for node in nodes if node.ended is not None and not node.closed}


def shared_nodes(o: Observed) -> set[str]:
    """Returns the names of the nodes on which pods of other jobs count: idle ones, and shared ones."""
    running = {pod.node for pod in o.pods if pod.node} if _uses_no_gpus(o) else set()
    return idle_nodes(o.job.status) | running


def _uses_no_gpus(o: Observed) -> bool:
    return o.job.spec is not None and o.job.spec.gpus.count == 0


def _followed(node: NodeCost) -> bool:
    """Returns whether the end of the node matters: it is paid for, or may turn out to be free."""
    return not node.closed or bool(node.paid_by)


def _news(facts: Sequence[NodeFacts], cost: CostStatus) -> bool:
    """Returns whether a node is new, gone, idle, used again (by any job) or about to be taken back."""
    known = {(node.name, node.created): node for node in cost.nodes}
    return any(_is_news(fact, _account(known, fact)) for fact in facts)


def _account(known: Mapping[Machine, NodeCost], fact: NodeFacts) -> NodeCost | None:
    return known.get((fact.name, fact.created)) or known.get((fact.name, None))


def _is_news(fact: NodeFacts, node: NodeCost | None) -> bool:
    if node is None:
        return True
    updated = _updated(node, fact)
    over = _followed(node) and fact.gone is not None
    taken = not node.closed and fact.taken is not None
    forgotten = not _followed(node) and not fact.pods
    return updated != node or over or taken or forgotten


def _facts(status: Status, o: Observed) -> Iterator[NodeFacts]:
    """Yields what is observed of each node that has pods of the job, or that has an account."""
    accounts: dict[str, list[NodeCost]] = {}
    for node in o.job.status.cost.nodes if o.job.status.cost else ():
        accounts.setdefault(node.name, []).append(node)
    on_node: dict[str, list[PodView]] = {name: [] for name in accounts}
    for pod in o.pods:
        if pod.node and pod.bound is not None:
            on_node.setdefault(pod.node, []).append(pod)
    others: dict[str, list[PodView]] = {}
    for pod in o.others:
        others.setdefault(pod.node, []).append(pod)
    for name, pods in on_node.items():
        for account, own, next_one in _machines(pods, accounts.get(name, []), o.nodes.get(name), o):
            fact = _fact(name, own, account, next_one, status, o)
            beside = others.get(name, [])
            if _uses_no_gpus(o) and next_one is None and name in o.nodes:
                fact = replace(fact, fraction=_fraction(own, beside, o.nodes[name], fact.attempt, o) or None)
            yield replace(fact, taken=_taken(beside, fact, o)) if beside else fact


def _machines(
    pods: list[PodView], accounts: list[NodeCost], view: NodeView | None, o: Observed
) -> Iterator[tuple[NodeCost | None, list[PodView], datetime | None]]:
    """Yields each account of a node's name, its pods, and when the next machine of this name came."""
    present, created = accounts[-1] if accounts else None, view.created if view else None
    if present and created and present.created and present.created != created:
        present, earlier = None, accounts
    else:
        earlier, created = accounts[:-1], present.created if present else None
    past = [p for p in pods if created and pod_ended(p, o) and end_time(p, o) < created] if earlier else []
    for account in earlier:
        yield account, past if account is earlier[-1] else [], created
    rest = [pod for pod in pods if pod not in past]
    if present or rest:
        yield present, rest, None


def _fraction(
    pods: Sequence[PodView], others: Sequence[PodView], node: NodeView, attempt: int, o: Observed
) -> Decimal:
    """Returns the share of a node that a job's pods of its last attempt there request, beside other jobs'."""
    own = [pod for pod in pods if pod.attempt == attempt]
    requested = resources.total(pod.requests for pod in own).share_of(node.allocatable)
    if own and not requested:
        beside = sum(1 for pod in others if not pod_ended(pod, o))
        requested = Decimal(len(own)) / (len(own) + beside)
    return requested.quantize(CENT_FRACTION, rounding=ROUND_UP)


def _taken(others: Sequence[PodView], fact: NodeFacts, o: Observed) -> datetime | None:
    """Returns since when another job's pod is, or was, there after the end of this job's pods."""
    if fact.ended is None:
        return None
    stayed = (p for p in others if not pod_ended(p, o) or end_time(p, o) > fact.ended)
    return min((pod.bound for pod in stayed if pod.bound is not None), default=None)


def _fact(
    name: str,
    pods: Sequence[PodView],
    account: NodeCost | None,
    next_one: datetime | None,
    status: Status,
    o: Observed,
) -> NodeFacts:
    exists = name in o.nodes and next_one is None
    node = o.nodes[name] if exists else NodeView(name=name, resource_version=0)
    gone = None if exists else min(_gone(pods, o), next_one or o.now)
    in_order = sorted(pods, key=lambda pod: pod.bound or pod.created)
    first, last = (in_order[0], in_order[-1]) if in_order else (None, None)
    bound = account.bound if account else (first.bound if first and first.bound else o.now)
    if node.created and account is None:
        bound = max(bound, node.created)
    record = status.record(first.attempt) if first else None
    return NodeFacts(
        name=name,
        created=node.created or (account.created if account else None),
        instance_type=node.instance_type,
        zone=node.zone,
        capacity_type=node.found.capacity_type or (record.capacity_type if record else ""),
        platform=min(map(str, node.found.platforms), default=""),
        gpus=node.gpus,
        used=sum(pod.gpus for pod in pods if last and pod.attempt == last.attempt),
        pod_created=first.created if first else bound,
        bound=bound,
        ended=_ended(pods, account, o),
        last_bound=last.bound if last and last.bound else bound,
        first_attempt=first.attempt if first else account.attempt if account else 0,
        attempt=last.attempt if last else account.attempt if account else 0,
        pods=len(pods),
        gone=gone,
        reclaimed=node.reclaimed,
    )


def _ended(pods: Sequence[PodView], account: NodeCost | None, o: Observed) -> datetime | None:
    """Returns when the last of the pods ended; None while one runs."""
    if any(not pod_ended(pod, o) for pod in pods):
        return None
    if account is not None and account.ended is not None and not _used_again(pods, account, account.ended):
        return account.ended  # once; a pod that is lost with its node may have no time of its own
    return max((end_time(pod, o) for pod in pods), default=o.now.replace(microsecond=0))


def _used_again(pods: Sequence[PodView], account: NodeCost, ended: datetime) -> bool:
    """Returns whether a pod came after the account's end, though it may have ended unseen."""
    return any(pod.attempt > account.attempt or (pod.bound or ended) > ended for pod in pods)


def _gone(pods: Sequence[PodView], o: Observed) -> datetime:
    """Returns when a node that does not exist was gone: at the latest when Kubernetes missed it."""
    missed = [p.disrupted for p in pods if p.disrupted and p.disruption.startswith(NODE_MISSED)]
    return min(missed, default=o.now.replace(microsecond=0))


# --- sums -----------------------------------------------------------------------------------------------
def accounted(costs: CostStatus, facts: Iterable[NodeFacts], prices: PriceList, now: datetime) -> Sums:
    """Returns the sums up to `now`. `facts` has every node that has an account in `costs`."""
    cost = cache(prices.cost)  # the nodes of a gang have the same prices at the same time
    known = {(node.name, node.created): node for node in costs.nodes}
    sums, kept = Sums(costs=replace(costs, nodes=())), []
    for fact in facts:
        before = _account(known, fact) or _opened(fact)
        node = _updated(before, fact)
        if not node.closed:
            sums, node = _before_next(sums, before, node, fact, cost)
            sums, node = _with_node(sums, node, fact, cost, now)
        sums, node = _settled(sums, node, fact.gone, now)
        if fact.pods or _followed(node):
            kept.append((node, bool(fact.pods)))
    costs = replace(sums.costs, nodes=_newest(kept))
    spent = costs.use + costs.boot + costs.idle - costs.refunded
    state = UNKNOWN if costs.unknown_seconds else ESTIMATED
    return replace(sums, costs=replace(costs, spent=spent, state=state, time=now))


def _newest(kept: Sequence[tuple[NodeCost, bool]]) -> tuple[NodeCost, ...]:
    """Returns as many nodes as the status may hold: those without pods that are idle longest are dropped."""
    idle = [(node.ended, place) for place, (node, has_pods) in enumerate(kept) if node.ended and not has_pods]
    dropped = {place for _, place in sorted(idle)[: max(0, len(kept) - MOST_NODES)]}
    return tuple(node for place, (node, _) in enumerate(kept) if place not in dropped)


def _opened(fact: NodeFacts) -> NodeCost:
    """Returns the account of a node. One that was there before the pod was not booted for it."""
    booted = fact.created is not None and fact.pod_created <= fact.created <= fact.bound
    start = fact.created if booted and fact.created else fact.bound
    return NodeCost(
        name=fact.name,
        start=start,
        bound=fact.bound,
        accounted=start,
        attempt=fact.first_attempt,
        used=fact.used,
        fraction=fact.fraction,
    )


def _updated(node: NodeCost, fact: NodeFacts) -> NodeCost:
    running = fact.ended is None and fact.gone is None
    ran = fact.ended is not None and node.ended is not None and fact.ended > node.ended
    if node.closed and (running or ran):  # an hour idle, and then used again
        node = replace(node, closed=False, accounted=max(node.accounted, fact.last_bound))
    return replace(
        node,
        created=node.created or fact.created,
        instance_type=fact.instance_type or node.instance_type,
        zone=fact.zone or node.zone,
        capacity_type=fact.capacity_type or node.capacity_type,
        platform=fact.platform or node.platform,
        gpus=fact.gpus or node.gpus,
        used=max(fact.used, node.used) if fact.attempt == node.attempt else fact.used or node.used,
        fraction=fact.fraction or node.fraction,
        ended=fact.ended,
        reclaimed=fact.reclaimed or node.reclaimed,
    )


def _before_next(
    sums: Sums, before: NodeCost, node: NodeCost, fact: NodeFacts, cost: Cost
) -> tuple[Sums, NodeCost]:
    """Adds the time until the job's last pod was bound there, for the attempt, share and end until then."""
    if (fact.attempt, node.used, node.fraction) == (before.attempt, before.used, before.fraction):
        return sums, node
    until = replace(node, attempt=before.attempt, used=before.used, fraction=before.fraction)
    until = replace(until, ended=before.ended)
    sums, until = _with_time(sums, until, _paid_until(until, fact, fact.last_bound), cost)
    node = replace(until, attempt=fact.attempt, used=node.used, fraction=node.fraction, ended=node.ended)
    return sums, replace(node, accounted=max(until.accounted, fact.last_bound))


def _with_node(
    sums: Sums, node: NodeCost, fact: NodeFacts, cost: Cost, now: datetime
) -> tuple[Sums, NodeCost]:
    """Adds a node's time up to `now` or its end."""
    last = _paid_until(node, fact, now)
    end = last if fact.gone is None else min(last, fact.gone)
    sums, node = _with_time(sums, node, end, cost)
    return sums, replace(node, closed=fact.gone is not None or last < now)


def _paid_until(node: NodeCost, fact: NodeFacts, at: datetime) -> datetime:
    """Returns until when the job pays for a node that exists at that time."""
    if node.ended is None:
        return at
    booted = node.created is not None and node.start == node.created
    idle = node.ended + (IDLE_LIMIT if booted else timedelta(0))
    if fact.taken is not None:
        idle = min(idle, max(node.ended, fact.taken))
    return min(at, idle)


def _with_time(sums: Sums, node: NodeCost, end: datetime, cost: Cost) -> tuple[Sums, NodeCost]:
    """Adds the time from `node.accounted` to `end`, divided into boot, use and idle."""
    parts = {"boot": (node.start, node.bound), "use": (node.bound, node.ended or end)}
    if node.ended is not None:
        parts["idle"] = (node.ended, end)
    for part, (begin, until) in parts.items():
        begin, until = max(begin, node.accounted), min(until, end)
        if begin < until:
            sums, node = _with_part(sums, node, part, cost, begin, until)
    return sums, replace(node, accounted=max(node.accounted, end))


def _with_part(
    sums: Sums, node: NodeCost, part: str, cost: Cost, begin: datetime, until: datetime
) -> tuple[Sums, NodeCost]:
    amount = cost(node.instance_type, node.capacity_type, node.zone, begin, until)
    own = (amount.usd * node.share).quantize(CENT_FRACTION)
    seconds = (Decimal((until - begin).total_seconds()) * node.share).quantize(MILLISECOND)
    paid = AttemptCost(spent=own, unknown_seconds=amount.unknown_seconds)
    costs = _with_amount(sums.costs, part, own, seconds, amount)
    if part == "use":
        other = cost(node.instance_type, CapacityType.ON_DEMAND, node.zone, begin, until)
        on_demand = (other.usd * node.share).quantize(CENT_FRACTION)
        paid = replace(paid, use_seconds=seconds, on_demand_use=on_demand)
        costs = replace(
            costs,
            on_demand_use=costs.on_demand_use + on_demand,
            on_demand_unknown_seconds=costs.on_demand_unknown_seconds + other.unknown_seconds,
        )
    node = replace(
        node,
        spent=node.spent + own,
        seconds=node.seconds + seconds,
        use_seconds=node.use_seconds + paid.use_seconds,
        paid_by=_paid_by(node, own),
    )
    return replace(sums, costs=costs).plus(node.attempt, paid), node


def _with_amount(costs: CostStatus, part: str, own: Decimal, seconds: Decimal, amount: Amount) -> CostStatus:
    sums = {part: getattr(costs, part) + own, f"{part}_seconds": getattr(costs, f"{part}_seconds") + seconds}
    return replace(
        costs,
        whole_nodes=costs.whole_nodes + amount.usd.quantize(CENT_FRACTION),
        unknown_seconds=costs.unknown_seconds + amount.unknown_seconds,
        **sums,
    )


def _paid_by(node: NodeCost, own: Decimal) -> tuple[AttemptShare, ...]:
    """Returns who has paid for the node; older attempts than the status keeps are left out."""
    known = {share.number: share for share in node.paid_by}
    old = known.pop(node.attempt, AttemptShare(number=node.attempt))
    return (*known.values(), replace(old, spent=old.spent + own))[-KEPT_ATTEMPTS:]


# --- refunds --------------------------------------------------------------------------------------------
def _settled(sums: Sums, node: NodeCost, gone: datetime | None, now: datetime) -> tuple[Sums, NodeCost]:
    """Takes off what the cloud does not bill, once the node is gone; until then keeps who has paid."""
    spot = node.capacity_type == CapacityType.SPOT and node.platform == Platform.AWS
    end = now if gone is None else min(now, gone)
    free = spot and node.created is not None and end - node.created < FREE_FIRST_HOUR
    if free and gone is None:
        return sums, node
    if free and node.reclaimed and node.paid_by:
        sums = _refunded(sums, node)
    return sums, replace(node, paid_by=())


def _refunded(sums: Sums, node: NodeCost) -> Sums:
    for share in node.paid_by:
        sums = sums.plus(share.number, AttemptCost(spent=-share.spent))
    costs = sums.costs
    costs = replace(
        costs,
        refunded=costs.refunded + node.spent,
        refunded_seconds=costs.refunded_seconds + node.seconds,
        refunded_use_seconds=costs.refunded_use_seconds + node.use_seconds,
    )
    return replace(sums, costs=costs)
