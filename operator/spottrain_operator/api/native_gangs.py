"""Kubernetes' own gang scheduling: which jobs use it, and an attempt's PodGroup. Pure.

From the sources of Kubernetes 1.37, the first with scheduling.k8s.io/v1beta1 (a PodGroup, and the pod's
schedulingGroup). Its alpha versions are off by default and change with each release, so they are not used.
"""

from __future__ import annotations

from typing import Any, Final

from spottrain_operator.api.training_job import TrainingJobSpec
from spottrain_operator.names import ZONE_LABEL

Json = dict[str, Any]

API_VERSION: Final = "scheduling.k8s.io/v1beta1"
POD_GROUPS: Final = "podgroups"
OTHERS: Final = ("workloadRef", "schedulingGroup", "evictionResponders")
"""Template fields that already group its pods, or that are incompatible with a group."""


def fits(spec: TrainingJobSpec) -> bool:
    """Returns whether the job is a gang for the default scheduler, without another grouping."""
    template = spec.template["spec"]
    default = template.get("schedulerName") in (None, "", "default-scheduler")
    return spec.workers > 1 and default and not any(template.get(f) for f in OTHERS)


def group(meta: Json, spec: TrainingJobSpec, *, zoned: bool) -> Json:
    """Returns the PodGroup that makes one attempt's pods a gang: all of them are bound, or none.

    The API server silently drops fields whose feature gate is off.
    """
    body: Json = {"schedulingPolicy": {"gang": {"minCount": spec.workers}}}
    priority = spec.template["spec"].get("priorityClassName")
    if priority:  # pods whose priority differs from their group's are not scheduled
        body["priorityClassName"] = priority
    if zoned and spec.capacity.same_zone:  # with the pods' affinity alone a full zone may be retried for ever
        body["schedulingConstraints"] = {"topology": [{"key": ZONE_LABEL}]}
    return {"apiVersion": API_VERSION, "kind": "PodGroup", "metadata": meta, "spec": body}


def reference(name: str) -> Json:
    """Returns the field of the pod's spec that refers to the group."""
    return {"schedulingGroup": {"podGroupName": name}}


def grouped(spec: Json) -> bool:
    """Returns whether a pod refers to such a group."""
    return bool(spec.get("schedulingGroup"))
