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
import pickle
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Generic, TypeVar

from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.views import node_facts, node_view, pod_view
from spottrain_operator.control.caches import Caches, Newest
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io.cluster import SILENCE_SECONDS, Cluster, Json
from spottrain_operator.io.metrics import GHOSTS, RELISTS, WATCH_AGE

logger = logging.getLogger(__name__)
V = TypeVar("V", PodView, NodeView)

FIRST_DELAY: Final = 0.5
LONGEST_DELAY: Final = 30.0
FROZEN_SECONDS: Final = 2 * SILENCE_SECONDS
"""A watch that is open and silent for so long was not restarted, as it should have been: /livez fails."""
BRIEF_SECONDS: Final = 1.0
"""A watch that ends within this time, without an event, counts as failed: it is not restarted at once."""
TRANSIENT: Final = frozenset({0, 429, 502, 503, 504})
"""HTTP statuses after which a watch goes on from its last version, and after others not; 0: no response."""
NO_NAMESPACE: Final = frozenset({403, 404})
"""HTTP statuses of the LIST of a namespace that is gone, or that the operator may not read (any more)."""
QUIET_SECONDS: Final = 60.0
"""Seconds before another failure of the same informer is logged."""
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
class Kind(Generic[V]):
    """How the objects of one kind become views."""

    name: str
    """In metrics and log lines."""
    plural: str
    key: Callable[[Json], str]
    """The cache's key, from the metadata."""
    view: Callable[[Json], V | None]
    """None: the object is not ours."""
    facts: Callable[[Json], Json] | None = None
    """Everything that `view` reads but the resourceVersion. For objects that are often written without a
    change of it; None: each new version is parsed."""


PODS: Final[Kind[PodView]] = Kind(name="Pod", plural="pods", key=lambda meta: str(meta["uid"]), view=pod_view)
NODES: Final[Kind[NodeView]] = Kind(
    name="Node", plural="nodes", key=lambda meta: str(meta["name"]), view=node_view, facts=node_facts
)


def _fail(why: str) -> None:
    raise RuntimeError(why)


