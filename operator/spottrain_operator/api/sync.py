"""checkpoint.mode Sync: the folder that a sidecar uploads, and what in a spec does not fit with it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from spottrain.contract import ARGUMENTS_OF_SHELL, PODINFO_DIR, Env, SyncEnv, loses_arguments

from spottrain_operator.api import volumes
from spottrain_operator.api.template import judged, trainer_path
from spottrain_operator.api.training_job import CheckpointSpec, TrainingJobSpec

Json = dict[str, Any]

STORE_VARIABLES: Final = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
STORE_PREFIXES: Final = ("AWS_", "GOOGLE_")
OUR_VARIABLES: Final = frozenset(
    {Env.JOB_NAME, Env.JOB_NAMESPACE, Env.JOB_UID, Env.ATTEMPT, Env.POD_UID, SyncEnv.PATH}
)
"""Variables that the operator sets on trainer and sidecar alike."""
REFERENCE: Final = re.compile(r"\$\$|\$\(([^()]+)\)")
"""A variable's name in a value or in `subPathExpr`, as the kubelet reads it; `$$` stands for `$`."""
SIDECARS_FOLDERS: Final = (
    *("/bin", "/dev", "/etc/ssl", "/lib", "/lib64", "/opt/spottrain", "/opt/venv", "/proc", "/sys"),
    *("/usr", "/usr/bin", "/usr/lib"),
)
"""Folders of the sidecar's image, in which it has the sync folder at the script's path."""
CLOSED_FOLDERS: Final = tuple(own for own in SIDECARS_FOLDERS if own not in ("/dev", "/usr"))
"""Those in which no folder of a script may be; /usr/src and /dev/shm are in use for that."""


