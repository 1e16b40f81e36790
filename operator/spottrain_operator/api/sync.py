"""checkpoint.mode Sync: the folder that a sidecar uploads, and what in a spec does not fit with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from spottrain.contract import PODINFO_DIR, PROGRESS_PORT, SyncEnv, SyncWhen

from spottrain_operator.api import volumes
from spottrain_operator.api.template import judged, trainer_path
from spottrain_operator.api.training_job import CheckpointSpec, TrainingJobSpec
from spottrain_operator.names import SYNC_CONTAINER

Json = dict[str, Any]

STORE_VARIABLES: Final = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
STORE_PREFIXES: Final = ("AWS_", "GOOGLE_")
SIDECARS_FOLDERS: Final = ("/bin", "/dev", "/lib", "/opt/spottrain", "/opt/venv", "/proc", "/sys", "/usr")
"""Folders of the sidecar's image, in which it has the sync folder at the script's path."""


def store_variables(trainer: Mapping[str, Any]) -> list[Json]:
    """Returns the trainer's variables for access to a store, such as AWS_REGION, for the sidecar."""
    given = (dict(e) for e in trainer.get("env") or ())
    return [e for e in given if e["name"].upper() in STORE_VARIABLES or e["name"].startswith(STORE_PREFIXES)]


def when_of(checkpoint: CheckpointSpec) -> str:
    """Returns `syncWhen` as the sidecar reads it; an object without fields where it is absent."""
    return checkpoint.sync_when.to_json() if checkpoint.sync_when is not None else "{}"


def folder(checkpoint: CheckpointSpec) -> str:
    return volumes.clean(checkpoint.sync_path)


def mount_of(trainer: Mapping[str, Any], path: str) -> Json | None:
    """Returns the template's mount that holds a path; None where the path is on no volume."""
    mounts = {volumes.clean(m.get("mountPath")): dict(m) for m in trainer.get("volumeMounts") or ()}
    found = [at for at in mounts if _within(path, at)]
    return mounts[max(found, key=len)] if found else None


def uri_folder(checkpoint: CheckpointSpec) -> str:
    """Returns the folder of a file:// URI; "" for other URIs."""
    if not checkpoint.uri.startswith("file:"):
        return ""
    return volumes.clean(unquote(urlsplit(checkpoint.uri).path))


