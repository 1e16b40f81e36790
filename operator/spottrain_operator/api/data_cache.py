"""`spec.dataCache`: a volume for downloads that all attempts share, and how it comes into the trainer. Pure.

Called by api.py for what it refuses, by render.py for what it adds, and by policies/claims.py. beside.py
makes its claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from spottrain.contract import DATA_CACHE_DIR, Env, library_homes

from spottrain_operator.api import volumes
from spottrain_operator.api.template import judged, trainer_path
from spottrain_operator.names import cache_claim_name

Json = dict[str, Any]

VOLUME: Final = "spottrain-data-cache"


class AccessMode(StrEnum):
    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE = "ReadWriteOnce"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCache:
    """Either `claim_name` or `size` is set."""

    claim_name: str = ""
    size: str = ""
    storage_class_name: str = ""
    access_mode: AccessMode | None = None
    """None beside `claim_name`: that claim's own."""
    mount_path: str = DATA_CACHE_DIR

    @property
    def mode(self) -> AccessMode:
        """Of the claim that is made."""
        return self.access_mode or AccessMode.READ_WRITE_MANY

    def claim(self, job: str, job_uid: str) -> str:
        """Name of the claim that it is on."""
        return self.claim_name or cache_claim_name(job, job_uid)

    @property
    def path(self) -> str:
        return volumes.clean(self.mount_path)

    def problem(self, pod: Mapping[str, Any], checkpoint_uri: str) -> str:
        """What of the job is in the way of the data cache, as a sentence; "" where nothing is."""
        return self._path_problem() or self._template_problem(pod) or self._folder_problem(checkpoint_uri)

    def _path_problem(self) -> str:
        what = f"spec.dataCache.mountPath {self.mount_path}"
        if self.path == "/" or ".." in self.mount_path.split("/"):
            return f"{what} must be a folder below /, without .. in its path"
        if self.path in volumes.OWN_PATHS:
            return f"{what} is a folder that the operator mounts itself; take another one"
        return ""

    def _template_problem(self, pod: Mapping[str, Any]) -> str:
        trainer, where = judged(pod["containers"]), trainer_path(pod)
        hint = "it is the operator's where spec.dataCache is set; change or leave out one of the two"
        if taken := next((path for path in volumes.paths(trainer) if _within(path, self.path)), ""):
            return f"{where}.volumeMounts must not have {taken}: {hint}"
        if any(v.get("name") == VOLUME for v in pod.get("volumes") or ()):
            return f"spec.template.spec.volumes must not have {VOLUME}: {hint}"
        if any(e.get("name") == Env.DATA_CACHE for e in trainer.get("env") or ()):
            return f"{where}.env must not have {Env.DATA_CACHE}: {hint}"
        return ""

    def _folder_problem(self, checkpoint_uri: str) -> str:
        folder = volumes.clean(unquote(urlsplit(checkpoint_uri).path))
        if not checkpoint_uri.startswith("file:") or not _within(folder, self.path):
            return ""
        return (
            f"spec.checkpoint.uri {checkpoint_uri} is in the data cache, which is for what can be downloaded "
            "again, and may go with the job; give checkpoints a volume of their own, or an s3:// or gs:// URI"
        )


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def mount(body: Json, trainer: Json, cache: DataCache, claim: str) -> None:
    """After `volumes.equip`."""
    trainer["volumeMounts"].append({"name": VOLUME, "mountPath": cache.path})
    body["volumes"].append({"name": VOLUME, "persistentVolumeClaim": {"claimName": claim}})


def homes(cache: DataCache | None, trainer: Mapping[str, Any]) -> dict[str, str]:
    """Where other libraries are to keep what they download, unless the template says so.

    An envFrom of the template may hold these names, which nobody here can see, and `env` would win over it:
    there the runtime sets them, as far as they are still free.
    """
    return library_homes(cache.path) if cache is not None and not trainer.get("envFrom") else {}
