"""Caches of jobs, pods, nodes and Kueue's Workloads, as small views.

An older resourceVersion never replaces a newer one, so replies to our own writes can be stored at once. The
versions of the last removed objects are kept, so that a response from before the deletion does not bring them
back.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from spottrain_operator.api.kueue import WorkloadView
from spottrain_operator.api.node_pools import NOTHING
from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.training_job import Job, JobKey
from spottrain_operator.api.validation import parse_job
from spottrain_operator.api.views import pod_view
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.names import PLURAL
from spottrain_operator.policies.placement import MOST_AVOIDED, avoid_order
from spottrain_operator.policies.pod_end import trainer_ended

K = TypeVar("K")
V = TypeVar("V", bound=Job | PodView | NodeView | WorkloadView)
REMEMBERED: Final = 65_536
"""Number of removed objects of each kind whose versions are kept: more than are removed while a response is
on its way, or the pages of a LIST are read."""


class Newest(Generic[K, V]):
    """Objects of one kind, each in the newest version that was seen.

    Args:
        key: Returns what identifies an object.
        indexes: By name: what objects are looked up by.
    """

    def __init__(self, key: Callable[[V], K], **indexes: Callable[[V], Hashable]) -> None:
        self.key: Callable[[V], K] = key
        self._live: dict[K, V] = {}
        self._removed: dict[K, int] = {}
        self._indexes = indexes
        self._by: defaultdict[tuple[str, Hashable], dict[K, V]] = defaultdict(dict)

    def get(self, key: K) -> V | None:
        return self._live.get(key)

    def by(self, index: str, value: Hashable) -> Collection[V]:
        """Returns the objects with this value."""
        return self._by[index, value].values() if (index, value) in self._by else ()

    def put(self, value: V) -> bool:
        """Stores an object; returns whether it was newer than the cached or removed one."""
        key = self.key(value)
        if not self.is_news(key, value.resource_version):
            return False
        if (old := self._live.get(key)) is not None:
            self._unlist(key, old)
        self._live[key] = value
        for name, of in self._indexes.items():
            self._by[name, of(value)][key] = value
        return True

    def is_news(self, key: K, version: int) -> bool:
        """Returns whether `put` would store an object of this version."""
        old = self._live.get(key)
        known = old.resource_version if old is not None else -1
        return version > max(known, self._removed.get(key, -1))

    def remove(self, key: K, version: int = 0) -> None:
        """Removes an object. `version` is the deletion's, where it is known."""
        last = 0
        if (old := self._live.pop(key, None)) is not None:
            last = old.resource_version
            self._unlist(key, old)
        self._removed[key] = max(version, last, self._removed.pop(key, 0))
        if len(self._removed) > REMEMBERED:
            del self._removed[next(iter(self._removed))]

    def drop(self, value: V) -> None:
        """Removes an object that is known in this version; a newer one of its key stays."""
        old = self.get(self.key(value))
        if old is None or old.resource_version <= value.resource_version:
            self.remove(self.key(value), value.resource_version)

    def is_removed(self, key: K) -> bool:
        """Returns whether an object is known not to exist. Where it is only not cached, it may exist."""
        return key in self._removed and key not in self._live

    def _unlist(self, key: K, value: V) -> None:
        for name, of in self._indexes.items():
            members = self._by[name, of(value)]
            del members[key]
            if not members:
                del self._by[name, of(value)]

    def keys(self) -> tuple[K, ...]:
        return tuple(self._live)

    def __iter__(self) -> Iterator[V]:
        return iter(tuple(self._live.values()))


class PodCache(Newest[str, PodView]):
    """By UID."""

    def __init__(self) -> None:
        super().__init__(lambda pod: pod.uid, job=lambda pod: _name(pod.job), node=lambda pod: pod.node)

    def remember(self, raw: dict[str, Any]) -> PodView | None:
        """Stores a pod as the API server has returned it. None: it is not ours."""
        pod = pod_view(raw)
        if pod is not None:
            self.put(pod)
        return pod

    def of(self, key: JobKey) -> tuple[PodView, ...]:
        """Returns a job's pods, sorted by attempt."""
        found = (pod for pod in self.by("job", _name(key)) if pod.job == key)
        return tuple(sorted(found, key=lambda p: p.attempt))

    def jobs(self) -> set[JobKey]:
        return {pod.job for pod in self._live.values()}

    def trainers(self, *, ending: bool = False) -> list[PodView]:
        """Returns the pods that can be asked for their progress; `ending`: only those that are to end."""
        pods = self._live.values()
        return [pod for pod in pods if (not ending or is_ending(pod)) and _answers(pod)]

    def other_lives(self, key: JobKey) -> set[JobKey]:
        """Returns deleted jobs of the same name that still have pods in the cache."""
        return {pod.job for pod in self.by("job", _name(key))} - {key}

    def others_on(self, nodes: Collection[str], key: JobKey) -> tuple[PodView, ...]:
        """Returns the pods of other jobs on these nodes."""
        return tuple(pod for node in nodes for pod in self.by("node", node) if pod.job != key)

    def jobs_on(self, node: str) -> set[JobKey]:
        return {pod.job for pod in self.by("node", node)}


