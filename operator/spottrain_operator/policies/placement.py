"""Which nodes a new pod must avoid, to which it returns, and which pods are created when. Pure.

Both rules are required node affinities, which cannot be removed from a pod. If one becomes useless, the
attempt is replaced and not charged. A pin returns each rank of a gang to its node, so that only lost nodes
are replaced.

A gang that must be in one zone has pins of one zone only, and its other ranks require that zone. By the
affinity between its pods alone, a rank without a pin that is scheduled first may choose another zone, and
the pinned ranks could then never be scheduled.

Karpenter adds no node for a pod whose required node affinity names hosts, not even to exclude them
(tests/karpenter). With Karpenter, only pinned pods therefore have such a rule, as they need no new node.
Taints and a preferred affinity keep the other pods away from nodes that end soon. Those pods are created
after the pinned ones have their nodes, because they could occupy these. So it is where more than MOST_AVOIDED
ranks are pinned: to keep the others off that many nodes by name would make each of their pods large. It is
the same where a node of a pinned rank has GPUs for another one: it may be the last in the zone with room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Final

from spottrain_operator.api import native_gangs
from spottrain_operator.api.native_gangs import GangApi
from spottrain_operator.api.node_pools import ChosenPool, Preset
from spottrain_operator.api.observed import NodeView, Observed, Placement, PodView
from spottrain_operator.api.training_job import AttemptRecord, Job, Status, TrainingJobSpec
from spottrain_operator.names import HOSTNAME_LABEL, Cause, Reason
from spottrain_operator.policies import gang

FAULT_KEPT: Final = timedelta(hours=24)
"""How long a job avoids a node whose GPU ended one of its attempts."""
PATIENCE: Final = timedelta(seconds=60)
"""Time for a pinned pod to be scheduled: its node exists, so another pod must occupy its resources."""
MOST_AVOIDED: Final = 100
"""Maximum number of nodes that a pod avoids: each is written into the pod twice, and the scheduler compares
it with each node. On a node beyond them a pod gets that node's notice, which is no failure of the job."""
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
NO_LABELS: Final = "node affinity/selector"
"""In the scheduler's message about nodes that lack a label."""
UNPINNED: Final = frozenset({Cause.MOVED, Cause.SCHEDULING_TIMEOUT})
"""Causes after which no rank is pinned."""
KARPENTER: Final = "karpenter."
"""Prefix of the labels of Karpenter and its providers."""


# --- nodes to avoid -----------------------------------------------------------------------------------
def faulty_nodes(status: Status) -> set[str]:
    """Returns the names of nodes with a failed GPU, from the attempt records."""
    return {r.faulty_node for r in status.attempts if r.faulty_node}


def faulty(o: Observed, status: Status) -> set[str]:
    """Returns host names of nodes with a failed GPU, by an attempt of the last day or a health monitor."""
    recent = (r for r in status.attempts if r.faulty_node and o.now - (r.ended or o.now) < FAULT_KEPT)
    names = {o.nodes[r.faulty_node].hostname if r.faulty_node in o.nodes else r.faulty_node for r in recent}
    return names | {n.hostname for n in o.nodes.values() if n.fault}


def avoid_note(o: Observed, pod: PodView) -> str:
    """Returns a note that a pending pod avoids nodes with a failed GPU; "" where it does not."""
    failed = faulty(o, o.job.status)
    kept = [name for name in pod.avoids if name in failed]
    return f" (avoids {', '.join(kept)}, where a GPU has failed)" if kept else ""


def to_avoid(o: Observed, status: Status) -> tuple[str, ...]:
    """Returns host names of nodes with a failed GPU, of nodes where the predecessor still saves, and of nodes
    with a notice: MOST_AVOIDED at most, in this order."""
    saved: Iterable[str] = ()
    if status.gate_until is not None and status.gate_until > o.now:
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
    """Returns whether a pod that avoids nodes is unschedulable; pinned pods are handled by `useless_pin`."""
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


# --- nodes to return to -------------------------------------------------------------------------------
def pinned_nodes(job: Job) -> set[str]:
    """Returns the names of nodes to which ranks of the current or the next attempt may be pinned."""
    status = job.status
    records = [*_chain(status, status.attempt), *_chain(status, status.attempt - 1)]
    return {r.node for record in records for r in record.ranks if r.node}


def pins(o: Observed, status: Status) -> dict[int, str]:
    """Returns the host name by rank of surviving nodes, for `status`'s attempt."""
    if o.job.spec is None or o.job.spec.workers == 1:
        return {}
    pool = status.current.pool if status.current is not None else ""
    found: dict[int, str] = {}
    homeless: set[int] = set()
    for record in _chain(status, status.attempt - 1):
        # After its queue has stopped it, or a suspension, a job may be admitted for other nodes.
        readmitted = record.reason == Reason.EVICTED or (o.job.queue and record.cause == Cause.SUSPENDED)
        if record.cause in UNPINNED or readmitted or record.pool != pool:
            break
        older = {r: host for r, host in survivors(o, record).items() if r not in homeless}
        found = older | found
        if record.reason == Reason.PIN_USELESS:
            homeless |= {rank.rank for rank in record.ranks if not rank.node}
    return _of_one_zone(o, status, found) if gang.in_one_zone(o) else found


