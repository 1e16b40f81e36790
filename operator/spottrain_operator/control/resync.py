"""What is done at the start and every few minutes: metrics are summed, and the features of this cluster are
read.

A cluster may be upgraded while the operator runs. A failed query of features blocks nothing; the last result
is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from decimal import Decimal

from prometheus_client import Gauge

from spottrain_operator.api.native_gangs import API_VERSION, POD_GROUPS
from spottrain_operator.api.node_pools import of_node_pool
from spottrain_operator.api.training_job import Job
from spottrain_operator.api.wire import camel
from spottrain_operator.control.memory import Memory
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.metrics import COMPARED, GOODPUT, JOBS, ON_DEMAND, SPENT, UNPRICED
from spottrain_operator.names import NODE_POOLS, Phase
from spottrain_operator.policies.goodput import PARTS, UNKNOWN

logger = logging.getLogger(__name__)


def show_jobs(jobs: Iterable[Job]) -> None:
    """Sets the metrics that are sums over all jobs: phases, costs and times, by namespace and team."""
    jobs = list(jobs)
    phases = [job.status.phase for job in jobs]
    for phase in Phase:
        JOBS.labels(phase).set(phases.count(phase))
    gauges = (SPENT, UNPRICED, ON_DEMAND, COMPARED, GOODPUT)
    sums: dict[Gauge, dict[tuple[str, ...], Decimal]] = {gauge: {} for gauge in gauges}
    for gauge, labels, value in (figure for job in jobs for figure in _figures(job)):
        sums[gauge][labels] = sums[gauge].get(labels, Decimal(0)) + value
    for gauge, values in sums.items():
        gauge.clear()  # namespaces and teams whose jobs are gone
        for labels, value in values.items():
            gauge.labels(*labels).set(float(value))


def _figures(job: Job) -> Iterator[tuple[Gauge, tuple[str, ...], Decimal]]:
    owner, cost, times = (job.key.namespace, job.team), job.status.cost, job.status.goodput
    if cost is not None:
        yield SPENT, owner, cost.spent
        yield UNPRICED, owner, cost.unknown_seconds
        known = cost.saving != UNKNOWN
        yield ON_DEMAND, owner, cost.on_demand_ideal if known else Decimal(0)
        yield COMPARED, owner, cost.spent if known else Decimal(0)
    for part in PARTS if times is not None else ():
        yield GOODPUT, (*owner, camel(part)), getattr(times, part)


async def discover(cluster: Cluster, memory: Memory) -> None:
    try:
        listed = await cluster.served(API_VERSION) or {}
    except ApiError as error:
        logger.warning("it is unknown whether this cluster has gang scheduling: %s", error)
        return
    found = POD_GROUPS in {resource["name"] for resource in listed.get("resources") or ()}
    if found is not memory.has_gangs:
        logger.info("%s", f"gangs are scheduled by {API_VERSION}" if found else "gang scheduling has gone")
    memory.has_gangs = found
    for known in memory.jobs.values():
        known.ungrouped = False


async def discover_node_pools(cluster: Cluster, memory: Memory) -> None:
    """Reads Karpenter's NodePools, which offer capacity even without nodes. Most clusters have none."""
    try:
        async for page in cluster.pages(NODE_POOLS, ""):
            for raw in page.items:
                memory.node_pools |= of_node_pool(raw)
    except ApiError as error:
        if error.kind is not ApiFailure.NOT_FOUND:
            words = "Karpenter's NodePools cannot be read, so capacity is detected from nodes only: %s"
            logger.warning(words, error)
