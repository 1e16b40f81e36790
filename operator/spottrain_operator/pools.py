"""Which labels and taints a pool's nodes have: what the manifest says, on top of a preset. Pure.

Called by api.py. The facts are those of the documentation of EKS, Karpenter, GKE and AKS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from spottrain_operator.names import GPU_RESOURCE, NOTICE_WINDOW, ON_DEMAND_WINDOW, Platform


class CapacityType(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "onDemand"
    RESERVED = "reserved"
    SPOT_FIRST = "spotFirst"
    """Of a job only: spot, and on demand for a while where spot is dry or does not last."""


class Preset(StrEnum):
    """`spec.capacity.pools[].preset`: who makes the nodes."""

    EKS = "EKS"
    """Managed node groups."""
    KARPENTER = "Karpenter"
    GKE = "GKE"
    AKS = "AKS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """A group of nodes, and how pods get onto it."""

    name: str
    platform: Platform | None = None
    preset: Preset | None = None
    type: CapacityType = CapacityType.SPOT
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Any, ...] = ()

    @property
    def where(self) -> Platform | None:
        """The platform, or the one that the preset implies."""
        return self.platform or (_PLATFORM[self.preset] if self.preset else None)

    @property
    def window(self) -> int:
        """Seconds of grace that a pod can count on here."""
        if self.type is not CapacityType.SPOT:
            return ON_DEMAND_WINDOW
        return NOTICE_WINDOW[self.where] if self.where else min(NOTICE_WINDOW.values())

    @property
    def selector(self) -> dict[str, str]:
        labels = _LABELS.get((self.preset, self.type), {}) if self.preset else {}
        return labels | self.node_selector

    @property
    def tolerated(self) -> tuple[Any, ...]:
        taints = _TAINTS.get((self.preset, self.type), ()) if self.preset else ()
        gpu = ({"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"},) if self.preset else ()
        return (*gpu, *taints, *self.tolerations)


_PLATFORM: Final = {
    Preset.EKS: Platform.AWS,
    Preset.KARPENTER: Platform.AWS,
    Preset.GKE: Platform.GKE,
    Preset.AKS: Platform.AZURE,
}
_LABELS: Final[dict[tuple[Preset, CapacityType], dict[str, str]]] = {
    (Preset.EKS, CapacityType.SPOT): {"eks.amazonaws.com/capacityType": "SPOT"},
    (Preset.EKS, CapacityType.ON_DEMAND): {"eks.amazonaws.com/capacityType": "ON_DEMAND"},
    (Preset.EKS, CapacityType.RESERVED): {"eks.amazonaws.com/capacityType": "CAPACITY_BLOCK"},
    (Preset.KARPENTER, CapacityType.SPOT): {"karpenter.sh/capacity-type": "spot"},
    (Preset.KARPENTER, CapacityType.ON_DEMAND): {"karpenter.sh/capacity-type": "on-demand"},
    (Preset.KARPENTER, CapacityType.RESERVED): {"karpenter.sh/capacity-type": "reserved"},
    (Preset.GKE, CapacityType.SPOT): {"cloud.google.com/gke-spot": "true"},
    (Preset.AKS, CapacityType.SPOT): {"kubernetes.azure.com/scalesetpriority": "spot"},
}
"""On-demand nodes of GKE and AKS have no label of their own: what keeps pods off spot there is its taint."""
_TAINTS: Final[dict[tuple[Preset, CapacityType], tuple[dict[str, str], ...]]] = {
    (Preset.GKE, CapacityType.SPOT): (
        {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
    ),
    (Preset.AKS, CapacityType.SPOT): (
        {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot"}
        | {"effect": "NoSchedule"},
    ),
}
