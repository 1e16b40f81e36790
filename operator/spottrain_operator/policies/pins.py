"""Which node each rank of a gang is to come back to, so that only lost nodes are asked for anew. Pure.

Called by plan and observe. A pin is a hard rule, and part of the pod for good: where it can be of no use any
more, the attempt is replaced, uncharged.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spottrain_operator.api import AttemptRecord, Job, Status
from spottrain_operator.model import Observed, PodView
from spottrain_operator.names import Cause

PATIENCE: Final = timedelta(seconds=60)
"""For a pinned pod to be scheduled: its node is there, so what it waits for is another one's to give back."""


UNPINNED: Final = frozenset({Cause.MOVED, Cause.SCHEDULING_TIMEOUT})
"""After these the whole gang looks for nodes anew."""


def nodes_of(job: Job) -> set[str]:
    """Names of the nodes that the next attempt's ranks may be pinned to."""
    return {r.node for record in job.status.attempts[-2:] for r in record.ranks if r.node}


def pins(o: Observed, status: Status) -> dict[int, str]:
    """Host name by rank, of the nodes that survive; for the attempt that `status` names."""
    before = _before(status)
    if o.job.spec is None or o.job.spec.workers == 1 or before is None or before.cause in UNPINNED:
        return {}
    if before.pool != _pool_of(status):
        return {}
    return survivors(o, before)


def survivors(o: Observed, record: AttemptRecord) -> dict[int, str]:
    """Host name by rank, of the nodes of an attempt that can be used on; of ranks that there are still."""
    found = {}
    for rank in record.ranks:
        node = o.nodes.get(rank.node)
        usable = node is not None and node.ready and node.notice is None and not node.leaving
        if node is not None and usable and o.job.spec is not None and rank.rank < o.job.spec.workers:
            found[rank.rank] = node.hostname
    return found


def in_vain(o: Observed, pod: PodView) -> str:
    """Why a pod without a node should not stay pinned, as a sentence; "" where it should."""
    if not pod.pinned or pod.node or pod.deleted is not None or pod.queued:
        return ""
    usable = {n.hostname for n in o.nodes.values() if n.ready and n.notice is None and not n.leaving}
    if pod.pinned not in usable:
        return f"pod {pod.name} was to come back to node {pod.pinned}, which is gone or going"
    queued = o.job.spec is not None and bool(o.job.spec.queue_name)  # it may have waited for admission
    if pod.unschedulable and o.now - pod.created > PATIENCE and not queued:
        return f"pod {pod.name} was to come back to node {pod.pinned}, which has no room: {pod.unschedulable}"
    return ""


def _before(status: Status) -> AttemptRecord | None:
    """The last attempt but the current that was seen to have nodes."""
    return status.record(status.attempt - 1)


def _pool_of(status: Status) -> str:
    record = status.record(status.attempt)
    return record.pool if record is not None else ""
