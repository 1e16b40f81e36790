"""Caches of jobs, pods and nodes, as small views.

An older resourceVersion never replaces a newer one, so replies to our own writes can be stored at once.
kopf sends no DELETED event for objects that vanished during a relist. resync.py therefore removes what a
fresh LIST does not contain. The versions of removed objects are kept for a while, so that a response from
before the deletion does not bring them back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from spottrain_operator.api.node_pools import NOTHING
from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.training_job import Job, JobKey

K = TypeVar("K")
REMEMBERED: Final = 4096
"""Number of removed objects of each kind whose versions are kept; responses under way are far fewer."""


class JobCache:
    def __init__(self) -> None:
        self._jobs: dict[JobKey, Job] = {}
        self._removed: dict[JobKey, int] = {}

    def get(self, key: JobKey) -> Job | None:
        return self._jobs.get(key)

    def put(self, job: Job) -> bool:
        """Stores a job; returns whether it was newer than the cached or removed one."""
        old = self._jobs.get(job.key)
        if job.resource_version <= _newest_known(old, self._removed, job.key):
            return False
        self._jobs[job.key] = job
        return True

    def drop(self, key: JobKey, version: int = 0) -> None:
        """Removes a job. `version` is the deletion's, where it is known."""
        old = self._jobs.pop(key, None)
        _note_removal(self._removed, key, max(version, old.resource_version if old is not None else 0))

    def keys(self) -> tuple[JobKey, ...]:
        return tuple(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(tuple(self._jobs.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """The result of a LIST of one job's pods."""

    pods: tuple[PodView, ...]
    """The newest known state of each pod, sorted by attempt."""
    gone: tuple[PodView, ...]
    """Pods that the cache held before the LIST, and that do not exist any more."""


class PodCache:
    def __init__(self) -> None:
        self._pods: dict[JobKey, dict[str, PodView]] = defaultdict(dict)
        self._on_node: dict[str, dict[str, JobKey]] = defaultdict(dict)
        self._lives: dict[tuple[str, str], set[JobKey]] = defaultdict(set)
        self._removed: dict[str, int] = {}
        """By UID."""

    def of(self, key: JobKey) -> tuple[PodView, ...]:
        return tuple(sorted(self._pods.get(key, {}).values(), key=lambda p: p.attempt))

    def put(self, pod: PodView) -> bool:
        pods = self._pods.get(pod.job, {})
        if pod.resource_version <= _newest_known(pods.get(pod.uid), self._removed, pod.uid):
            return False
        pods = self._pods[pod.job]
        pods[pod.uid] = pod
        self._lives[pod.job.namespace, pod.job.name].add(pod.job)
        if pod.node:
            self._on_node[pod.node][pod.uid] = pod.job
        return True

    def drop(self, pod: PodView) -> None:
        pods = self._pods.get(pod.job, {})
        old = pods.pop(pod.uid, pod)
        _note_removal(self._removed, pod.uid, max(old.resource_version, pod.resource_version))
        if not pods:
            self._pods.pop(pod.job, None)
            self._forget_life(pod.job)
        on_node = self._on_node.get(pod.node, {})
        on_node.pop(pod.uid, None)
        if not on_node:
            self._on_node.pop(pod.node, None)

    def _forget_life(self, key: JobKey) -> None:
        lives = self._lives.get((key.namespace, key.name), set())
        lives.discard(key)
        if not lives:
            self._lives.pop((key.namespace, key.name), None)

    def other_lives(self, key: JobKey) -> tuple[JobKey, ...]:
        """Returns deleted jobs of the same name that still have pods in the cache."""
        return tuple(life for life in self._lives.get((key.namespace, key.name), ()) if life != key)

    def update(self, listed: Listed) -> None:
        for pod in listed.gone:
            self.drop(pod)
        for pod in listed.pods:
            self.put(pod)

    def jobs_on(self, node: str) -> set[JobKey]:
        return set(self._on_node.get(node, {}).values())

    def keys(self) -> tuple[JobKey, ...]:
        return tuple(self._pods)

    def __iter__(self) -> Iterator[PodView]:
        return (pod for pods in tuple(self._pods.values()) for pod in tuple(pods.values()))


class NodeCache:
    def __init__(self) -> None:
        self._nodes: dict[str, NodeView] = {}
        self._noticed: set[str] = set()
        self._removed: dict[str, int] = {}
        self.found = NOTHING
        """Detected from all nodes, including removed ones: a node group may be scaled to zero."""

    def get(self, name: str) -> NodeView | None:
        return self._nodes.get(name)

    def put(self, node: NodeView) -> bool:
        """Stores a node; returns whether a field that decisions need has changed, which heartbeats do not."""
        old = self._nodes.get(node.name)
        if node.resource_version <= _newest_known(old, self._removed, node.name):
            return False
        self._nodes[node.name] = node
        self.found |= node.found
        going = node.notice is not None or bool(node.leaving) or bool(node.fault)
        (self._noticed.add if going else self._noticed.discard)(node.name)
        return old is None or _essence(old) != _essence(node)

    def drop(self, node: NodeView) -> None:
        """Removes a node; a newer one of its name stays."""
        _note_removal(self._removed, node.name, node.resource_version)
        old = self._nodes.get(node.name)
        if old is not None and old.resource_version <= node.resource_version:
            del self._nodes[node.name]
            self._noticed.discard(node.name)

    def with_hostnames(self, names: Collection[str]) -> dict[str, NodeView]:
        return {n.name: n for n in self._nodes.values() if n.hostname in names} if names else {}

    def zoned(self, fetched: Collection[NodeView] = ()) -> bool:
        """Returns whether nodes have zone labels; True where there are no nodes yet."""
        every = (*self._nodes.values(), *fetched)
        return not every or any(node.zone for node in every)

    def karpenter(self, fetched: Collection[NodeView] = ()) -> bool:
        return any(node.karpenter for node in (*self._nodes.values(), *fetched))

    def noticed(self) -> dict[str, NodeView]:
        """Returns by name the nodes that are faulty, have a notice, or are taken out of service."""
        return {name: self._nodes[name] for name in self._noticed}

    def __iter__(self) -> Iterator[NodeView]:
        return iter(tuple(self._nodes.values()))


def _essence(node: NodeView) -> NodeView:
    return replace(node, resource_version=0)


def _newest_known(old: Job | PodView | NodeView | None, removed: dict[K, int], key: K) -> int:
    """Returns the newest version of an object that was cached or removed; -1 if there was none."""
    return max(old.resource_version if old is not None else -1, removed.get(key, -1))


def _note_removal(removed: dict[K, int], key: K, version: int) -> None:
    """Stores the version of a removed object; the oldest entry goes where there are too many."""
    removed[key] = max(version, removed.pop(key, 0))
    if len(removed) > REMEMBERED:
        del removed[next(iter(removed))]


class Caches:
    def __init__(self) -> None:
        self.jobs = JobCache()
        self.pods = PodCache()
        self.nodes = NodeCache()
