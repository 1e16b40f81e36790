"""Kubernetes' own gang scheduling: its supported versions, which jobs use it, and its objects. Pure.

From the sources of Kubernetes 1.35 (v1alpha1: a Workload, and the pod's workloadRef), 1.36 (v1alpha2: a
PodGroup, and the pod's schedulingGroup) and 1.37 (v1alpha3 and v1beta1: the same). A PodGroup needs no
Workload, which holds templates only.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from spottrain_operator.api.training_job import TrainingJobSpec
from spottrain_operator.names import QUEUE_LABEL, ZONE_LABEL

Json = dict[str, Any]

API_GROUP: Final = "scheduling.k8s.io"


class GangApi(StrEnum):
    """Versions of `scheduling.k8s.io` with gangs; the first that a cluster serves is used."""

    V1BETA1 = "v1beta1"
    V1ALPHA3 = "v1alpha3"
    V1ALPHA2 = "v1alpha2"
    V1ALPHA1 = "v1alpha1"

    @property
    def group(self) -> str:
        """The group with its version, as in the API's paths."""
        return f"{API_GROUP}/{self}"

    @property
    def resource(self) -> str:
        return "workloads" if self is GangApi.V1ALPHA1 else "podgroups"


OTHERS: Final = ("workloadRef", "schedulingGroup", "evictionResponders")
"""Template fields that already group its pods, or that are incompatible with a group."""
_MEMBERS: Final = "workers"
"""Name of a Workload's only pod group."""


def fits(spec: TrainingJobSpec) -> bool:
    """Returns whether the job is a gang for the default scheduler, without a queue or another grouping."""
    return spec.workers > 1 and one_by_one(spec)


def one_by_one(spec: TrainingJobSpec) -> bool:
    """Returns whether the job's spec leaves its pods to be scheduled one by one, not all or none."""
    template = spec.template["spec"]
    labels = (spec.template.get("metadata") or {}).get("labels") or {}
    queued = bool(spec.queue_name) or QUEUE_LABEL in labels
    default = template.get("schedulerName") in (None, "", "default-scheduler")
    return default and not queued and not any(template.get(f) for f in OTHERS)


def group(api: GangApi, meta: Json, spec: TrainingJobSpec, *, zoned: bool) -> Json:
    """Returns the object that makes one attempt's pods a gang: all of them are bound, or none.

    The API server silently drops fields whose feature gate is off.
    """
    policy: Json = {"gang": {"minCount": spec.workers}}
    if api is GangApi.V1ALPHA1:
        groups = [{"name": _MEMBERS, "policy": policy}]
        return {"apiVersion": api.group, "kind": "Workload", "metadata": meta, "spec": {"podGroups": groups}}
    body: Json = {"schedulingPolicy": policy}
    priority = spec.template["spec"].get("priorityClassName")
    if priority:  # pods whose priority differs from their group's are not scheduled
        body["priorityClassName"] = priority
    if (
        zoned and spec.capacity.same_zone
    ):  # with the pods' affinity alone the scheduler may retry a full zone for ever
        body["schedulingConstraints"] = {"topology": [{"key": ZONE_LABEL}]}
    return {"apiVersion": api.group, "kind": "PodGroup", "metadata": meta, "spec": body}


def reference(api: GangApi, name: str) -> Json:
    """Returns the fields of the pod's spec that refer to the group."""
    if api is GangApi.V1ALPHA1:
        return {"workloadRef": {"name": name, "podGroup": _MEMBERS}}
    return {"schedulingGroup": {"podGroupName": name}}


def grouped(spec: Json) -> bool:
    """Returns whether a pod refers to such a group."""
    return bool(spec.get("workloadRef") or spec.get("schedulingGroup"))
