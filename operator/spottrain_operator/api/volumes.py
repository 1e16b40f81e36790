"""The volumes of the trainer, and whether a directory there outlives its node. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from spottrain.contract import CACHE_DIR, DEADLINE_NAME, PODINFO_DIR, SAVE_ADVISED_NAME

from spottrain_operator.api.template import judged, trainer_path
from spottrain_operator.names import DEADLINE_ANNOTATION, SAVE_ADVISED_ANNOTATION

Json = dict[str, Any]

HOME_DIR: Final = "/home/spottrain"
TMP_DIR: Final = "/tmp"
SHM_DIR: Final = "/dev/shm"
CA_VOLUME: Final = "spottrain-ca"
CA_DIR: Final = "/etc/spottrain-ca"
CA_NAME: Final = "ca.crt"
CA_VARIABLE: Final = "AWS_CA_BUNDLE"
"""botocore reads it, so it also applies to the user's own S3 clients."""
OWN_PATHS: Final = frozenset({PODINFO_DIR, SHM_DIR, HOME_DIR, TMP_DIR, CACHE_DIR, CA_DIR})
"""Mount paths of the operator's own volumes."""
DURABLE: Final = frozenset(
    {
        "persistentVolumeClaim",
        "nfs",
        "cephfs",
        "azureFile",
        "azureDisk",
        "awsElasticBlockStore",
        "gcePersistentDisk",
        "cinder",
        "fc",
        "iscsi",
        "rbd",
        "portworxVolume",
        "vsphereVolume",
    }
)
"""Volume types whose data outlives the node. Inline `csi` and `ephemeral` volumes end with their pod."""


# --- references ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectRef:
    """Reference to an object in the job's namespace; its kind follows from the field."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRef:
    """Reference to a key of a ConfigMap or Secret in the job's namespace."""

    name: str
    key: str = CA_NAME


@dataclass(frozen=True, kw_only=True, slots=True)
class CABundle:
    """Certificates of a private authority; one of the two is set."""

    config_map_key_ref: KeyRef | None = None
    secret_key_ref: KeyRef | None = None

    @property
    def source(self) -> Json:
        """Volume source with only the certificates, under a fixed file name."""
        ref = self.secret_key_ref or self.config_map_key_ref
        assert ref is not None
        items = [{"key": ref.key, "path": CA_NAME}]
        if self.secret_key_ref is not None:
            return {"secret": {"secretName": ref.name, "items": items}}
        return {"configMap": {"name": ref.name, "items": items}}


# --- what the operator adds ---------------------------------------------------------------------------
def equip(body: Json, trainer: Json, ca: Json | None) -> None:
    """Mounts a cache, shared memory and the annotation files, and writable directories on a read-only root.

    `ca`: volume source of a CA bundle.
    """
    mounts = list(trainer.get("volumeMounts") or ())
    added = [w for w in _wanted(trainer) if w[1] not in paths(trainer)]
    trainer["volumeMounts"] = [*mounts, *({"name": name, "mountPath": path} for name, path, _ in added)]
    body["volumes"] = [*(body.get("volumes") or ()), *({"name": name} | source for name, _, source in added)]
    if ca is not None:
        trainer["volumeMounts"].append({"name": CA_VOLUME, "mountPath": CA_DIR, "readOnly": True})
        body["volumes"].append({"name": CA_VOLUME} | ca)


def read_only(trainer: Mapping[str, Any]) -> bool:
    return bool((trainer.get("securityContext") or {}).get("readOnlyRootFilesystem"))


def has_disk(pod: Mapping[str, Any]) -> bool:
    """Returns whether a volume may belong to root, so that other users need an fsGroup to write there."""
    return any(kind in volume for volume in pod.get("volumes") or () for kind in (*DURABLE, "ephemeral"))


def _wanted(trainer: Mapping[str, Any]) -> list[tuple[str, str, Json]]:
    files = {DEADLINE_NAME: DEADLINE_ANNOTATION, SAVE_ADVISED_NAME: SAVE_ADVISED_ANNOTATION}
    fields = {path: {"fieldPath": f"metadata.annotations['{word}']"} for path, word in files.items()}
    podinfo = {"items": [{"path": path, "fieldRef": field} for path, field in fields.items()]}
    wanted: list[tuple[str, str, Json]] = [
        ("spottrain-podinfo", PODINFO_DIR, {"downwardAPI": podinfo}),
        ("spottrain-shm", SHM_DIR, {"emptyDir": {"medium": "Memory"}}),
        ("spottrain-cache", CACHE_DIR, {"emptyDir": {}}),
    ]
    if read_only(trainer):  # otherwise a mount would hide the image's own files there
        wanted.append(("spottrain-home", HOME_DIR, {"emptyDir": {}}))
        wanted.append(("spottrain-tmp", TMP_DIR, {"emptyDir": {}}))
    return wanted


def paths(trainer: Mapping[str, Any]) -> set[str]:
    """Returns the mount paths of the template's trainer."""
    return {clean(m.get("mountPath")) for m in trainer.get("volumeMounts") or ()}


# --- validation ---------------------------------------------------------------------------------------
def ca_problem(pod: Mapping[str, Any]) -> str:
    """Returns a sentence about what in the template conflicts with a CA bundle; "" without a conflict."""
    trainer, where = judged(pod["containers"]), trainer_path(pod)
    hint = "it is the operator's where spec.checkpoint.caBundle is set; leave one of the two out"
    if any(e.get("name") == CA_VARIABLE for e in trainer.get("env") or ()):
        return f"{where}.env must not have {CA_VARIABLE}: {hint}"
    if any(path == CA_DIR or path.startswith(f"{CA_DIR}/") for path in paths(trainer)):
        return f"{where}.volumeMounts must not have {CA_DIR}: {hint}"
    if any(v.get("name") == CA_VOLUME for v in pod.get("volumes") or ()):
        return f"spec.template.spec.volumes must not have {CA_VOLUME}: {hint}"
    return ""


def folder_problem(pod: Mapping[str, Any], uri: str) -> str:
    """Returns a sentence about why data at a file:// URI is lost with its node; "" where it survives."""
    trainer, path = judged(pod["containers"]), clean(unquote(urlsplit(uri).path))
    mounts = {clean(m.get("mountPath")): str(m.get("name")) for m in trainer.get("volumeMounts") or ()}
    kinds = {str(v.get("name")): _kind(v) for v in pod.get("volumes") or ()}
    for name, at, source in _wanted(trainer):
        mounts.setdefault(at, name)
        kinds.setdefault(name, _kind(source))
    above = [at for at in mounts if path == at or path.startswith(f"{at.rstrip('/')}/")]
    what = f"spec.checkpoint.uri {uri}"
    todo = (
        "spot capacity needs a persistentVolumeClaim or a network file system there, or an s3:// or gs:// URI"
    )
    if not above:
        return f"{what} is on no volume of {trainer_path(pod)}, so it is lost with its node: {todo}"
    name = mounts[max(above, key=len)]
    if name not in kinds:
        return f"{what} is on volume {name}, which spec.template.spec.volumes does not have"
    if kinds[name] in DURABLE:
        return ""
    return f"{what} is on volume {name} ({kinds[name]}), which does not outlive its node: {todo}"


def _kind(volume: Mapping[str, Any]) -> str:
    return next((kind for kind in volume if kind != "name"), "emptyDir")


def clean(path: object) -> str:
    return posixpath.normpath("/" + str(path or "").lstrip("/"))