def is_ending(pod: PodView) -> bool:
    return pod.deleted is not None or pod.notice is not None


def _name(key: JobKey) -> tuple[str, str]:
    return key.namespace, key.name


def _answers(pod: PodView) -> bool:
    """Returns whether this is a running rank 0. With checkpoint.mode Sync the sidecar answers, before the
    trainer starts and after it has ended."""
    runs = pod.running_since is not None or (pod.sync is not None and pod.sync.running)
    return pod.rank == 0 and runs and bool(pod.ip) and not trainer_ended(pod)


class NodeCache(Newest[str, NodeView]):
    """By name."""

    def __init__(self) -> None:
        super().__init__(
            lambda node: node.name,
            hostname=lambda node: node.hostname,
            marked=lambda node: node.notice is not None or bool(node.leaving or node.fault),
            zoned=lambda node: bool(node.zone),
            karpenter=lambda node: node.karpenter,
        )
        self.found = NOTHING
        """Detected from all nodes, including removed ones: a node group may be scaled to zero."""

    def put(self, node: NodeView) -> bool:
        """Stores a node; returns whether a field that decisions need has changed, which heartbeats do not."""
        old = self.get(node.name)
        if not super().put(node):
            return False
        self.found |= node.found
        return old is None or replace(node, resource_version=old.resource_version) != old

    def with_hostnames(self, names: Collection[str]) -> dict[str, NodeView]:
        return {node.name: node for name in names for node in self.by("hostname", name)}

    @property
    def zoned(self) -> bool:
        """Whether nodes have zone labels; True where there are no nodes yet."""
        return bool(self.by("zoned", True)) or not self._live

    @property
    def karpenter(self) -> bool:
        return bool(self.by("karpenter", True))

    def marked(self) -> Collection[NodeView]:
        """Returns all nodes that are faulty, have a notice, or are taken out of service."""
        return self.by("marked", True)

    def noticed(self) -> Mapping[str, NodeView]:
        """Returns these nodes by name; of more than MOST_AVOIDED those that it matters most to avoid."""
        first = self.marked()
        if len(first) > MOST_AVOIDED:
            first = heapq.nsmallest(MOST_AVOIDED, first, key=avoid_order)
        return {node.name: node for node in first}


class WorkloadCache(Newest[str, WorkloadView]):
    """By UID."""

    def __init__(self) -> None:
        super().__init__(lambda workload: workload.uid, job=lambda workload: workload.job)

    def of(self, key: JobKey) -> WorkloadView | None:
        """Returns the job's Workload; while one is replaced the newer one."""
        return max(self.by("job", key), key=lambda w: (not w.going, w.resource_version), default=None)


class Caches:
    def __init__(self) -> None:
        self.jobs: Newest[JobKey, Job] = Newest(lambda job: job.key)
        self.workloads = WorkloadCache()
        self.pods = PodCache()
        self.nodes = NodeCache()

    async def read_job(self, key: JobKey, cluster: Cluster) -> Job | None:
        """Brings one job up to date, and returns it; None where it is gone or another one has its name."""
        raw = await cluster.get(PLURAL, key.name, key.namespace) if key.name else None
        job = parse_job(raw) if raw is not None else None
        if job is not None and job.key == key:
            self.jobs.put(job)  # which refuses it where it was deleted meanwhile
        else:
            self.jobs.remove(key)
        return self.jobs.get(key)

    def all_run(self, pod: PodView) -> bool:
        """Returns whether all pods of this one's attempt run, so that no news of its start is to come."""
        job, running = self.jobs.get(pod.job), 0
        for peer in self.pods.by("job", _name(pod.job)):
            if (peer.job, peer.attempt) != (pod.job, pod.attempt):
                continue
            if peer.running_since is None:  # found soon: those that changed last come last
                return False
            running += 1
        return job is not None and job.spec is not None and running == job.spec.workers

    def urgent(self) -> set[JobKey]:
        """Returns the jobs to which something has happened that may not have been reacted to yet.

        These are new, changed and deleted jobs, and jobs with pods that end or whose nodes are marked.
        """
        changed = {j.key for j in self.jobs if j.deleting or j.generation != j.status.observed_generation}
        ends = (p for p in self.pods if p.holds_outcome and (p.deleted is not None or trainer_ended(p)))
        ending = {pod.job for pod in ends}
        return changed.union(ending, *(self.pods.jobs_on(node.name) for node in self.nodes.marked()))
