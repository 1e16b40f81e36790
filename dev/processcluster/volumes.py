"""The volumes of a pod as folders of this machine, and the paths under which its containers know them."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from processcluster.kube import Json, Refused

if TYPE_CHECKING:
    from processcluster.pod import Pod


FAILED_MOUNT: Final = "FailedMount"


class NotYet(Exception):
    """A volume or a container cannot be had now: the kubelet's reason, and a sentence. It is tried again."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(kw_only=True)
class Volumes:
    pod: Pod
    folders: dict[str, Path] = field(default_factory=dict)

    def make(self) -> None:
        """Fills all folders. Raises NotYet while something that a volume names is not there."""
        for volume in self.pod.raw["spec"].get("volumes") or ():
            try:
                self.folders[volume["name"]] = self._folder(volume)
            except NotYet as problem:
                what = f'MountVolume.SetUp failed for volume "{volume["name"]}" : {problem}'
                raise NotYet(FAILED_MOUNT, what) from None

    def refresh(self) -> None:
        """Writes the downward API's files again: they follow the pod's annotations."""
        for volume in self.pod.raw["spec"].get("volumes") or ():
            if volume["name"] in self.folders and _has_downward(volume):
                self._folder(volume)

    def _folder(self, volume: Json) -> Path:
        if "hostPath" in volume:
            return _host_path(volume["hostPath"])
        if "persistentVolumeClaim" in volume:
            return self._claimed(volume["persistentVolumeClaim"]["claimName"])
        folder = self.pod.root / "volumes" / str(volume["name"])
        folder.mkdir(parents=True, exist_ok=True)
        for source in volume.get("projected", {}).get("sources") or [volume]:
            for path, content in self._files(source).items():
                _write(folder / path, content)
        return folder

    def _files(self, source: Json) -> dict[str, bytes]:
        if (wanted := source.get("downwardAPI")) is not None:
            fields = {i["path"]: i["fieldRef"]["fieldPath"] for i in wanted.get("items") or ()}
            return {path: self.pod.field(name).encode() for path, name in fields.items()}
        if (wanted := source.get("serviceAccountToken")) is not None:
            return {wanted["path"]: self.pod.token().encode()}
        for kind, key in (("configmaps", "configMap"), ("secrets", "secret")):
            if (wanted := source.get(key)) is not None:
                name = wanted.get("secretName") or wanted["name"]
                data = self.pod.data_of(kind, name, optional=bool(wanted.get("optional")))
                items = {i["key"]: i["path"] for i in wanted.get("items") or ()} or {k: k for k in data}
                return {path: data[key] for key, path in items.items() if key in data}
        return {}

    def _claimed(self, name: str) -> Path:
        space, kube = self.pod.namespace_path, self.pod.node.kube
        claim = kube.get(f"{space}/persistentvolumeclaims/{name}")
        volume_name = (claim or {}).get("spec", {}).get("volumeName")
        if not volume_name:
            raise NotYet(FAILED_MOUNT, f'persistentvolumeclaim "{name}" is not bound')
        volume = kube.get(f"/api/v1/persistentvolumes/{volume_name}") or {}
        source = volume.get("spec", {}).get("hostPath") or volume.get("spec", {}).get("local")
        if source is None:
            raise NotYet(FAILED_MOUNT, f'volume "{volume_name}" is neither a hostPath nor local')
        return _host_path(source)

    def paths(self, container: Json) -> dict[str, str]:
        """The folder that stands for each mount path of a container. /dev/shm is this machine's own."""
        return {
            mount["mountPath"].rstrip("/"): str(self._mounted(mount))
            for mount in container.get("volumeMounts") or ()
            if mount["mountPath"].rstrip("/") != "/dev/shm"
        }

    def _mounted(self, mount: Json) -> Path:
        folder = self.folders[mount["name"]]
        if sub := mount.get("subPath"):
            folder = folder / sub
            if not folder.exists():
                folder.mkdir(parents=True)
        return folder


def _has_downward(volume: Json) -> bool:
    sources = volume.get("projected", {}).get("sources") or [volume]
    return any("downwardAPI" in source for source in sources)


def _host_path(source: Json) -> Path:
    path = Path(source["path"])
    if source.get("type") == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise NotYet(FAILED_MOUNT, f"hostPath {path} does not exist on this machine")
    return path


def _write(file: Path, content: bytes) -> None:
    """Whole or not at all: a trainer may read it at any moment."""
    if file.exists() and file.read_bytes() == content:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, file)


def data_of(pod: Pod, kind: str, name: str, *, optional: bool) -> dict[str, bytes]:
    """The keys of a ConfigMap or Secret. Raises NotYet where it is not there and must be."""
    try:
        found = pod.node.kube.get(f"{pod.namespace_path}/{kind}/{name}")
    except Refused as refused:
        raise NotYet("CreateContainerConfigError", str(refused)) from None
    if found is None:
        if optional:
            return {}
        raise NotYet("CreateContainerConfigError", f'{kind.removesuffix("s")} "{name}" not found')
    text = {key: value.encode() for key, value in (found.get("data") or {}).items()}
    if kind == "secrets":
        return {key: base64.b64decode(value) for key, value in text.items()}
    binary = {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}
    return text | binary
