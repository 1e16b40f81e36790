"""Renders the pods of an attempt from the job's template. Pure.

The template's values are kept, except for the fields that the operator owns (template.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from spottrain.contract import (
    CACHE_DIR,
    DEADLINE_NAME,
    PODINFO_DIR,
    PROGRESS_PORT,
    SAVE_ADVISED_NAME,
    STORE_WAIT_SECONDS,
    Env,
)

from spottrain_operator import names
from spottrain_operator.api import data_cache, native_gangs, volumes
from spottrain_operator.api.kueue import Assigned
from spottrain_operator.api.node_pools import CapacityType, ChosenPool
from spottrain_operator.api.observed import Observed, Placement
from spottrain_operator.api.template import PROGRESS_NAME, judged
from spottrain_operator.api.training_job import CompileCache, Job, Logs, Status, TrainingJobSpec
from spottrain_operator.names import Reason
from spottrain_operator.policies import capacity
from spottrain_operator.rendering import injection, sync_sidecar, variables

Json = dict[str, Any]

KEEP_ALIVE: Final = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Annotations against voluntary disruption; they do not affect our DELETE, which is not an eviction."""
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
FS_GROUP: Final = 1000
"""Group of the runtime image's user, so that it may write to mounted disks."""


SOLE: Final = Placement()


def grace(spec: TrainingJobSpec, pool: ChosenPool) -> int:
    """Returns terminationGracePeriodSeconds: the window or the template's value, on spot the shorter one.

    With checkpoint.mode Sync it limits the last upload after a normal end; a notice has a grace of its own.
    """
    asked = spec.template["spec"].get("terminationGracePeriodSeconds")
    if spec.checkpoint.synced:
        return sync_sidecar.UPLOAD_GRACE if asked is None else int(asked)
    if asked is None:
        return pool.window
    return min(int(asked), pool.window) if pool.type is CapacityType.SPOT else int(asked)


def grace_note(spec: TrainingJobSpec, pool: ChosenPool) -> str:
    """Returns a note about the requested grace period; "" where it equals the window."""
    asked, window = spec.template["spec"].get("terminationGracePeriodSeconds"), pool.window
    if asked is None or pool.type is not CapacityType.SPOT or asked == window or spec.checkpoint.synced:
        return ""
    if asked > window:
        return (
            f"terminationGracePeriodSeconds {asked} is cut to {window}, the notice window of this capacity; "
            "where its nodes have more, set noticeSeconds of the pool"
        )
    return (
        f"terminationGracePeriodSeconds {asked} leaves less than the {window} s that are available for saving"
    )


def notes(o: Observed, status: Status) -> dict[Reason, str]:
    """Returns notes for the user about an accepted job's grace period and nodes."""
    if o.job.spec is None or capacity.problem(o):
        return {}
    pool = capacity.pool_of(o, status)
    found = {Reason.GRACE_CHANGED: grace_note(o.job.spec, pool), Reason.CAPACITY_UNKNOWN: pool.doubt}
    return {reason: words for reason, words in found.items() if words}


def trial(job: Job, pool: ChosenPool, *, sync_image: str) -> Json:
    """Returns the next attempt's pod of rank 0, for a dry run: with a name that no pod has."""
    made = pod(job, replace(job.status, attempt=job.status.attempt + 1), pool, sync_image=sync_image)
    meta = {name: value for name, value in made["metadata"].items() if name != "name"}
    return made | {"metadata": meta | {"generateName": f"{made['metadata']['name'][:50]}-"}}


def pod(job: Job, status: Status, pool: ChosenPool, place: Placement = SOLE, *, sync_image: str = "") -> Json:
    """Returns a pod of attempt `status.attempt`, on nodes of `pool`.

    sync_image: our image without torch: the sidecar of checkpoint.mode Sync, and runtime.inject.
    """
    assert job.spec is not None
    spec = job.spec
    body = copy.deepcopy(spec.template["spec"])
    trainer = judged(body["containers"])
    body |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": grace(spec, pool)}
    _place(body, pool, place)
    _use_quota(body, place.assigned)
    if spec.workers > 1:
        _join_gang(body, job, status, place)
    ca = spec.checkpoint.ca_bundle
    volumes.equip(body, trainer, ca.source if ca and not spec.checkpoint.synced else None)
    if spec.data_cache is not None:
        data_cache.mount(body, trainer, spec.data_cache)
    _equip_container(trainer, job, status, grace(spec, pool), place.rank)
    if spec.checkpoint.synced:
        sync_sidecar.add(body, trainer, job, status, sync_image)
    if spec.runtime.inject:
        injection.add(body, trainer, sync_image)
    for container in (trainer, *(body.get("initContainers") or ())):
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    restrict(body)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(job, status, place), "spec": body}


