"""Kueue's Workloads of our jobs: whether this cluster serves them, and a cache of them while it does.

Kueue may be installed, upgraded and removed while the operator runs. Nothing of that concerns jobs that name
no queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from spottrain_operator.api import kueue
from spottrain_operator.api.kueue import WorkloadView
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.informer import Informer, Kind
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.metrics import WATCH_AGE

logger = logging.getLogger(__name__)
NOT_ASKED: Final = "the operator has not asked yet what this cluster serves"
NOT_LISTED: Final = "the operator cannot list its Workloads (see its log), and tries again"
KIND: Final[Kind[str, WorkloadView]] = Kind(
    name="Workload",
    plural="workloads",
    version=kueue.API_VERSION,
    key=lambda raw: str(raw["metadata"]["uid"]),
    view=kueue.workload_view,
)


class Workloads:
    """Informers of the Workloads in each watched namespace; a changed one enqueues its job."""

    def __init__(
        self, cluster: Cluster, caches: Caches, queue: WorkQueue, namespaces: tuple[str, ...] = ()
    ) -> None:
        self._cluster, self._caches, self._queue = cluster, caches, queue
        self._namespaces = namespaces or ("",)
        self._missing = NOT_ASKED
        """Why Kueue cannot be used; "" where it can."""
        self._informers: tuple[Informer[str, WorkloadView], ...] = ()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Runs until cancelled."""
        WATCH_AGE.labels(KIND.plural).set_function(
            lambda: max((informer.age for informer in self._informers), default=0.0)
        )
        async with asyncio.TaskGroup() as self._group:
            await asyncio.Event().wait()

    async def discover(self) -> None:
        """Asks whether Kueue is served, and follows it. Where that fails, the last answer is kept."""
        try:
            missing = await why_not_served(self._cluster)
        except ApiError as error:
            logger.warning("it is unknown whether this cluster has Kueue: %s", error)
            return
        before, self._missing = self._missing, missing
        if missing == before:
            return
        logger.info("Kueue: %s", missing or kueue.API_VERSION)
        for task in self._tasks:
            task.cancel()
        self._informers = tuple(
            Informer(
                KIND,
                cluster=self._cluster,
                cache=self._caches.workloads,
                changed=lambda workload, _: self._queue.add(workload.job),
                namespace=namespace,
            )
            for namespace in (() if missing else self._namespaces)
        )
        assert self._group is not None
        works = (self._wake(), *(informer.run() for informer in self._informers))
        self._tasks = [self._group.create_task(work) for work in works]

    async def _wake(self) -> None:
        """Enqueues the jobs that have waited for Kueue, once it can be used."""
        for informer in self._informers:
            await informer.synced.wait()
        for job in self._caches.jobs:
            if job.queue:
                self._queue.add(job.key)

    def missing(self) -> str:
        """Returns why Kueue cannot be used, as while its Workloads are not in the cache; "" where it can."""
        synced = all(informer.synced.is_set() for informer in self._informers)
        return self._missing if synced else NOT_LISTED

    async def synced(self, seconds: float) -> None:
        """Waits until the Workloads are in the cache, at most for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for informer in self._informers:
                    await informer.synced.wait()


async def why_not_served(cluster: Cluster) -> str:
    """Returns why the cluster's Kueue cannot be used; "" where it can. Raises ApiError."""
    about = await cluster.served(kueue.API_GROUP) or {}
    offered = {version["version"] for version in about.get("versions") or ()}
    if kueue.VERSION in offered:
        return ""
    if offered:
        return f"this cluster's Kueue serves {', '.join(sorted(offered))} and not {kueue.VERSION}; upgrade it"
    return "this cluster does not serve kueue.x-k8s.io; install Kueue"
