"""Which nodes a new pod must avoid, and to which the ranks of a gang return. Pure.

To avoid nodes is a required node affinity, which cannot be removed from a pod: if it becomes useless, the
attempt is replaced and not charged. To return is a preferred one: each rank prefers the node that it had, so
a gang asks for as many new nodes as it has lost, and no pod waits for a node that another one occupies.

A gang that must be in one zone requires the zone of the nodes that it returns to. By the affinity between its
pods alone, the rank that is scheduled first could choose another zone, and all would need new nodes.

Karpenter adds no node for a pod whose required node affinity names hosts, not even to exclude them
(tests/karpenter). With Karpenter, taints and a preferred affinity keep pods away from nodes that end soon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Final

from spottrain_operator.api.bookkeeping import Bookkeeping
from spottrain_operator.api.node_pools import PROVISIONERS, ChosenPool
from spottrain_operator.api.observed import NodeView, Observed, Placement, PodView
from spottrain_operator.api.training_job import AttemptRecord, Status
from spottrain_operator.names import HOSTNAME_LABEL, Cause, Platform, Reason
from spottrain_operator.policies import gang

FAULT_KEPT: Final = timedelta(hours=24)
"""How long a job avoids a node whose GPU ended one of its attempts."""
MOST_AVOIDED: Final = 100
"""Maximum number of nodes that a pod avoids: each is written into the pod twice, and the scheduler compares
it with each node. On a node beyond them a pod gets that node's notice, which is no failure of the job."""
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
MOVED_ON: Final = frozenset({Cause.MOVED, Cause.SCHEDULING_TIMEOUT})
"""Causes after which no rank returns to its node."""
KARPENTER: Final = "karpenter."
"""Prefix of the labels of Karpenter and its providers."""


# --- nodes to avoid -----------------------------------------------------------------------------------
def faulty(o: Observed, status: Status) -> set[str]:
    """Returns host names of nodes with a failed GPU, by an attempt of the last day or a health monitor."""
    recent = (r for r in status.attempts if r.faulty_node and o.now - (r.ended or o.now) < FAULT_KEPT)
    names = {o.nodes[r.faulty_node].hostname if r.faulty_node in o.nodes else r.faulty_node for r in recent}
    return names | {n.hostname for n in o.nodes.values() if n.fault}


def to_avoid(o: Observed, status: Status) -> tuple[str, ...]:
    """Returns host names of nodes with a failed GPU, of nodes where the predecessor still saves, and of nodes
    with a notice: MOST_AVOIDED at most, in this order."""
    saved: Iterable[str] = ()
    if status.gate_until is not None:
        saving = (r.node for r in status.attempts if r.cause == Cause.SPOT_NOTICE and r.ended is None)
        saved = (o.nodes[name].hostname if name in o.nodes else name for name in saving if name)
    ending = (
        n
        for n in o.nodes.values()
        if n.leaving or (n.notice is not None and (n.notice.assumed or n.notice.deadline > o.now))
    )
    hosts = (*sorted(faulty(o, status)), *saved, *(n.hostname for n in sorted(ending, key=avoid_order)))
    return tuple(sorted(tuple(dict.fromkeys(hosts))[:MOST_AVOIDED]))


def avoid_order(node: NodeView) -> tuple[bool, bool, float, str]:
    """Orders nodes by how much it matters to avoid them.

    Nothing else keeps pods off a faulty GPU. Nodes that are out of service mostly have a taint. Of those with
    a notice the last ones are there longest.
    """
    deadline = node.notice.deadline.timestamp() if node.notice is not None else 0.0
    return not node.fault, bool(node.leaving), -deadline, node.name


def is_kept_off(pod: PodView) -> bool:
    """Returns whether a pod that avoids nodes is unschedulable."""
    return bool(pod.avoids and pod.unschedulable) and not pod.node and pod.deleted is None


def allowed(o: Observed) -> set[str]:
    """Returns host names of usable nodes that a new pod would not avoid."""
    return {n.hostname for n in o.nodes.values() if n.usable} - set(to_avoid(o, o.job.status))