def pods(
    job: Job, status: Status, pool: ChosenPool, places: Iterable[Placement], *, sync_image: str = ""
) -> Iterator[Json]:
    """Yields the pods of an attempt. What those of a gang have in common is rendered once; they share it, so
    it must not be changed."""
    alike: dict[Placement, Json] = {}
    for place in places:
        common = replace(place, rank=0, preferred_node="")
        if common not in alike:
            alike[common] = pod(job, status, pool, common, sync_image=sync_image)
        yield _of_rank(alike[common], job, status, place)


def _of_rank(first: Json, job: Job, status: Status, place: Placement) -> Json:
    """Returns the pod of another rank, from the one of rank 0 that prefers no node."""
    name, meta, body = job.pod_name(status.attempt, place.rank), first["metadata"], dict(first["spec"])
    meta = meta | {"name": name, "labels": meta["labels"] | {names.RANK_LABEL: str(place.rank)}}
    if place.preferred_node:
        affinity = body.get("affinity") or {}
        body["affinity"] = affinity | {"nodeAffinity": dict(affinity.get("nodeAffinity") or {})}
        _prefer(body, _on(place.preferred_node))
    if place.rank:
        body["hostname"] = name
        trainer = judged(body["containers"])
        own = {"name": "", "value": str(place.rank)}
        env = [own | {"name": e["name"]} if e["name"] in RANK_VARIABLES else e for e in trainer["env"]]
        body["containers"] = [c if c is not trainer else c | {"env": env} for c in body["containers"]]
    return first | {"metadata": meta, "spec": body}


def owner_of(job: Job) -> Json:
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": job.key.name, "uid": job.key.uid}
    return owner | {"controller": True, "blockOwnerDeletion": True}


def _metadata(job: Job, status: Status, place: Placement) -> Json:
    assert job.spec is not None
    given, key = job.spec.template.get("metadata") or {}, job.key
    labels = {
        names.JOB_LABEL: names.job_label(key.name),
        names.JOB_UID_LABEL: key.uid,
        names.ATTEMPT_LABEL: str(status.attempt),
        names.RANK_LABEL: str(place.rank),
        names.MANAGED_BY_LABEL: names.MANAGED_BY,
        names.ROLE_LABEL: names.ROLE_TRAINER,
    }
    annotations = KEEP_ALIVE | (given.get("annotations") or {}) | dict(place.assigned.annotations)
    annotations[names.TRAINER_ANNOTATION] = judged(job.spec.template["spec"]["containers"])["name"]
    if place.avoid and not place.soft:
        annotations[names.AVOIDS_ANNOTATION] = ",".join(sorted(place.avoid))
    return {
        "name": job.pod_name(status.attempt, place.rank),
        "namespace": key.namespace,
        "labels": (given.get("labels") or {}) | dict(place.assigned.labels) | labels,
        "annotations": annotations,
        "finalizers": [names.OUTCOME_FINALIZER],
        "ownerReferences": [owner_of(job)],
    }


# --- placement ---------------------------------------------------------------------------------------
def _place(body: Json, pool: ChosenPool, place: Placement) -> None:
    body["nodeSelector"] = (body.get("nodeSelector") or {}) | pool.selector
    silence = [  # first, because of several tolerations that match a taint the first one applies
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute"}
        | {"tolerationSeconds": names.NODE_SILENCE}
        for state in ("not-ready", "unreachable")
    ]
    ours = {t["key"] for t in silence}
    given = (*(body.get("tolerations") or ()), *pool.tolerated)
    body["tolerations"] = [*silence, *(t for t in given if t.get("key") not in ours)]
    for rule in pool.exclusions:
        _require(body, rule)
    _require(body, *pool.rules)
    if place.avoid:
        rule = {"key": names.HOSTNAME_LABEL, "operator": "NotIn", "values": sorted(place.avoid)}
        (_prefer if place.soft else _require)(body, rule)
    if place.zone:
        _require(body, {"key": names.ZONE_LABEL, "operator": "In", "values": [place.zone]})
    if place.preferred_node:
        _prefer(body, _on(place.preferred_node))


def _on(host: str) -> Json:
    return {"key": names.HOSTNAME_LABEL, "operator": "In", "values": [host]}


def _use_quota(body: Json, given: Assigned) -> None:
    """Adds node labels and tolerations of the flavors that the job's queue has assigned."""
    body["nodeSelector"] |= dict(given.node_selector)
    body["tolerations"] += [t for t in given.tolerations if t not in body["tolerations"]]


