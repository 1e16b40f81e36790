"""Caches of jobs, pods and nodes, as small views.

An older resourceVersion never replaces a newer one, so replies to our own writes can be stored at once.
kopf sends no DELETED event for objects that vanished during a relist. resync.py therefore removes what a
fresh LIST does not contain. The versions of removed objects are kept for a while, so that a response from
before the deletion does not bring them back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from spottrain_operator.api.node_pools import NOTHING
from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.training_job import Job, JobKey

K = TypeVar("K")
V = TypeVar("V", Job, PodView, NodeView)
REMEMBERED: Final = 4096
"""Number of removed objects of each kind whose versions are kept; responses under way are far fewer."""


class Newest(Generic[K, V]):
    """Objects of one kind, each in the newest version that was seen."""

    def __init__(self, key: Callable[[V], K]) -> None:
        self.key: Callable[[V], K] = key
        self._live: dict[K, V] = {}
        self._removed: dict[K, int] = {}

    def get(self, key: K) -> V | None:
        return self._live.get(key)

    def put(self, value: V) -> bool:
        """Stores an object; returns whether it was newer than the cached or removed one."""
        key = self.key(value)
        old = self._live.get(key)
        known = old.resource_version if old is not None else -1
        if value.resource_version <= max(known, self._removed.get(key, -1)):
            return False
        self._live[key] = value
        return True

    def remove(self, key: K, version: int = 0) -> None:
        """Removes an object. `version` is the deletion's, where it is known."""
        old = self._live.pop(key, None)
        last = old.resource_version if old is not None else 0
        self._removed[key] = max(version, last, self._removed.pop(key, 0))
        if len(self._removed) > REMEMBERED:
            del self._removed[next(iter(self._removed))]

    def keys(self) -> tuple[K, ...]:
        return tuple(self._live)

    def __iter__(self) -> Iterator[V]:
        return iter(tuple(self._live.values()))


class JobCache(Newest[JobKey, Job]):
    def __init__(self) -> None:
        super().__init__(lambda job: job.key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """The result of a LIST of one job's pods."""

    pods: tuple[PodView, ...]
    """The newest known state of each pod, sorted by attempt."""
    gone: tuple[PodView, ...]
    """Pods that the cache held before the LIST, and that do not exist any more."""


class PodCache(Newest[str, PodView]):
    """By UID."""

    def __init__(self) -> None:
        super().__init__(lambda pod: pod.uid)
        self._by_job: dict[JobKey, dict[str, PodView]] = defaultdict(dict)

    def of(self, key: JobKey) -> tuple[PodView, ...]:
        return tuple(sorted(self._by_job.get(key, {}).values(), key=lambda p: p.attempt))

    def put(self, pod: PodView) -> bool:
        old = self.get(pod.uid)
        if not super().put(pod):
            return False
        if old is not None and old.job != pod.job:
            self._unlist(old)
        self._by_job[pod.job][pod.uid] = pod
        return True

    def remove(self, uid: str, version: int = 0) -> None:
        if (old := self.get(uid)) is not None:
            self._unlist(old)
        super().remove(uid, version)

    def drop(self, pod: PodView) -> None:
        self.remove(pod.uid, pod.resource_version)

    def _unlist(self, pod: PodView) -> None:
        pods = self._by_job[pod.job]
        pods.pop(pod.uid, None)
        if not pods:
            del self._by_job[pod.job]

    def update(self, listed: Listed) -> None:
        for pod in listed.gone:
            self.drop(pod)
        for pod in listed.pods:
            self.put(pod)

    def jobs(self) -> tuple[JobKey, ...]:
        return tuple(self._by_job)

    def other_lives(self, key: JobKey) -> tuple[JobKey, ...]:
        """Returns deleted jobs of the same name that still have pods in the cache."""
        return tuple(
            k
            for k in self._by_job
            if k.name == key.name and k.namespace == key.namespace and k.uid != key.uid
        )

    def jobs_on(self, node: str) -> set[JobKey]:
        return {pod.job for pod in self._live.values() if pod.node == node}


class NodeCache(Newest[str, NodeView]):
    """By name."""

    def __init__(self) -> None:
        super().__init__(lambda node: node.name)
        self.found = NOTHING
        """Detected from all nodes, including removed ones: a node group may be scaled to zero."""

    def put(self, node: NodeView) -> bool:
        """Stores a node; returns whether a field that decisions need has changed, which heartbeats do not."""
        old = self.get(node.name)
        if not super().put(node):
            return False
        self.found |= node.found
        return old is None or replace(node, resource_version=old.resource_version) != old

    def drop(self, node: NodeView) -> None:
        """Removes a node; a newer one of its name stays."""
        old = self.get(node.name)
        if old is None or old.resource_version <= node.resource_version:
            self.remove(node.name, node.resource_version)

    def with_hostnames(self, names: Collection[str]) -> dict[str, NodeView]:
        return {n.name: n for n in self._live.values() if n.hostname in names} if names else {}

    def zoned(self, fetched: Collection[NodeView] = ()) -> bool:
        """Returns whether nodes have zone labels; True where there are no nodes yet."""
        every = (*self._live.values(), *fetched)
        return not every or any(node.zone for node in every)

    def karpenter(self, fetched: Collection[NodeView] = ()) -> bool:
        return any(node.karpenter for node in (*self._live.values(), *fetched))

    def noticed(self) -> dict[str, NodeView]:
        """Returns by name the nodes that are faulty, have a notice, or are taken out of service."""
        return {n.name: n for n in self._live.values() if n.notice is not None or n.leaving or n.fault}


class Caches:
    def __init__(self) -> None:
        self.jobs = JobCache()
        self.pods = PodCache()
        self.nodes = NodeCache()
