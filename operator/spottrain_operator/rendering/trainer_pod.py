"""Renders the pods of an attempt from the job's template. Pure.

The template's values are kept, except for the fields that the operator owns (template.py). A pod shares parts
with its template, so it must not be changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from spottrain.contract import CACHE_DIR, DEADLINE_NAME, PODINFO_DIR, PROGRESS_PORT, SAVE_ADVISED_NAME, Env

from spottrain_operator import names
from spottrain_operator.api import injected, native_gangs, sync, volumes
from spottrain_operator.api.node_pools import CapacityType, ChosenPool
from spottrain_operator.api.observed import Observed, Placement
from spottrain_operator.api.template import PROGRESS_NAME
from spottrain_operator.api.training_job import Job, Status, TrainingJobSpec
from spottrain_operator.names import Reason
from spottrain_operator.policies import capacity
from spottrain_operator.rendering import init_containers, scheduling, variables

Json = dict[str, Any]

KEEP_ALIVE: Final = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Annotations against voluntary disruption; they do not affect our DELETE, which is not an eviction."""
FS_GROUP: Final = 1000
"""Group of the runtime image's user, so that it may write to mounted disks."""
UPLOAD_GRACE: Final = 600
"""Default of terminationGracePeriodSeconds with checkpoint.mode Sync."""
DATA_CACHE: Final = "spottrain-data-cache"
SOLE: Final = Placement()


def trial(job: Job, pool: ChosenPool, *, sync_image: str) -> Json:
    """Returns the next attempt's pod of rank 0, for a dry run: with a name that no pod has."""
    made = pod(job, replace(job.status, attempt=job.status.attempt + 1), pool, sync_image=sync_image)
    meta = {name: value for name, value in made["metadata"].items() if name != "name"}
    return made | {"metadata": meta | {"generateName": f"{made['metadata']['name'][:50]}-"}}


def pod(job: Job, status: Status, pool: ChosenPool, place: Placement = SOLE, *, sync_image: str = "") -> Json:
    """Returns a pod of attempt `status.attempt`, on nodes of `pool`.

    sync_image: our image without torch: the sidecar of checkpoint.mode Sync, and runtime.inject.
    """
    spec = job.valid_spec
    given, seconds = spec.pod, grace(spec, pool)
    mounted = [*(given.get("volumes") or ()), *(volume for volume, _ in _volumes(spec))]
    context = security(given, mounted)
    trainer = _trainer(job, status, seconds, place.rank)
    ours = _init_containers(job, status, trainer, seconds, sync_image)
    made = given | {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": seconds,
        "nodeSelector": scheduling.node_selector(given, pool, place),
        "tolerations": scheduling.tolerations(given, pool, place),
        "affinity": scheduling.affinity(given, job, status, pool, place),
        **_gang(job, status, place),
        "initContainers": [
            _restricted(_complete(c), context) for c in (*ours, *(given.get("initContainers") or ()))
        ],
        "containers": [
            _restricted(trainer if c["name"] == trainer["name"] else c, context) for c in given["containers"]
        ],
        "volumes": mounted,
        # The trainer does not use the API server.
        "automountServiceAccountToken": given.get("automountServiceAccountToken", False),
        "securityContext": context,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(job, status, place), "spec": _full(made)}


def _full(fields: Json) -> Json:
    """Returns the fields that are not empty."""
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


# --- metadata ----------------------------------------------------------------------------------------
def owner_of(job: Job) -> Json:
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": job.key.name, "uid": job.key.uid}
    return owner | {"controller": True, "blockOwnerDeletion": True}


def _metadata(job: Job, status: Status, place: Placement) -> Json:
    given, key = job.valid_spec.template.get("metadata") or {}, job.key
    labels = {
        names.JOB_LABEL: names.job_label(key.name),
        names.JOB_UID_LABEL: key.uid,
        names.ATTEMPT_LABEL: str(status.attempt),
        names.RANK_LABEL: str(place.rank),
        names.MANAGED_BY_LABEL: names.MANAGED_BY,
        names.ROLE_LABEL: names.ROLE_TRAINER,
    }
    annotations = KEEP_ALIVE | (given.get("annotations") or {}) | dict(place.assigned.annotations)
    annotations[names.TRAINER_ANNOTATION] = job.valid_spec.trainer["name"]
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


