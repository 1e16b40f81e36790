"""Which nodes a new pod is kept off, and when such a rule has outlived its reason. Pure.

Called by plan.py. The rule is a hard one, and it is part of the pod for good.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import Status
from spottrain_operator.names import Cause

FAULT_KEPT: Final = timedelta(hours=24)
"""For which a node whose GPU ended an attempt is not used again by that job."""


def nodes_of(status: Status) -> set[str]:
    """Names of the nodes on which a GPU has failed, by the records of the attempts."""
    return {r.faulty_node for r in status.attempts if r.faulty_node}


def faulty(o: Observed, status: Status) -> set[str]:
    """Host names of nodes with a GPU that has failed: in an attempt of the last day, or as monitors say."""
    recent = (r for r in status.attempts if r.faulty_node and o.now - (r.ended or o.now) < FAULT_KEPT)
    names = {o.nodes[r.faulty_node].hostname if r.faulty_node in o.nodes else r.faulty_node for r in recent}
    return names | {n.hostname for n in o.nodes.values() if n.fault}


def note(o: Observed, pod: PodView) -> str:
    """That a pod without a node is kept off nodes with a failed GPU; "" where it is not."""
    kept = [name for name in pod.avoids if name in faulty(o, o.job.status)]
    return f" (kept off {', '.join(kept)}, where a GPU has failed)" if kept else ""


def doomed(o: Observed, status: Status) -> tuple[str, ...]:
    """Host names of nodes with a notice or a failed GPU, and of those whose pods, still saving, the new one
    is to follow."""
    going = (n for n in o.nodes.values() if n.leaving or (n.notice is not None and n.notice.deadline > o.now))
    names = {n.hostname for n in going} | faulty(o, status)
    if status.gate_until is not None and status.gate_until > o.now:
        saving = (r.node for r in status.attempts if r.cause == Cause.SPOT_NOTICE and r.ended is None)
        names |= {o.nodes[name].hostname if name in o.nodes else name for name in saving if name}
    return tuple(sorted(names))


def may_be_in_vain(pod: PodView) -> bool:
    """No node is found for a pod that is kept off some; one that is pinned waits for another (pins.py)."""
    waits = bool(pod.avoids and pod.unschedulable) and not pod.pinned
    return waits and not pod.node and pod.deleted is None


def free_again(o: Observed, pod: PodView) -> tuple[str, ...]:
    """Of the nodes that the pod is kept off, those that its successor would not be kept off."""
    still = doomed(o, o.job.status)
    usable = {n.hostname for n in o.nodes.values() if n.ready and n.notice is None and not n.leaving}
    return tuple(name for name in pod.avoids if name in usable and name not in still)
