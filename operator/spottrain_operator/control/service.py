"""The operator's service: caches, queue, workers, resync, progress, health.

Workers start once the first resync has filled the caches, so that no decision uses incomplete ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from spottrain_operator.api.validation import parse_job
from spottrain_operator.api.views import node_view, pod_view
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.progress import Poller
from spottrain_operator.control.reconcile import Reconciler
from spottrain_operator.control.resync import discover, discover_node_pools, resync
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Cluster, KubeCluster
from spottrain_operator.io.health import Health
from spottrain_operator.io.price_file import PriceFile
from spottrain_operator.settings import Settings

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0


def utc_now() -> datetime:
    return datetime.now(UTC)


def _log_end(task: asyncio.Task[None]) -> None:
    """Logs why a task has ended. /livez then fails, and the kubelet restarts the operator."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("a task of the operator has ended", exc_info=error)


class Service:
    def __init__(self, settings: Settings, *, now: Callable[[], datetime] = utc_now) -> None:
        self.settings = settings
        self.caches = Caches()
        self.queue = WorkQueue()
        self.memory = Memory()
        self._now = now
        self._synced = False
        self._cluster: KubeCluster | None = None
        self._health: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # --- life ---
    async def start(self) -> None:
        self._cluster = await KubeCluster.connect()
        health = Health(alive=self._alive, ready=lambda: self._synced)
        self._health = await health.start(self.settings.health_port)
        for work in (health.measure_lag(), self._run(self._cluster)):
            self._tasks.append(asyncio.create_task(work))
            self._tasks[-1].add_done_callback(_log_end)

    def _alive(self) -> bool:
        return not any(task.done() for task in self._tasks)

    async def stop(self) -> None:
        """Cancels all tasks; the next process continues from the written state."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._health is not None:
            await self._health.cleanup()
        if self._cluster is not None:
            await self._cluster.close()

    async def _run(self, cluster: Cluster) -> None:
        await self._resync(cluster)
        self._synced = True
        logger.info("caches are filled: %d jobs", len(self.caches.jobs.keys()))
        reconcile = Reconciler(
            cluster=cluster,
            caches=self.caches,
            memory=self.memory,
            default_pool=self.settings.default_pool,
            pools={pool.name: pool for pool in self.settings.pools},
            limits=self.settings.limits,
            now=self._now,
            prices=PriceFile(self.settings.price_file),
        )
        poller = Poller(
            caches=self.caches,
            memory=self.memory,
            queue=self.queue,
            interval=self.settings.progress_seconds,
            write_interval=self.settings.limits.progress_interval,
            now=self._now,
        )
        async with asyncio.TaskGroup() as group:
            for _ in range(self.settings.workers):
                group.create_task(self.queue.work(reconcile))
            group.create_task(poller.run())
            group.create_task(self._keep_resyncing(cluster))

    async def _keep_resyncing(self, cluster: Cluster) -> None:
        while True:
            await asyncio.sleep(self.settings.resync_seconds)
            await self._resync(cluster)

    async def _resync(self, cluster: Cluster) -> None:
        if self.settings.native_gangs:
            await discover(cluster, self.memory)
        await discover_node_pools(cluster, self.memory)
        while True:
            try:
                return await resync(cluster, self.caches, self.queue, self.settings.namespaces)
            except ApiError as error:
                logger.warning("listing failed, and is retried: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    # --- watch events ---
    def saw_job(self, kind: str | None, raw: Mapping[str, Any]) -> None:
        job = parse_job(raw)
        if kind == "DELETED":
            self.caches.jobs.remove(job.key, job.resource_version)
        elif not self.caches.jobs.put(job):
            return
        self.queue.add(job.key)

    def saw_pod(self, kind: str | None, raw: Mapping[str, Any]) -> None:
        pod = pod_view(raw)
        if pod is None:
            return
        if kind == "DELETED":
            self.caches.pods.drop(pod)
        elif not self.caches.pods.put(pod):
            return
        self.queue.add(pod.job)

    def saw_node(self, kind: str | None, raw: Mapping[str, Any]) -> None:
        node = node_view(raw)
        if kind == "DELETED":
            self.caches.nodes.drop(node)
        elif not self.caches.nodes.put(node):
            return
        for key in self.caches.pods.jobs_on(node.name):
            self.queue.add(key)
