"""Informers: they keep the caches equal to what the API server has, as client-go's reflectors do.

Each lists its objects, removes from the cache what the LIST does not contain, and then watches from the
LIST's version on. A watch that ends is continued from the last version that was seen. Where that one is no
longer kept, or the API server reports another error, the objects are listed again. None of that ends the
process. The TrainingJobs are only listed: kopf watches them (docs/adr/0015-informer.md).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Hashable
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from spottrain_operator.api.kueue import WorkloadView
from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.training_job import Job, JobKey
from spottrain_operator.api.validation import identity, parse_job
from spottrain_operator.api.views import node_view, pod_view
from spottrain_operator.control.caches import Caches, Newest
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io.cluster import Cluster, Json
from spottrain_operator.io.logs import QuietLog
from spottrain_operator.io.metrics import GHOSTS, RELISTS, WATCH_AGE
from spottrain_operator.names import PLURAL
from spottrain_operator.policies.pod_end import trainer_ended

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Job | PodView | NodeView | WorkloadView)

FIRST_DELAY: Final = 0.5
LONGEST_DELAY: Final = 30.0
BRIEF_SECONDS: Final = 1.0
"""A watch that ends within this time, without an event, counts as failed: it is not restarted at once."""
TRANSIENT: Final = frozenset({0, 429, 502, 503, 504})
"""HTTP statuses after which a watch goes on from its last version, and after others not; 0: no response."""
NO_NAMESPACE: Final = frozenset({403, 404})
"""HTTP statuses of the LIST of a namespace that is gone, or that the operator may not read (any more)."""
AT_A_TIME: Final = 50
"""Listed objects that are stored before other tasks may run."""


class Why(StrEnum):
    """Why objects are listed."""

    START = "start"
    EXPIRED = "expired"
    """The version from which the watch should have gone on is no longer kept."""
    ERROR = "error"
    """Of the watch, reported by the API server."""
    RESYNC = "resync"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind(Generic[K, V]):
    """How the objects of one kind become views."""

    name: str
    """In metrics and log lines."""
    plural: str
    version: str = ""
    """Group and version, of kinds that the client does not know by their plural."""
    key: Callable[[Json], K]
    """The cache's key, from the object."""
    view: Callable[[Json], V | None]
    """None: the object is not ours."""


JOBS: Final[Kind[JobKey, Job]] = Kind(
    name="TrainingJob", plural=PLURAL, key=lambda raw: identity(raw)[0], view=parse_job
)
PODS: Final[Kind[str, PodView]] = Kind(
    name="Pod", plural="pods", key=lambda raw: str(raw["metadata"]["uid"]), view=pod_view
)
NODES: Final[Kind[str, NodeView]] = Kind(
    name="Node", plural="nodes", key=lambda raw: str(raw["metadata"]["name"]), view=node_view
)


