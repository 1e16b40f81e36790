"""The ledger: what the nodes of a job cost. Pure.

A node is paid for from its creation to its deletion. Its time for a job has three parts:

    boot    from its creation until the job's first pod is on it, if it was created for that pod
    use     until all of the job's pods there have ended
    idle    until it is deleted, or a next pod of this or another job is on it, or IDLE_LIMIT has passed;
            only if it was created for the job, because others are kept for somebody else

Each part goes to the attempt whose pod was bound to the node last. How far each node is accounted is in the
bookkeeping, so an operator that was down adds the time that it missed, once. A node that pods of other jobs
may use too is paid for by the share of its GPUs. A job without GPUs pays by the share of CPU or memory that
it requests, the larger of both; where it requests neither, the jobs there pay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import ROUND_UP, Decimal
from functools import cache
from heapq import nlargest
from typing import Final

from spottrain_operator.api import resources
from spottrain_operator.api.bookkeeping import AttemptCosts, CostSums, Ledger, NodeAccount
from spottrain_operator.api.node_pools import CapacityType
from spottrain_operator.api.observed import NodeView, Observed, PodView
from spottrain_operator.api.prices import Amount, PriceList
from spottrain_operator.api.training_job import KEPT_ATTEMPTS, Status
from spottrain_operator.policies.pod_end import NODE_MISSED, end_time, pod_ended

IDLE_LIMIT: Final = timedelta(hours=1)
"""A node that stays longer than this after the job is kept for something else."""
MOST_NODES: Final = 1024
"""As many as a gang may have pods."""
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
    start: datetime
    """Since when the job pays for it: its creation, where it was created for the job, else `bound`."""
    bound: datetime
    """When the job's first pod there was bound to it."""
    last_bound: datetime
    """When the job's last pod there was bound."""
    share: Decimal | None = None
    """The job's share of the node, by its pods there of the attempt that was bound last; None: unknown."""
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


def updated(o: Observed, status: Status, *, due: bool) -> Ledger:
    """Returns the ledger with what the job's nodes have cost up to now.

    It is the old one where neither the sums are `due` nor a node is new, gone, idle or used again.
    """
    old, facts = o.books.ledger, list(_facts(status, o))
    known = _accounts(old)
    if not facts or not (due or any(_is_news(fact, _account(known, fact)) for fact in facts)):
        return old  # most reconciles: no sum is computed
    new = accounted(old, facts, o.prices, o.now.replace(microsecond=0), since=o.books.lost)
    return new if old.time is None or new.sums != old.sums else replace(new, time=old.time)


def open_nodes(ledger: Ledger) -> set[str]:
    """Returns the names of the nodes that are not accounted to their end."""
    return {node.name for node in ledger.nodes if not node.closed}


def idle_nodes(ledger: Ledger) -> set[str]:
    """Returns the names of those whose idle time the job pays."""
    return {node.name for node in ledger.nodes if node.ended is not None and not node.closed}


def shared_nodes(o: Observed) -> set[str]:
    """Returns the names of the nodes on which pods of other jobs count: idle ones, and shared ones."""
    uses_gpus = o.job.spec is None or o.job.spec.gpus.count != 0
    return idle_nodes(o.books.ledger) | (set() if uses_gpus else {pod.node for pod in o.pods if pod.node})


def _accounts(ledger: Ledger) -> dict[Machine, NodeAccount]:
    return {(node.name, node.created): node for node in ledger.nodes}


def _account(known: Mapping[Machine, NodeAccount], fact: NodeFacts) -> NodeAccount | None:
    return known.get((fact.name, fact.created)) or known.get((fact.name, None))


def _is_news(fact: NodeFacts, node: NodeAccount | None) -> bool:
    """Returns whether a node is new, gone, idle or used again (by any job)."""
    if node is None:
        return True
    over = not node.closed and (fact.gone is not None or fact.taken is not None)
    forgotten = node.closed and not fact.pods
    return _updated(node, fact) != node or over or forgotten


# --- what is observed of the nodes ------------------------------------------------------------------------
def _facts(status: Status, o: Observed) -> Iterator[NodeFacts]:
    """Yields what is observed of each node that has pods of the job, or that has an account."""
    accounts: dict[str, list[NodeAccount]] = {}
    for node in o.books.ledger.nodes:
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
            yield _fact(name, own, others.get(name, []), account, next_one, status, o)


def _machines(
    pods: list[PodView], accounts: list[NodeAccount], view: NodeView | None, o: Observed
) -> Iterator[tuple[NodeAccount | None, list[PodView], datetime | None]]:
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


