"""Objects of a job other than its trainer pods: Service, pod group, claim, cleanup pod. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

from spottrain_operator import names
from spottrain_operator.api import kueue, native_gangs, sync, volumes, wire
from spottrain_operator.api.bookkeeping import DATA_KEY, Bookkeeping
from spottrain_operator.api.node_pools import ChosenPool, Pool
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.rendering import init_containers, trainer_pod, variables

Json = dict[str, Any]

OUR_USER: Final = 1000
"""User of our image."""
CLEANUP_SECONDS: Final = 840
"""A little less than the operator's own limit for the cleanup pod (policies/cleanup.py)."""
IDENTITY: Final = ("serviceAccountName", "imagePullSecrets")
"""Fields of the template that access to the store needs."""
SCRATCH: Final = {"name": "spottrain-tmp", "mountPath": volumes.TMP_DIR}


def _metadata(job: Job, name: str) -> Json:
    key = job.key
    return {
        "name": name,
        "namespace": key.namespace,
        "labels": {
            names.JOB_LABEL: names.job_label(key.name),
            names.JOB_UID_LABEL: key.uid,
            names.MANAGED_BY_LABEL: names.MANAGED_BY,
        },
        "ownerReferences": [trainer_pod.owner_of(job)],
    }


def books(job: Job, bookkeeping: Bookkeeping) -> Json:
    """Returns the ConfigMap with a job's bookkeeping."""
    meta = _metadata(job, job.books_name)
    meta["ownerReferences"][0]["blockOwnerDeletion"] = False
    text = json.dumps(wire.encode(bookkeeping), separators=(",", ":"))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {DATA_KEY: text}}


def service(job: Job) -> Json:
    """Returns a gang's headless Service: the DNS name of rank 0, also before its pod is ready.

    The other ranks need no name, and each pod that a Service selects costs two writes of endpoints or more.
    """
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {names.JOB_UID_LABEL: job.key.uid, names.RANK_LABEL: "0"},
        "ports": [{"name": "rendezvous", "port": names.RENDEZVOUS_PORT}],
    }
    meta = _metadata(job, job.service_name)
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def gang(job: Job, status: Status, *, zoned: bool) -> Json:
    """Returns the PodGroup of Kubernetes' own gang scheduling; one per attempt, because it is immutable."""
    meta = _metadata(job, job.group_name(status.attempt))
    return native_gangs.group(meta, job.valid_spec, zoned=zoned)


def workload(
    job: Job, status: Status, pool: ChosenPool, priority: int | None, *, sync_image: str = ""
) -> Json:
    """Returns the Workload with which a job asks its Kueue queue; one for all attempts of an admission.

    priority: the value of the class that the job names; None without one.
    """
    meta = _metadata(job, job.workload_name)
    meta["labels"][kueue.JOB_UID_LABEL] = job.key.uid
    meta["annotations"] = {
        names.POD_SET_ANNOTATION: kueue.digest(job.valid_spec),
        names.POOL_ANNOTATION: kueue.nodes_of(pool),
    }
    pod = trainer_pod.pod(job, status, pool, sync_image=sync_image)
    named = kueue.priority_of(*kueue.class_named(job.queue_priority, job.valid_spec), priority)
    return kueue.workload(meta, pod, job.valid_spec.workers, job.queue, named)


def cleanup(job: Job, pool: Pool, *, sync_image: str = "") -> Json:
    """Returns the pod that deletes a deleted job's checkpoints, with our image and its identity, in its pool.

    Of the template it has only what access to the store needs: the rest may be what is wrong with the job.
    """
    template, ca = job.valid_spec.pod, job.valid_spec.checkpoint.ca_bundle
    container = _cleaner(job, sync_image)
    names_of_mounts = {mount["name"] for mount in container["volumeMounts"]}
    mounted = [v for v in template.get("volumes") or () if v["name"] in names_of_mounts]
    mounted += [{"name": SCRATCH["name"], "emptyDir": {}}, *([ca.volume] if ca is not None else ())]
    body = {name: template[name] for name in IDENTITY if name in template} | {
        "restartPolicy": "OnFailure",
        "activeDeadlineSeconds": CLEANUP_SECONDS,
        "tolerations": [*(template.get("tolerations") or ()), *pool.tolerated],
        "containers": [container],
        "volumes": mounted,
        "automountServiceAccountToken": template.get("automountServiceAccountToken", False),
        "securityContext": trainer_pod.security(template, mounted),
    }
    meta = _metadata(job, job.cleanup_name)
    meta["labels"][names.ROLE_LABEL] = names.ROLE_CLEANUP
    meta["ownerReferences"][0]["blockOwnerDeletion"] = False
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": body}


def _cleaner(job: Job, sync_image: str) -> Json:
    """Returns the cleanup container: our image with the trainer's access to the store."""
    checkpoint, trainer = job.valid_spec.checkpoint, job.valid_spec.trainer
    words = [checkpoint.uri, "--job-uid", job.key.uid, "--yes"]
    words += ["--endpoint", checkpoint.endpoint] if checkpoint.endpoint else []
    stored = sync.uri_folder(checkpoint)
    # Files that a store's variables name (credentials); other mounts might hide what the image needs.
    env = sync.variables(trainer, sync.mounts_of(trainer, stored))
    files = [str(e["value"]) for e in env if str(e.get("value", "")).startswith("/")]
    access = init_containers.store_access(checkpoint, trainer, sync.mounts_of(trainer, stored, *files))
    ours = variables.given(variables.of_s3(checkpoint))
    return {
        "name": names.ROLE_CLEANUP,
        "image": sync_image,
        "command": ["spottrain", "checkpoints", "delete", *words],
        "env": [*access["env"], *variables.listed(ours)],
        "envFrom": [*_others_env(job, trainer), *access["envFrom"]],
        "securityContext": _security(job),
        "volumeMounts": list({m["mountPath"]: m for m in (SCRATCH, *access["volumeMounts"])}.values()),
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},  # a ResourceQuota may require both
            "limits": {"cpu": "1", "memory": "1Gi"},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _others_env(job: Job, trainer: Json) -> list[Json]:
    """Returns the trainer's `envFrom`, of which one that is missing by now does no harm."""
    if job.valid_spec.checkpoint.synced:  # there access is the sidecar's alone, which does not get it
        return []
    return [
        source
        | {ref: source[ref] | {"optional": True} for ref in ("secretRef", "configMapRef") if ref in source}
        for source in trainer.get("envFrom") or ()
    ]


def _security(job: Job) -> Json:
    """Returns our image's security context: for files that of the trainer, else no rights at all."""
    context = sync.security_context(job.valid_spec)
    if not sync.uri_folder(job.valid_spec.checkpoint):
        context |= {"runAsNonRoot": True} | ({"runAsUser": OUR_USER} if context.get("runAsUser") == 0 else {})
    return init_containers.security(context)
