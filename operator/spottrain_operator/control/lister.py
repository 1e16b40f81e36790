"""LISTs: each makes a cache equal to what the API server has of one kind in one namespace.

Objects that the cache has in that version already are not parsed. What the cache had and the LIST lacks is
removed.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from spottrain_operator.api.kueue import WorkloadView
from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.training_job import Job, JobKey
from spottrain_operator.api.validation import identity, parse_job
from spottrain_operator.api.views import node_facts, node_view, pod_view
from spottrain_operator.control.caches import JobCache, Newest
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Cluster, Json
from spottrain_operator.io.metrics import GHOSTS
from spottrain_operator.names import PLURAL

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Job | PodView | NodeView | WorkloadView)

NO_NAMESPACE: Final = frozenset({403, 404})
"""HTTP statuses of the LIST of a namespace that is gone, or that the operator may not read (any more)."""
AT_A_TIME: Final = 50
"""Listed objects that are stored before other tasks may run."""


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
    facts: Callable[[Json], Json] | None = None
    """Everything that `view` reads but the resourceVersion. For objects that are often written without a
    change of it; None: each new version is parsed."""

    @property
    def collection(self) -> str:
        """Its name in requests of the client."""
        return f"{self.version}/{self.plural}" if self.version else self.plural


JOBS: Final[Kind[JobKey, Job]] = Kind(
    name="TrainingJob", plural=PLURAL, key=lambda raw: identity(raw)[0], view=parse_job
)
PODS: Final[Kind[str, PodView]] = Kind(
    name="Pod", plural="pods", key=lambda raw: str(raw["metadata"]["uid"]), view=pod_view
)
NODES: Final[Kind[str, NodeView]] = Kind(
    name="Node",
    plural="nodes",
    key=lambda raw: str(raw["metadata"]["name"]),
    view=node_view,
    facts=node_facts,
)


def fail(why: str) -> None:
    raise RuntimeError(why)


class Lister(Generic[K, V]):
    """One kind in one namespace ("": everywhere)."""

    def __init__(
        self,
        kind: Kind[K, V],
        *,
        cluster: Cluster,
        cache: Newest[K, V],
        changed: Callable[[V, V | None], None],
        namespace: str = "",
        went_back: Callable[[str], None] = fail,
    ) -> None:
        """`changed` gets each changed view and the one before it, and what is new or gone with None.

        `went_back` is told where the versions of the API server go back (etcd was restored from a backup):
        what the caches hold may then never be replaced, so the process must end.
        """
        self.kind: Kind[K, V] = kind
        self.namespace = namespace
        self._cluster = cluster
        self._cache: Newest[K, V] = cache
        self._changed: Callable[[V, V | None], None] = changed
        self._went_back = went_back
        self._newest = 0
        """The highest version of a LIST, or of what else came from the API server."""
        self._parsed: dict[K, tuple[int, V]] = {}
        """Of kinds with facts: the hash of the facts, and the view."""
        self._unreadable: dict[K, str] = {}
        """The error of each object that cannot be parsed, so that it is logged once."""
        self._warned = False
        """Whether it was logged that the namespace cannot be read, since it last could."""

    def __str__(self) -> str:
        return f"{self.kind.plural} of {self.namespace or 'all namespaces'}"

    async def relist(self) -> str:
        """Replaces what the cache has of these objects by a LIST; returns its version. Raises ApiError.

        A watch may run meanwhile: what it reports after the LIST's snapshot has a higher version.
        """
        version, live, seen = "", set[K | None](), self._newest
        with self._cache.listing():
            before = [v for v in self._cache if self.namespace in ("", _namespace(v))]
            async for page in self._cluster.pages(self.kind.collection, self.namespace):
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
        self._newest = max(self._newest, int(version))
        self._warned = False
        return version

    def _compare(self, version: str, seen: int) -> None:
        """Compares a LIST's version with the newest from before it began: a LIST is never older."""
        if version.isdecimal() and int(version) < seen:
            self._went_back(
                f"the LIST of {self} has version {version}, after {seen}: etcd was restored from a backup"
            )

    def without(self, error: ApiError) -> bool:
        """Returns whether this LIST's error concerns a watched namespace alone: the others go on.

        It is logged once. What the cache has stays: the refusal may pass.
        """
        if not self.namespace or error.status not in NO_NAMESPACE:
            return False
        if not self._warned:
            self._warned = True
            logger.warning("the %s cannot be listed; all others go on, and it is retried: %s", self, error)
        return True

    # --- objects ---
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
            view = self._view(key, version, raw)
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

    def _view(self, key: K, version: int, raw: Json) -> V | None:
        """Parses an object, unless nothing that the view reads has changed."""
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

    def _remove(self, key: K, version: int) -> bool:
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
            self._changed(old, None)
        return old is not None


async def read_job(key: JobKey, jobs: JobCache, cluster: Cluster) -> Job | None:
    """Brings one cached job up to date, and returns it; None where it is gone or another one has its name."""
    raw = await cluster.get(PLURAL, key.name, key.namespace) if key.name else None
    job = parse_job(raw) if raw is not None else None
    if job is not None and job.key == key:
        jobs.put(job)  # which refuses it where it was deleted meanwhile
    else:
        jobs.delete(key)
    return jobs.get(key)


async def relist(listers: Iterable[Lister[Any, Any]]) -> None:
    """Repairs what the watches have missed. Raises ApiError, after the LISTs that succeed.

    A namespace that cannot be read is left out, and logged.
    """
    failed: ApiError | None = None
    for lister in listers:
        try:
            await lister.relist()
        except ApiError as error:
            if not lister.without(error):
                failed = failed or error
    if failed is not None:
        raise failed


def _namespace(view: Job | PodView | NodeView | WorkloadView) -> str:
    if isinstance(view, Job):
        return view.key.namespace
    return "" if isinstance(view, NodeView) else view.namespace