class Informer(Generic[V]):
    """One kind in one namespace ("": everywhere)."""

    def __init__(
        self,
        kind: Kind[V],
        *,
        cluster: Cluster,
        cache: Newest[str, V],
        changed: Callable[[V], None],
        namespace: str = "",
        went_back: Callable[[str], None] = _fail,
    ) -> None:
        """`changed` gets each view that is new or changed, and the last one of what is gone.

        `went_back` is told where the versions of the API server go back (etcd was restored from a backup):
        what the caches hold may then never be replaced, so the process must end.
        """
        self.kind: Kind[V] = kind
        self.namespace = namespace
        self.synced = asyncio.Event()
        """Set once the first LIST is in the cache, or the one namespace cannot be read."""
        self._cluster = cluster
        self._cache: Newest[str, V] = cache
        self._changed: Callable[[V], None] = changed
        self._version = ""
        """Where the watch goes on; "": the objects must be listed."""
        self._newest = 0
        """The highest version of a LIST, an event or a bookmark."""
        self._went_back = went_back
        self._why = Why.START
        self._heard = _now()
        """Time of the last event, bookmark, or LIST before a watch."""
        self._events = 0
        """Number of events and bookmarks."""
        self._silent_since: float | None = None
        """Since when a watch says nothing; None: none is open at the moment."""
        self._parsed: dict[str, tuple[int, V]] = {}
        """Of kinds with facts: the hash of the facts, and the view."""
        self._unreadable: dict[str, str] = {}
        """The error of each object that cannot be parsed, so that it is logged once."""
        self._logged = -QUIET_SECONDS
        self._warned = False
        """Whether it was logged that the namespace cannot be read, since it last could."""

    def __str__(self) -> str:
        return f"{self.kind.plural} of {self.namespace or 'all namespaces'}"

    # --- state ---
    @property
    def age(self) -> float:
        """Seconds since the API server last told anything."""
        return _now() - self._heard

    @property
    def live(self) -> bool:
        """Whether the cache was filled, and a watch that is not dead has kept it up to date since."""
        return self.synced.is_set() and self._silent_since is not None and self.age < SILENCE_SECONDS

    @property
    def frozen(self) -> bool:
        """Whether a dead watch was not restarted. It is not frozen while the API server cannot be reached."""
        return self._silent_since is not None and _now() - self._silent_since > FROZEN_SECONDS

    # --- life ---
    async def run(self) -> None:
        """Runs until cancelled."""
        failures = 0
        while True:
            began, events = _now(), self._events
            error = await self._turn()
            if self._events > events or (error is None and _now() - began > BRIEF_SECONDS):
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
                self._heard = _now()
            await self._watch()
        except ApiError as error:
            if not self._version and self.without(error):
                self._go_on_without(error)
            else:
                self._log(error)
            if error.status not in TRANSIENT:
                self._version = ""
                self._why = Why.EXPIRED if error.kind is ApiFailure.EXPIRED else Why.ERROR
            return error
        return None

    async def relist(self, why: Why = Why.RESYNC) -> None:
        """Replaces what the cache has of these objects by a fresh LIST. Raises ApiError.

        A watch may run meanwhile: what it reports after the LIST's snapshot has a higher version.
        """
        RELISTS.labels(self.kind.plural, why).inc()
        version, live, seen = "", set[str](), self._newest
        with self._cache.listing():
            before = [v for v in self._cache if not self.namespace or _namespace(v) == self.namespace]
            async for page in self._cluster.pages(self.kind.plural, self.namespace):
                if not version:
                    version = page.version
                    self._compare(version, seen)
                for number, raw in enumerate(page.items):
                    live.add(self._store(raw))
                    if number % AT_A_TIME == 0:
                        await asyncio.sleep(0)
            if not version.isdecimal():
                raise ApiError(0, f"the LIST of {self} has no resourceVersion")
            for old in before:
                key = self._cache.key(old)
                # Where it is another view by now, the watch is ahead of this LIST.
                if key not in live and self._cache.get(key) is old and self._remove(key, int(version)):
                    GHOSTS.labels(self.kind.name).inc()
        self._version = self._version or version
        self._newest = max(self._newest, int(version))
        self._warned = False
        self.synced.set()

    def _compare(self, version: str, seen: int) -> None:
        """Compares a LIST's version with the newest from before it began: a LIST is never older."""
        if version.isdecimal() and int(version) < seen:
            self._went_back(
                f"the LIST of {self} has version {version}, after {seen}: etcd was restored from a backup"
            )

    def without(self, error: ApiError) -> bool:
        """Returns whether this LIST's error concerns a watched namespace alone: the others go on."""
        return bool(self.namespace) and error.status in NO_NAMESPACE

    def _go_on_without(self, error: ApiError) -> None:
        """What the cache has stays: the refusal may pass."""
        if not self._warned:
            self._warned = True
            logger.warning("the %s cannot be listed; all others go on, and it is retried: %s", self, error)
        self.synced.set()

    async def _watch(self) -> None:
        def opened() -> None:
            self._silent_since = _now()

        events = self._cluster.watch(self.kind.plural, self.namespace, self._version, opened)
        try:
            async with aclosing(events):
                async for event in events:
                    self._events += 1
                    self._heard = self._silent_since = _now()
                    self._apply(event["type"], event["object"])
        finally:
            self._silent_since = None

    def _log(self, error: ApiError) -> None:
        if _now() - self._logged > QUIET_SECONDS:
            self._logged = _now()
            logger.warning("watching the %s is interrupted, and goes on soon: %s", self, error)

    # --- objects ---
    def _apply(self, event: str, raw: Json) -> None:
        if event in ("ADDED", "MODIFIED"):
            self._store(raw)
        elif event == "DELETED":
            self._remove(*self._identity(raw))
        self._version = str((raw.get("metadata") or {}).get("resourceVersion") or self._version)
        if self._version.isdecimal():
            self._newest = max(self._newest, int(self._version))

    def _identity(self, raw: Json) -> tuple[str, int]:
        """Returns an object's key and version. Raises ApiError where it is not the API server's."""
        try:
            return self.kind.key(raw["metadata"]), int(raw["metadata"]["resourceVersion"])
        except (KeyError, TypeError, ValueError) as error:
            words = f"one of the {self} has no usable metadata ({type(error).__name__} {error})"
            raise ApiError(0, words) from error

    def _store(self, raw: Json) -> str:
        """Stores an object if it is newer than the cached one; returns its key, "" where it is not ours.

        One that cannot be parsed is logged, and counts as unchanged.
        """
        key, version = self._identity(raw)
        if not self._cache.is_news(key, version):
            return key
        try:
            view = self._view(key, version, raw)
        except Exception as error:  # whatever it is, it must not stop the others
            words = f"{type(error).__name__} {error}"
            if self._unreadable.get(key) != words:
                self._unreadable[key] = words
                logger.error("%s %s cannot be read: %s", self.kind.name, raw["metadata"].get("name"), words)
            return key
        self._unreadable.pop(key, None)
        if view is None:
            return ""
        if self._cache.put(view):
            self._changed(view)
        return key

    def _view(self, key: str, version: int, raw: Json) -> V | None:
        """Parses an object; not anew where nothing that the view reads has changed."""
        if self.kind.facts is None:
            return self.kind.view(raw)
        facts = self.kind.facts(raw)
        digest = hash(pickle.dumps(facts))
        known, view = self._parsed.get(key, (None, None))
        if view is None or digest != known or self._cache.get(key) is not view:
            view = self.kind.view(raw)
        else:
            view = replace(view, resource_version=version)
        if view is not None:
            self._parsed[key] = digest, view
        return view

    def _remove(self, key: str, version: int) -> bool:
        """Removes what was deleted by this version; a newer object of the same key stays.

        Returns whether the cache had it.
        """
        old = self._cache.get(key)
        if old is not None and old.resource_version > version:
            return False
        self._parsed.pop(key, None)
        self._unreadable.pop(key, None)
        self._cache.remove(key, version)
        if old is not None:
            self._changed(old)
        return old is not None