def _require(body: Json, *either: Json) -> None:
    """Adds a required node affinity; of several rules a node must match one.

    A template may tolerate every taint, so the taint of a node that ends soon is not enough.
    """
    if not either:
        return
    node = _affinity(body, "nodeAffinity")
    required = node.get(REQUIRED) or {}
    terms = required.get("nodeSelectorTerms") or [{}]  # terms are alternatives: each needs the rule
    both = [(term, rule) for term in terms for rule in either]
    kept = [t | {"matchExpressions": [*(t.get("matchExpressions") or ()), rule]} for t, rule in both]
    node[REQUIRED] = {"nodeSelectorTerms": kept}


def _prefer(body: Json, rule: Json) -> None:
    node = _affinity(body, "nodeAffinity")
    wish = {"weight": 100, "preference": {"matchExpressions": [rule]}}
    node[PREFERRED] = [*(node.get(PREFERRED) or ()), wish]


def _affinity(body: Json, kind: str) -> Json:
    """Returns that part of the pod's affinity, to be changed in place; adds it where it is missing."""
    affinity = body["affinity"] = body.get("affinity") or {}
    found: Json = affinity.get(kind) or {}
    affinity[kind] = found
    return found


def _join_gang(body: Json, job: Job, status: Status, place: Placement) -> None:
    """Sets the pod's host name, and its gang's zone: traffic between zones is slow and costs money."""
    assert job.spec is not None
    body["hostname"] = job.pod_name(status.attempt, place.rank)
    body["subdomain"] = job.service_name
    if place.grouped:
        body |= native_gangs.reference(job.group_name(status.attempt))
    if not (job.spec.capacity.same_zone and place.zoned):
        return
    labels = {names.JOB_UID_LABEL: job.key.uid, names.ATTEMPT_LABEL: str(status.attempt)}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": names.ZONE_LABEL}
    peers = _affinity(body, "podAffinity")
    peers[REQUIRED] = [*(peers.get(REQUIRED) or ()), term]


# --- environment -------------------------------------------------------------------------------------
def _equip_container(trainer: Json, job: Job, status: Status, grace_seconds: int, rank: int) -> None:
    """Sets the trainer container's environment, its progress port, and the GPUs that it requests."""
    assert job.spec is not None
    spec = job.spec
    given = {e.get("name"): e for e in trainer.get("env") or ()}
    ours = environment(job, status, grace_seconds, rank)
    beside = spec.checkpoint.synced  # access to the store is the sidecar's alone, and so is the progress port
    if spec.checkpoint.ca_bundle is not None and not beside:
        ours[volumes.CA_VARIABLE] = f"{volumes.CA_DIR}/{volumes.CA_NAME}"
    writable = _WRITABLE if volumes.read_only(trainer) else {}
    silent = _CACHES | writable | data_cache.homes(spec.data_cache, trainer)
    gpus = spec.gpus.count
    silent[PROCESSES] = "auto" if gpus is None else str(max(gpus, 1))  # auto: torchrun counts a DRA claim's
    defaults = {k: v for k, v in silent.items() if k not in given}
    kept = [e for e in trainer.get("env") or () if e.get("name") not in {*ours, Env.POD_UID}]
    trainer["env"] = [*kept, *variables.listed(defaults | ours), variables.POD_UID]
    if (secret := spec.checkpoint.credentials_secret_ref) and not beside:
        trainer["envFrom"] = [*(trainer.get("envFrom") or ()), {"secretRef": {"name": secret.name}}]
    ports = trainer.get("ports") or []
    if not beside and PROGRESS_PORT not in [port.get("containerPort") for port in ports]:
        trainer["ports"] = [*ports, {"name": PROGRESS_NAME, "containerPort": PROGRESS_PORT}]
    if added := spec.gpus.added:
        resources = trainer.setdefault("resources", {})
        for kind in ("requests", "limits"):
            resources[kind] = (resources.get(kind) or {}) | {names.GPU_RESOURCE: str(added)}


PROCESSES: Final = "PET_NPROC_PER_NODE"
"""torchrun's flag --nproc-per-node as an environment variable."""
RANK_VARIABLES: Final = (str(Env.WORKER_INDEX), "NODE_RANK", "PET_NODE_RANK")
_WRITABLE: Final = {"HOME": volumes.HOME_DIR, "TMPDIR": volumes.TMP_DIR}
"""Only with a read-only image: otherwise files in its own home, such as packages, would not be found."""
_CACHES: Final = {
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_DIR}/inductor",
    "TRITON_CACHE_DIR": f"{CACHE_DIR}/triton",
}


