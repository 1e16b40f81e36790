"""Discovers features of this cluster: Kubernetes' own gang scheduling, Karpenter's NodePools.

Discovery is repeated with each resync, because a cluster may be upgraded while the operator runs. A failed
query blocks nothing; the last result is kept.
"""

from __future__ import annotations

import logging

from spottrain_operator.api.native_gangs import API_GROUP, GangApi
from spottrain_operator.api.node_pools import of_node_pool
from spottrain_operator.control.memory import Memory
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.names import NODE_POOLS

logger = logging.getLogger(__name__)


async def discover(cluster: Cluster, memory: Memory) -> None:
    try:
        found = await _served(cluster)
    except ApiError as error:
        if not memory.discovery_failed:
            logger.warning("it is unknown whether this cluster has gang scheduling: %s", error)
        memory.discovery_failed = True
        return
    memory.discovery_failed = False
    if found is not memory.gang_api:
        words = (
            f"gangs are scheduled by {found.group}"
            if found
            else "this cluster has no gang scheduling of its own"
        )
        logger.info("%s", words)
    memory.gang_api = found
    memory.ungrouped.clear()


async def _served(cluster: Cluster) -> GangApi | None:
    """Returns the first version with the kind: earlier v1alpha1 and v1beta1 had only priority classes."""
    about = await cluster.served(API_GROUP) or {}
    offered = {version["version"] for version in about.get("versions") or ()}
    for api in GangApi:
        if api in offered:
            listed = await cluster.served(api.group) or {}
            if api.resource in {resource["name"] for resource in listed.get("resources") or ()}:
                return api
    return None


async def discover_node_pools(cluster: Cluster, memory: Memory) -> None:
    """Reads Karpenter's NodePools, which offer capacity even without nodes. Most clusters have none."""
    try:
        async for raw in cluster.every(NODE_POOLS, ()):
            memory.node_pools |= of_node_pool(raw)
    except ApiError as error:
        failed = error.kind is not ApiFailure.NOT_FOUND
        if failed and not memory.node_pools_failed:
            logger.warning(
                "Karpenter's NodePools cannot be read, so capacity is detected from nodes only: %s", error
            )
        memory.node_pools_failed = failed
    else:
        memory.node_pools_failed = False
