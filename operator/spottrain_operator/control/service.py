"""The operator's service: caches, informers, queue, workers, resync, progress, health.

Workers start once the caches are filled, so that no decision uses incomplete ones, and once this process
leads. Until then it stands by, with caches that follow the cluster.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from spottrain_operator.api import kueue
from spottrain_operator.api.training_job import Job
from spottrain_operator.api.validation import identity, parse_job
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.informer import Informers
from spottrain_operator.control.leader import Elector, LeaseLock, Times
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.observe import Sources
from spottrain_operator.control.progress import Poller
from spottrain_operator.control.reconcile import Reconciler
from spottrain_operator.control.resync import discover, discover_node_pools, show_jobs
from spottrain_operator.control.work_queue import Lane, WorkQueue
from spottrain_operator.control.workloads import Workloads
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.health import Health
from spottrain_operator.io.metrics import LEADER, RESYNCS
from spottrain_operator.io.price_file import PriceFiles
from spottrain_operator.settings import Settings

logger = logging.getLogger(__name__)

WORKLOADS_SECONDS = 15.0
"""The start waits so long for Kueue's Workloads. Afterwards only jobs with a queue wait for them."""


def utc_now() -> datetime:
    return datetime.now(UTC)


def _lost(why: str) -> None:
    _end_process(f"lost leadership, exiting: {why}")


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _end_process("a task of the operator has failed, exiting", error)


def _end_process(words: str, error: BaseException | None = None) -> None:
    """Ends the process at once: nothing that it began as the leader goes on. It is restarted as a standby."""
    logger.critical("%s", words, exc_info=error)
    logging.shutdown()
    os._exit(1)


class Service:
    def __init__(self, settings: Settings, *, now: Callable[[], datetime] = utc_now) -> None:
        self.settings = settings
        self.caches = Caches()
        self.queue = WorkQueue(open=False, resync=settings.resync_seconds)
        self.memory = Memory()
        self._now = now
        self._times = Times(lease=settings.lease_seconds)
        self._synced = False
        self._cluster: Cluster | None = None
        self._workloads: Workloads | None = None
        """None: jobs with a Kueue queue wait, because the operator's use of Kueue is off."""
        self._lease_cluster: Cluster | None = None
        self._elector: Elector | None = None
        """None: without a Lease this process leads."""
        self._health: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # --- life ---
    async def start(self) -> None:
        if self.settings.lease_namespace:
            self._lease_cluster = await Cluster.connect()
            self._elector = self._candidate(self._lease_cluster)
        time_to_write = self._elector.time_to_write if self._elector is not None else lambda: math.inf
        self._cluster = await Cluster.connect(write_timeout=self._times.write, time_to_write=time_to_write)
        informers = Informers(self._cluster, self.caches, self.queue, self.settings.namespaces)
        works = [informers.run()]
        if self.settings.kueue:
            self._workloads = Workloads(self._cluster, self.caches, self.queue, self.settings.namespaces)
            works.append(self._workloads.run())
        health = Health(ready=lambda: self._synced)
        self._health = await health.start(self.settings.health_port, self.settings.bind_address)
        for work in (*works, health.measure_lag(), self._run(self._cluster, informers)):
            self._tasks.append(asyncio.create_task(work))
            self._tasks[-1].add_done_callback(_ended)

    async def stop(self) -> None:
        """Cancels all tasks; the next process continues from the written state."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._elector is not None:
            await self._elector.release()
        if self._health is not None:
            await self._health.cleanup()
        for cluster in (self._cluster, self._lease_cluster):
            if cluster is not None:
                await cluster.close()

    async def _run(self, cluster: Cluster, informers: Informers) -> None:
        await asyncio.gather(informers.synced(), self._read_jobs(cluster, informers))
        if self._workloads is not None:
            await self._workloads.synced(WORKLOADS_SECONDS)
        self._synced = True
        logger.info("caches are filled: %d jobs", len(self.caches.jobs.keys()))
        gc.collect()
        gc.freeze()  # each full collection would look at all of it again, and hold the event loop meanwhile
        sources = Sources(
            cluster=cluster,
            caches=self.caches,
            memory=self.memory,
            default_pool=self.settings.default_pool,
            pools={pool.name: pool for pool in self.settings.pools},
            limits=self.settings.limits,
            prices=PriceFiles(self.settings.price_file, self.settings.fetched_price_file),
            defaults=self.settings.job_defaults,
            sync_image=self.settings.sync_image,
            kueue=self._workloads.missing if self._workloads is not None else lambda: kueue.OFF,
        )
        reconcile = Reconciler(sources=sources, now=self._now)
        poller = Poller(
            sources=sources, queue=self.queue, interval=self.settings.progress_seconds, now=self._now
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_resyncing(cluster, informers))
            if self._elector is not None:
                group.create_task(self._elector.run())
                await self._elector.leading()
            self._lead()
            for _ in range(self.settings.workers):
                group.create_task(self.queue.work(reconcile))
            group.create_task(poller.run())

    def _candidate(self, cluster: Cluster) -> Elector:
        given = self.settings
        return Elector(
            LeaseLock(cluster, given.lease_namespace, given.lease_name),
            given.identity or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}",
            self._times,
            lost=_lost,
            now=self._now,
        )

    def _lead(self) -> None:
        """Begins the work on every job, as after a restart: the caches are up to date, the queue is empty.

        A new event does not wait behind all of them, nor does what has happened while nobody led.
        """
        LEADER.set(1)
        self.queue.open = True
        urgent = self.caches.urgent()
        for key in {*self.caches.jobs.keys(), *self.caches.pods.jobs()}:
            self.queue.add(key, Lane.EVENT if key in urgent else Lane.RESYNC)
        show_jobs(self.caches.jobs)

    async def _keep_resyncing(self, cluster: Cluster, informers: Informers) -> None:
        """Repairs what kopf's watch has missed: it does not tell of deletions during its LIST."""
        while True:
            await asyncio.sleep(self.settings.resync_seconds)
            await self._read_jobs(cluster, informers)
            if self.queue.open:  # else a sum over both processes would count the jobs twice
                show_jobs(self.caches.jobs)

    async def _read_jobs(self, cluster: Cluster, informers: Informers) -> None:
        """Reads what this cluster offers, and lists the jobs."""
        if self.settings.native_gangs:
            await discover(cluster, self.memory)
        if self._workloads is not None:
            await self._workloads.discover()
        await discover_node_pools(cluster, self.memory)
        await informers.list_jobs()
        RESYNCS.inc()

    # --- watch events ---
    def saw_job(self, kind: str | None, raw: Mapping[str, Any]) -> None:
        key, version = identity(raw)
        before = self.caches.jobs.get(key)
        if kind == "DELETED":
            self.caches.jobs.remove(key, version)
            self.queue.add(key)
        elif self.caches.jobs.is_news(key, version) and self.caches.jobs.put(job := parse_job(raw)):
            (self.queue.add_soon if _only_status(before, job) else self.queue.add)(key)


def _only_status(before: Job | None, job: Job) -> bool:
    """Returns whether nothing but the status is new. The event of our own write may come before its reply."""
    if before is None:
        return False
    return job == replace(before, status=job.status, resource_version=job.resource_version)