def variables(trainer: Mapping[str, Any], mounts: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Returns the trainer's variables that a container with access to the store and these mounts needs.

    They are those of a store, such as AWS_REGION, and the ones that these or the mounts name. The order
    stays, because a value names variables before it.
    """
    given = [dict(e) for e in trainer.get("env") or ()]
    wanted = {e["name"] for e in given if _of_store(e["name"])}.union(*map(_named_by, mounts))
    while more := {name for e in given if e["name"] in wanted for name in _named_by(e)} - wanted:
        wanted |= more
    return [e for e in given if e["name"] in wanted]


def _of_store(name: str) -> bool:
    return name.upper() in STORE_VARIABLES or name.startswith(STORE_PREFIXES)


def _named_by(entry: Mapping[str, Any]) -> set[str]:
    """Returns the variables that a variable's value, or a mount's `subPathExpr`, names."""
    text = str(entry.get("value") or entry.get("subPathExpr") or "")
    return {name for name in REFERENCE.findall(text) if name}


def folder(checkpoint: CheckpointSpec) -> str:
    return volumes.clean(checkpoint.sync_path)


def mount_of(trainer: Mapping[str, Any], path: str) -> Json | None:
    """Returns the template's mount that holds a path; None where the path is on no volume."""
    mounts = {volumes.clean(m.get("mountPath")): dict(m) for m in trainer.get("volumeMounts") or ()}
    found = [at for at in mounts if volumes.within(path, at)]
    return mounts[max(found, key=len)] if found else None


def uri_folder(checkpoint: CheckpointSpec) -> str:
    """Returns the folder of a file:// URI; "" for other URIs."""
    if not checkpoint.uri.startswith("file:"):
        return ""
    return volumes.clean(unquote(urlsplit(checkpoint.uri).path))


def store_mounts(checkpoint: CheckpointSpec, trainer: Mapping[str, Any]) -> list[Json]:
    """Returns the template's mount with the folder of a file:// URI."""
    stored = uri_folder(checkpoint)
    mount = mount_of(trainer, stored) if stored else None
    return [mount] if mount is not None else []


def mounts(checkpoint: CheckpointSpec, trainer: Mapping[str, Any]) -> list[Json]:
    """Returns the template's mounts that the sidecar has too: with the folder, and with a file:// URI."""
    mount = mount_of(trainer, folder(checkpoint))
    found = [*([] if mount is None else [mount]), *store_mounts(checkpoint, trainer)]
    return list({m["mountPath"]: m for m in found}.values())


def security_context(pod: Mapping[str, Any]) -> Json:
    """Returns what holds for the trainer's processes: of the pod, or of the container where that differs."""
    return (pod.get("securityContext") or {}) | (judged(pod["containers"]).get("securityContext") or {})


# --- validation ---------------------------------------------------------------------------------------
def problem(spec: TrainingJobSpec) -> str:
    """Returns a sentence about what in the spec does not fit with its mode; "" where all does."""
    if not spec.checkpoint.synced:
        return ""
    checks = (_args_problem, _path_problem, _pod_problem, _uri_problem, _mounts_problem, _variables_problem)
    return next((words for check in checks if (words := check(spec))), "")


def _args_problem(spec: TrainingJobSpec) -> str:
    """Arguments replace those of an image, which are not known here."""
    pod = spec.template["spec"]
    trainer, where = judged(pod["containers"]), trainer_path(pod)
    words = [str(word) for kind in ("command", "args") for word in trainer.get(kind) or ()]
    if not spec.checkpoint.resume_args:
        return ""
    if not words:
        return (
            f"{where}.command or args is needed with spec.checkpoint.resumeArgs, because arguments replace "
            "those of the image; write the image's entry point or its arguments there"
        )
    if text := loses_arguments(words):
        what = "command" if trainer.get("command") else "args"
        return f"{where}.{what} with {text!r} and spec.checkpoint.resumeArgs: {ARGUMENTS_OF_SHELL}"
    return ""


def _path_problem(spec: TrainingJobSpec) -> str:
    path = folder(spec.checkpoint)
    what = f"spec.checkpoint.syncPath {spec.checkpoint.sync_path}"
    cache = [spec.data_cache.path] if spec.data_cache is not None else []
    # A folder below /tmp, /cache or the home is fine: it has a volume of its own there.
    inside = (*cache, PODINFO_DIR, volumes.CA_DIR, *CLOSED_FOLDERS)
    over = [
        own for own in (*sorted(volumes.OWN_PATHS), *SIDECARS_FOLDERS, *cache) if volumes.within(own, path)
    ]
    if taken := next(iter((*over, *(own for own in inside if volumes.within(path, own)))), ""):
        return f"{what} overlaps with {taken}, which the operator or its sidecar needs; take another folder"
    trainer = judged(spec.template["spec"]["containers"])
    where = f"{trainer_path(spec.template['spec'])}.volumeMounts"
    if inner := next(
        (p for p in sorted(volumes.paths(trainer)) if p != path and volumes.within(p, path)), ""
    ):
        return f"{where} has {inner} in {what}, and it would not be uploaded; mount it elsewhere"
    mount = mount_of(trainer, path)
    if mount is not None and mount.get("readOnly"):
        return f"{where} has {mount['mountPath']} with readOnly, and {what} must be writable"
    return ""


def _pod_problem(spec: TrainingJobSpec) -> str:
    pod, path = spec.template["spec"], "spec.template.spec"
    others = [c["name"] for c in pod["containers"] if c is not judged(pod["containers"])]
    if others:
        return (
            f"{path}.containers must have one container with checkpoint.mode Sync, and has {others[0]} too: "
            "the last upload begins when all have ended. Make the others initContainers with "
            "restartPolicy: Always"
        )
    context = security_context(pod)
    if context.get("runAsNonRoot") and context.get("runAsUser") is None:
        return (
            f"{path}.securityContext.runAsUser must be set beside runAsNonRoot with checkpoint.mode Sync: "
            "the sidecar runs as the same user, so that it can read the script's files and the script can "
            "write restored ones. Write the number of the image's user"
        )
    return ""


def _uri_problem(spec: TrainingJobSpec) -> str:
    pod, checkpoint = spec.template["spec"], spec.checkpoint
    path, stored = folder(checkpoint), uri_folder(checkpoint)
    if not stored:
        return ""
    if volumes.within(stored, path) or volumes.within(path, stored):
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


def _mounts_problem(spec: TrainingJobSpec) -> str:
    """A mount that holds the folder may be far above it, and is in the sidecar as a whole."""
    pod = spec.template["spec"]
    needed = sorted((*SIDECARS_FOLDERS, volumes.TMP_DIR, PODINFO_DIR, volumes.CA_DIR))
    for mount in mounts(spec.checkpoint, judged(pod["containers"])):
        at = volumes.clean(mount["mountPath"])
        if hidden := next((own for own in needed if volumes.within(own, at)), ""):
            return (
                f"{trainer_path(pod)}.volumeMounts has {mount['mountPath']}, which the sidecar gets too "
                f"because of spec.checkpoint, and there it hides {hidden}, which the sidecar needs; mount "
                "the volume at a folder of its own"
            )
    return ""


def _variables_problem(spec: TrainingJobSpec) -> str:
    """What `envFrom` holds is not known here, and the sidecar does not get it."""
    pod = spec.template["spec"]
    trainer = judged(pod["containers"])
    if not trainer.get("envFrom"):
        return ""
    shared = mounts(spec.checkpoint, trainer)
    known = {e["name"] for e in trainer.get("env") or ()} | {str(name) for name in OUR_VARIABLES}
    copied = [(f"env {e['name']}", e) for e in variables(trainer, shared)]
    for what, entry in [*copied, *((f"volumeMounts {m['mountPath']}", m) for m in shared)]:
        if unknown := sorted(_named_by(entry) - known):
            return (
                f"{trainer_path(pod)}.{what} names $({unknown[0]}), which is not in env: the sidecar of "
                f"checkpoint.mode Sync does not get envFrom; write {unknown[0]} into env"
            )
    return ""