# --- nodes to return to -------------------------------------------------------------------------------
def known_nodes(status: Status, books: Bookkeeping) -> set[str]:
    """Returns the names of nodes of the current attempt and of the one before, and of those that failed."""
    records = (r for r in (status.current, status.previous) if r is not None)
    failed = (r.faulty_node for r in status.attempts)
    return {name for name in (*failed, *(n for r in records for n in books.nodes_of(r.number))) if name}


def predecessor(o: Observed, status: Status) -> AttemptRecord | None:
    """Returns the attempt to whose nodes the ranks of `status`'s attempt return; None if to none."""
    record, current = status.previous, status.current
    if gang.spec_size(o) == 1 or record is None or current is None:
        return None
    # After its queue has stopped it, or a suspension, a job may be admitted for other nodes.
    readmitted = record.reason == Reason.EVICTED or (o.job.queue and record.cause == Cause.SUSPENDED)
    return None if record.cause in MOVED_ON or readmitted or record.pool != current.pool else record


def survivors(o: Observed, record: AttemptRecord) -> dict[int, NodeView]:
    """Returns the node by rank of an attempt's usable nodes, for ranks that still exist."""
    found, bad = {}, faulty(o, o.job.status) | {record.faulty_node}
    for rank, name in enumerate(o.books.nodes_of(record.number)[: gang.spec_size(o)]):
        node = o.nodes.get(name)
        if node is not None and node.usable and node.hostname not in bad:
            found[rank] = node
    return found


def previous_nodes(o: Observed, status: Status) -> dict[int, NodeView]:
    """Returns the node by rank to which the ranks of `status`'s attempt return."""
    record = predecessor(o, status)
    return survivors(o, record) if record is not None else {}


def zone_of(o: Observed, status: Status) -> str:
    """Returns the zone that a gang of one zone requires: its pods', else that of most previous nodes."""
    if not gang.in_one_zone(o):
        return ""
    begun = [o.nodes[p.node] for p in o.pods if p.attempt == status.attempt and p.node in o.nodes]
    zones = Counter(node.zone for node in begun or previous_nodes(o, status).values() if node.zone)
    return max(sorted(zones), key=zones.__getitem__, default="")


def zone_note(o: Observed, pod: PodView) -> str:
    """Returns a note that a pending pod must be in its gang's zone, which the scheduler does not report."""
    zone = zone_of(o, o.job.status)
    if not zone or "affinity" not in pod.unschedulable:
        return ""
    return (
        f" (capacity.sameZone keeps all {gang.size(o)} pods in zone {zone}: set it to false, or select a "
        "zone that has room for all)"
    )


# --- pods to create -----------------------------------------------------------------------------------
def placements(o: Observed, status: Status, pool: ChosenPool, grouped: bool = False) -> Iterator[Placement]:
    """Yields the ranks to create now. `grouped`: whether they have a PodGroup."""
    zone, avoided, soft = zone_of(o, status), to_avoid(o, status), by_karpenter(o, pool)
    previous = previous_nodes(o, status)
    for rank in gang.missing(o, status):
        node = previous.get(rank)
        yield Placement(
            rank=rank,
            avoid=avoided,
            preferred_node=node.hostname if node is not None else "",
            zoned=o.zoned,
            zone=zone,
            soft=soft,
            grouped=grouped,
        )


def by_karpenter(o: Observed, pool: ChosenPool) -> bool:
    """Returns whether Karpenter may add the nodes: it provisioned some, or the pods require its labels.

    It adds none for a template that names its hosts.
    """
    assert o.job.spec is not None
    template = o.job.spec.pod
    affinity = ((template.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED) or {}
    rules = [
        rule
        for term in affinity.get("nodeSelectorTerms") or ()
        for kind in ("matchExpressions", "matchFields")
        for rule in term.get(kind) or ()
    ]
    asked = {str(rule.get("key")) for rule in (*rules, *pool.rules)}
    asked |= {*pool.selector, *(template.get("nodeSelector") or {})}
    if pool.platform in PROVISIONERS - {Platform.KARPENTER} or asked & {HOSTNAME_LABEL, "metadata.name"}:
        return False  # other autoscalers handle a required rule well
    return (
        o.karpenter or pool.platform is Platform.KARPENTER or any(key.startswith(KARPENTER) for key in asked)
    )
