"""Volumes that a spec names, and those of its template. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spottrain.contract import CACHE_DIR, DATA_CACHE_DIR, PODINFO_DIR

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
READ_ONLY_PATHS: Final = frozenset({HOME_DIR, TMP_DIR})
"""Those of them that only a trainer with a read-only root file system has."""
DURABLE: Final = frozenset(
    {
        *("persistentVolumeClaim", "nfs", "cephfs", "azureFile", "azureDisk", "awsElasticBlockStore"),
        *("gcePersistentDisk", "cinder", "fc", "iscsi", "rbd", "portworxVolume", "vsphereVolume"),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCache:
    """A volume for downloads that all attempts share."""

    claim_ref: ObjectRef
    mount_path: str = DATA_CACHE_DIR

    @property
    def path(self) -> str:
        return clean(self.mount_path)


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