class Informer(Generic[K, V]):
    """Lists one kind in one namespace ("": everywhere), and watches it."""

    def __init__(
        self,
        kind: Kind[K, V],
        *,
        cluster: Cluster,
        cache: Newest[K, V],
        changed: Callable[[V, V | None], None],
        namespace: str = "",
    ) -> None:
        """`changed` gets each changed view and the one before it, and what is new or gone with None."""
        self.kind: Kind[K, V] = kind
        self.namespace = namespace
        self.synced = asyncio.Event()
        """Set once the first LIST is in the cache, or the one namespace cannot be read."""
        self._cluster = cluster
        self._cache: Newest[K, V] = cache
        self._changed: Callable[[V, V | None], None] = changed
        self._collection = f"{kind.version}/{kind.plural}" if kind.version else kind.plural
        self._version = ""
        """Where the watch goes on; "": the objects must be listed."""
        self._unreadable: dict[K, str] = {}
        """The error of each object that cannot be parsed, so that it is logged once."""
        self._now = asyncio.get_running_loop().time  # also for /metrics, which may be read outside the loop
        self._heard = self._now()
        self._events = 0
        """Number of events and bookmarks."""
        self._quiet = QuietLog()
        self._refused = False
        """Whether it was logged that the namespace cannot be read, since it last could."""

    def __str__(self) -> str:
        return f"{self.kind.plural} of {self.namespace or 'all namespaces'}"

    @property
    def age(self) -> float:
        """Seconds since the last event, bookmark, or LIST before a watch."""
        return self._now() - self._heard

    # --- life ---
    async def run(self) -> None:
        """Lists and watches until cancelled."""
        failures, why = 0, Why.START
        while True:
            began, events, error = self._now(), self._events, None
            try:
                if not self._version:
                    self._version = await self.relist(why)
                    self._heard = self._now()
                await self._watch()
            except ApiError as failure:
                error = failure
                self._tell(error)
                if error.status not in TRANSIENT:
                    self._version = ""
                    why = Why.EXPIRED if error.kind is ApiFailure.EXPIRED else Why.ERROR
            if self._events > events or (error is None and self._now() - began > BRIEF_SECONDS):
                failures = 0
                if error is None or error.kind is ApiFailure.EXPIRED:
                    continue
            failures += 1
            await asyncio.sleep(delay(failures))

    async def keep_listing(self) -> None:
        """Lists until that succeeds, or the namespace cannot be read."""
        failures = 0
        while True:
            try:
                await self.relist(Why.RESYNC)
                return
            except ApiError as error:
                self._tell(error)
                if self._refused:
                    return
            failures += 1
            await asyncio.sleep(delay(failures))

    async def relist(self, why: Why = Why.RESYNC) -> str:
        """Replaces what the cache has of these objects by a LIST; returns its version.

        Raises ApiError.

        A watch may run meanwhile: what it reports after the LIST's snapshot has a higher version.
        """
        RELISTS.labels(self.kind.plural, why).inc()
        version, live = 0, set[K | None]()
        before = [v for v in self._cache if self.namespace in ("", _namespace(v))]
        async for page in self._cluster.pages(self._collection, self.namespace):
            if not page.version.isdecimal():
                raise ApiError(0, f"the LIST of {self} has no resourceVersion")
            version = version or int(page.version)
            for number, raw in enumerate(page.items):
                live.add(self._store(raw))
                if number % AT_A_TIME == 0:
                    await asyncio.sleep(0)
        for old in before:
            key = self._cache.key(old)
            # Where it is another view by now, the watch is ahead of this LIST.
            if key not in live and self._cache.get(key) is old and self._remove(key, version):
                GHOSTS.labels(self.kind.name).inc()
        self._refused = False
        self.synced.set()
        return str(version)

    async def _watch(self) -> None:
        async with aclosing(self._cluster.watch(self._collection, self.namespace, self._version)) as events:
            async for event in events:
                self._events += 1
                self._heard = self._now()
                self._apply(event["type"], event["object"])

    def _tell(self, error: ApiError) -> None:
        """Logs a failure once a minute; once where it concerns a watched namespace alone.

        What the cache has of that one stays: the refusal may pass.
        """
        if self.namespace and not self._version and error.status in NO_NAMESPACE:
            if not self._refused:
                words = "the %s cannot be listed; all others go on, and it is retried: %s"
                logger.warning(words, self, error)
            self._refused = True
            self.synced.set()
        elif self._quiet.due():
            what = "watch" if self._version else "LIST"
            logger.warning("%s of %s failed, retrying: %s", what, self, error)

    # --- objects ---
    def _apply(self, event: str, raw: Json) -> None:
        if event in ("ADDED", "MODIFIED"):
            self._store(raw)
        elif event == "DELETED":
            self._remove(*self._identity(raw))
        self._version = str((raw.get("metadata") or {}).get("resourceVersion") or self._version)

    def _identity(self, raw: Json) -> tuple[K, int]:
        """Returns an object's key and version. Raises ApiError where it is not the API server's."""
        try:
            return self.kind.key(raw), int(raw["metadata"]["resourceVersion"])
        except (KeyError, TypeError, ValueError) as error:
            words = f"one of the {self} has no usable metadata ({type(error).__name__} {error})"
            raise ApiError(0, words) from error

    def _store(self, raw: Json) -> K | None:
        """Stores an object if it is newer than the cached one; returns its key, None where it is not ours.

        One that cannot be parsed is logged, and counts as unchanged.
        """
        key, version = self._identity(raw)
        if not self._cache.is_news(key, version):
            return key
        try:
            view = self.kind.view(raw)
        except Exception as error:  # whatever it is, it must not stop the others
            words = f"{type(error).__name__} {error}"
            if self._unreadable.get(key) != words:
                self._unreadable[key] = words
                logger.error("%s %s cannot be read: %s", self.kind.name, raw["metadata"].get("name"), words)
            return key
        self._unreadable.pop(key, None)
        if view is None:
            return None
        before = self._cache.get(key)
        if self._cache.put(view):
            self._changed(view, before)
        return key

    def _remove(self, key: K, version: int) -> bool:
        """Removes what was deleted by this version; a newer object of the same key stays.

        Returns whether the cache had it.
        """
        old = self._cache.get(key)
        if old is not None and old.resource_version > version:
            return False
        self._unreadable.pop(key, None)
        self._cache.remove(key, version)
        if old is not None:
            self._changed(old, None)
        return old is not None


