"""Objects of a job other than its trainer pods: Service, pod group, claim, cleanup pod. Pure."""

from __future__ import annotations

import copy
from typing import Any, Final

from spottrain_operator import names
from spottrain_operator.api import kueue, native_gangs, sync, volumes
from spottrain_operator.api.data_cache import DataCache
from spottrain_operator.api.kueue import KueueApi
from spottrain_operator.api.node_pools import ChosenPool, Pool
from spottrain_operator.api.template import judged
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.rendering import sync_sidecar, trainer_pod

Json = dict[str, Any]

VOLCANO: Final = "scheduling.volcano.sh/v1beta1"
CLEANUP_SECONDS: Final = 840
"""A little less than the operator's own limit for the cleanup pod (policies/cleanup.py)."""
IDENTITY: Final = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "imagePullSecrets",
    "securityContext",
    "volumes",
)
REACH: Final = ("image", "imagePullPolicy", "env", "envFrom", "securityContext", "volumeMounts")
"""Fields of the trainer container that access to the store needs; a file:// URI needs its volumes."""


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


def service(job: Job) -> Json:
    """Returns a gang's headless Service; it also publishes unready pods, which wait for each other."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {names.JOB_UID_LABEL: job.key.uid, names.ROLE_LABEL: names.ROLE_TRAINER},
        "ports": [{"name": "rendezvous", "port": names.RENDEZVOUS_PORT}],
    }
    meta = _metadata(job, job.service_name)
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def cache_claim(job: Job, cache: DataCache) -> Json:
    """Returns the data cache's claim: one for all attempts; the garbage collector deletes it with the job."""
    body: Json = {"accessModes": [str(cache.mode)], "resources": {"requests": {"storage": cache.size}}}
    if cache.storage_class_name:
        body["storageClassName"] = cache.storage_class_name
    meta = _metadata(job, job.cache_claim_name)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": body}


def pod_group(job: Job, status: Status) -> Json | None:
    """Returns Volcano's PodGroup if the template uses that scheduler, which then starts all pods or none."""
    assert job.spec is not None
    if job.spec.template["spec"].get("schedulerName") != "volcano":
        return None
    meta = _metadata(job, job.group_name(status.attempt))
    queue = {"queue": job.spec.queue_name} if job.spec.queue_name else {}
    spec = {"minMember": job.spec.workers} | queue
    return {"apiVersion": VOLCANO, "kind": "PodGroup", "metadata": meta, "spec": spec}


def gang(job: Job, status: Status, api: native_gangs.GangApi, *, zoned: bool) -> Json:
    """Returns the group of Kubernetes' own gang scheduling; one per attempt, because it is immutable."""
    assert job.spec is not None
    meta = _metadata(job, job.group_name(status.attempt))
    return native_gangs.group(api, meta, job.spec, zoned=zoned)


def workload(
    job: Job,
    status: Status,
    pool: ChosenPool,
    api: KueueApi,
    priority: int | None,
    *,
    sync_image: str = "",
) -> Json:
    """Returns the Workload with which a job asks its Kueue queue; one for all attempts of an admission.

    priority: the value of the class that the job names; None without one.
    """
    assert job.spec is not None
    meta = _metadata(job, job.workload_name)
    meta["labels"][kueue.JOB_UID_LABEL] = job.key.uid
    meta["annotations"] = {
        names.POD_SET_ANNOTATION: kueue.digest(job.spec),
        names.POOL_ANNOTATION: kueue.nodes_of(pool),
    }
    pod = trainer_pod.pod(job, status, pool, sync_image=sync_image)
    named = kueue.priority_of(api, *kueue.class_named(job.queue_priority, job.spec), priority)
    return kueue.workload(api, meta, pod, job.spec.workers, job.queue, named)


def cleanup(job: Job, pool: Pool, *, sync_image: str = "") -> Json:
    """Returns the pod that deletes a deleted job's checkpoints, with its image and identity, in its pool.

    Where the image may lack the runtime (checkpoint.mode Sync, runtime.inject), it is the one of ours.
    """
    assert job.spec is not None
    container = _cleaner(job, sync_image)
    template, ca = job.spec.template["spec"], job.spec.checkpoint.ca_bundle
    body: Json = {name: copy.deepcopy(template[name]) for name in IDENTITY if name in template} | {
        "restartPolicy": "OnFailure",
        "activeDeadlineSeconds": CLEANUP_SECONDS,
        "tolerations": list(pool.tolerated),
        "containers": [container],
    }
    volumes.equip(body, container, ca.source if ca else None)
    if ca is not None:
        container["env"].append({"name": volumes.CA_VARIABLE, "value": f"{volumes.CA_DIR}/{volumes.CA_NAME}"})
    trainer_pod.restrict(body)
    meta = _metadata(job, job.cleanup_name)
    meta["labels"][names.ROLE_LABEL] = names.ROLE_CLEANUP
    meta["ownerReferences"][0]["blockOwnerDeletion"] = False
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": body}


def _cleaner(job: Job, sync_image: str) -> Json:
    """Returns the cleanup container: the trainer's access to the store, without its GPUs and command."""
    assert job.spec is not None
    checkpoint, trainer = job.spec.checkpoint, judged(job.spec.template["spec"]["containers"])
    words = [checkpoint.uri, "--job-uid", job.key.uid, "--yes"]
    words += ["--endpoint", checkpoint.endpoint] if checkpoint.endpoint else []
    kept: Json = {name: copy.deepcopy(trainer[name]) for name in REACH if name in trainer}
    if checkpoint.synced or job.spec.runtime.inject:
        mounts = sync.store_mounts(checkpoint, trainer)  # others might hide what the image needs
        given = {} if checkpoint.synced else {"envFrom": list(trainer.get("envFrom") or ())}
        kept = given | {
            "image": sync_image,
            "env": sync.variables(trainer, mounts),
            "securityContext": sync_sidecar.security(job.spec.template["spec"]),
            "volumeMounts": mounts,
        }
    container = kept | {"name": names.ROLE_CLEANUP, "command": ["spottrain", "checkpoints", "delete", *words]}
    container["env"] = list(kept.get("env") or ())
    little = {"cpu": "100m", "memory": "256Mi"}  # a ResourceQuota may require both
    container["resources"] = {"requests": little, "limits": {"cpu": "1", "memory": "1Gi"}}
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    if secret := checkpoint.credentials_secret_ref:
        container["envFrom"] = [*(kept.get("envFrom") or ()), {"secretRef": {"name": secret.name}}]
    return container
