"""Determines the node to which each rank of a gang returns, so that only lost nodes are replaced. Pure.

A pin is a required node affinity, which cannot be removed from a pod. If it becomes useless, the attempt is
replaced and not charged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Final

from spottrain_operator.api import native_gangs
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, Job, Status
from spottrain_operator.names import Cause, Reason
from spottrain_operator.policies import avoid

PATIENCE: Final = timedelta(seconds=60)
"""Time for a pinned pod to be scheduled: its node exists, so another pod must occupy its resources."""


UNPINNED: Final = frozenset({Cause.MOVED, Cause.SCHEDULING_TIMEOUT})
"""Causes after which no rank is pinned."""


def nodes_of(job: Job) -> set[str]:
    """Returns the names of nodes to which ranks of the current or the next attempt may be pinned."""
    status = job.status
    records = [*_chain(status, status.attempt), *_chain(status, status.attempt - 1)]
    return {r.node for record in records for r in record.ranks if r.node}


def pins(o: Observed, status: Status) -> dict[int, str]:
    """Returns the host name by rank of surviving nodes, for `status`'s attempt."""
    if o.job.spec is None or o.job.spec.workers == 1:
        return {}
    found: dict[int, str] = {}
    homeless: set[int] = set()
    for record in _chain(status, status.attempt - 1):
        if record.cause in UNPINNED or record.pool != _pool_of(status):
            break
        older = {r: host for r, host in survivors(o, record).items() if r not in homeless}
        found = older | found
        if record.reason == Reason.PIN_USELESS:
            homeless |= {rank.rank for rank in record.ranks if not rank.node}
    return found


def survivors(o: Observed, record: AttemptRecord) -> dict[int, str]:
    """Returns the host name by rank of an attempt's usable nodes, for ranks that still exist."""
    found, bad = {}, avoid.faulty(o, o.job.status) | {record.faulty_node}
    for rank in record.ranks:
        node = o.nodes.get(rank.node)
        if node is None or not node.usable or node.hostname in bad or o.job.spec is None:
            continue
        if rank.rank < o.job.spec.workers:
            found[rank.rank] = node.hostname
    return found


def useless(o: Observed, pod: PodView, healthy: Collection[str]) -> str:
    """Returns a sentence about why a pending pod must not stay pinned; "" where it may.

    `healthy` is avoid.healthy's result, which is the same for all pods of a gang.
    """
    if not pod.pinned or pod.node or pod.deleted is not None or pod.queued:
        return ""
    if pod.pinned not in healthy:
        return f"pod {pod.name} was pinned to node {pod.pinned}, which is gone or is leaving"
    alone = o.job.spec is not None and not pod.grouped and native_gangs.one_by_one(o.job.spec)
    if pod.unschedulable and o.now - pod.created > PATIENCE and alone:  # otherwise it waits for the gang
        return f"pod {pod.name} was pinned to node {pod.pinned}, which has no room: {pod.unschedulable}"
    return ""


def _chain(status: Status, number: int) -> Iterator[AttemptRecord]:
    """Yields an attempt and its predecessors while each was replaced, maybe before its ranks had nodes."""
    record = status.record(number)
    while record is not None:
        yield record
        record = status.record(record.number - 1) if record.cause == Cause.REPLACED else None


def _pool_of(status: Status) -> str:
    record = status.current
    return record.pool if record is not None else ""
