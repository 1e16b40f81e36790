"""Labels and taints of a pool's nodes: the manifest's, on top of the platform's. Pure.

Where the platform is `Auto`, both are detected from the cluster's nodes and from Karpenter's NodePools.
Sources: the documentation of EKS, Karpenter, GKE and AKS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from spottrain_operator.names import GPU_RESOURCE, NOTICE_WINDOW, ON_DEMAND_WINDOW, Platform


class CapacityType(StrEnum):
    SPOT = "Spot"
    ON_DEMAND = "OnDemand"
    RESERVED = "Reserved"
    SPOT_FIRST = "SpotFirst"
    """Of a job only: spot, and on-demand for a while where spot is unavailable or reclaimed too often."""
    CHEAPEST = "Cheapest"
    """Of a job only: spot or on-demand, whichever is expected to cost less and to be done in time."""

    @property
    def mixes(self) -> bool:
        """Whether a job of this type uses spot and on-demand, so that each pool has its own type."""
        return self in (CapacityType.SPOT_FIRST, CapacityType.CHEAPEST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """A group of nodes, and how pods are scheduled onto it."""

    name: str
    platform: Platform | None = None
    type: CapacityType = CapacityType.SPOT
    notice_seconds: int | None = None
    """Seconds of grace after a notice; None: what is usual on the platform."""
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Any, ...] = ()

    @property
    def cloud(self) -> Platform | None:
        """The cloud, Auto if it must be detected. None: a pool of the chart, given by its name."""
        return _CLOUD.get(self.platform, self.platform) if self.platform is not None else None

    @property
    def finds_labels(self) -> bool:
        """Whether the labels of its nodes must be detected."""
        return self.platform is Platform.AUTO and not self._says_type

    @property
    def _says_type(self) -> bool:
        return any(key in CAPACITY_KEYS for key in self.node_selector)

    @property
    def _labels(self) -> list[Label]:
        """The label that the platform gives to nodes of this type, if it has one."""
        labels = _LABELS.get(self.platform, {})
        return [labels[self.type]] if self.type in labels else []

    @property
    def selector(self) -> dict[str, str]:
        return dict([] if self._says_type else self._labels) | self.node_selector

    @property
    def tolerated(self) -> tuple[Any, ...]:
        """Tolerations. With detected labels they cover every cloud: a node group may have no node yet."""
        tainted = _TAINTED & (CAPACITY_LABELS[self.type] if self.finds_labels else {*self._labels})
        taints = [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}
            for key, value in sorted(tainted)
        ]
        known = self.platform in PROVISIONERS or self.finds_labels
        gpu = [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}] if known else []
        return (*gpu, *taints, *self.tolerations)


LEAST_WINDOW: Final = min(NOTICE_WINDOW.values())
"""Window of an unknown platform."""
_CLOUD: Final = {
    Platform.EKS: Platform.AWS,
    Platform.KARPENTER: Platform.AUTO,
    Platform.AKS: Platform.AZURE,
}
Label = tuple[str, str]
"""Key and value."""
_GKE_SPOT: Final = ("cloud.google.com/gke-spot", "true")
_AKS_SPOT: Final = ("kubernetes.azure.com/scalesetpriority", "spot")
_KARPENTER_KEY: Final = "karpenter.sh/capacity-type"
_EKS_KEY: Final = "eks.amazonaws.com/capacityType"
_LABELS: Final[Mapping[Platform | None, Mapping[CapacityType, Label]]] = {
    Platform.EKS: {
        CapacityType.SPOT: (_EKS_KEY, "SPOT"),
        CapacityType.ON_DEMAND: (_EKS_KEY, "ON_DEMAND"),
        CapacityType.RESERVED: (_EKS_KEY, "CAPACITY_BLOCK"),
    },
    Platform.KARPENTER: {
        CapacityType.SPOT: (_KARPENTER_KEY, "spot"),
        CapacityType.ON_DEMAND: (_KARPENTER_KEY, "on-demand"),
        CapacityType.RESERVED: (_KARPENTER_KEY, "reserved"),
    },
    Platform.GKE: {CapacityType.SPOT: _GKE_SPOT},
    Platform.AKS: {CapacityType.SPOT: _AKS_SPOT},
}
"""How a platform labels its nodes. On-demand nodes of GKE and AKS have no label of their own."""
PROVISIONERS: Final = frozenset(_LABELS)
"""Platforms whose nodes have known labels and taints."""
_TAINTED: Final = frozenset({_GKE_SPOT, _AKS_SPOT})
"""Labels that are also taints of their nodes, by which pods without a toleration stay on-demand there."""


# --- detection from the cluster ---------------------------------------------------------------------------
CAPACITY_LABELS: Final[dict[CapacityType, frozenset[Label]]] = {
    kind: frozenset(labels[kind] for labels in _LABELS.values() if kind in labels)
    for kind in (CapacityType.SPOT, CapacityType.ON_DEMAND, CapacityType.RESERVED)
}
CAPACITY_LABELS[CapacityType.SPOT] |= {
    ("cloud.google.com/gke-preemptible", "true"),
    ("node-role.kubernetes.io/spot-worker", "true"),  # usual with kOps
}
_ALL: Final = frozenset[Label]().union(*CAPACITY_LABELS.values())
CAPACITY_KEYS: Final = frozenset(key for key, _ in _ALL)
_STARTS: Final = (
    ("aws:", Platform.AWS),
    ("gce:", Platform.GCP),
    ("azure:", Platform.AZURE),
    ("eks.amazonaws.com/", Platform.AWS),
    ("cloud.google.com/gke-", Platform.GKE),
    ("kubernetes.azure.com/", Platform.AZURE),
)
"""Platform by what a node's spec.providerID, or the key of one of its labels, begins with."""
_NODE_CLASSES: Final = {
    "karpenter.k8s.aws": Platform.AWS,
    "eks.amazonaws.com": Platform.AWS,
    "karpenter.azure.com": Platform.AZURE,
    "karpenter.k8s.gcp": Platform.GKE,
}
"""Platform by API group of a NodePool's node class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Capacity labels and platforms detected from nodes and NodePools."""

    labels: frozenset[Label] = frozenset()
    """Entries of CAPACITY_LABELS that nodes have, or would have."""
    platforms: frozenset[Platform] = frozenset()

    @property
    def capacity_type(self) -> str:
        """The capacity type of a single node; "" where no label tells."""
        return next((kind for kind, labels in CAPACITY_LABELS.items() if self.labels & labels), "")

    def __or__(self, other: Found) -> Found:
        return Found(labels=self.labels | other.labels, platforms=self.platforms | other.platforms)


