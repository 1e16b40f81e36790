"""Informers: they keep the caches of pods and nodes equal to what the API server has.

Each lists its objects, removes from the cache what the LIST does not contain, and then watches from the
LIST's version on. A watch that ends is continued from the last version that was seen. Where that one is no
longer kept, or the API server reports another error, the objects are listed again. None of that ends the
process.
Why not kopf: docs/adr/0015-informer.md.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from enum import StrEnum
from typing import Final

from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.training_job import Job
from spottrain_operator.control.caches import Caches, Newest
from spottrain_operator.control.lister import JOBS, NODES, PODS, Kind, Lister, V, fail, relist
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io.cluster import SILENCE_SECONDS, Cluster, Json
from spottrain_operator.io.logs import QuietLog
from spottrain_operator.io.metrics import RELISTS, WATCH_AGE
from spottrain_operator.policies.pod_end import trainer_ended

logger = logging.getLogger(__name__)

FIRST_DELAY: Final = 0.5
LONGEST_DELAY: Final = 30.0
FROZEN_SECONDS: Final = 2 * SILENCE_SECONDS
"""A watch that is open and silent for so long was not restarted, as it should have been: /livez fails."""
BRIEF_SECONDS: Final = 1.0
"""A watch that ends within this time, without an event, counts as failed: it is not restarted at once."""
TRANSIENT: Final = frozenset({0, 429, 502, 503, 504})
"""HTTP statuses after which a watch goes on from its last version, and after others not; 0: no response."""


class Why(StrEnum):
    """Why objects are listed."""

    START = "start"
    EXPIRED = "expired"
    """The version from which the watch should have gone on is no longer kept."""
    ERROR = "error"
    """Of the watch, reported by the API server."""
    RESYNC = "resync"


class Informer(Lister[str, V]):
    """Lists one kind in one namespace ("": everywhere), and watches it."""

    def __init__(
        self,
        kind: Kind[str, V],
        *,
        cluster: Cluster,
        cache: Newest[str, V],
        changed: Callable[[V, V | None], None],
        namespace: str = "",
        went_back: Callable[[str], None] = fail,
    ) -> None:
        super().__init__(
            kind, cluster=cluster, cache=cache, changed=changed, namespace=namespace, went_back=went_back
        )
        self.synced = asyncio.Event()
        """Set once the first LIST is in the cache, or the one namespace cannot be read."""
        self._version = ""
        """Where the watch goes on; "": the objects must be listed."""
        self._why = Why.START
        self._now = asyncio.get_running_loop().time  # also for /metrics, which may be read outside the loop
        self._heard = self._now()
        """Time of the last event, bookmark, or LIST before a watch."""
        self._events = 0
        """Number of events and bookmarks."""
        self._silent_since: float | None = None
        """Since when a watch says nothing; None: none is open at the moment."""
        self._quiet = QuietLog()

    # --- state ---
    @property
    def age(self) -> float:
        """Seconds since the API server last told anything."""
        return self._now() - self._heard

    @property
    def live(self) -> bool:
        """Whether the cache was filled, and a watch that is not dead has kept it up to date since."""
        return self.synced.is_set() and self._silent_since is not None and self.age < SILENCE_SECONDS

    @property
    def frozen(self) -> bool:
        """Whether a dead watch was not restarted. It is not frozen while the API server cannot be reached."""
        return self._silent_since is not None and self._now() - self._silent_since > FROZEN_SECONDS

    # --- life ---
    async def run(self) -> None:
        """Runs until cancelled."""
        failures = 0
        while True:
            began, events = self._now(), self._events
            error = await self._turn()
            if self._events > events or (error is None and self._now() - began > BRIEF_SECONDS):
                failures = 0
                if error is None or error.kind is ApiFailure.EXPIRED:
                    continue
            failures += 1
            await asyncio.sleep(delay(failures))

    async def _turn(self) -> ApiError | None:
        """Lists if it must, and follows one watch to its end; returns the error that ended it."""
        try:
            if not self._version:
                await self.relist(self._why)
                self._heard = self._now()
            await self._watch()
        except ApiError as error:
            if not self._version and self.without(error):
                self.synced.set()
            else:
                self._log(error)
            if error.status not in TRANSIENT:
                self._version = ""
                self._why = Why.EXPIRED if error.kind is ApiFailure.EXPIRED else Why.ERROR
            return error
        return None

    async def relist(self, why: Why = Why.RESYNC) -> str:
        """As of `Lister`; the first one says where the watch begins."""
        RELISTS.labels(self.kind.plural, why).inc()
        version = await super().relist()
        self._version = self._version or version
        self.synced.set()
        return version

    async def _watch(self) -> None:
        def opened() -> None:
            self._silent_since = self._now()

        events = self._cluster.watch(self.kind.collection, self.namespace, self._version, opened)
        try:
            async with aclosing(events):
                async for event in events:
                    self._events += 1
                    self._heard = self._silent_since = self._now()
                    self._apply(event["type"], event["object"])
        finally:
            self._silent_since = None

    def _log(self, error: ApiError) -> None:
        if self._quiet.due():
            logger.warning("watch of %s failed, retrying: %s", self, error)

    # --- objects ---
    def _apply(self, event: str, raw: Json) -> None:
        if event in ("ADDED", "MODIFIED"):
            self._store(raw)
        elif event == "DELETED":
            self._remove(*self._identity(raw))
        self._version = str((raw.get("metadata") or {}).get("resourceVersion") or self._version)
        if self._version.isdecimal():
            self._newest = max(self._newest, int(self._version))


class Informers:
    """Those of nodes, and of our pods in each watched namespace; a changed object enqueues its jobs.

    The TrainingJobs are only listed here: kopf watches them.
    """

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        queue: WorkQueue,
        namespaces: tuple[str, ...] = (),
        went_back: Callable[[str], None] = fail,
    ) -> None:
        def pod_changed(pod: PodView, before: PodView | None) -> None:
            (queue.add if urgent(pod, before) else queue.add_soon)(pod.job)

        def job_changed(job: Job, _: Job | None) -> None:
            queue.add(job.key)

        def node_changed(node: NodeView, _: NodeView | None) -> None:
            for key in caches.pods.jobs_on(node.name):
                queue.add(key)

        self.nodes = Informer(
            NODES, cluster=cluster, cache=caches.nodes, changed=node_changed, went_back=went_back
        )
        self.pods = tuple(
            Informer(
                PODS,
                cluster=cluster,
                cache=caches.pods,
                changed=pod_changed,
                namespace=namespace,
                went_back=went_back,
            )
            for namespace in namespaces or ("",)
        )
        self.jobs = tuple(
            Lister(
                JOBS,
                cluster=cluster,
                cache=caches.jobs,
                changed=job_changed,
                namespace=namespace,
                went_back=went_back,
            )
            for namespace in namespaces or ("",)
        )

    @property
    def all(self) -> tuple[Informer[NodeView] | Informer[PodView], ...]:
        return (self.nodes, *self.pods)

    async def run(self) -> None:
        """Runs until cancelled."""
        WATCH_AGE.labels(self.nodes.kind.plural).set_function(lambda: self.nodes.age)
        WATCH_AGE.labels(PODS.plural).set_function(lambda: max(informer.age for informer in self.pods))
        async with asyncio.TaskGroup() as group:
            for informer in self.all:
                group.create_task(informer.run())

    async def synced(self) -> None:
        """Waits until every cache is filled."""
        for informer in self.all:
            await informer.synced.wait()

    async def relist(self) -> None:
        """Repairs what the watches have missed of nodes and pods. Raises ApiError, as `lister.relist`."""
        await relist(self.all)

    def frozen(self) -> list[str]:
        """Returns which watches are frozen."""
        return [str(informer) for informer in self.all if informer.frozen]

    def knows_pods(self, namespace: str) -> bool:
        """Returns whether the cache has every pod of ours in this namespace, but for the last moments."""
        return any(i.live for i in self.pods if i.namespace in ("", namespace))


def urgent(pod: PodView, before: PodView | None) -> bool:
    """Returns whether a pod's job is reconciled at once: the pod has ended or will, or it is new or gone."""
    if before is None:  # that it is gone is no news once its end was recorded
        return pod.holds_outcome or not trainer_ended(pod)
    return _end(pod) != _end(before)


def _end(pod: PodView) -> tuple[object, ...]:
    over = pod.ended, pod.uploading, pod.init_failure, pod.lost, pod.phase in ("Succeeded", "Failed")
    return *over, pod.deleted, pod.notice, pod.disruption, pod.unhealthy


def delay(failures: int) -> float:
    """Returns the seconds before the next try, spread so that not all clients come back at once."""
    longest = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(failures - 1, 10))
    return random.uniform(longest / 2, longest)
