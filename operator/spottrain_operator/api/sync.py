"""checkpoint.mode Sync: the folder that a sidecar uploads, and what in a spec does not fit with it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from spottrain.contract import ARGUMENTS_OF_SHELL, PODINFO_DIR, loses_arguments

from spottrain_operator.api import volumes
from spottrain_operator.api.template import trainer_path
from spottrain_operator.api.training_job import CheckpointSpec, TrainingJobSpec

Json = dict[str, Any]

STORE_VARIABLES: Final = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
STORE_PREFIXES: Final = ("AWS_", "GOOGLE_")
REFERENCE: Final = re.compile(r"\$\$|\$\(([^()]+)\)")
"""A variable's name in a value or in `subPathExpr`, as the kubelet reads it; `$$` stands for `$`."""
SIDECARS_FOLDERS: Final = (
    *("/bin", "/dev", "/etc/ssl", "/lib", "/lib64", "/opt/spottrain", "/opt/venv", "/proc", "/sys"),
    *("/usr", "/usr/bin", "/usr/lib"),
)
"""Folders of the sidecar's image, in which it has the sync folder at the script's path."""


def variables(trainer: Mapping[str, Any], mounts: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Returns the trainer's variables that a container with access to the store and these mounts needs.

    They are those of a store, such as AWS_REGION, and the ones that these or the mounts name. The order
    stays, because a value names variables before it.
    """
    given = [dict(e) for e in trainer.get("env") or ()]
    of_store = (
        e["name"]
        for e in given
        if e["name"].upper() in STORE_VARIABLES or e["name"].startswith(STORE_PREFIXES)
    )
    wanted = set(of_store).union(*map(_named_by, mounts))
    while more := {name for e in given if e["name"] in wanted for name in _named_by(e)} - wanted:
        wanted |= more
    return [e for e in given if e["name"] in wanted]


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


def mounts_of(trainer: Mapping[str, Any], *paths: str) -> list[Json]:
    """Returns the template's mounts that hold these paths, each once."""
    found = [mount for path in paths if path and (mount := mount_of(trainer, path)) is not None]
    return list({mount["mountPath"]: mount for mount in found}.values())


def security_context(spec: TrainingJobSpec) -> Json:
    """Returns what holds for the trainer's processes: of the pod, or of the container where that differs."""
    return (spec.pod.get("securityContext") or {}) | (spec.trainer.get("securityContext") or {})


# --- validation ---------------------------------------------------------------------------------------
def problem(spec: TrainingJobSpec) -> str:
    """Returns a sentence about what in the spec does not fit with its mode; "" where all does."""
    if not spec.checkpoint.synced:
        return ""
    checks = (_pod_problems, _argument_problems, _uri_problems, _folder_problems)
    return next((words for check in checks for words in check(spec)), "")


def _pod_problems(spec: TrainingJobSpec) -> Iterator[str]:
    if others := [c["name"] for c in spec.pod["containers"] if c is not spec.trainer]:
        yield (
            "spec.template.spec.containers must have one container with checkpoint.mode Sync, and has "
            f"{others[0]} too; make the others initContainers with restartPolicy: Always (docs/sync.md)"
        )
    context = security_context(spec)
    if context.get("runAsNonRoot") and context.get("runAsUser") is None:
        yield (
            "spec.template.spec.securityContext.runAsUser must be set beside runAsNonRoot with "
            "checkpoint.mode Sync: write the number of the image's user; the sidecar runs as that user too"
        )


def _argument_problems(spec: TrainingJobSpec) -> Iterator[str]:
    """Arguments replace those of an image, which are not known here."""
    if not spec.checkpoint.resume_args:
        return
    trainer, where = spec.trainer, trainer_path(spec.pod)
    words = [str(word) for kind in ("command", "args") for word in trainer.get(kind) or ()]
    if not words:
        yield (
            f"{where}.command or args is needed with spec.checkpoint.resumeArgs, because arguments replace "
            "those of the image; write the image's entry point or its arguments there"
        )
    if text := loses_arguments(words):
        what = "command" if trainer.get("command") else "args"
        yield f"{where}.{what} with {text!r} and spec.checkpoint.resumeArgs: {ARGUMENTS_OF_SHELL}"


def _uri_problems(spec: TrainingJobSpec) -> Iterator[str]:
    checkpoint = spec.checkpoint
    path, stored = folder(checkpoint), uri_folder(checkpoint)
    if stored and (volumes.within(stored, path) or volumes.within(path, stored)):
        yield (
            f"spec.checkpoint.uri {checkpoint.uri} and syncPath {checkpoint.sync_path} overlap; take two "
            "folders of which none is in the other"
        )
    if stored and mount_of(spec.trainer, stored) is None:
        yield (
            f"spec.checkpoint.uri {checkpoint.uri} is on no volume of {trainer_path(spec.pod)}, so the "
            "sidecar cannot write there: mount one, or use an s3:// or gs:// URI"
        )


def _folder_problems(spec: TrainingJobSpec) -> Iterator[str]:
    """The sidecar has the folder, and the volumes that it needs, where the script has them."""
    path, trainer = folder(spec.checkpoint), spec.trainer
    what = f"spec.checkpoint.syncPath {spec.checkpoint.sync_path}"
    where = f"{trainer_path(spec.pod)}.volumeMounts"
    cache = [spec.data_cache.path] if spec.data_cache is not None else []
    # A folder below /tmp, /cache or the home is fine: it has a volume of its own there.
    around = [*cache, PODINFO_DIR, volumes.CA_DIR]
    hidden = [*cache, *sorted(volumes.OWN_PATHS), *SIDECARS_FOLDERS]
    for taken in [own for own in around if volumes.within(path, own)] + _in(path, hidden):
        yield f"{what} overlaps with {taken}, which the operator or its sidecar needs; take another folder"
    for inner in _in(path, sorted(volumes.paths(trainer) - {path})):
        yield f"{where} has {inner} in {what}, and it would not be uploaded; mount it elsewhere"
    if (mount_of(trainer, path) or {}).get("readOnly"):
        yield f"{where} mounts {what} with readOnly, and it must be writable"


def _in(folder: str, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if volumes.within(path, folder)]
