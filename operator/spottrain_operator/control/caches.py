"""Caches of jobs, pods and nodes, as small views.

An older resourceVersion never replaces a newer one, so replies to our own writes can be stored at once. The
versions of removed objects are kept for a while, and all of them during a LIST, so that a response from
before the deletion does not bring them back.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from spottrain_operator.api.kueue import WorkloadView
from spottrain_operator.api.node_pools import NOTHING
from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.training_job import Job, JobKey
from spottrain_operator.policies.placement import MOST_AVOIDED, avoid_order
from spottrain_operator.policies.pod_end import trainer_ended

K = TypeVar("K")
V = TypeVar("V", bound=Job | PodView | NodeView | WorkloadView)
REMEMBERED: Final = 16_384
"""Number of removed objects of each kind whose versions are kept while nothing is listed: more than are
removed in the 30 s that a response may take."""


class Newest(Generic[K, V]):
    """Objects of one kind, each in the newest version that was seen."""

    def __init__(self, key: Callable[[V], K]) -> None:
        self.key: Callable[[V], K] = key
        self._live: dict[K, V] = {}
        self._removed: dict[K, int] = {}
        self._lists = 0
        """Number of LISTs under way."""

    def get(self, key: K) -> V | None:
        return self._live.get(key)

    def put(self, value: V) -> bool:
        """Stores an object; returns whether it was newer than the cached or removed one."""
        key = self.key(value)
        if not self.is_news(key, value.resource_version):
            return False
        self._live[key] = value
        return True

    def is_news(self, key: K, version: int) -> bool:
        """Returns whether `put` would store an object of this version."""
        old = self._live.get(key)
        known = old.resource_version if old is not None else -1
        return version > max(known, self._removed.get(key, -1))

    def remove(self, key: K, version: int = 0) -> None:
        """Removes an object. `version` is the deletion's, where it is known."""
        old = self._live.pop(key, None)
        last = old.resource_version if old is not None else 0
        self._removed[key] = max(version, last, self._removed.pop(key, 0))
        self._forget()

    def is_removed(self, key: K) -> bool:
        """Returns whether an object is known not to exist. Where it is only not cached, it may exist."""
        return key in self._removed and key not in self._live

    @contextmanager
    def listing(self) -> Iterator[None]:
        """Within it no removal is forgotten: a LIST of any length may contain what was deleted meanwhile."""
        self._lists += 1
        try:
            yield
        finally:
            self._lists -= 1
            self._forget()

    def _forget(self) -> None:
        while len(self._removed) > REMEMBERED and not self._lists:
            del self._removed[next(iter(self._removed))]

    def keys(self) -> tuple[K, ...]:
        return tuple(self._live)

    def __iter__(self) -> Iterator[V]:
        return iter(tuple(self._live.values()))


