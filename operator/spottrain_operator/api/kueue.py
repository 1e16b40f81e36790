"""Kueue's Workload: how one asks a queue for a job's resources, what Kueue answers, what it is told. Pure.

From the sources of Kueue 0.19: its jobframework does for the jobs of a Go controller what the operator does
here for its own (a request of one pod set, pods only while it is admitted, quota given back once they ended).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from spottrain_operator import names
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.training_job import JobKey, TrainingJobSpec
from spottrain_operator.api.wire import rfc3339

Json = dict[str, Any]

API_GROUP: Final = "kueue.x-k8s.io"
VERSION: Final = "v1beta2"
API_VERSION: Final = f"{API_GROUP}/{VERSION}"
WORKLOADS: Final = f"{API_VERSION}/workloads"
FLAVORS: Final = f"{API_VERSION}/resourceflavors"
POD_CLASSES: Final = "scheduling.k8s.io/v1/priorityclasses"
QUEUE_CLASSES: Final = f"{API_VERSION}/workloadpriorityclasses"
OFF: Final = "the operator's use of Kueue is off (value kueue.enabled of its chart)"
JOB_UID_LABEL: Final = f"{API_GROUP}/job-uid"
"""On a Workload: Kueue finishes one with it that has lost its owner."""
POD_SET: Final = "main"
"""Name of a Workload's only pod set."""
ADMITTED: Final = "Admitted"
EVICTED: Final = "Evicted"
FINISHED: Final = "Finished"
PODS_READY: Final = "PodsReady"
QUOTA_RESERVED: Final = "QuotaReserved"
REQUEUED: Final = "Requeued"
REQUEUED_AT_ONCE: Final = frozenset({"Preempted", "NodeFailures"})
"""Reasons of an eviction after which the Workload is in the queue again; after others Kueue decides when."""
SCHEDULING_FIELDS: Final = (
    "nodeSelector",
    "tolerations",
    "priorityClassName",
    "runtimeClassName",
    "overhead",
    "resources",
    "resourceClaims",
)
"""Fields of a pod's spec from which Kueue computes quota and flavors; so are containers and node affinity."""
CONTAINER_FIELDS: Final = ("name", "image", "resources", "restartPolicy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assigned:
    """What an admission adds to the pods, so that they use the quota that was reserved."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Json, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Assigned) -> Assigned:
        more = tuple(t for t in other.tolerations if t not in self.tolerations)
        return Assigned(
            node_selector={**self.node_selector, **other.node_selector},
            tolerations=(*self.tolerations, *more),
            labels={**self.labels, **other.labels},
            annotations={**self.annotations, **other.annotations},
        )


NOTHING: Final = Assigned()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadView:
    """The fields of a Workload that decisions need."""

    name: str
    namespace: str
    uid: str
    job: JobKey
    resource_version: int
    made_for: str = ""
    """The digest of what it asks for (`digest`)."""
    pool: str = ""
    """For which nodes (`nodes_of`)."""
    queue: str = ""
    priority_class: str = ""
    going: bool = False
    """Whether it is being deleted."""
    active: bool = True
    """spec.active: False keeps it out of its queue."""
    reserved: bool = False
    """Whether it holds quota. That is so before its admission, and after an eviction until it is released."""
    admitted: bool = False
    finished: bool = False
    evicted: str = ""
    """Reason of Evicted=True."""
    message: str = ""
    """Kueue's sentence about the eviction, or about why the Workload is not admitted."""
    cluster_queue: str = ""
    flavors: tuple[str, ...] = ()
    """Names of the assigned ResourceFlavors."""
    updates: Assigned = NOTHING
    """What admission checks add to the pods."""
    by_topology: bool = False
    """Whether Kueue has chosen the nodes of each pod."""
    ready: bool | None = None
    """PodsReady; None: Kueue was not told yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What is known about the admission of a job that names a queue, or that has a Workload."""

    missing: str = ""
    """Why Kueue cannot be asked; "" where it can."""
    workload: WorkloadView | None = None
    flavors: Mapping[str, Assigned | None] = field(default_factory=dict)
    """Those that are assigned, by name, where pods must be created; None: it does not exist."""
    priority: int | None = None
    """Of the class that the job names, where a Workload must be created. None: it names none."""
    unread: str = ""
    """Why an assigned ResourceFlavor cannot be read; no pod is created without it."""
    unknown_class: str = ""
    """Kind and name of a class that the job names, and that does not exist."""

    @property
    def evicted(self) -> bool:
        return self.workload is not None and bool(self.workload.evicted)


@dataclass(frozen=True, slots=True)
class Told:
    """A condition that Kueue is told."""

    type: str
    status: bool
    reason: str
    message: str


# --- what a job asks for --------------------------------------------------------------------------------
def parts(pod: Mapping[str, Any]) -> Json:
    """Returns those fields of a pod's spec that decide about quota and flavors, without its environment."""
    kept: Json = {name: pod[name] for name in SCHEDULING_FIELDS if pod.get(name)}
    if node := (pod.get("affinity") or {}).get("nodeAffinity"):
        kept["affinity"] = {"nodeAffinity": node}
    for kind in ("containers", "initContainers"):
        if pod.get(kind):
            kept[kind] = [{k: c[k] for k in CONTAINER_FIELDS if k in c} for c in pod[kind]]
    return kept


def digest(spec: TrainingJobSpec) -> str:
    """Returns a digest of what the spec asks for. Only the person's own words are in it: another operator
    may render other pods, and a job must not lose its admission by an upgrade."""
    asked = [spec.workers, spec.gpus.added, parts(spec.template["spec"])]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]


