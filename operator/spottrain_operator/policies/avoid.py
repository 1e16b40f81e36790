"""Determines which nodes a new pod must avoid, and when that rule no longer applies. Pure.

The rule is a required node affinity, which cannot be removed from a pod.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import Status
from spottrain_operator.names import Cause

FAULT_KEPT: Final = timedelta(hours=24)
"""How long a job avoids a node whose GPU ended one of its attempts."""


def nodes_of(status: Status) -> set[str]:
    """Returns the names of nodes with a failed GPU, from the attempt records."""
    return {r.faulty_node for r in status.attempts if r.faulty_node}


def faulty(o: Observed, status: Status) -> set[str]:
    """Returns host names of nodes with a failed GPU, by an attempt of the last day or a health monitor."""
    recent = (r for r in status.attempts if r.faulty_node and o.now - (r.ended or o.now) < FAULT_KEPT)
    names = {o.nodes[r.faulty_node].hostname if r.faulty_node in o.nodes else r.faulty_node for r in recent}
    return names | {n.hostname for n in o.nodes.values() if n.fault}


def note(o: Observed, pod: PodView) -> str:
    """Returns a note that a pending pod avoids nodes with a failed GPU; "" where it does not."""
    failed = faulty(o, o.job.status)
    kept = [name for name in pod.avoids if name in failed]
    return f" (avoids {', '.join(kept)}, where a GPU has failed)" if kept else ""


def to_avoid(o: Observed, status: Status) -> tuple[str, ...]:
    """Returns host names of nodes with a notice or a failed GPU, and of nodes where the predecessor still
    saves."""
    going = (n for n in o.nodes.values() if n.leaving or (n.notice is not None and n.notice.deadline > o.now))
    names = {n.hostname for n in going} | faulty(o, status)
    if status.gate_until is not None and status.gate_until > o.now:
        saving = (r.node for r in status.attempts if r.cause == Cause.SPOT_NOTICE and r.ended is None)
        names |= {o.nodes[name].hostname if name in o.nodes else name for name in saving if name}
    return tuple(sorted(names))


def is_unschedulable(pod: PodView) -> bool:
    """Returns whether a pod that avoids nodes is unschedulable; pinned pods are handled in pins.py."""
    waits = bool(pod.avoids and pod.unschedulable) and not pod.pinned
    return waits and not pod.node and pod.deleted is None


def allowed(o: Observed) -> set[str]:
    """Returns host names of usable nodes that a new pod would not avoid."""
    return usable(o) - set(to_avoid(o, o.job.status))


def healthy(o: Observed) -> set[str]:
    """Returns host names of usable nodes without a failed GPU."""
    return usable(o) - faulty(o, o.job.status)


def usable(o: Observed) -> set[str]:
    """Returns host names of usable nodes."""
    return {n.hostname for n in o.nodes.values() if n.usable}
