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
from spottrain_operator.api.kueue import Kueue, KueueApi, WorkloadView
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.informer import Informer, Kind
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.metrics import WATCH_AGE

logger = logging.getLogger(__name__)
NOT_ASKED: Final = Kueue(missing="the operator has not asked yet what this cluster serves")
NOT_LISTED: Final = Kueue(missing="the operator cannot list its Workloads (see its log), and tries again")


def kind_of(api: KueueApi) -> Kind[str, WorkloadView]:
    return Kind(
        name="Workload",
        plural=kueue.WORKLOADS,
        version=api.group,
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
        self._served = NOT_ASKED
        self._informers: tuple[Informer[str, WorkloadView], ...] = ()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Runs until cancelled."""
        WATCH_AGE.labels(kueue.WORKLOADS).set_function(
            lambda: max((informer.age for informer in self._informers), default=0.0)
        )
        async with asyncio.TaskGroup() as self._group:
            await asyncio.Event().wait()

    async def discover(self) -> None:
        """Asks which version is served, and follows it. Where that fails, the last answer is kept."""
        try:
            found = await served(self._cluster)
        except ApiError as error:
            logger.warning("it is unknown whether this cluster has Kueue: %s", error)
            return
        before, self._served = self._served, found
        if found != before:
            logger.info("Kueue: %s", found.api.group if found.api is not None else found.missing)
        if found.api is not before.api:
            self._follow(found.api)

    def _follow(self, api: KueueApi | None) -> None:
        for task in self._tasks:
            task.cancel()
        self._informers = tuple(
            Informer(
                kind_of(api),
                cluster=self._cluster,
                cache=self._caches.workloads,
                changed=lambda workload, _: self._queue.add(workload.job),
                namespace=namespace,
            )
            for namespace in (self._namespaces if api is not None else ())
            if api is not None
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

    def kueue(self) -> Kueue:
        """Returns what may be used of Kueue: nothing while its Workloads are not in the cache."""
        synced = all(informer.synced.is_set() for informer in self._informers)
        return self._served if synced else NOT_LISTED

    async def synced(self, seconds: float) -> None:
        """Waits until the Workloads are in the cache, at most for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for informer in self._informers:
                    await informer.synced.wait()


async def served(cluster: Cluster) -> Kueue:
    """Returns the version of Kueue's API that is served, or why none can be used. Raises ApiError."""
    about = await cluster.served(kueue.API_GROUP) or {}
    offered = {version["version"] for version in about.get("versions") or ()}
    found = next((api for api in KueueApi if api in offered), None)
    if found is not None:
        return Kueue(api=found, missing="")
    if offered:
        return Kueue(missing=f"this cluster's Kueue serves {', '.join(sorted(offered))} only; upgrade it")
    return Kueue(missing="this cluster does not serve kueue.x-k8s.io; install Kueue")
