"""The ledger: what the nodes of a job cost, summed in status.cost. Pure.

A node is paid for from its creation to its deletion. Its time for a job has three parts:

    boot    from its creation until the job's first pod is on it, if it was created for that pod
    use     until all of the job's pods there have ended
    idle    until it is deleted, or the job's next pod is on it, or IDLE_LIMIT has passed

How far each node is accounted stands in the status, so an operator that was down adds the time that it
missed, once. A node that pods of other jobs use too is paid for by the share of its GPUs; `wholeNodes` is the
sum without shares.

AWS does not bill a spot instance that EC2 itself interrupts in its first hour (AWS: "Billing for interrupted
Spot Instances"). What such a node had cost moves to `refunded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from spottrain_operator.api.node_pools import CAPACITY_LABELS, CapacityType
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.prices import Amount, PriceList
from spottrain_operator.api.training_job import CostStatus, NodeCost, Status
from spottrain_operator.names import Platform
from spottrain_operator.policies.pod_end import pod_ended

ESTIMATED: Final = "Estimated"
"""Every second has a price. Estimated, because only the cloud's bill is exact."""
UNKNOWN: Final = "Unknown"
IDLE_LIMIT: Final = timedelta(hours=1)
"""A node that stays longer than this after the job is kept for something else."""
IDLE_RECHECK: Final = timedelta(seconds=30)
FREE_FIRST_HOUR: Final = timedelta(hours=1)
CENT_FRACTION: Final = Decimal("0.000001")
"""Dollars are kept to a millionth, so that sums of many seconds stay right to the cent."""


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
    """GPUs of the node; 0: a CPU node, which is paid for whole."""
    used: int
    """GPUs of the job's pods there."""
    pod_created: datetime
    """Creation of the job's first pod there."""
    bound: datetime
    """When that pod was bound to the node."""
    last_bound: datetime
    """When the job's last pod there was bound."""
    pods: int = 1
    """How many of the job's pods there still exist as objects, ended or not."""
    ended: datetime | None = None
    """When the last of the job's pods there ended; None while one runs."""
    gone: datetime | None = None
    """When the node was deleted."""
    reclaimed: bool = False
    """Whether the cloud announced to take it back."""


def with_costs(status: Status, o: Observed) -> Status:
    """Adds to status.cost what the job's nodes have cost since it was last written.

    Time alone makes it due only each `Limits.cost_interval`, because each change is a write.
    """
    facts = list(_facts(status, o))
    old = o.job.status.cost
    if not facts:
        return status
    cost = accounted(old or CostStatus(), facts, o.prices, o.now.replace(microsecond=0))
    if old is None:
        return replace(status, cost=cost)
    if replace(cost, time=old.time) == old:
        return status  # every node is accounted to its end
    late = old.time is not None and o.now - old.time >= o.limits.cost_interval
    due = late or status != o.job.status or _states(cost) != _states(old)
    return replace(status, cost=cost) if due else status


def recheck(status: Status, o: Observed) -> datetime | None:
    """Returns when to look again at idle nodes: their events do not enqueue a job without pods there."""
    nodes = status.cost.nodes if status.cost else ()
    idle = any(node.ended is not None and not node.closed for node in nodes)
    return o.now + IDLE_RECHECK if idle else None


def open_nodes(status: Status) -> set[str]:
    """Returns the names of the nodes that are not accounted to their end."""
    return {node.name for node in status.cost.nodes if not node.closed} if status.cost else set()


def _states(cost: CostStatus) -> list[tuple[object, ...]]:
    return [(n.name, n.used, n.ended, n.reclaimed, n.closed) for n in cost.nodes]


def _facts(status: Status, o: Observed) -> Iterator[NodeFacts]:
    """Yields what is observed of each node that has pods of the job, or that has an account."""
    accounts = {node.name: node for node in o.job.status.cost.nodes} if o.job.status.cost else {}
    on_node: dict[str, list[PodView]] = {name: [] for name in accounts}
    for pod in o.pods:
        if pod.node and pod.bound is not None:
            on_node.setdefault(pod.node, []).append(pod)
    for name, pods in on_node.items():
        yield _fact(name, pods, accounts.get(name), status, o)


def _fact(
    name: str, pods: Sequence[PodView], account: NodeCost | None, status: Status, o: Observed
) -> NodeFacts:
    node = o.nodes.get(name)
    first = min(pods, key=lambda pod: pod.bound or pod.created, default=None)
    bound = account.bound if account else (first.bound if first and first.bound else o.now)
    record = status.record(first.attempt) if first else None
    label = next(
        (kind for kind, labels in CAPACITY_LABELS.items() if node and node.found.labels & labels), ""
    )
    return NodeFacts(
        name=name,
        created=node.created if node else None,
        instance_type=node.instance_type if node else "",
        zone=node.zone if node else "",
        capacity_type=label or (record.capacity_type if record else ""),
        platform=min(map(str, node.found.platforms), default="") if node else "",
        gpus=node.gpus if node else 0,
        used=sum(pod.gpus for pod in pods if not pod_ended(pod, o)),
        pod_created=first.created if first else bound,
        bound=bound,
        ended=_ended(pods, account, o),
        last_bound=max((pod.bound for pod in pods if pod.bound), default=bound),
        pods=len(pods),
        gone=o.now.replace(microsecond=0) if node is None else None,
        reclaimed=node is not None and node.notice is not None,
    )


