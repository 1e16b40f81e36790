"""What a process node cannot do, said before a pod starts; and what it does not enforce, said beside it.
Pure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from processcluster.images import Image, repository

Json = dict[str, Any]
NOT_ENFORCED: Final = (
    "containers here are processes of the user who started the cluster: a read-only root file system, "
    "capabilities, seccomp profiles, networks and ephemeral-storage limits are not enforced"
)
_KNOWN_VOLUMES: Final = frozenset(
    {"emptyDir", "configMap", "secret", "projected", "downwardAPI", "hostPath", "persistentVolumeClaim"}
)
_OF_FILES: Final = {"CHOWN", "DAC_OVERRIDE", "FOWNER"}
"""Capabilities that nobody needs where all files are one user's."""
_SHARED_NAMESPACES: Final = ("hostPID", "hostIPC", "shareProcessNamespace")


def why_not(pod: Json, images: Mapping[str, Image]) -> str | None:
    """The first thing that the pod asks for and cannot have, and what to do about it; None: it can start."""
    return next(_reasons(pod["spec"], images), None)


def _reasons(spec: Json, images: Mapping[str, Image]) -> Iterator[str]:
    elsewhere = "use `make demo-containers` or a real cluster"
    for name in _SHARED_NAMESPACES:
        if spec.get(name):
            yield f"spec.{name} needs containers: {elsewhere}"
    for volume in spec.get("volumes") or ():
        if not _KNOWN_VOLUMES & set(volume):
            kinds = ", ".join(sorted(set(volume) - {"name"}))
            yield f"volume {volume['name']!r} is of the kind {kinds}: {elsewhere}"
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        for reason in _of_container(container, spec.get("securityContext") or {}, images):
            yield f"container {container['name']!r}: {reason}"


def _of_container(container: Json, pod_context: Json, images: Mapping[str, Image]) -> Iterator[str]:
    context = pod_context | (container.get("securityContext") or {})
    image = images.get(repository(container["image"]))
    user = context.get("runAsUser")
    allowed = {os.getuid()}
    if image:
        allowed |= {image.user, 0} if image.roots_files else {image.user}
    if user is not None and user not in allowed:
        yield (
            f"securityContext.runAsUser {user} is another user than the one who runs this cluster "
            f"({os.getuid()}); leave it out, or use `make demo-containers` or a real cluster"
        )
    if context.get("privileged"):
        yield "securityContext.privileged needs a container; leave it out here"
    if added := set((context.get("capabilities") or {}).get("add") or ()) - _OF_FILES:
        names = ", ".join(sorted(added))
        yield f"securityContext.capabilities.add {names} needs a container; leave it out here"
    for name in (container.get("resources") or {}).get("limits") or {}:
        if name.startswith("hugepages-"):
            yield f"resources.limits[{name!r}] needs a container; leave it out here"
    if container.get("lifecycle"):
        yield "lifecycle hooks are not run here; use `make demo-containers` or a real cluster"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "grpc" in (container.get(probe) or {}):
            yield f"{probe}.grpc is not known here; use exec, httpGet or tcpSocket"