class Informers:
    """Those of nodes, and of our pods in each watched namespace; a changed object enqueues its jobs."""

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        queue: WorkQueue,
        namespaces: tuple[str, ...] = (),
        went_back: Callable[[str], None] = _fail,
    ) -> None:
        def pod_changed(pod: PodView) -> None:
            queue.add(pod.job)

        def node_changed(node: NodeView) -> None:
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
        """Repairs what the watches have missed. Raises ApiError, after the LISTs that succeed.

        A namespace that cannot be read is left out: its informer has told so, and tries again.
        """
        failed: ApiError | None = None
        for informer in self.all:
            try:
                await informer.relist()
            except ApiError as error:
                if failed is None and not informer.without(error):
                    failed = error
        if failed is not None:
            raise failed

    def frozen(self) -> list[str]:
        """Returns which watches are frozen."""
        return [str(informer) for informer in self.all if informer.frozen]

    def knows_pods(self, namespace: str) -> bool:
        """Returns whether the cache has every pod of ours in this namespace, but for the last moments."""
        return any(i.live for i in self.pods if i.namespace in ("", namespace))


def delay(failures: int) -> float:
    """Returns the seconds before the next try, spread so that not all clients come back at once."""
    longest = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(failures - 1, 10))
    return random.uniform(longest / 2, longest)


def _namespace(view: PodView | NodeView) -> str:
    return view.namespace if isinstance(view, PodView) else ""


def _now() -> float:
    return asyncio.get_running_loop().time()
