"""The volumes of the trainer, and whether a directory there outlives its node. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from spottrain.contract import CACHE_DIR, PODINFO_DIR

from spottrain_operator.api.template import judged, trainer_path

Json = dict[str, Any]

HOME_DIR: Final = "/home/spottrain"
TMP_DIR: Final = "/tmp"
SHM_DIR: Final = "/dev/shm"
CA_VOLUME: Final = "spottrain-ca"
CA_DIR: Final = "/etc/spottrain-ca"
CA_NAME: Final = "ca.crt"
CA_FILE: Final = f"{CA_DIR}/{CA_NAME}"
CA_MOUNT: Final = {"name": CA_VOLUME, "mountPath": CA_DIR, "readOnly": True}
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
    def volume(self) -> Json:
        """Volume with only the certificates, under a fixed file name."""
        ref = self.secret_key_ref or self.config_map_key_ref
        assert ref is not None
        items = [{"key": ref.key, "path": CA_NAME}]
        if self.secret_key_ref is not None:
            return {"name": CA_VOLUME, "secret": {"secretName": ref.name, "items": items}}
        return {"name": CA_VOLUME, "configMap": {"name": ref.name, "items": items}}


# --- of a template ------------------------------------------------------------------------------------
def read_only(trainer: Mapping[str, Any]) -> bool:
    return bool((trainer.get("securityContext") or {}).get("readOnlyRootFilesystem"))


def is_disk(volume: Mapping[str, Any]) -> bool:
    return any(kind in volume for kind in (*DURABLE, "ephemeral"))


def paths(trainer: Mapping[str, Any]) -> set[str]:
    """Returns the mount paths of the template's trainer."""
    return {clean(m.get("mountPath")) for m in trainer.get("volumeMounts") or ()}


def clean(path: object) -> str:
    return posixpath.normpath("/" + str(path or "").lstrip("/"))


def within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


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
    kinds = {
        str(v.get("name")): next((k for k in v if k != "name"), "emptyDir") for v in pod.get("volumes") or ()
    }
    ours = OWN_PATHS if read_only(trainer) else OWN_PATHS - {HOME_DIR, TMP_DIR}
    nearest = max((at for at in {*mounts, *ours} if within(path, at)), key=len, default="")
    what = f"spec.checkpoint.uri {uri}"
    todo = (
        "spot capacity needs a persistentVolumeClaim or a network file system there, or an s3:// or gs:// URI"
    )
    if nearest not in mounts:
        return f"{what} is on no volume of {trainer_path(pod)}, so it is lost with its node: {todo}"
    name = mounts[nearest]
    if name not in kinds:
        return f"{what} is on volume {name}, which spec.template.spec.volumes does not have"
    if kinds[name] in DURABLE:
        return ""
    return f"{what} is on volume {name} ({kinds[name]}), which does not outlive its node: {todo}"
