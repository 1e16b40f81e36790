"""Determines how many GPUs a worker has, and the resource names under which Kubernetes counts them. Pure.

The template specifies them by any resource name or by a DRA claim. spec.gpusPerWorker applies only if the
template requests none. The default without either is one Nvidia GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spottrain_operator.api.template import trainer_of, trainer_path

GPUS: Final = re.compile(
    r"nvidia\.com/(gpu|gpu[.-].+|mig-.+)|amd\.com/(gpu|.+_nps[0-9]+)|gpu\.intel\.com/(i915|xe)|habana\.ai/.+"
    r"|aws\.amazon\.com/neuron.*|google\.com/tpu"
)
"""Extended resources that are GPUs or other accelerators, whole or in parts."""
OTHER_DEVICES: Final = re.compile(
    r"gpu\.intel\.com/.*|.*(rdma|hca|efa|sriov|roce|hostdev|network|fuse|kvm|qat|sgx).*"
)
"""Extended resources that are something else: network cards, devices of the host."""
DEFAULT: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """GPUs of one worker."""

    count: int | None
    """0: it trains on the CPU. None: only the container can count them (DRA, a device of another name)."""
    added: int = 0
    """Number of nvidia.com/gpu to add to a template that requests none."""


def of(pod: Mapping[str, Any], per_worker: int | None) -> Gpus:
    """Returns the trainer's GPUs by the template and spec.gpusPerWorker (None: absent)."""
    trainer = trainer_of(pod["containers"])
    limits = _limits(trainer)
    if any(map(GPUS.fullmatch, limits)):
        return Gpus(count=counted(limits))
    claims = (trainer.get("resources") or {}).get("claims")
    if claims or (per_worker != 0 and any(map(_unknown_device, limits))):
        return Gpus(count=per_worker)
    count = DEFAULT if per_worker is None else per_worker
    return Gpus(count=count, added=count)


def counted(resources: Mapping[str, Any]) -> int:
    """Returns how many GPUs a container's limits, or a node's allocatable resources, name."""
    amounts = (str(amount) for name, amount in resources.items() if GPUS.fullmatch(name))
    return sum(int(amount) for amount in amounts if amount.isdecimal())


def problem(pod: Mapping[str, Any], per_worker: int | None) -> str:
    """Returns a sentence about an invalid combination of template and spec.gpusPerWorker; "" if valid."""
    trainer, where = trainer_of(pod["containers"]), f"{trainer_path(pod)}.resources"
    limits, requests = _limits(trainer), (trainer.get("resources") or {}).get("requests") or {}
    for name in requests:
        if GPUS.fullmatch(name) and name not in limits:
            return (
                f"{where}.requests has {name} {requests[name]} and {where}.limits does not: Kubernetes "
                "counts devices by their limits; move it there"
            )
    asked = {name: amount for name, amount in limits.items() if GPUS.fullmatch(name)}
    if per_worker is not None and asked and counted(asked) != per_worker:
        said = ", ".join(f"{name} {amount}" for name, amount in asked.items())
        return f"spec.gpusPerWorker is {per_worker} and {where}.limits has {said}: leave one of the two out"
    return ""


def _limits(trainer: Mapping[str, Any]) -> Mapping[str, Any]:
    return (trainer.get("resources") or {}).get("limits") or {}


def _unknown_device(resource: str) -> bool:
    """Returns whether it is an extended resource that may be a GPU of another name."""
    domain, slash, _ = resource.partition("/")
    extended = bool(slash) and not f".{domain}".endswith(".kubernetes.io")
    return extended and not OTHER_DEVICES.fullmatch(resource)