def _gang(job: Job, status: Status, place: Placement) -> Json:
    """Returns the host name by which the others find rank 0, and the reference to the attempt's PodGroup."""
    if job.valid_spec.workers == 1:
        return {}
    group = native_gangs.reference(job.group_name(status.attempt)) if place.grouped else {}
    if place.rank:
        return group
    return group | {"hostname": job.pod_name(status.attempt), "subdomain": job.service_name}


# --- containers -------------------------------------------------------------------------------------
def _init_containers(
    job: Job, status: Status, trainer: Json, grace_seconds: int, image: str
) -> Iterator[Json]:
    if job.valid_spec.checkpoint.synced:
        yield init_containers.sidecar(job, status, grace_seconds, trainer, image)
    if job.valid_spec.runtime.inject:
        yield init_containers.inject(trainer, image)


def _trainer(job: Job, status: Status, grace_seconds: int, rank: int) -> Json:
    spec, checkpoint = job.valid_spec, job.valid_spec.checkpoint
    given = spec.trainer
    # With checkpoint.mode Sync access to the store is the sidecar's alone, and so is the progress port.
    ports, sources = list(given.get("ports") or ()), list(given.get("envFrom") or ())
    if not checkpoint.synced and PROGRESS_PORT not in [port.get("containerPort") for port in ports]:
        ports.append({"name": PROGRESS_NAME, "containerPort": PROGRESS_PORT})
    if not checkpoint.synced and (secret := checkpoint.credentials_secret_ref):
        sources.append({"secretRef": {"name": secret.name}})
    own = given | {
        **_command(spec, status, given),
        "env": _environment(job, status, grace_seconds, rank),
        "envFrom": sources,
        "ports": ports,
        "resources": _resources(spec, given.get("resources") or {}),
        "volumeMounts": [
            *(given.get("volumeMounts") or ()),
            *(mount for _, mount in _volumes(spec) if mount),
        ],
    }
    return _complete(own)


def _command(spec: TrainingJobSpec, status: Status, given: Json) -> Json:
    if spec.runtime.inject:
        return {"command": injected.launched(injected.words_of(given)), "args": []}
    if spec.checkpoint.resume_args and variables.resumed(spec, status) == "true":
        return {"args": [*(given.get("args") or ()), *spec.checkpoint.resume_args]}
    return {}


def _environment(job: Job, status: Status, grace_seconds: int, rank: int) -> list[Json]:
    template = job.valid_spec.trainer
    ours = variables.of_trainer(job, status, grace_seconds, rank)
    kept = [e for e in template.get("env") or () if e.get("name") not in {*ours, Env.POD_UID}]
    set_already = {e.get("name") for e in kept}
    defaults = variables.for_libraries(job.valid_spec, template)
    added = {name: value for name, value in defaults.items() if name not in set_already}
    return [*kept, *variables.listed(added | ours), variables.POD_UID]


def _resources(spec: TrainingJobSpec, given: Json) -> Json:
    gpus = {names.GPU_RESOURCE: str(spec.gpus.added)} if spec.gpus.added else {}
    return given | {kind: (given.get(kind) or {}) | gpus for kind in ("requests", "limits") if gpus}


def _complete(container: Json) -> Json:
    return {"terminationMessagePolicy": "FallbackToLogsOnError"} | _full(container)


# --- volumes -----------------------------------------------------------------------------------------
def _volumes(spec: TrainingJobSpec) -> Iterator[tuple[Json, Json | None]]:
    """Yields the volumes that the operator adds, and how the trainer mounts each; None: it does not."""
    trainer, checkpoint = spec.trainer, spec.checkpoint
    for name, path, source in _folders(trainer):
        if path not in volumes.paths(trainer):
            yield {"name": name} | source, {"name": name, "mountPath": path}
    if checkpoint.ca_bundle is not None:
        yield checkpoint.ca_bundle.volume, None if checkpoint.synced else volumes.CA_MOUNT
    if spec.data_cache is not None:
        claim = {"persistentVolumeClaim": {"claimName": spec.data_cache.claim_ref.name}}
        yield {"name": DATA_CACHE} | claim, {"name": DATA_CACHE, "mountPath": spec.data_cache.path}
    if checkpoint.synced:
        path, name = sync.folder(checkpoint), names.SYNC_CONTAINER
        yield {"name": init_containers.SYNC_STATE["name"], "emptyDir": {}}, None
        if sync.mount_of(trainer, path) is None:
            yield {"name": name, "emptyDir": {}}, {"name": name, "mountPath": path}
    if spec.runtime.inject:
        name = names.INJECT_CONTAINER
        yield {"name": name, "emptyDir": {}}, {"name": name, "mountPath": injected.FOLDER, "readOnly": True}