def nodes_of(pool: Pool) -> str:
    """Returns which nodes a pool is for. Labels that were found on its nodes are not in it: they may be found
    while the job waits, and its Workload is good without them."""
    selector = json.dumps(dict(pool.selector), sort_keys=True).encode()
    return f"{pool.name} {pool.type} {hashlib.sha256(selector).hexdigest()[:16]}"


def workload(meta: Json, pod: Json, count: int, queue: str, priority: Json) -> Json:
    """Returns the request for `count` pods. `pod`: a rendered one. `priority`: from `priority_of`."""
    labels = {k: v for k, v in pod["metadata"]["labels"].items() if not k.startswith(f"{names.DOMAIN}/")}
    template = {"metadata": {"labels": labels}, "spec": {"restartPolicy": "Never"} | parts(pod["spec"])}
    pod_set = {"name": POD_SET, "count": count, "template": template}
    spec = {"queueName": queue, "podSets": [pod_set]} | priority
    return {"apiVersion": API_VERSION, "kind": "Workload", "metadata": meta, "spec": spec}


def class_named(job_class: str, spec: TrainingJobSpec) -> tuple[str, str]:
    """Returns kind and name of the class that decides about the priority; ("", "") without one."""
    if job_class:
        return "WorkloadPriorityClass", job_class
    pod_class = str(spec.template["spec"].get("priorityClassName") or "")
    return ("PriorityClass", pod_class) if pod_class else ("", "")


def priority_of(kind: str, name: str, value: int | None) -> Json:
    """Returns the fields of a Workload's spec about its priority."""
    if value is None:
        return {}
    group = API_GROUP if kind == "WorkloadPriorityClass" else "scheduling.k8s.io"
    return {"priority": value, "priorityClassRef": {"group": group, "kind": kind, "name": name}}


