"""`spec.dataCache`: a volume for downloads that all attempts share, and its validation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from spottrain.contract import DATA_CACHE_DIR, Env

from spottrain_operator.api import volumes
from spottrain_operator.api.template import judged, trainer_path

Json = dict[str, Any]

VOLUME: Final = "spottrain-data-cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCache:
    claim_ref: volumes.ObjectRef
    mount_path: str = DATA_CACHE_DIR

    @property
    def path(self) -> str:
        return volumes.clean(self.mount_path)


def problem(cache: DataCache, pod: Mapping[str, Any], checkpoint_uri: str) -> str:
    """Returns a sentence about what in the job conflicts with the data cache; "" without a conflict."""
    return _path_problem(cache) or _template_problem(cache, pod) or _folder_problem(cache, checkpoint_uri)


def _path_problem(cache: DataCache) -> str:
    what = f"spec.dataCache.mountPath {cache.mount_path}"
    if cache.path == "/" or ".." in cache.mount_path.split("/"):
        return f"{what} must be a folder below /, without .. in its path"
    if cache.path in volumes.OWN_PATHS:
        return f"{what} is a folder that the operator mounts itself; take another one"
    return ""


def _template_problem(cache: DataCache, pod: Mapping[str, Any]) -> str:
    trainer, where = judged(pod["containers"]), trainer_path(pod)
    hint = "it is the operator's where spec.dataCache is set; change or leave out one of the two"
    if taken := next((path for path in volumes.paths(trainer) if volumes.within(path, cache.path)), ""):
        return f"{where}.volumeMounts must not have {taken}: {hint}"
    if any(v.get("name") == VOLUME for v in pod.get("volumes") or ()):
        return f"spec.template.spec.volumes must not have {VOLUME}: {hint}"
    if any(e.get("name") == Env.DATA_CACHE for e in trainer.get("env") or ()):
        return f"{where}.env must not have {Env.DATA_CACHE}: {hint}"
    return ""


def _folder_problem(cache: DataCache, checkpoint_uri: str) -> str:
    folder = volumes.clean(unquote(urlsplit(checkpoint_uri).path))
    if not checkpoint_uri.startswith("file:") or not volumes.within(folder, cache.path):
        return ""
    return (
        f"spec.checkpoint.uri {checkpoint_uri} is in the data cache, which is for what can be downloaded "
        "again; give checkpoints a volume of their own, or an s3:// or gs:// URI"
    )
