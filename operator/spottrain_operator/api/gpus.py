"""Determines how many GPUs a worker has, and the resource names under which Kubernetes counts them. Pure.

The template specifies them by any resource name or by a DRA claim. spec.gpusPerWorker applies only if the
template requests none. The default without either is one Nvidia GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spottrain_operator.api.template import judged, trainer_path

KNOWN: Final = re.compile(
    r"nvidia\.com/(gpu|gpu[.-].+|mig-.+)|amd\.com/(gpu|.+_nps[0-9]+)|gpu\.intel\.com/(i915|xe)|habana\.ai/.+"
    r"|aws\.amazon\.com/neuron.*|google\.com/tpu"
)
"""Extended resources that are GPUs or other accelerators, whole or in parts."""
OTHER_DEVICES: Final = re.compile(
    r"gpu\.intel\.com/.*|.*(rdma|hca|efa|sriov|roce|hostdev|network|fuse|kvm|qat|sgx).*"
)
"""Extended resources that are something else: network cards, devices of the host."""
SHARES: Final = re.compile(r".*(mem|core|percent).*")
"""Extended resources for shares of one GPU, such as aliyun.com/gpu-mem: any amount counts as one GPU."""
DEFAULT: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """GPUs of one worker."""

    count: int | None
    """0: it trains on the CPU. None: a DRA claim requests them, and only the container can count them."""
    added: int = 0
    """Number of nvidia.com/gpu to add to a template that requests none."""


def of(pod: Mapping[str, Any], per_worker: int | None) -> Gpus:
    """Returns the trainer's GPUs by the template and spec.gpusPerWorker (None: absent)."""
    trainer = judged(pod["containers"])
    if asked := _asked(trainer, per_worker):
        return Gpus(count=sum(int(str(value)) for value in asked.values()))
    if _claims(trainer):
        return Gpus(count=per_worker)
    count = DEFAULT if per_worker is None else per_worker
    return Gpus(count=count, added=count)


def counted(resources: Mapping[str, Any]) -> int:
    """Returns how many GPUs a container's limits, or a node's allocatable resources, name."""
    amounts = (str(amount) for name, amount in resources.items() if KNOWN.fullmatch(name))
    return sum(int(amount) for amount in amounts if amount.isdecimal())


def problem(pod: Mapping[str, Any], per_worker: int | None) -> str:
    """Returns a sentence about an invalid combination of template and spec.gpusPerWorker; "" if valid."""
    trainer, where = judged(pod["containers"]), f"{trainer_path(pod)}.resources"
    limits, requests = _listed(trainer, "limits"), _listed(trainer, "requests")
    for name in dict.fromkeys(n for n in (*limits, *requests) if _whole_device(n)):
        if name not in limits:
            return (
                f"{where}.requests has {name} {requests[name]} and {where}.limits does not: Kubernetes "
                "counts devices by their limits; move it there"
            )
        if not re.fullmatch("[0-9]+", str(limits[name])):
            return f"{where}.limits has {name} {limits[name]}: devices are counted in whole numbers"
        if str(requests.get(name, limits[name])) != str(limits[name]):
            return (
                f"{where}.requests has {name} {requests[name]} and {where}.limits has {limits[name]}: "
                "they must be equal; leave the request out"
            )
    asked = _asked(trainer, per_worker)
    if per_worker is not None and asked and sum(int(str(v)) for v in asked.values()) != per_worker:
        said = ", ".join(f"{name} {value}" for name, value in asked.items())
        return f"spec.gpusPerWorker is {per_worker} and {where}.limits has {said}: leave one of the two out"
    return _idle_claims(pod, where) if per_worker is None and not asked else ""


def _idle_claims(pod: Mapping[str, Any], where: str) -> str:
    """Rejects a DRA claim that no container uses: the trainer would get another GPU as well."""
    claims = [str(c.get("name")) for c in pod.get("resourceClaims") or ()]
    users = [*pod["containers"], *(pod.get("initContainers") or ())]
    if not claims or any(_claims(container) for container in users):
        return ""
    return (
        f"spec.template.spec.resourceClaims has {', '.join(claims)}, which no container uses: name it in "
        f"{where}.claims, or set spec.gpusPerWorker"
    )


def _asked(trainer: Mapping[str, Any], per_worker: int | None) -> dict[str, Any]:
    """Returns the template's GPUs by resource name. Unknown devices count unless gpusPerWorker is 0."""
    limits = {name: value for name, value in _listed(trainer, "limits").items() if _extended(name)}
    known = {name: value for name, value in limits.items() if KNOWN.fullmatch(name)}
    if known or per_worker == 0:
        return known
    devices = {name: value for name, value in limits.items() if _whole_device(name)}
    shares = [name for name in limits if SHARES.fullmatch(name) and not OTHER_DEVICES.fullmatch(name)]
    return devices or dict.fromkeys(shares[:1], 1)


def _whole_device(resource: str) -> bool:
    if KNOWN.fullmatch(resource):
        return True
    return _extended(resource) and not (OTHER_DEVICES.fullmatch(resource) or SHARES.fullmatch(resource))


def _listed(trainer: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return (trainer.get("resources") or {}).get(kind) or {}


def _claims(container: Mapping[str, Any]) -> Any:
    return (container.get("resources") or {}).get("claims")


def _extended(resource: str) -> bool:
    """Returns whether it is an extended resource, counted by a device plugin or a driver."""
    domain, slash, _ = resource.partition("/")
    return bool(slash) and not f".{domain}".endswith(".kubernetes.io")