# --- what Kueue answers ---------------------------------------------------------------------------------
def workload_view(raw: Mapping[str, Any]) -> WorkloadView | None:
    """Returns None for a Workload that no TrainingJob controls."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    job = JobKey.of_owner(meta)
    if job is None:
        return None
    said = {c["type"]: c for c in status.get("conditions") or ()}
    evicted, reserved = _true(said, EVICTED), _true(said, QUOTA_RESERVED)
    admission = status.get("admission") or {}
    assignments = admission.get("podSetAssignments") or ()
    flavors = (f for a in assignments for f in (a.get("flavors") or {}).values())
    checks, notes = status.get("admissionChecks") or (), meta.get("annotations") or {}
    return WorkloadView(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        job=job,
        resource_version=int(meta["resourceVersion"]),
        made_for=notes.get(names.POD_SET_ANNOTATION, ""),
        pool=notes.get(names.POOL_ANNOTATION, ""),
        queue=str(spec.get("queueName") or ""),
        priority_class=str((spec.get("priorityClassRef") or {}).get("name") or ""),
        going="deletionTimestamp" in meta,
        active=spec.get("active") is not False,
        reserved=reserved,
        admitted=_true(said, ADMITTED) and bool(admission),
        finished=_true(said, FINISHED),
        evicted=str(said[EVICTED].get("reason", "")) or EVICTED if evicted else "",
        message=_message(said, checks, evicted=evicted, reserved=reserved),
        cluster_queue=str(admission.get("clusterQueue") or ""),
        flavors=tuple(dict.fromkeys(map(str, flavors))),
        updates=_updates(checks),
        by_topology=any(a.get("topologyAssignment") for a in assignments),
        ready=_true(said, PODS_READY) if PODS_READY in said else None,
    )


def _true(said: Mapping[str, Any], kind: str) -> bool:
    return (said.get(kind) or {}).get("status") == "True"


def _message(said: Mapping[str, Any], checks: Iterable[Json], *, evicted: bool, reserved: bool) -> str:
    if evicted:
        return str(said[EVICTED].get("message") or "")
    if reserved:
        open_checks = [c for c in checks if c.get("state") != "Ready"]
        words = (f"{c.get('name')} ({c.get('message') or c.get('state')})" for c in open_checks)
        return f"its quota is reserved; admission checks to come: {', '.join(words)}" if open_checks else ""
    return str((said.get(QUOTA_RESERVED) or {}).get("message") or "")


def _updates(checks: Iterable[Json]) -> Assigned:
    found = NOTHING
    for update in (u for check in checks for u in check.get("podSetUpdates") or ()):
        if update.get("name") == POD_SET:
            found |= Assigned(
                node_selector=update.get("nodeSelector") or {},
                tolerations=tuple(update.get("tolerations") or ()),
                labels=update.get("labels") or {},
                annotations=update.get("annotations") or {},
            )
    return found


def of_flavor(raw: Mapping[str, Any]) -> Assigned:
    """Returns what a ResourceFlavor adds to the pods that use its quota."""
    spec = raw.get("spec") or {}
    return Assigned(
        node_selector=spec.get("nodeLabels") or {}, tolerations=tuple(spec.get("tolerations") or ())
    )


# --- what Kueue is told ---------------------------------------------------------------------------------
def status_patch(raw: Mapping[str, Any], words: Iterable[Told], now: datetime, *, release: bool) -> Json:
    """Returns a merge patch of the Workload's status; it fails where the Workload has changed since `raw`.

    release: Kueue may give the quota to others.
    """
    meta = raw["metadata"]
    known = {c["type"]: dict(c) for c in (raw.get("status") or {}).get("conditions") or ()}
    for word in words:
        condition = known.setdefault(word.type, {"type": word.type})
        if condition.get("status") != str(word.status):
            condition["lastTransitionTime"] = rfc3339(now, timespec="seconds")
        condition |= {"status": str(word.status), "reason": word.reason, "message": word.message[:32768]}
        condition["observedGeneration"] = int(meta.get("generation") or 0)
    status: Json = {"conditions": list(known.values())}
    if release:
        status["admission"] = None
    precondition = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
    return {"metadata": precondition, "status": status}