class JobCache(Newest[JobKey, Job]):
    def __init__(self) -> None:
        super().__init__(lambda job: job.key)
        self._deleted: dict[JobKey, None] = {}

    def delete(self, key: JobKey, version: int = 0) -> None:
        """Removes a job that does not exist any more: no job ever has its UID again."""
        self.remove(key, version)
        self._deleted[key] = None
        if len(self._deleted) > REMEMBERED:
            del self._deleted[next(iter(self._deleted))]

    def is_deleted(self, key: JobKey) -> bool:
        """Returns whether the job is known not to exist. Where it is only not cached, it may exist."""
        return key in self._deleted


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
        self._by_node: dict[str, dict[str, PodView]] = defaultdict(dict)
        self._lives: dict[tuple[str, str], dict[JobKey, None]] = defaultdict(dict)
        """Jobs with pods, by namespace and name: more than one where a job was created again."""
        self._trainers: dict[str, PodView] = {}
        """Running pods of rank 0, by UID: those that can be asked for their progress. With checkpoint.mode
        Sync the sidecar answers, before the trainer starts and after it has ended."""

    def of(self, key: JobKey) -> tuple[PodView, ...]:
        return tuple(sorted(self._by_job.get(key, {}).values(), key=lambda p: p.attempt))

    def put(self, pod: PodView) -> bool:
        old = self.get(pod.uid)
        if not super().put(pod):
            return False
        if old is not None and (old.job, old.node) != (pod.job, pod.node):
            self._unlist(old)
        self._by_job[pod.job][pod.uid] = pod
        self._lives[_name(pod.job)][pod.job] = None
        if pod.node:
            self._by_node[pod.node][pod.uid] = pod
        runs = pod.running_since is not None or (pod.sync is not None and pod.sync.running)
        if pod.rank == 0 and runs and pod.ip and not trainer_ended(pod):
            self._trainers[pod.uid] = pod
        else:
            self._trainers.pop(pod.uid, None)
        return True

    def remove(self, uid: str, version: int = 0) -> None:
        if (old := self.get(uid)) is not None:
            self._unlist(old)
        super().remove(uid, version)

    def drop(self, pod: PodView) -> None:
        self.remove(pod.uid, pod.resource_version)

    def _unlist(self, pod: PodView) -> None:
        if not _without(self._by_job, pod.job, pod.uid):
            _without(self._lives, _name(pod.job), pod.job)
        if pod.node:
            _without(self._by_node, pod.node, pod.uid)
        self._trainers.pop(pod.uid, None)

    def update(self, listed: Listed) -> None:
        for pod in listed.gone:
            self.drop(pod)
        for pod in listed.pods:
            self.put(pod)

    def jobs(self) -> tuple[JobKey, ...]:
        return tuple(self._by_job)

    def trainers(self) -> tuple[PodView, ...]:
        """Returns the running pods of rank 0."""
        return tuple(self._trainers.values())

    def has(self, key: JobKey) -> bool:
        """Returns whether a job has pods."""
        return key in self._by_job

    def other_lives(self, key: JobKey) -> tuple[JobKey, ...]:
        """Returns deleted jobs of the same name that still have pods in the cache."""
        return tuple(k for k in self._lives.get(_name(key), ()) if k != key)

    def others_on(self, nodes: Collection[str], key: JobKey) -> tuple[PodView, ...]:
        """Returns the pods of other jobs on these nodes."""
        there = (pod for node in nodes for pod in self._by_node.get(node, {}).values())
        return tuple(pod for pod in there if pod.job != key)

    def jobs_on(self, node: str) -> set[JobKey]:
        return {pod.job for pod in self._by_node.get(node, {}).values()}


def _name(key: JobKey) -> tuple[str, str]:
    return key.namespace, key.name


def _without(index: dict[Any, dict[K, Any]], of: object, member: K) -> bool:
    """Removes a member from an entry of an index; returns whether others are left there."""
    members = index[of]
    members.pop(member, None)
    if not members:
        del index[of]
    return bool(members)