def _share(pods: Sequence[PodView], others: Sequence[PodView], node: NodeView, o: Observed) -> Decimal | None:
    """Returns the share of a node that these pods have: of its GPUs, or of CPU or memory; None: unknown."""
    if used := sum(pod.gpus for pod in pods) if node.gpus else 0:
        share = Decimal(used) / node.gpus
    elif pods and o.job.spec is not None and o.job.spec.gpus.count == 0:
        share = resources.total(pod.requests for pod in pods).share_of(node.allocatable)
        beside = sum(1 for pod in others if not pod_ended(pod, o))
        share = share or Decimal(len(pods)) / (len(pods) + beside)
    else:
        return None
    return min(Decimal(1), share).quantize(CENT_FRACTION, rounding=ROUND_UP)


def _taken(others: Sequence[PodView], ended: datetime | None, o: Observed) -> datetime | None:
    """Returns since when another job's pod is, or was, there after the end of this job's pods."""
    if ended is None:
        return None
    stayed = (p for p in others if not pod_ended(p, o) or end_time(p, o) > ended)
    return min((pod.bound for pod in stayed if pod.bound is not None), default=None)


def _fact(
    name: str,
    pods: Sequence[PodView],
    others: Sequence[PodView],
    account: NodeAccount | None,
    next_one: datetime | None,
    status: Status,
    o: Observed,
) -> NodeFacts:
    exists = name in o.nodes and next_one is None
    node = o.nodes[name] if exists else NodeView(name=name, resource_version=0)
    in_order = sorted(pods, key=lambda pod: pod.bound or pod.created)
    first, last = (in_order[0], in_order[-1]) if in_order else (None, None)
    bound = account.bound if account else (first.bound if first and first.bound else o.now)
    if node.created and account is None:
        bound = max(bound, node.created)
    # One that was there before the pod was not booted for it.
    booted = first is not None and node.created is not None and first.created <= node.created <= bound
    record = status.record(first.attempt) if first else None
    ended = _ended(pods, account, o)
    # A node that does not exist was gone at the latest when Kubernetes missed it.
    missed = (p.disrupted for p in pods if p.disrupted and p.disruption.startswith(NODE_MISSED))
    gone = min(missed, default=o.now.replace(microsecond=0))
    return NodeFacts(
        name=name,
        created=node.created or (account.created if account else None),
        instance_type=node.instance_type,
        zone=node.zone,
        capacity_type=node.found.capacity_type or (record.capacity_type if record else ""),
        start=node.created if booted and node.created else bound,
        bound=bound,
        ended=ended,
        last_bound=last.bound if last and last.bound else bound,
        share=_share([p for p in pods if last and p.attempt == last.attempt], others, node, o),
        first_attempt=first.attempt if first else account.attempt if account else 0,
        attempt=last.attempt if last else account.attempt if account else 0,
        pods=len(pods),
        gone=None if exists else min(gone, next_one or o.now),
        taken=_taken(others, ended, o),
    )


def _ended(pods: Sequence[PodView], account: NodeAccount | None, o: Observed) -> datetime | None:
    """Returns when the last of the pods ended; None while one runs."""
    if any(not pod_ended(pod, o) for pod in pods):
        return None
    if account is not None and (ended := account.ended) is not None:
        # A pod that came after the account's end may have ended unseen.
        used_again = any(p.attempt > account.attempt or (p.bound or ended) > ended for p in pods)
        if not used_again:
            return ended  # once; a pod that is lost with its node may have no time of its own
    return max((end_time(pod, o) for pod in pods), default=o.now.replace(microsecond=0))


# --- sums -----------------------------------------------------------------------------------------------
def accounted(
    ledger: Ledger,
    facts: Iterable[NodeFacts],
    prices: PriceList,
    now: datetime,
    *,
    since: datetime | None = None,
) -> Ledger:
    """Returns the ledger up to `now`.

    Args:
        ledger: What is in it already.
        facts: Of every node that has an account, and of new ones.
        prices: The price list.
        now: Up to when.
        since: A node without an account is paid for from then on: what it cost before is in the sums.
    """
    cost = cache(prices.cost)  # the nodes of a gang have the same prices at the same time
    known, kept = _accounts(ledger), list[tuple[NodeAccount, int]]()
    sums = {attempt.number: attempt.sums for attempt in ledger.attempts}
    for fact in facts:
        before = _account(known, fact) or _opened(fact, since)
        periods = list(_periods(before, fact, cost, now))
        for attempt, more, _ in periods:
            sums[attempt] = sums.get(attempt, CostSums()) + more
        node = periods[-1][2]
        if fact.pods or not node.closed:
            kept.append((node, fact.pods))
    if len(kept) > MOST_NODES:  # those without pods that are idle longest are dropped
        kept = nlargest(MOST_NODES, kept, key=lambda each: each[0].ended or now if not each[1] else now)
    old = sorted(sums)[:-KEPT_ATTEMPTS]
    return Ledger(
        time=now,
        nodes=tuple(node for node, _ in kept),
        attempts=tuple(AttemptCosts(number=n, sums=sums[n]) for n in sorted(sums)[-KEPT_ATTEMPTS:]),
        earlier=sum((sums[number] for number in old), ledger.earlier),
    )


