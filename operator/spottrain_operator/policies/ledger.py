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

from collections.abc import Callable, Iterable, Iterator, Sequence
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

Cost = Callable[[str, str, str, datetime, datetime], Amount]
"""`PriceList.cost`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A node that has, or had, pods of the job."""

    before: NodeAccount
    """Its account so far; a new one where it had none."""
    account: NodeAccount
    """The same with what is observed now, for the attempt whose pod was bound there last."""
    last_bound: datetime
    """When that pod was bound."""
    pods: int
    """How many of the job's pods there still exist as objects, ended or not."""
    until: datetime | None
    """When the node was deleted, or when another job's pod came after the end of this job's."""

    @property
    def is_news(self) -> bool:
        """Whether it is new, gone, idle or used again (by any job)."""
        over = self.until is not None if not self.account.closed else not self.pods
        return over or self.account != self.before


def updated(o: Observed, status: Status, *, due: bool) -> Ledger:
    """Returns the ledger with what the job's nodes have cost up to now.

    It is the old one where neither the sums are `due` nor a node is new, gone, idle or used again.
    """
    old, seen = o.books.ledger, list(_all_seen(status, o))
    if not seen or not (due or any(each.is_news for each in seen)):
        return old  # most reconciles: no sum is computed
    new = accounted(old, seen, o.prices, o.now.replace(microsecond=0))
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


# --- what is observed of the nodes ------------------------------------------------------------------------
def _all_seen(status: Status, o: Observed) -> Iterator[Seen]:
    """Yields each node that has pods of the job, or that has an account."""
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
            yield _seen(name, own, others.get(name, []), account, next_one, status, o)


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
    bounds = [pod.bound for pod in stayed if pod.bound is not None]
    return max(ended, min(bounds)) if bounds else None


def _seen(
    name: str,
    pods: Sequence[PodView],
    others: Sequence[PodView],
    known: NodeAccount | None,
    next_one: datetime | None,
    status: Status,
    o: Observed,
) -> Seen:
    exists = name in o.nodes and next_one is None
    node = o.nodes[name] if exists else NodeView(name=name, resource_version=0)
    in_order = sorted(pods, key=lambda pod: pod.bound or pod.created)
    last = in_order[-1] if in_order else None
    share = _share([p for p in pods if last and p.attempt == last.attempt], others, node, o)
    before = known or _opened(node, in_order[0], share, o)
    record = status.record(in_order[0].attempt) if in_order else None
    attempt = last.attempt if last else before.attempt
    last_bound = (last.bound if last else None) or before.bound
    ended = _ended(pods, known, o)
    # One that was an hour idle may be used again.
    ran = ended is not None and before.ended is not None and ended > before.ended
    closed = before.closed and not ran and (ended is not None or not exists)
    # The objects of pods that have ended go one after the other.
    shared = ended is None or attempt != before.attempt
    account = replace(
        before,
        created=before.created or node.created,
        instance_type=node.instance_type or before.instance_type,
        zone=node.zone or before.zone,
        capacity_type=node.found.capacity_type
        or (record.capacity_type if record else "")
        or before.capacity_type,
        share=share if share and shared else before.share,
        ended=ended,
        attempt=before.attempt if closed else attempt,
        closed=closed,
        accounted=max(before.accounted, last_bound) if before.closed and not closed else before.accounted,
    )
    # A node that does not exist was gone at the latest when Kubernetes missed it.
    missed = (p.disrupted for p in pods if p.disrupted and p.disruption.startswith(NODE_MISSED))
    gone = min(min(missed, default=o.now.replace(microsecond=0)), next_one or o.now)
    ends = (None if exists else gone, _taken(others, ended, o))
    until = min((end for end in ends if end is not None), default=None)
    return Seen(before=before, account=account, last_bound=last_bound, pods=len(pods), until=until)


def _opened(node: NodeView, first: PodView, share: Decimal | None, o: Observed) -> NodeAccount:
    """Returns the account of a node that has none: paid for from its creation, if that was for the pod."""
    bound = max(first.bound or o.now, node.created or first.bound or o.now)
    # One that was there before the pod was not booted for it.
    booted = node.created is not None and first.created <= node.created
    start = node.created if booted and node.created else bound
    return NodeAccount(
        name=node.name,
        start=start,
        bound=bound,
        accounted=max(start, o.books.lost or start),  # what it cost before is in the sums
        attempt=first.attempt,
        share=share or Decimal(1),
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
def accounted(ledger: Ledger, seen: Iterable[Seen], prices: PriceList, now: datetime) -> Ledger:
    """Returns the ledger up to `now`. `seen`: every node that has an account, and new ones."""
    cost = cache(prices.cost)  # the nodes of a gang have the same prices at the same time
    kept = list[tuple[NodeAccount, int]]()
    sums = {attempt.number: attempt.sums for attempt in ledger.attempts}
    for each in seen:
        node = each.account
        for attempt, more, after in _periods(each, cost, now):
            sums[attempt] = sums.get(attempt, CostSums()) + more
            node = after
        if each.pods or not node.closed:
            kept.append((node, each.pods))
    if len(kept) > MOST_NODES:  # those without pods that are idle longest are dropped
        kept = nlargest(MOST_NODES, kept, key=lambda each: each[0].ended or now if not each[1] else now)
    old = sorted(sums)[:-KEPT_ATTEMPTS]
    return Ledger(
        time=now,
        nodes=tuple(node for node, _ in kept),
        attempts=tuple(AttemptCosts(number=n, sums=sums[n]) for n in sorted(sums)[-KEPT_ATTEMPTS:]),
        earlier=sum((sums[number] for number in old), ledger.earlier),
    )


def _periods(each: Seen, cost: Cost, now: datetime) -> Iterator[tuple[int, CostSums, NodeAccount]]:
    """Yields the attempt that pays, what it pays in addition, and the account after that, up to `now`.

    Until the job's last pod was bound there, that is the attempt, share and end of the account.
    """
    before, node = each.before, each.account
    if node.closed:
        return
    if (node.attempt, node.share) != (before.attempt, before.share):
        past = replace(node, attempt=before.attempt, share=before.share, ended=before.ended)
        end = _paid_until(past, each.last_bound)
        yield past.attempt, _until(past, end, cost), past
        node = replace(node, accounted=max(past.accounted, end, each.last_bound))
    last = _paid_until(node, now)
    end = last if each.until is None else min(last, each.until)
    over = each.until is not None or last < now
    after = replace(node, accounted=max(node.accounted, end), closed=over)
    yield node.attempt, _until(node, end, cost), after


def _paid_until(node: NodeAccount, at: datetime) -> datetime:
    """Returns until when the job pays for a node that exists at that time and is nobody else's."""
    if node.ended is None:
        return at
    booted = node.created is not None and node.start == node.created
    return min(at, node.ended + (IDLE_LIMIT if booted else timedelta(0)))


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
