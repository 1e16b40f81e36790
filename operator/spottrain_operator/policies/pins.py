"""Which node each rank of a gang is to come back to, so that only lost nodes are asked for anew. Pure.

Called by plan and observe. A pin is a hard rule, and part of the pod for good: where it can be of no use any
more, the attempt is replaced, uncharged.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from spottrain_operator.api import native_gangs
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, Job, Status
from spottrain_operator.names import Cause
from spottrain_operator.policies import avoid

PATIENCE: Final = timedelta(seconds=60)
"""For a pinned pod to be scheduled: its node is there, so what it waits for is another one's to give back."""


COMING_BACK: Final = "was to come back to node"
"""In the evidence of an attempt that was replaced because of a pin."""
UNPINNED: Final = frozenset({Cause.MOVED, Cause.SCHEDULING_TIMEOUT})
"""After these the whole gang looks for nodes anew."""


def nodes_of(job: Job) -> set[str]:
    """Names of the nodes that the current or the next attempt's ranks may be pinned to."""
    status = job.status
    records = [*_chain(status, status.attempt), *_chain(status, status.attempt - 1)]
    return {r.node for record in records for r in record.ranks if r.node}


def pins(o: Observed, status: Status) -> dict[int, str]:
    """Host name by rank, of the nodes that survive; for the attempt that `status` names."""
    if o.job.spec is None or o.job.spec.workers == 1:
        return {}
    found: dict[int, str] = {}
    homeless: set[int] = set()
    for record in _chain(status, status.attempt - 1):
        if record.cause in UNPINNED or record.pool != _pool_of(status):
            break
        older = {r: host for r, host in survivors(o, record).items() if r not in homeless}
        found = older | found
        if COMING_BACK in record.evidence:  # what they were pinned to was of no use
            homeless |= {rank.rank for rank in record.ranks if not rank.node}
    return found


def survivors(o: Observed, record: AttemptRecord) -> dict[int, str]:
    """Host name by rank, of the nodes of an attempt that can be used on; of ranks that there are still."""
    found, bad = {}, avoid.faulty(o, o.job.status) | {record.faulty_node}
    for rank in record.ranks:
        node = o.nodes.get(rank.node)
        usable = node is not None and node.ready and node.notice is None and not node.leaving
        usable = usable and node is not None and node.hostname not in bad
        if node is not None and usable and o.job.spec is not None and rank.rank < o.job.spec.workers:
            found[rank.rank] = node.hostname
    return found


def in_vain(o: Observed, pod: PodView) -> str:
    """Why a pod without a node should not stay pinned, as a sentence; "" where it should."""
    if not pod.pinned or pod.node or pod.deleted is not None or pod.queued:
        return ""
    usable = {n.hostname for n in o.nodes.values() if n.ready and n.notice is None and not n.leaving}
    usable -= avoid.faulty(o, o.job.status)
    if pod.pinned not in usable:
        return f"pod {pod.name} {COMING_BACK} {pod.pinned}, which is gone or going"
    alone = o.job.spec is not None and not pod.grouped and native_gangs.one_by_one(o.job.spec)
    if pod.unschedulable and o.now - pod.created > PATIENCE and alone:  # others wait for all of the gang
        return f"pod {pod.name} {COMING_BACK} {pod.pinned}, which has no room: {pod.unschedulable}"
    return ""


def _chain(status: Status, number: int) -> Iterator[AttemptRecord]:
    """That attempt, and those before it while each was replaced, maybe before its ranks had nodes."""
    record = status.record(number)
    while record is not None:
        yield record
        record = status.record(record.number - 1) if record.cause == Cause.REPLACED else None


def _pool_of(status: Status) -> str:
    record = status.record(status.attempt)
    return record.pool if record is not None else ""
