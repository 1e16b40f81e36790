"""The Lease object (coordination.k8s.io/v1) that says which process is the leader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from spottrain_operator.api.wire import rfc3339
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Json, KubeCluster

API_VERSION = "coordination.k8s.io/v1"
MOST_SECONDS = 3600
"""A Lease that claims to be valid for longer counts as valid for this long: anyone may have written it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """What the API server last said about the Lease."""

    holder: str = ""
    """Identity of the leader; "" where it was given up."""
    seconds: int = 0
    """How long it is valid after each renewal; 0 where the object does not say it."""
    transitions: int = 0
    acquired: str = ""
    """RFC 3339, by the holder's clock: for people only."""
    version: str = ""
    """Its resourceVersion, for the next write."""
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The object: what others have written stays as it is."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """What each renewal changes; labels and annotations of others do not count as one."""
        return self.raw.get("spec") or {}


class LeaseLock(Protocol):
    """Reads and writes one Lease. Every method raises ApiError on a failure."""

    async def get(self, seconds: float) -> Lease | None:
        """Returns None where there is no Lease. `seconds` limits the request."""

    async def create(self, lease: Lease, renewed: datetime, seconds: float) -> Lease: ...

    async def replace(self, lease: Lease, renewed: datetime, seconds: float) -> Lease:
        """Replaces the Lease in the version that `lease` has. A conflict: it has changed since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeLease:
    """`LeaseLock` at the API server.

    `cluster` is a client with connections of its own, so that a renewal never waits for other requests.
    """

    cluster: KubeCluster
    namespace: str
    name: str

    async def get(self, seconds: float) -> Lease | None:
        raw = await self.cluster.get("leases", self.name, self.namespace, seconds=seconds)
        return _lease(raw) if raw is not None else None

    async def create(self, lease: Lease, renewed: datetime, seconds: float) -> Lease:
        raw = self._object(lease, renewed)
        return _lease(await self.cluster.create("leases", raw, seconds=seconds))

    async def replace(self, lease: Lease, renewed: datetime, seconds: float) -> Lease:
        if not lease.version:  # without one the API server would overwrite any version
            raise ApiError(0, f"Lease {self.namespace}/{self.name} has no resourceVersion")
        raw = self._object(lease, renewed)
        return _lease(await self.cluster.replace("leases", raw, seconds=seconds))

    def _object(self, lease: Lease, renewed: datetime) -> Json:
        meta = dict(lease.raw.get("metadata") or {}) | {"name": self.name, "namespace": self.namespace}
        if lease.version:
            meta["resourceVersion"] = lease.version
        spec = dict(lease.spec) | {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": lease.seconds,
            "leaseTransitions": lease.transitions,
            "acquireTime": lease.acquired,
            "renewTime": rfc3339(renewed, timespec="microseconds"),
        }
        return {"apiVersion": API_VERSION, "kind": "Lease", "metadata": meta, "spec": spec}


def _lease(raw: Json) -> Lease:
    spec = raw.get("spec") or {}
    return Lease(
        holder=spec.get("holderIdentity") or "",
        seconds=min(spec.get("leaseDurationSeconds") or 0, MOST_SECONDS),
        transitions=spec.get("leaseTransitions") or 0,
        acquired=spec.get("acquireTime") or "",
        version=raw["metadata"]["resourceVersion"],
        raw=raw,
    )
