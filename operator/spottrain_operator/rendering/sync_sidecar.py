"""Renders the sidecar of checkpoint.mode Sync, which restores a folder and uploads it as it grows. Pure.

It is a native sidecar: an init container with restartPolicy Always. The kubelet starts the other containers
when its startup probe has passed, which is when the folder is restored, and ends it after they have ended.
"""

from __future__ import annotations

from typing import Any, Final

from spottrain.contract import (
    DEADLINE_NAME,
    PODINFO_DIR,
    PROGRESS_PORT,
    STORE_WAIT_SECONDS,
    Env,
    LastExit,
    OnExisting,
    SyncEnv,
)

from spottrain_operator import names
from spottrain_operator.api import sync, volumes
from spottrain_operator.api.template import PROGRESS_NAME, judged
from spottrain_operator.api.training_job import Job, Status, TrainingJobSpec
from spottrain_operator.rendering import variables

Json = dict[str, Any]

STATE_VOLUME: Final = "spottrain-sync-state"
RESULT_FILE: Final = f"{volumes.TMP_DIR}/spottrain-restored.json"
"""On a volume of the pod, so that a sidecar that is started again does not restore again."""
UPLOAD_GRACE: Final = 600
"""Default of terminationGracePeriodSeconds: after a normal end of the script it limits the last upload."""
PROBE: Final = {"exec": {"command": ["test", "-s", RESULT_FILE]}, "periodSeconds": 1, "timeoutSeconds": 10}
NEVER_FAILS: Final = {"failureThreshold": 2**31 - 1}
"""A restore may take long, and the sidecar itself knows when to give up."""
RESOURCES: Final = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "2", "memory": "512Mi"},  # a ResourceQuota may require both
}
ROOTS_RIGHTS: Final = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]
"""What root needs to read and restore files of another user, and to give them back to that user."""


def add(body: Json, trainer: Json, job: Job, status: Status, image: str) -> None:
    """Adds the sidecar, before other init containers, and the folder's volume; after `volumes.equip`."""
    assert job.spec is not None
    spec, given = job.spec, judged(job.spec.template["spec"]["containers"])
    path = sync.folder(spec.checkpoint)
    mounts = sync.mounts(spec.checkpoint, given)
    if sync.mount_of(given, path) is None:
        mounts.append({"name": names.SYNC_CONTAINER, "mountPath": path})
        trainer["volumeMounts"].append(mounts[-1])
        body["volumes"].append({"name": names.SYNC_CONTAINER, "emptyDir": {}})
    body["volumes"].append({"name": STATE_VOLUME, "emptyDir": {}})
    if _resumed(spec, status) == "true" and spec.checkpoint.resume_args:
        trainer["args"] = [*(trainer.get("args") or ()), *spec.checkpoint.resume_args]
    podinfo = next(m for m in trainer["volumeMounts"] if volumes.clean(m["mountPath"]) == PODINFO_DIR)
    state = {"name": STATE_VOLUME, "mountPath": volumes.TMP_DIR}
    container = access(spec, image, body) | {
        "name": names.SYNC_CONTAINER,
        "restartPolicy": "Always",
        "args": [path],
        "ports": [{"name": PROGRESS_NAME, "containerPort": PROGRESS_PORT}],
        "startupProbe": PROBE | NEVER_FAILS,
        "resources": RESOURCES,
    }
    ours = environment(job, status, int(body["terminationGracePeriodSeconds"]))
    container["env"] = [*container["env"], *variables.listed(ours), variables.POD_UID]
    container["volumeMounts"] = [*container["volumeMounts"], podinfo, state, *mounts]
    body["initContainers"] = [container, *(body.get("initContainers") or ())]