def environment(job: Job, status: Status, grace_seconds: int, rank: int = 0) -> dict[str, str]:
    """Returns the contract's variables (`contract.Env`) that differ from their defaults."""
    assert job.spec is not None
    gpus = job.spec.gpus.count
    values = variables.identity(job, status) | {
        Env.GPUS: "" if gpus is None else str(gpus),
        Env.TRAINING: json.dumps(job.spec.training, sort_keys=True),
        Env.DEADLINE_FILE: f"{PODINFO_DIR}/{DEADLINE_NAME}",
        Env.SAVE_ADVISED_FILE: f"{PODINFO_DIR}/{SAVE_ADVISED_NAME}",
        Env.CACHE_DIR: CACHE_DIR,
        Env.DATA_CACHE: job.spec.data_cache.path if job.spec.data_cache is not None else "",
    }
    if job.spec.checkpoint.synced:
        return variables.given(values) | sync_sidecar.of_script(job, status)
    values |= {
        Env.GRACE_SECONDS: str(grace_seconds),
        Env.TERMINATION_MESSAGE: variables.TERMINATION_LOG,
        Env.PROGRESS_PORT: str(PROGRESS_PORT),
    }
    if job.spec.checkpoint.managed:
        values |= _saving(job.spec, status)
    return variables.given(values) | (_gang(job, status, rank) if job.spec.workers > 1 else {})


def _gang(job: Job, status: Status, rank: int) -> dict[str, str]:
    """Returns the variables for our launcher, torchrun (PET_...: its flags) and custom launchers.

    Each attempt has its own rank 0 host name, so that no rank connects to a pod of the previous attempt.
    """
    assert job.spec is not None
    host = f"{job.pod_name(status.attempt)}.{job.service_name}.{job.key.namespace}.svc"
    port = str(names.RENDEZVOUS_PORT)
    workers = str(job.spec.workers)
    return {
        **dict.fromkeys(RANK_VARIABLES, str(rank)),
        str(Env.WORKERS): workers,
        str(Env.RENDEZVOUS): f"{host}:{port}",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "NNODES": workers,
        "PET_NNODES": workers,
        "PET_MASTER_ADDR": host,
        "PET_MASTER_PORT": port,
    }


def _saving(spec: TrainingJobSpec, status: Status) -> dict[str, str]:
    """Returns the variables that only our runtime reads."""
    checkpoint, first = spec.checkpoint, spec.checkpoint.init_from
    return variables.store(spec, status) | {
        Env.INIT_FROM: first.source if first else "",
        Env.INIT_IGNORE: ",".join(first.ignore) if first else "",
        Env.CHECKPOINT_INTERVAL: checkpoint.interval,
        Env.CHECKPOINT_KEEP_BEST: variables.yes_or_no(checkpoint.keep_best),
        Env.COMPILE_CACHE: _compile_cache(checkpoint.compile_cache, status),
        Env.IMAGE_DIGEST: _digest(spec),
        Env.HANG_TIMEOUT: str(spec.failure_policy.hang_timeout_seconds or ""),
        Env.STORE_WAIT: str(min(STORE_WAIT_SECONDS, spec.failure_policy.store_outage_seconds)),
        Env.LOGS: "keep" if checkpoint.logs is Logs.KEEP else "off",
    }


def _compile_cache(wanted: CompileCache, status: Status) -> str:
    """Returns "drop" (do not restore) after an illegal instruction, until another exit code follows."""
    codes = [r.exit_code for r in status.attempts if r.exit_code is not None]
    if wanted is CompileCache.NONE:
        return "off"
    return "drop" if codes and codes[-1] == names.ILLEGAL_INSTRUCTION else "keep"


def _digest(spec: TrainingJobSpec) -> str:
    """Returns the digest of a pinned image; "" for a tag, which may change with the next pull."""
    image = str(judged(spec.template["spec"]["containers"]).get("image") or "")
    return image.partition("@")[2]


# --- security context --------------------------------------------------------------------------------
def restrict(body: Json) -> None:
    """Applies restrictions that break no image; with runAsNonRoot, the restricted Pod Security Standard.

    Most published images run as root, and the operator cannot know whether this one does.
    """
    body.setdefault("automountServiceAccountToken", False)  # the trainer does not use the API server
    context = body.setdefault("securityContext", {})
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    if volumes.has_disk(body):
        context.setdefault("fsGroup", FS_GROUP)
        context.setdefault("fsGroupChangePolicy", "OnRootMismatch")
    for container in [*body["containers"], *(body.get("initContainers") or ())]:
        own = container.get("securityContext") or {}
        # The API server rejects the combination with privileged, which is an explicit choice.
        if own.get("runAsNonRoot", context.get("runAsNonRoot")) and not own.get("privileged"):
            container["securityContext"] = _UNPRIVILEGED | own


_UNPRIVILEGED: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
