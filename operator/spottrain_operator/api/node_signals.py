"""Termination signals of other components on a node: Karpenter, AWS's node termination handler, GKE, AKS, the
cluster autoscaler, Kubernetes itself. Pure. docs/interruptions.md has the same table.

A signal with a time is a notice, and is handled like our agent's. A signal without a time marks the node as
leaving: new pods avoid it, and a container that a signal ends there is attributed to it. A rebalance
recommendation is advice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from spottrain_operator.api.observed import Notice
from spottrain_operator.api.wire import optional_timestamp, unix_timestamp

Raw = Mapping[str, Any]

KARPENTER_DISRUPTED: Final = "karpenter.sh/disrupted"
KARPENTER_DEADLINE: Final = "karpenter.sh/nodeclaim-termination-timestamp"
NTH: Final = "aws-node-termination-handler/"
NTH_TIME: Final = f"{NTH}action-time"
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
LEAVING_TAINTS: Final = {
    KARPENTER_DISRUPTED: "Karpenter takes the node out of service",
    f"{NTH}spot-itn": "the AWS node termination handler has seen a spot interruption",
    f"{NTH}scheduled-maintenance": "the AWS node termination handler reports a maintenance event",
    f"{NTH}asg-lifecycle-termination": "its auto scaling group ends the instance",
    "cloud.google.com/impending-node-termination": "Google Cloud ends the machine",
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler deletes the node",
    "remediator.aks.microsoft.com/unschedulable": "AKS drains the node",
    "remediator.kubernetes.azure.com/unschedulable": "AKS drains the node",
    OUT_OF_SERVICE: "an administrator says that the node is down",
}
ENDING_CONDITIONS: Final = {
    "PreemptionScheduled": (timedelta(seconds=30), "AKS has seen a spot eviction"),
    "GCESpotPreempting": (timedelta(seconds=30), "Google Cloud takes the spot machine back"),
}
"""Conditions that become True with the cloud's notice: the usual time until termination, and a sentence.
The pool's noticeSeconds may be longer."""
LEAVING_CONDITIONS: Final = {"VMEventScheduled": "Azure has an event for this machine"}
FAULTY_IF_TRUE: Final = frozenset(
    {
        "GPUMissing",
        "GPUXIDErrors",
        "XIDErrors",
        "XidError",
        "GPUUnhealthy",
        "GpuUnhealthy",
        "SysLogsXIDError",
        "SysLogsSXIDError",
        "SysLogsGPUFallenOff",
        "GpuMemWatch",
        "GpuPcieWatch",
        "GpuNvlinkWatch",
        "GpuDriverWatch",
        "GpuInforomWatch",
    }
)
"""Conditions of node problem detectors: AKS (GPU...), NVSentinel (SysLogs..., ...Watch), common names."""
FAULTY_IF_FALSE: Final = frozenset({"AcceleratedHardwareReady"})
"""Conditions of the EKS node monitoring agent."""
FAULTY_TAINTS: Final = frozenset({"nvidia.com/gpu.unhealthy", "nvidia.com/syslog-xid-error"})
MAINTENANCE_LABEL: Final = "cloud.google.com/active-node-maintenance"
KARPENTER_NOTICE: Final = timedelta(seconds=120)
"""From the node's deletion, if Karpenter sets no time: it deletes the node at AWS's two-minute notice."""


def notice(node: Raw) -> Notice | None:
    """Returns the earliest termination that other components have announced with a time."""
    return min(_notices(node), key=lambda found: found.deadline, default=None)


def _notices(node: Raw) -> Iterator[Notice]:
    meta, taints = node["metadata"], _taints(node)
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    if stamped := optional_timestamp(annotations.get(KARPENTER_DEADLINE)):
        yield Notice(deadline=stamped, source=f"Karpenter {KARPENTER_DEADLINE}")
    elif KARPENTER_DISRUPTED in taints and (deleted := optional_timestamp(meta.get("deletionTimestamp"))):
        yield Notice(deadline=deleted + KARPENTER_NOTICE, source=f"taint {KARPENTER_DISRUPTED}", seen=deleted)
    ending = next((k for k in (f"{NTH}spot-itn", f"{NTH}asg-lifecycle-termination") if k in taints), "")
    if ending and (at := unix_timestamp(labels.get(NTH_TIME, ""))):
        yield Notice(deadline=at, source=f"taint {ending}")
    for condition in node.get("status", {}).get("conditions") or ():
        given, _ = ENDING_CONDITIONS.get(condition["type"], (None, ""))
        since = optional_timestamp(condition.get("lastTransitionTime"))
        if given is not None and condition.get("status") == "True" and since is not None:
            source = f"condition {condition['type']}"
            yield Notice(deadline=since + given, source=source, seen=since, assumed=True)


def leaving(node: Raw) -> str:
    """Returns a sentence about what takes the node out of service; "" where nothing does."""
    meta = node["metadata"]
    found = next(
        (f"{LEAVING_TAINTS[key]} (taint {key})" for key in _taints(node) if key in LEAVING_TAINTS), ""
    )
    if found or "deletionTimestamp" in meta:
        return found or "the node is being deleted"
    if (meta.get("labels") or {}).get(MAINTENANCE_LABEL) == "ONGOING":
        return f"Google Cloud maintains the machine (label {MAINTENANCE_LABEL})"
    for condition in node.get("status", {}).get("conditions") or ():
        kind, true = condition["type"], condition.get("status") == "True"
        if true and kind in LEAVING_CONDITIONS:
            return f"{LEAVING_CONDITIONS[kind]} (condition {kind}): {condition.get('message', '')[:200]}"
        if kind == "Ready" and not true and "shutting down" in condition.get("message", ""):
            return "the node shuts down (condition Ready)"
    return ""


def fault(node: Raw) -> str:
    """Returns a health monitor's report of faulty GPUs; "" where nothing is wrong."""
    if found := next((key for key in _taints(node) if key in FAULTY_TAINTS), ""):
        return f"taint {found}"
    for condition in node.get("status", {}).get("conditions") or ():
        kind, status = condition["type"], condition.get("status")
        if (kind in FAULTY_IF_TRUE and status == "True") or (kind in FAULTY_IF_FALSE and status == "False"):
            why = ": ".join(filter(None, (condition.get("reason"), condition.get("message", "")[:500])))
            return f"condition {kind}={status} ({why or 'no reason given'})"
    return ""


def out_of_service(node: Raw) -> bool:
    """Returns whether an administrator marked the machine as off, so that no container runs there."""
    return OUT_OF_SERVICE in _taints(node)


def advice(node: Raw) -> str:
    """Returns the RFC 3339 time of a rebalance recommendation from the node termination handler, or ""."""
    if f"{NTH}rebalance-recommendation" not in _taints(node):
        return ""
    at = unix_timestamp((node["metadata"].get("labels") or {}).get(NTH_TIME, "")) or optional_timestamp(
        node["metadata"].get("creationTimestamp")
    )
    return at.isoformat().replace("+00:00", "Z") if at else ""


def _taints(node: Raw) -> dict[str, Raw]:
    return {str(t.get("key")): t for t in node.get("spec", {}).get("taints") or ()}