def _folders(trainer: Json) -> Iterator[tuple[str, str, Json]]:
    """Yields name, mount path and source of each volume, for paths on which the template has none."""
    files = {DEADLINE_NAME: names.DEADLINE_ANNOTATION, SAVE_ADVISED_NAME: names.SAVE_ADVISED_ANNOTATION}
    fields = {path: {"fieldPath": f"metadata.annotations['{word}']"} for path, word in files.items()}
    items = [{"path": path, "fieldRef": field} for path, field in fields.items()]
    yield "spottrain-podinfo", PODINFO_DIR, {"downwardAPI": {"items": items}}
    yield "spottrain-shm", volumes.SHM_DIR, {"emptyDir": {"medium": "Memory"}}
    yield "spottrain-cache", CACHE_DIR, {"emptyDir": {}}
    if volumes.read_only(trainer):  # otherwise a mount would hide the image's own files there
        yield "spottrain-home", volumes.HOME_DIR, {"emptyDir": {}}
        yield "spottrain-tmp", volumes.TMP_DIR, {"emptyDir": {}}


# --- security context --------------------------------------------------------------------------------
def security(template: Json, mounted: Iterable[Json]) -> Json:
    """Returns the security context of a pod with these volumes, with restrictions that break no image.

    Most published images run as root, and the operator cannot know whether this one does. A disk belongs to
    root, so other users need an fsGroup to write there.
    """
    context: Json = {"seccompProfile": {"type": "RuntimeDefault"}}
    if any(map(volumes.is_disk, mounted)):
        context |= {"fsGroup": FS_GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
    return context | (template.get("securityContext") or {})


def _restricted(container: Json, pod_context: Json) -> Json:
    """Returns a container; with runAsNonRoot it meets the restricted Pod Security Standard."""
    own = container.get("securityContext") or {}
    # The API server rejects the combination with privileged, which is an explicit choice.
    if own.get("runAsNonRoot", pod_context.get("runAsNonRoot")) and not own.get("privileged"):
        return container | {"securityContext": init_containers.UNPRIVILEGED | own}
    return container


# --- grace period ------------------------------------------------------------------------------------
def grace(spec: TrainingJobSpec, pool: ChosenPool) -> int:
    """Returns terminationGracePeriodSeconds: the window or the template's value, on spot the shorter one.

    With checkpoint.mode Sync it limits the last upload after a normal end; a notice has a grace of its own.
    """
    asked = spec.pod.get("terminationGracePeriodSeconds")
    if spec.checkpoint.synced:
        return UPLOAD_GRACE if asked is None else int(asked)
    if asked is None:
        return pool.window
    return min(int(asked), pool.window) if pool.type is CapacityType.SPOT else int(asked)


def grace_note(spec: TrainingJobSpec, pool: ChosenPool) -> str:
    """Returns a note about the requested grace period; "" where it equals the window."""
    asked, window = spec.pod.get("terminationGracePeriodSeconds"), pool.window
    if asked in (None, window) or pool.type is not CapacityType.SPOT or spec.checkpoint.synced:
        return ""
    return (
        f"terminationGracePeriodSeconds is {asked}, the notice window of this capacity {window}; the shorter "
        "one is taken. Where its nodes have a longer notice, set noticeSeconds of the pool"
    )


def notes(o: Observed, status: Status) -> dict[Reason, str]:
    """Returns notes for the user about an accepted job's grace period and nodes."""
    if o.job.spec is None or capacity.problem(o):
        return {}
    pool = capacity.pool_of(o, status)
    found = {Reason.GRACE_CHANGED: grace_note(o.job.spec, pool), Reason.CAPACITY_UNKNOWN: pool.doubt}
    return {reason: words for reason, words in found.items() if words}
