"""The Lease object (coordination.k8s.io/v1) that says which process is the leader."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain_operator.io.cluster import Cluster, Json


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeLease:
    """`control.leader.LeaseLock` at the API server.

    `cluster` is a client with connections of its own, so that a renewal never waits for other requests.
    """

    cluster: Cluster
    namespace: str
    name: str

    async def get(self, seconds: float) -> Json | None:
        return await self.cluster.get("leases", self.name, self.namespace, seconds=seconds)

    async def write(self, lease: Json | None, spec: Json, seconds: float) -> Json:
        if lease is not None:
            return await self.cluster.replace("leases", lease | {"spec": spec}, seconds=seconds)
        made = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}
        meta = {"name": self.name, "namespace": self.namespace}
        return await self.cluster.create("leases", made | {"metadata": meta}, seconds=seconds)