class Informers:
    """Those of nodes, and of our pods and jobs in each watched namespace; a change enqueues its jobs."""

    def __init__(
        self, cluster: Cluster, caches: Caches, queue: WorkQueue, namespaces: tuple[str, ...] = ()
    ) -> None:
        def pod_changed(pod: PodView, before: PodView | None) -> None:
            if caches.jobs.is_removed(pod.job) and not pod.holds_outcome:
                return  # it was released, and nothing of a deleted job waits for its end
            gone = caches.pods.get(pod.uid) is None
            started = pod.running_since is not None and (before is None or before.running_since is None)
            at_once = urgent(pod, before, gone) or (started and caches.all_run(pod))
            (queue.add if at_once else queue.add_soon)(pod.job)

        def job_changed(job: Job, _: Job | None) -> None:
            queue.add(job.key)

        def node_changed(node: NodeView, _: NodeView | None) -> None:
            for key in caches.pods.jobs_on(node.name):
                queue.add(key)

        self.nodes = Informer(NODES, cluster=cluster, cache=caches.nodes, changed=node_changed)
        self.pods = tuple(
            Informer(PODS, cluster=cluster, cache=caches.pods, changed=pod_changed, namespace=namespace)
            for namespace in namespaces or ("",)
        )
        self.jobs = tuple(
            Informer(JOBS, cluster=cluster, cache=caches.jobs, changed=job_changed, namespace=namespace)
            for namespace in namespaces or ("",)
        )

    async def run(self) -> None:
        """Runs until cancelled."""
        WATCH_AGE.labels(NODES.plural).set_function(lambda: self.nodes.age)
        WATCH_AGE.labels(PODS.plural).set_function(lambda: max(informer.age for informer in self.pods))
        async with asyncio.TaskGroup() as group:
            group.create_task(self.nodes.run())
            for informer in self.pods:
                group.create_task(informer.run())

    async def synced(self) -> None:
        """Waits until the caches of nodes and pods are filled."""
        for synced in (self.nodes.synced, *(informer.synced for informer in self.pods)):
            await synced.wait()

    async def list_jobs(self) -> None:
        """Lists the jobs, and enqueues those of which kopf's watch has missed something."""
        await asyncio.gather(*(informer.keep_listing() for informer in self.jobs))


def urgent(pod: PodView, before: PodView | None, gone: bool) -> bool:
    """Returns whether a pod's job is reconciled at once: the pod has ended or will, or it is gone."""
    if gone:  # no news once its end was recorded
        return pod.holds_outcome or not trainer_ended(pod)
    return _end(pod) != _end(before) if before is not None else any(_end(pod))


def _end(pod: PodView) -> tuple[object, ...]:
    over = pod.ended, pod.uploading, pod.init_failure, pod.lost, pod.phase in ("Succeeded", "Failed")
    return *over, pod.deleted, pod.notice, pod.disruption, pod.unhealthy


def delay(failures: int) -> float:
    """Returns the seconds before the next try, spread so that not all clients come back at once."""
    longest = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(failures - 1, 10))
    return random.uniform(longest / 2, longest)


def _namespace(view: Job | PodView | NodeView | WorkloadView) -> str:
    if isinstance(view, Job):
        return view.key.namespace
    return "" if isinstance(view, NodeView) else view.namespace