def access(spec: TrainingJobSpec, image: str, body: Json) -> Json:
    """Returns a container of the sidecar's image with the job's access to the store."""
    checkpoint = spec.checkpoint
    given = judged(spec.template["spec"]["containers"])
    container: Json = {
        "image": image,
        "env": sync.variables(given, sync.mounts(checkpoint, given)),
        "volumeMounts": [],
        "securityContext": security(spec.template["spec"]),
    }
    if checkpoint.ca_bundle is not None:
        container["env"].append({"name": volumes.CA_VARIABLE, "value": f"{volumes.CA_DIR}/{volumes.CA_NAME}"})
        container["volumeMounts"].append(
            {"name": volumes.CA_VOLUME, "mountPath": volumes.CA_DIR, "readOnly": True}
        )
        body["volumes"] = [
            *(body.get("volumes") or ()),
            {"name": volumes.CA_VOLUME} | checkpoint.ca_bundle.source,
        ]
    if secret := checkpoint.credentials_secret_ref:
        container["envFrom"] = [{"secretRef": {"name": secret.name}}]
    return container


def security(pod: Json) -> Json:
    """Returns our image's security context: the script's user, or root where its image says the user.

    Where root is forbidden and the template names no user, it is our image's own.
    """
    context = sync.security_context(pod)
    user = context.get("runAsUser")
    not_root = bool(user) or (user is None and bool(context.get("runAsNonRoot")))
    unprivileged: Json = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": not_root,
        "capabilities": {"drop": ["ALL"]},
    }
    if not not_root:
        unprivileged["capabilities"]["add"] = ROOTS_RIGHTS
        user = 0
    numbers = {"runAsUser": user, "runAsGroup": context.get("runAsGroup")}
    return unprivileged | {name: number for name, number in numbers.items() if number is not None}


# --- environment --------------------------------------------------------------------------------------
def environment(job: Job, status: Status, grace_seconds: int) -> dict[str, str]:
    """Returns the contract's variables for the sidecar that differ from their defaults."""
    assert job.spec is not None
    checkpoint = job.spec.checkpoint
    wait = min(STORE_WAIT_SECONDS, job.spec.failure_policy.store_outage_seconds)
    values = variables.identity(job, status) | variables.store(job.spec, status)
    values |= {
        Env.GRACE_SECONDS: str(grace_seconds),
        Env.DEADLINE_FILE: f"{PODINFO_DIR}/{DEADLINE_NAME}",
        Env.TERMINATION_MESSAGE: variables.TERMINATION_LOG,
        Env.PROGRESS_PORT: str(PROGRESS_PORT),
        Env.STORE_WAIT: str(wait),
        SyncEnv.PATH: sync.folder(checkpoint),
        SyncEnv.WHEN: sync.when_of(checkpoint),
        SyncEnv.RESULT_FILE: RESULT_FILE,
        SyncEnv.LAST_EXIT: _last_exit(status),
    }
    if checkpoint.resume_args:  # the script's arguments are chosen before it is known what is restored
        values[SyncEnv.RESUMED] = _resumed(job.spec, status)
    return variables.given(values)


def _last_exit(status: Status) -> str:
    """Returns the newest exit code that is known, with its attempt; "" if none is."""
    known = [LastExit(attempt=r.number, code=r.exit_code) for r in status.attempts if r.exit_code is not None]
    past = [each for each in known if each.attempt < status.attempt]
    return str(max(past, key=lambda each: each.attempt)) if past else ""


def of_script(job: Job, status: Status) -> dict[str, str]:
    """Returns the variables that tell the script about its folder."""
    assert job.spec is not None
    values: dict[str, str] = {
        SyncEnv.PATH: sync.folder(job.spec.checkpoint),
        SyncEnv.RESUMED: _resumed(job.spec, status),
    }
    return variables.given(values)


def _resumed(spec: TrainingJobSpec, status: Status) -> str:
    """Returns whether the folder is restored, or "" where only the sidecar knows.

    An earlier attempt may have committed what the operator has not seen. With `resumeArgs` that is "false":
    a sidecar that finds a checkpoint then ends the attempt, and the next one knows.
    """
    if status.known_durable_step is not None:
        return "true"
    first = status.attempt <= 1 and spec.checkpoint.on_existing is not OnExisting.RESUME
    return "false" if first or spec.checkpoint.resume_args else ""