NOTHING: Final = Found()


def of_node(labels: Mapping[str, str], provider_id: str) -> Found:
    texts = (provider_id, *labels)
    platforms = {p for start, p in _STARTS if any(text.startswith(start) for text in texts)}
    if Platform.GKE in platforms:  # GKE runs on GCP machines, but its pods have less time
        platforms.discard(Platform.GCP)
    return Found(labels=_ALL & labels.items(), platforms=frozenset(platforms))


def of_node_pool(raw: Mapping[str, Any]) -> Found:
    """Detects from a Karpenter NodePool, even without nodes. Without a requirement it offers every type."""
    template = (raw.get("spec") or {}).get("template") or {}
    spec, labels = template.get("spec") or {}, (template.get("metadata") or {}).get("labels") or {}
    rules = [r for r in spec.get("requirements") or () if r.get("key") == _KARPENTER_KEY]
    if _KARPENTER_KEY in labels:
        rules.append({"operator": "In", "values": [labels[_KARPENTER_KEY]]})
    offered = _LABELS[Platform.KARPENTER].values()
    made = {(key, value) for key, value in offered if all(_fits(rule, value) for rule in rules)}
    cloud = _NODE_CLASSES.get((spec.get("nodeClassRef") or {}).get("group", ""))
    return Found(labels=frozenset(made), platforms=frozenset([cloud] if cloud else []))


