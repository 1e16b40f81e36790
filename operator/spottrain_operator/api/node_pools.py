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
    def selector(self) -> dict[str, str]:
        known = {} if self._says_type else _LABELS.get((self.platform, self.type), {})
        return known | self.node_selector

    @property
    def tolerated(self) -> tuple[Any, ...]:
        """Tolerations. With detected labels they cover every cloud: a node group may have no node yet."""
        taints = _TAINTS.get((self.platform, self.type), ())
        if self.finds_labels:
            taints = tuple(t for (_, kind), given in _TAINTS.items() if kind is self.type for t in given)
        known = self.platform in PROVISIONERS or self.finds_labels
        gpu = ({"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"},) if known else ()
        return (*gpu, *taints, *self.tolerations)


PROVISIONERS: Final = frozenset({Platform.EKS, Platform.KARPENTER, Platform.GKE, Platform.AKS})
"""Platforms whose nodes have known labels and taints."""
LEAST_WINDOW: Final = min(NOTICE_WINDOW.values())
"""Window of an unknown platform."""
_CLOUD: Final = {
    Platform.EKS: Platform.AWS,
    Platform.KARPENTER: Platform.AUTO,
    Platform.AKS: Platform.AZURE,
}
_LABELS: Final[dict[tuple[Platform | None, CapacityType], dict[str, str]]] = {
    (Platform.EKS, CapacityType.SPOT): {"eks.amazonaws.com/capacityType": "SPOT"},
    (Platform.EKS, CapacityType.ON_DEMAND): {"eks.amazonaws.com/capacityType": "ON_DEMAND"},
    (Platform.EKS, CapacityType.RESERVED): {"eks.amazonaws.com/capacityType": "CAPACITY_BLOCK"},
    (Platform.KARPENTER, CapacityType.SPOT): {"karpenter.sh/capacity-type": "spot"},
    (Platform.KARPENTER, CapacityType.ON_DEMAND): {"karpenter.sh/capacity-type": "on-demand"},
    (Platform.KARPENTER, CapacityType.RESERVED): {"karpenter.sh/capacity-type": "reserved"},
    (Platform.GKE, CapacityType.SPOT): {"cloud.google.com/gke-spot": "true"},
    (Platform.AKS, CapacityType.SPOT): {"kubernetes.azure.com/scalesetpriority": "spot"},
}
"""On-demand nodes of GKE and AKS have no label of their own: there the taint of spot nodes repels pods."""
_TAINTS: Final[dict[tuple[Platform | None, CapacityType], tuple[dict[str, str], ...]]] = {
    (Platform.GKE, CapacityType.SPOT): (
        {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
    ),
    (Platform.AKS, CapacityType.SPOT): (
        {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot"}
        | {"effect": "NoSchedule"},
    ),
}


# --- detection from the cluster ---------------------------------------------------------------------------
Label = tuple[str, str]
"""Key and value."""
CAPACITY_LABELS: Final[dict[CapacityType, frozenset[Label]]] = {
    CapacityType.SPOT: frozenset(
        {
            ("karpenter.sh/capacity-type", "spot"),
            ("eks.amazonaws.com/capacityType", "SPOT"),
            ("cloud.google.com/gke-spot", "true"),
            ("cloud.google.com/gke-preemptible", "true"),
            ("kubernetes.azure.com/scalesetpriority", "spot"),
            ("node-role.kubernetes.io/spot-worker", "true"),  # usual with kOps
        }
    ),
    CapacityType.ON_DEMAND: frozenset(
        {("karpenter.sh/capacity-type", "on-demand"), ("eks.amazonaws.com/capacityType", "ON_DEMAND")}
    ),
    CapacityType.RESERVED: frozenset(
        {("karpenter.sh/capacity-type", "reserved"), ("eks.amazonaws.com/capacityType", "CAPACITY_BLOCK")}
    ),
}
CAPACITY_KEYS: Final = frozenset(key for labels in CAPACITY_LABELS.values() for key, _ in labels)
_ALL: Final = frozenset[Label]().union(*CAPACITY_LABELS.values())
_CLOUDS: Final = (("aws:", Platform.AWS), ("gce:", Platform.GCP), ("azure:", Platform.AZURE))
"""Platform by prefix of a node's spec.providerID."""
_LABELLED: Final = (
    ("eks.amazonaws.com/", Platform.AWS),
    ("cloud.google.com/gke-", Platform.GKE),
    ("kubernetes.azure.com/", Platform.AZURE),
)
"""Platform by prefix of a label key."""
_NODE_CLASSES: Final = {
    "karpenter.k8s.aws": Platform.AWS,
    "eks.amazonaws.com": Platform.AWS,
    "karpenter.azure.com": Platform.AZURE,
    "karpenter.k8s.gcp": Platform.GKE,
}
"""Platform by API group of a NodePool's node class."""
_KARPENTER_KEY: Final = "karpenter.sh/capacity-type"


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
    platforms = {p for start, p in _LABELLED if any(key.startswith(start) for key in labels)}
    platforms |= {p for start, p in _CLOUDS if provider_id.startswith(start)}
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
    made = {
        (key, value) for key, value in _ALL if key == _KARPENTER_KEY and all(_fits(r, value) for r in rules)
    }
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
            offers = f"no node is labelled as {self.type} and no NodePool of Karpenter offers it"
            words.append(f"{offers}, so pods may run on any node")
        if self.type is CapacityType.SPOT and self.found_platform is None and self.notice_seconds is None:
            words.append(
                f"no node has a cloud's label, so the grace is {self.window} s, the shortest of all clouds"
            )
        todo = "set platform or nodeSelector in spec.capacity.pools or in the chart's defaultPool"
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