class NodeCache(Newest[str, NodeView]):
    """By name."""

    def __init__(self) -> None:
        super().__init__(lambda node: node.name)
        self.found = NOTHING
        """Detected from all nodes, including removed ones: a node group may be scaled to zero."""
        self._by_hostname: dict[str, dict[str, NodeView]] = defaultdict(dict)
        self._marked: dict[str, NodeView] = {}
        """Nodes that are faulty, have a notice, or are taken out of service."""
        self._to_avoid: Mapping[str, NodeView] = {}
        """The result of `noticed`."""
        self._with_zone = self._by_karpenter = 0
        """Numbers of nodes."""

    def put(self, node: NodeView) -> bool:
        """Stores a node; returns whether a field that decisions need has changed, which heartbeats do not."""
        old = self.get(node.name)
        if not super().put(node):
            return False
        if old is not None:
            self._unlist(old)
        self._by_hostname[node.hostname][node.name] = node
        self._count(node, 1)
        if node.notice is not None or node.leaving or node.fault:
            self._marked[node.name] = node
            self._choose()
        self.found |= node.found
        return old is None or replace(node, resource_version=old.resource_version) != old

    def remove(self, key: str, version: int = 0) -> None:
        if (old := self.get(key)) is not None:
            self._unlist(old)
        super().remove(key, version)

    def update(self, found: Collection[NodeView], absent: Collection[str]) -> None:
        """Stores what the API server has said of nodes that were not cached."""
        for node in found:
            self.put(node)
        for name in absent:
            if name not in self._live:  # else it has come meanwhile
                self.remove(name)

    def drop(self, node: NodeView) -> None:
        """Removes a node; a newer one of its name stays."""
        old = self.get(node.name)
        if old is None or old.resource_version <= node.resource_version:
            self.remove(node.name, node.resource_version)

    def _unlist(self, node: NodeView) -> None:
        _without(self._by_hostname, node.hostname, node.name)
        self._count(node, -1)
        if self._marked.pop(node.name, None) is not None:
            self._choose()

    def _choose(self) -> None:
        first = heapq.nsmallest(MOST_AVOIDED, self._marked.values(), key=avoid_order)
        self._to_avoid = {node.name: node for node in first}

    def _count(self, node: NodeView, change: int) -> None:
        self._with_zone += change * bool(node.zone)
        self._by_karpenter += change * node.karpenter

    def with_hostnames(self, names: Collection[str]) -> dict[str, NodeView]:
        found = (self._by_hostname.get(name, {}) for name in names)
        return {name: node for nodes in found for name, node in nodes.items()}

    def zoned(self, fetched: Collection[NodeView] = ()) -> bool:
        """Returns whether nodes have zone labels; True where there are no nodes yet."""
        return bool(self._with_zone) or any(n.zone for n in fetched) or not (self._live or fetched)

    def karpenter(self, fetched: Collection[NodeView] = ()) -> bool:
        return bool(self._by_karpenter) or any(node.karpenter for node in fetched)

    def marked(self) -> tuple[str, ...]:
        """Returns the names of all nodes that are faulty, have a notice, or are taken out of service."""
        return tuple(self._marked)

    def noticed(self) -> Mapping[str, NodeView]:
        """Returns by name the nodes that are faulty, have a notice, or are taken out of service.

        Of more than MOST_AVOIDED only those that it matters most to avoid.
        """
        return self._to_avoid


class WorkloadCache(Newest[str, WorkloadView]):
    """By UID."""

    def __init__(self) -> None:
        super().__init__(lambda workload: workload.uid)
        self._by_job: dict[JobKey, dict[str, WorkloadView]] = defaultdict(dict)

    def of(self, key: JobKey) -> WorkloadView | None:
        """Returns the job's Workload; while one is replaced the newer one."""
        found = self._by_job.get(key, {}).values()
        return max(found, key=lambda w: (not w.going, w.resource_version), default=None)

    def put(self, workload: WorkloadView) -> bool:
        if not super().put(workload):
            return False
        self._by_job[workload.job][workload.uid] = workload
        return True

    def remove(self, uid: str, version: int = 0) -> None:
        if (old := self.get(uid)) is not None:
            _without(self._by_job, old.job, uid)
        super().remove(uid, version)


class Caches:
    def __init__(self) -> None:
        self.jobs = JobCache()
        self.workloads = WorkloadCache()
        self.pods = PodCache()
        self.nodes = NodeCache()

    def urgent(self) -> set[JobKey]:
        """Returns the jobs to which something has happened that may not have been reacted to yet.

        These are new, changed and deleted jobs, and jobs with pods that end or whose nodes are marked.
        """
        changed = {j.key for j in self.jobs if j.deleting or j.generation != j.status.observed_generation}
        ends = (p for p in self.pods if p.holds_outcome and (p.deleted is not None or trainer_ended(p)))
        ending = {pod.job for pod in ends}
        return changed.union(ending, *map(self.pods.jobs_on, self.nodes.marked()))
