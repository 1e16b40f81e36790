"""What is read at the start and every few minutes: complete LISTs, and the features of this cluster.

kopf misses deletions during a relist (measured: 100 of 200 entries were stale). A cluster may be upgraded
while the operator runs. A failed query of features blocks nothing; the last result is kept.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from decimal import Decimal
from typing import Any

from spottrain_operator.api.native_gangs import API_GROUP, GangApi
from spottrain_operator.api.node_pools import of_node_pool
from spottrain_operator.api.training_job import Job
from spottrain_operator.api.validation import parse_job
from spottrain_operator.api.views import node_view, pod_view
from spottrain_operator.control.caches import Caches, K, Newest, V
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError, ApiFailure, InvalidSpec
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.metrics import GHOSTS, JOBS, RESYNCS, SPENT, UNPRICED
from spottrain_operator.names import NODE_POOLS, PLURAL, Phase

logger = logging.getLogger(__name__)


# --- objects --------------------------------------------------------------------------------------------
async def resync(cluster: Cluster, caches: Caches, queue: WorkQueue, namespaces: tuple[str, ...]) -> None:
    """Lists nodes, pods and jobs into the caches, then enqueues every job."""
    await _list(cluster.every("nodes", namespaces), caches.nodes, node_view, "Node")
    await _list(cluster.every("pods", namespaces), caches.pods, pod_view, "Pod")
    await _list(cluster.every(PLURAL, namespaces), caches.jobs, parse_job, "TrainingJob")
    for key in {*caches.jobs.keys(), *caches.pods.jobs()}:
        queue.add(key)
    show_jobs(caches.jobs)
    RESYNCS.inc()


def show_jobs(jobs: Iterable[Job]) -> None:
    """Sets the metrics that are sums over all jobs: phases, and costs by namespace."""
    jobs = list(jobs)
    phases = [job.status.phase for job in jobs]
    for phase in Phase:
        JOBS.labels(phase).set(phases.count(phase))
    spent: dict[str, Decimal] = {}
    unknown: dict[str, Decimal] = {}
    for job in jobs:
        if (cost := job.status.cost) is not None:
            namespace = job.key.namespace
            spent[namespace] = spent.get(namespace, Decimal(0)) + cost.spent
            unknown[namespace] = unknown.get(namespace, Decimal(0)) + cost.unknown_seconds
    for gauge, sums in ((SPENT, spent), (UNPRICED, unknown)):
        gauge.clear()  # namespaces whose jobs are gone
        for namespace, value in sums.items():
            gauge.labels(namespace).set(float(value))


async def _list(
    raws: AsyncIterator[dict[str, Any]],
    cache: Newest[K, V],
    view: Callable[[dict[str, Any]], V | None],
    kind: str,
) -> None:
    """Stores what is listed, and removes what the cache had before and the LIST does not contain."""
    before, live = tuple(cache), set()
    async for raw in raws:
        try:
            found = view(raw)
        except InvalidSpec as error:  # one job's unreadable status must not stop the others
            logger.error("%s: %s", raw["metadata"]["name"], error)
            continue
        if found is not None:
            live.add(cache.key(found))
            cache.put(found)
    for old in before:
        key = cache.key(old)
        if key not in live and cache.get(key) is old:  # else it changed meanwhile: the next LIST tells
            cache.remove(key)
            GHOSTS.labels(kind).inc()


# --- features -------------------------------------------------------------------------------------------
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