def _fits(rule: Mapping[str, Any], value: str) -> bool:
    """Returns whether a requirement admits a value of its label."""
    named = value in (rule.get("values") or ())
    return {"In": named, "NotIn": not named, "DoesNotExist": False}.get(rule.get("operator", ""), True)


def type_asked_for(node_selector: Mapping[str, str]) -> tuple[str, CapacityType] | None:
    """Returns the first capacity label in the selector, as `key=value`, and its capacity type."""
    for label in node_selector.items():
        for kind, labels in CAPACITY_LABELS.items():
            if label in labels:
                return "=".join(label), kind
    return None


# --- a pool as an attempt uses it -------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPool(Pool):
    """A pool with its detected labels and platform."""

    labels: tuple[str, ...] = ()
    """As `key=value`: a node must have one of them. Empty: any node matches."""
    found_platform: Platform | None = None
    window: int = LEAST_WINDOW
    """Seconds of grace that a pod can rely on here."""

    @property
    def rules(self) -> tuple[dict[str, Any], ...]:
        """Node affinity expressions, one of which a node must match. Empty: any node matches."""
        return _expressions("In", [label.partition("=")[::2] for label in self.labels])

    @property
    def exclusions(self) -> tuple[dict[str, Any], ...]:
        """Node affinity expressions, all of which a node must match.

        On-demand nodes of GKE and AKS have no label, so on-demand means: not labelled as another type.
        """
        if self.type is not CapacityType.ON_DEMAND or not self.finds_labels:
            return ()
        return _expressions("NotIn", sorted(_ALL - CAPACITY_LABELS[CapacityType.ON_DEMAND]))

    @property
    def doubt(self) -> str:
        """A sentence about what was not detected, and what to do; "" where all is known."""
        words = []
        if self.finds_labels and self.type is not CapacityType.ON_DEMAND and not self.labels:
            words.append(f"neither a node nor a NodePool is {self.type}, so pods may run on any node")
        if self.type is CapacityType.SPOT and self.found_platform is None and self.notice_seconds is None:
            words.append(f"the cloud is unknown, so the grace is {self.window} s")
        todo = "set platform or nodeSelector in capacity.pools or the chart's defaultPool"
        return f"pool {self.name}: {'; '.join(words)}; {todo}" if words else ""


def _expressions(operator: str, labels: Iterable[Label]) -> tuple[dict[str, Any], ...]:
    values: dict[str, list[str]] = {}
    for key, value in labels:
        values.setdefault(key, []).append(value)
    return tuple({"key": key, "operator": operator, "values": found} for key, found in values.items())


def chosen(pool: Pool, found: Found, before: tuple[str, ...] = ()) -> ChosenPool:
    """Completes a pool with what was detected.

    `before`: labels of an earlier attempt, used when no node with such a label is left.
    """
    labels: tuple[str, ...] = ()
    if pool.finds_labels and pool.type is not CapacityType.ON_DEMAND:
        seen = found.labels & CAPACITY_LABELS[pool.type]
        labels = tuple(sorted("=".join(label) for label in seen)) or before
    platform = pool.cloud
    if platform in (None, Platform.AUTO):
        platform = min(found.platforms, key=lambda p: (NOTICE_WINDOW[p], str(p)), default=None)
    seconds = NOTICE_WINDOW.get(platform or Platform.AUTO, LEAST_WINDOW)
    window = seconds if pool.type is CapacityType.SPOT else ON_DEMAND_WINDOW
    window = pool.notice_seconds or window
    return as_chosen(pool, labels=labels, found_platform=platform, window=window)


def as_chosen(pool: Pool, **more: Any) -> ChosenPool:
    return ChosenPool(**{f.name: getattr(pool, f.name) for f in fields(Pool)}, **more)