def _ended(pods: Sequence[PodView], account: NodeCost | None, o: Observed) -> datetime | None:
    """Returns when the last of the pods ended; None while one runs."""
    if any(not pod_ended(pod, o) for pod in pods):
        return None
    if account is not None and account.ended is not None:
        return account.ended  # once; a pod that is lost with its node has no time of its own
    ends = [pod.ended.finished for pod in pods if pod.ended and pod.ended.finished]
    return max(ends, default=o.now.replace(microsecond=0))


# --- sums -----------------------------------------------------------------------------------------------
def accounted(costs: CostStatus, facts: Iterable[NodeFacts], prices: PriceList, now: datetime) -> CostStatus:
    """Returns the sums up to `now`. `facts` has every node that has an account in `costs`."""
    known = {node.name: node for node in costs.nodes}
    costs = replace(costs, nodes=())
    for fact in facts:
        node = _updated(known.get(fact.name) or _opened(fact), fact)
        if not node.closed:
            costs, node = _with_node(costs, node, fact.gone, prices, now)
        if fact.pods or not node.closed:
            costs = replace(costs, nodes=(*costs.nodes, node))
    spent = costs.use + costs.boot + costs.idle - costs.refunded
    return replace(costs, spent=spent, state=UNKNOWN if costs.unknown_seconds else ESTIMATED, time=now)


def _opened(fact: NodeFacts) -> NodeCost:
    """Returns the account of a node. One that was there before the pod was not booted for it."""
    booted = fact.created is not None and fact.pod_created <= fact.created <= fact.bound
    start = fact.created if booted and fact.created else fact.bound
    return NodeCost(name=fact.name, start=start, bound=fact.bound, accounted=start)


def _updated(node: NodeCost, fact: NodeFacts) -> NodeCost:
    if node.closed and fact.ended is None and fact.gone is None:  # an hour idle, and then used again
        node = replace(node, closed=False, accounted=max(node.accounted, fact.last_bound))
    return replace(
        node,
        created=node.created or fact.created,
        instance_type=fact.instance_type or node.instance_type,
        zone=fact.zone or node.zone,
        capacity_type=fact.capacity_type or node.capacity_type,
        platform=fact.platform or node.platform,
        gpus=fact.gpus or node.gpus,
        used=fact.used or node.used,
        ended=fact.ended,
        reclaimed=fact.reclaimed or node.reclaimed,
    )


def _with_node(
    costs: CostStatus, node: NodeCost, gone: datetime | None, prices: PriceList, now: datetime
) -> tuple[CostStatus, NodeCost]:
    """Adds a node's time up to `now` or its end."""
    last = now if node.ended is None else min(now, node.ended + IDLE_LIMIT)
    end = last if gone is None else min(last, gone)
    costs, node = _with_time(costs, node, end, prices)
    if gone is None and end == now:
        return costs, node
    if _not_billed(node, end):
        costs = replace(costs, refunded=costs.refunded + node.spent)
    return costs, replace(node, closed=True)


def _with_time(
    costs: CostStatus, node: NodeCost, end: datetime, prices: PriceList
) -> tuple[CostStatus, NodeCost]:
    """Adds the time from `node.accounted` to `end`, divided into boot, use and idle."""
    parts = {"boot": (node.start, node.bound), "use": (node.bound, node.ended or end)}
    if node.ended is not None:
        parts["idle"] = (node.ended, end)
    for part, (begin, until) in parts.items():
        begin, until = max(begin, node.accounted), min(until, end)
        if begin >= until:
            continue
        amount = prices.cost(node.instance_type, node.capacity_type, node.zone, begin, until)
        own = (amount.usd * node.share).quantize(CENT_FRACTION)
        node = replace(node, spent=node.spent + own)
        costs = _with_amount(costs, part, own, amount)
    return costs, replace(node, accounted=max(node.accounted, end))


def _with_amount(costs: CostStatus, part: str, own: Decimal, amount: Amount) -> CostStatus:
    sums = {part: getattr(costs, part) + own}
    return replace(
        costs,
        whole_nodes=costs.whole_nodes + amount.usd.quantize(CENT_FRACTION),
        unknown_seconds=costs.unknown_seconds + amount.unknown_seconds,
        **sums,
    )


def _not_billed(node: NodeCost, end: datetime) -> bool:
    spot = node.capacity_type == CapacityType.SPOT and node.platform == Platform.AWS
    young = node.created is not None and end - node.created < FREE_FIRST_HOUR
    return spot and node.reclaimed and young
