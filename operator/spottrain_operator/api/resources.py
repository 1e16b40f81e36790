"""CPU and memory that a pod requests and that a node has. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

QUANTITY: Final = re.compile(r"\+?(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,3})?")
SUFFIXES: Final = {
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("num.kMGTPE", -3) if suffix != "."},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
NONE: Final = Decimal(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    cpu: Decimal = NONE
    memory: Decimal = NONE
    """Bytes."""

    def share_of(self, node: Resources) -> Decimal:
        """Returns the larger of both shares of a node; 0 where nothing is requested or known of the node."""
        pairs = ((self.cpu, node.cpu), (self.memory, node.memory))
        return max((part / whole for part, whole in pairs if whole), default=NONE)


NO_RESOURCES: Final = Resources()


def of_node(allocatable: Mapping[str, Any]) -> Resources:
    return _of(allocatable)


def of_pod(spec: Mapping[str, Any]) -> Resources:
    """Returns what the scheduler counts: the requests of the pod, else of its containers and sidecars, or of
    its largest init container."""
    whole = _requests(spec)
    sidecars = [c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"]
    running = total(_requests(c) for c in (*(spec.get("containers") or ()), *sidecars))
    first = [_requests(c) for c in spec.get("initContainers") or ()]
    return Resources(
        cpu=whole.cpu or max(running.cpu, *(r.cpu for r in first), NONE),
        memory=whole.memory or max(running.memory, *(r.memory for r in first), NONE),
    )


def total(several: Iterable[Resources]) -> Resources:
    each = tuple(several)
    return Resources(cpu=sum((r.cpu for r in each), NONE), memory=sum((r.memory for r in each), NONE))


def _requests(part: Mapping[str, Any]) -> Resources:
    """Returns the requests of a container or pod; the API server has filled in those that limits imply."""
    return _of((part.get("resources") or {}).get("requests") or {})


def _of(amounts: Mapping[str, Any]) -> Resources:
    return Resources(cpu=_amount(str(amounts.get("cpu", ""))), memory=_amount(str(amounts.get("memory", ""))))


@lru_cache(maxsize=4096)
def _amount(text: str) -> Decimal:
    """Parses a quantity of Kubernetes, such as 100m or 1.5Gi; 0 for what is none."""
    found = QUANTITY.fullmatch(text)
    if found is None:
        return NONE
    number, suffix = Decimal(found[1]), found[2] or ""
    if suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix != "Ei":
        return number.scaleb(int(suffix[1:]))
    return number * SUFFIXES.get(suffix, Decimal(1))