def _of_one_zone(o: Observed, status: Status, found: Mapping[int, str]) -> dict[int, str]:
    """Returns the pins of one zone: that of the attempt's pods, or else that of most pins."""
    zones = {n.hostname: n.zone for n in o.nodes.values()}
    names = {n.name: n.hostname for n in o.nodes.values()}
    begun = [names.get(p.node, p.pinned) for p in o.pods if p.attempt == status.attempt]
    for hosts in (begun, found.values()):
        counts = Counter(zone for host in hosts if (zone := zones.get(host, "")))
        if counts:
            zone = max(sorted(counts), key=counts.__getitem__)
            return {rank: host for rank, host in found.items() if zones[host] == zone}
    return {}  # the gang cannot be on nodes without a zone


def survivors(o: Observed, record: AttemptRecord) -> dict[int, str]:
    """Returns the host name by rank of an attempt's usable nodes, for ranks that still exist."""
    found, bad = {}, faulty(o, o.job.status) | {record.faulty_node}
    for rank in record.ranks:
        node = o.nodes.get(rank.node)
        if node is None or not node.usable or node.hostname in bad or o.job.spec is None:
            continue
        if rank.rank < o.job.spec.workers:
            found[rank.rank] = node.hostname
    return found


def useless_pin(o: Observed, pod: PodView, hosts: Collection[str]) -> str:
    """Returns a sentence about why a pending pod must not stay pinned; "" where it may.

    `hosts`: the result of `healthy`, which is the same for all pods of a gang.
    """
    if not pod.pinned or pod.node or pod.deleted is not None or pod.queued:
        return ""
    if pod.pinned not in hosts:
        return f"pod {pod.name} was pinned to node {pod.pinned}, which is gone, leaving or cordoned"
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


# --- pods to create -----------------------------------------------------------------------------------
def placements(
    o: Observed, status: Status, pool: ChosenPool, pinned: Mapping[int, str], api: GangApi | None = None
) -> Iterator[Placement]:
    """Yields the ranks to create now. `pinned`: host name by rank. `api`: version of their group."""
    soft = by_karpenter(o, pool)
    alone = api is None and o.job.spec is not None and native_gangs.one_by_one(o.job.spec)
    in_turn = alone and (soft or len(pinned) > MOST_AVOIDED or _may_hold_more(o, pinned))
    avoided, waits = to_avoid(o, status), in_turn and _waited_for(o, status, pinned)
    zone = _zone_of(o, pinned) if gang.in_one_zone(o) else ""
    for rank in gang.missing(o, status):
        pin = pinned.get(rank, "")
        if waits and not pin:
            continue
        leave = () if pin or in_turn else tuple(pinned.values())
        yield Placement(
            rank=rank,
            avoid=avoided,
            pin=pin,
            leave=leave,
            zoned=o.zoned,
            zone="" if pin else zone,
            soft=soft and not pin,
            gang_api=api,
        )


def by_karpenter(o: Observed, pool: ChosenPool) -> bool:
    """Returns whether Karpenter may add the nodes: it provisioned some, or the pods require its labels.

    It adds none for a template that names its hosts.
    """
    assert o.job.spec is not None
    asked = {*pool.selector, *(rule["key"] for rule in pool.rules), *asked_labels(o.job.spec)}
    if pool.preset not in (None, Preset.KARPENTER) or asked & {HOSTNAME_LABEL, "metadata.name"}:
        return False  # other autoscalers handle a required rule well
    return o.karpenter or pool.preset is Preset.KARPENTER or any(key.startswith(KARPENTER) for key in asked)


def asked_labels(spec: TrainingJobSpec) -> dict[str, str | None]:
    """Returns the node labels, and fields, that the template requires; None where its affinity says how."""
    pod = spec.template["spec"]
    affinity = ((pod.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED) or {}
    rules = [
        rule
        for term in affinity.get("nodeSelectorTerms") or ()
        for kind in ("matchExpressions", "matchFields")
        for rule in term.get(kind) or ()
    ]
    return {str(rule.get("key")): None for rule in rules} | (pod.get("nodeSelector") or {})


def asked_note(o: Observed, pool: ChosenPool, pod: PodView) -> str:
    """Returns a note about which labels a pending pod asks for, which the scheduler does not say."""
    if o.job.spec is None or NO_LABELS not in pod.unschedulable:
        return ""
    labels = asked_labels(o.job.spec) | dict(pool.selector)
    words = [f"{key} by its affinity" if value is None else f"{key}={value}" for key, value in labels.items()]
    return f" (the pod asks for nodes with {', '.join(words)})" if words else ""


def _may_hold_more(o: Observed, pinned: Mapping[int, str]) -> bool:
    """Returns whether a node of pinned ranks has GPUs for another rank too."""
    gpus = (o.job.spec.gpus.count if o.job.spec is not None else None) or 0
    ranks = Counter(pinned.values())
    nodes = [n for n in o.nodes.values() if n.hostname in ranks]
    return gpus > 0 and any(n.gpus >= gpus * (ranks[n.hostname] + 1) for n in nodes)


def _zone_of(o: Observed, pinned: Mapping[int, str]) -> str:
    """Returns the zone of the pinned ranks; "" where none is pinned."""
    hosts = set(pinned.values())
    return next((n.zone for n in o.nodes.values() if n.hostname in hosts), "")


def _waited_for(o: Observed, status: Status, pinned: Mapping[int, str]) -> bool:
    """Returns whether a pinned rank has no node yet."""
    placed = {p.rank for p in o.pods if p.attempt == status.attempt and p.node}
    return any(rank not in placed for rank in pinned)
