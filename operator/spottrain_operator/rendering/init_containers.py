"""Init containers with our image: the one that brings the runtime, and the sidecar of Sync. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from spottrain.contract import PODINFO_DIR, PROGRESS_PORT

from spottrain_operator.api import injected, sync, volumes
from spottrain_operator.api.template import PROGRESS_NAME
from spottrain_operator.api.training_job import CheckpointSpec, Job, Status
from spottrain_operator.names import INJECT_CONTAINER, SYNC_CONTAINER
from spottrain_operator.rendering import variables

Json = dict[str, Any]

INJECT_RESOURCES: Final = {"cpu": "500m", "memory": "128Mi"}
"""As requests and limits: a pod that is Guaranteed remains so. It counts only where the trainer has less."""
LIKE_THE_TRAINER: Final = ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "seLinuxOptions")
"""Parts of its security context, so that the pod is admitted, and its volume used, as the trainer is."""
SYNC_STATE: Final = {"name": "spottrain-sync-state", "mountPath": volumes.TMP_DIR}
SYNC_PROBE: Final = {
    "exec": {"command": ["test", "-s", variables.RESTORED_FILE]},
    "periodSeconds": 1,
    "timeoutSeconds": 10,
    "failureThreshold": 2**31 - 1,  # a restore may take long, and the sidecar itself knows when to give up
}
SYNC_RESOURCES: Final = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "2", "memory": "512Mi"},  # a ResourceQuota may require both
}
ROOTS_RIGHTS: Final = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]
"""What root needs to read and restore files of another user, and to give them back to that user."""
UNPRIVILEGED: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def inject(trainer: Json, image: str) -> Json:
    """Returns the container that writes the runtime to a volume of the trainer (spec.runtime.inject)."""
    own = trainer.get("securityContext") or {}
    context = UNPRIVILEGED | {"readOnlyRootFilesystem": True}
    return {
        "name": INJECT_CONTAINER,
        "image": image,
        "command": ["spottrain", "inject", injected.FOLDER],
        "resources": {"requests": INJECT_RESOURCES, "limits": INJECT_RESOURCES},
        "securityContext": context | {name: own[name] for name in LIKE_THE_TRAINER if name in own},
        "volumeMounts": [{"name": INJECT_CONTAINER, "mountPath": injected.FOLDER}],
    }


def sidecar(job: Job, status: Status, grace_seconds: int, trainer: Json, image: str) -> Json:
    """Returns the native sidecar that restores a folder and uploads it as it grows (checkpoint.mode Sync).

    The kubelet starts the other containers when its startup probe has passed, which is when the folder is
    restored, and ends it after they have ended. `trainer`: as it is in the pod.
    """
    spec, checkpoint = job.valid_spec, job.valid_spec.checkpoint
    path = sync.folder(checkpoint)
    mounts = sync.mounts_of(trainer, PODINFO_DIR, path, sync.uri_folder(checkpoint))
    access = store_access(checkpoint, spec.trainer, mounts)
    ours = variables.of_sidecar(job, status, grace_seconds)
    return access | {
        "name": SYNC_CONTAINER,
        "image": image,
        "restartPolicy": "Always",
        "args": [path],
        "env": [*access["env"], *variables.listed(ours), variables.POD_UID],
        "ports": [{"name": PROGRESS_NAME, "containerPort": PROGRESS_PORT}],
        "startupProbe": SYNC_PROBE,
        "resources": SYNC_RESOURCES,
        "securityContext": security(sync.security_context(spec)),
        "volumeMounts": [SYNC_STATE, *access["volumeMounts"]],
    }


def store_access(checkpoint: CheckpointSpec, trainer: Json, mounts: list[Json]) -> Json:
    """Returns what of a trainer a container with our image needs for the store, with these mounts of its."""
    env, certified = sync.variables(trainer, mounts), checkpoint.ca_bundle is not None
    if certified:
        env.append({"name": volumes.CA_VARIABLE, "value": volumes.CA_FILE})
    secret = checkpoint.credentials_secret_ref
    return {
        "env": env,
        "envFrom": [{"secretRef": {"name": secret.name}}] if secret is not None else [],
        "volumeMounts": [*([volumes.CA_MOUNT] if certified else []), *mounts],
    }


def security(context: Mapping[str, Any]) -> Json:
    """Returns our image's security context for a script's, by which files belong to the same user.

    That is root where the script's image says the user; where root is forbidden and no user is named, it is
    our image's own.
    """
    user = context.get("runAsUser")
    not_root = bool(user) or (user is None and bool(context.get("runAsNonRoot")))
    capabilities = {"drop": ["ALL"]} | ({} if not_root else {"add": ROOTS_RIGHTS})
    numbers = {"runAsUser": user if not_root else 0, "runAsGroup": context.get("runAsGroup")}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": not_root,
        "capabilities": capabilities,
    } | {name: number for name, number in numbers.items() if number is not None}