def user(pod: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns user and group of the trainer's processes; None where the image says them."""
    context = (pod.get("securityContext") or {}) | (judged(pod["containers"]).get("securityContext") or {})
    return context.get("runAsUser"), context.get("runAsGroup")


# --- validation ---------------------------------------------------------------------------------------
def problem(spec: TrainingJobSpec) -> str:
    """Returns a sentence about what in the spec does not fit with its mode; "" where all does."""
    pod, checkpoint = spec.template["spec"], spec.checkpoint
    if any(c.get("name") == SYNC_CONTAINER for c in (*pod["containers"], *(pod.get("initContainers") or ()))):
        return f"no container of spec.template.spec may be named {SYNC_CONTAINER}: that is the operator's"
    if not checkpoint.synced:
        if checkpoint.sync_path or checkpoint.sync_when is not None:
            return f"spec.checkpoint.syncPath and syncWhen need mode Sync, and mode is {checkpoint.mode}"
        return ""
    return _spec_problem(spec) or _path_problem(spec) or _pod_problem(pod) or _uri_problem(spec)


def _spec_problem(spec: TrainingJobSpec) -> str:
    if spec.workers > 1:
        return (
            f"spec.workers must be 1 with checkpoint.mode Sync, and is {spec.workers}: a sidecar uploads the "
            "folder of one pod, and nothing makes the folders of several belong to one step"
        )
    if spec.failure_policy.hang_timeout_seconds is not None:
        return (
            "spec.failurePolicy.hangTimeoutSeconds must be absent with checkpoint.mode Sync: the sidecar "
            "does not see the script's steps"
        )
    try:
        SyncWhen.from_json(when_of(spec.checkpoint))
    except ValueError as error:
        return f"spec.checkpoint.syncWhen {error}"
    return ""


def _path_problem(spec: TrainingJobSpec) -> str:
    given, path = spec.checkpoint.sync_path, folder(spec.checkpoint)
    what = f"spec.checkpoint.syncPath {given}"
    if not given:
        return "spec.checkpoint.mode Sync needs syncPath, the folder to which the script writes checkpoints"
    if not given.startswith("/") or path == "/" or ".." in given.split("/"):
        return f"{what} must be an absolute folder below /, without .. in its path"
    # A folder below /tmp, /cache or the home is fine: it has a volume of its own there.
    ours = next((own for own in sorted(volumes.OWN_PATHS) if _within(own, path)), "")
    if ours or _within(path, PODINFO_DIR) or _within(path, volumes.CA_DIR):
        return f"{what} is or holds a folder that the operator mounts itself; take another one"
    if hidden := next((own for own in SIDECARS_FOLDERS if _within(own, path)), ""):
        return f"{what} would hide {hidden}, which the sidecar needs; take another folder"
    cache = spec.data_cache.path if spec.data_cache is not None else ""
    if cache and (_within(path, cache) or _within(cache, path)):
        return f"{what} overlaps with spec.dataCache.mountPath {cache}; take another folder for one of them"
    trainer = judged(spec.template["spec"]["containers"])
    where = f"{trainer_path(spec.template['spec'])}.volumeMounts"
    if inner := next((p for p in sorted(volumes.paths(trainer)) if p != path and _within(p, path)), ""):
        return f"{where} has {inner} in {what}, and it would not be uploaded; mount it elsewhere"
    mount = mount_of(trainer, path)
    if mount is not None and mount.get("readOnly"):
        return f"{where} has {mount['mountPath']} with readOnly, and {what} must be writable"
    return ""


def _pod_problem(pod: Mapping[str, Any]) -> str:
    path = "spec.template.spec"
    others = [c["name"] for c in pod["containers"] if c is not judged(pod["containers"])]
    if others:
        return (
            f"{path}.containers must have one container with checkpoint.mode Sync, and has {others[0]} too: "
            "the last upload begins when all have ended. Make the others initContainers with "
            "restartPolicy: Always"
        )
    context = (pod.get("securityContext") or {}) | (judged(pod["containers"]).get("securityContext") or {})
    if context.get("runAsNonRoot") and context.get("runAsUser") is None:
        return (
            f"{path}.securityContext.runAsUser must be set beside runAsNonRoot with checkpoint.mode Sync: "
            "the sidecar runs as the same user, so that it can read the script's files and the script can "
            "write restored ones. Write the number of the image's user"
        )
    ports = [port.get("containerPort") for port in judged(pod["containers"]).get("ports") or ()]
    if PROGRESS_PORT in ports:
        return (
            f"{trainer_path(pod)}.ports must not have containerPort {PROGRESS_PORT}, on which the sidecar "
            "tells its progress; take another number"
        )
    for variable in judged(pod["containers"]).get("env") or ():
        if variable.get("name") in {str(name) for name in SyncEnv}:
            return (
                f"{trainer_path(pod)}.env must not have {variable['name']}, because the operator sets it; "
                "leave it out"
            )
    return ""


def _uri_problem(spec: TrainingJobSpec) -> str:
    pod, checkpoint = spec.template["spec"], spec.checkpoint
    path, stored = folder(checkpoint), uri_folder(checkpoint)
    if not stored:
        return ""
    if _within(stored, path) or _within(path, stored):
        return (
            f"spec.checkpoint.uri {checkpoint.uri} and syncPath {checkpoint.sync_path} overlap; take two "
            "folders of which none is in the other"
        )
    if mount_of(judged(pod["containers"]), stored) is None:
        return (
            f"spec.checkpoint.uri {checkpoint.uri} is on no volume of {trainer_path(pod)}, so the sidecar "
            "cannot write there: mount one, or use an s3:// or gs:// URI"
        )
    return ""


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