def _opened(fact: NodeFacts, since: datetime | None) -> NodeAccount:
    return NodeAccount(
        name=fact.name,
        start=fact.start,
        bound=fact.bound,
        accounted=max(fact.start, since or fact.start),
        attempt=fact.first_attempt,
        share=fact.share or Decimal(1),
    )


def _updated(node: NodeAccount, fact: NodeFacts) -> NodeAccount:
    running = fact.ended is None and fact.gone is None
    ran = fact.ended is not None and node.ended is not None and fact.ended > node.ended
    if node.closed and (running or ran):  # an hour idle, and then used again
        node = replace(node, closed=False, accounted=max(node.accounted, fact.last_bound))
    # The objects of pods that have ended go one after the other.
    shared = fact.ended is None or fact.attempt != node.attempt
    return replace(
        node,
        created=node.created or fact.created,
        instance_type=fact.instance_type or node.instance_type,
        zone=fact.zone or node.zone,
        capacity_type=fact.capacity_type or node.capacity_type,
        share=fact.share if fact.share and shared else node.share,
        ended=fact.ended,
    )


def _periods(
    before: NodeAccount, fact: NodeFacts, cost: Cost, now: datetime
) -> Iterator[tuple[int, CostSums, NodeAccount]]:
    """Yields the attempt that pays, what it pays in addition, and the account after that, up to `now`.

    Until the job's last pod was bound there, that is the attempt, share and end of the account.
    """
    node = _updated(before, fact)
    if node.closed:
        yield node.attempt, CostSums(), node
        return
    if (fact.attempt, node.share) != (before.attempt, before.share):
        past = replace(node, attempt=before.attempt, share=before.share, ended=before.ended)
        end = _paid_until(past, fact, fact.last_bound)
        yield past.attempt, _until(past, end, cost), past
        accounted_until = max(past.accounted, end, fact.last_bound)
        node = replace(node, attempt=fact.attempt, accounted=accounted_until)
    last = _paid_until(node, fact, now)
    end = last if fact.gone is None else min(last, fact.gone)
    over = fact.gone is not None or last < now
    after = replace(node, accounted=max(node.accounted, end), closed=over)
    yield node.attempt, _until(node, end, cost), after


def _paid_until(node: NodeAccount, fact: NodeFacts, at: datetime) -> datetime:
    """Returns until when the job pays for a node that exists at that time."""
    if node.ended is None:
        return at
    booted = node.created is not None and node.start == node.created
    idle = node.ended + (IDLE_LIMIT if booted else timedelta(0))
    if fact.taken is not None:
        idle = min(idle, max(node.ended, fact.taken))
    return min(at, idle)


def _until(node: NodeAccount, end: datetime, cost: Cost) -> CostSums:
    """Returns what the time from `node.accounted` to `end` costs, divided into boot, use and idle."""
    parts = {"boot": (node.start, node.bound), "use": (node.bound, node.ended or end)}
    if node.ended is not None:
        parts["idle"] = (node.ended, end)
    sums = CostSums()
    for part, (begin, until) in parts.items():
        begin, until = max(begin, node.accounted), min(until, end)
        if begin < until:
            sums += _cost_of(node, part, cost, begin, until)
    return sums


def _cost_of(node: NodeAccount, part: str, cost: Cost, begin: datetime, until: datetime) -> CostSums:
    amount = cost(node.instance_type, node.capacity_type, node.zone, begin, until)
    seconds = (Decimal((until - begin).total_seconds()) * node.share).quantize(MILLISECOND)
    own = {part: _dollars(amount, node), f"{part}_seconds": seconds}
    if part != "use":
        return CostSums(unknown_seconds=amount.unknown_seconds, **own)
    on_demand = cost(node.instance_type, CapacityType.ON_DEMAND, node.zone, begin, until)
    return CostSums(
        unknown_seconds=amount.unknown_seconds,
        on_demand_use=_dollars(on_demand, node),
        on_demand_unknown_seconds=on_demand.unknown_seconds,
        **own,
    )


def _dollars(amount: Amount, node: NodeAccount) -> Decimal:
    return (amount.usd * node.share).quantize(CENT_FRACTION)
