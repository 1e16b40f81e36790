"""State of this process beyond the caches; correctness does not depend on it.

`remember` stores what an observation has read. The memory is empty after a restart: a rejected pod is tried
once more, progress is queried again, and the pending timeout starts again where a pod may have waited for a
volume.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from spottrain_operator.api.bookkeeping import Bookkeeping
from spottrain_operator.api.kueue import Assigned
from spottrain_operator.api.node_pools import NOTHING
from spottrain_operator.api.observed import (
    NodeView,
    Observed,
    PodEvents,
    PodView,
    Refusal,
    Sample,
    Silence,
)
from spottrain_operator.api.training_job import AppliedDefaults, Job, JobKey
from spottrain_operator.control.caches import Caches, Listed
from spottrain_operator.errors import ApiError
from spottrain_operator.io.logs import about
from spottrain_operator.names import Condition

logger = logging.getLogger(__name__)

ACCEPTED_FOR = timedelta(minutes=10)
"""A dry run counts for so long: rules of the cluster may change, and creations that are rejected tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventsRead:
    """The Events of a pod at the time they were read."""

    at: datetime
    events: PodEvents


@dataclass(frozen=True, kw_only=True, slots=True)
class FlavorRead:
    """A ResourceFlavor of Kueue at the time it was read; None: it did not exist."""

    at: datetime
    flavor: Assigned | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """What the API server said of a job's pod."""

    accepted: str = ""
    """Digest of what the pod is made from, where it accepts the pod."""
    error: ApiError | None = None
    """Why it could not be asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What an observation read from the API server in addition to its Observed, for `remember`."""

    lists: tuple[Listed, ...] = ()
    """LISTs of the job's pods, or of deleted jobs of its name."""
    nodes: tuple[NodeView, ...] = ()
    """Nodes that the cache did not have."""
    absent_nodes: tuple[str, ...] = ()
    """Names of nodes that do not exist."""
    events: Mapping[str, EventsRead]
    """By pod UID."""
    flavors: Mapping[str, FlavorRead] = field(default_factory=dict)
    """By name."""
    events_error: str | None = None
    """Why Events could not be read, naming the pod; "": they were; None: no Events were requested."""
    dry_run: DryRun | None = None
    """None: it was not needed, or is in `Observed.refusal`."""


class Memory:
    def __init__(self) -> None:
        self.refusals: dict[JobKey, Refusal] = {}
        self.samples: dict[JobKey, Sample] = {}
        self.silences: dict[JobKey, Silence] = {}
        """Jobs whose trainer did not respond to the last query."""
        self.write_interval = timedelta(0)
        """Interval of writes that report only further steps, which the number of jobs allows."""
        self.began: datetime | None = None
        """When this process first reconciled a job."""
        self.cleanup_refused: dict[str, str] = {}
        """By job UID: the API server's final rejection of a cleanup pod."""
        self.cleanup_rejected: dict[str, str] = {}
        """By job UID: its last rejection of a cleanup pod that may be created later."""
        self.has_gangs = False
        """Whether this cluster serves Kubernetes' own gang scheduling."""
        self.flavors: dict[str, FlavorRead] = {}
        """ResourceFlavors by name."""
        self.node_pools = NOTHING
        """What all Karpenter NodePools seen so far offer."""
        self.node_pools_failed = False
        self.discovery_failed = False
        self.ungrouped: set[JobKey] = set()
        """Jobs whose group could not be created; retried after the next discovery."""
        self.unread: dict[JobKey, set[str]] = {}
        """Names of claims that could not be read in the last reconcile; each is logged once."""
        self.events: dict[JobKey, Mapping[str, EventsRead]] = {}
        """By pod UID."""
        self.events_failed = False
        """Whether the last attempt to read Events failed, which is logged once."""
        self.annotations: dict[JobKey, Mapping[str, datetime]] = {}
        """See `annotated_at`."""
        self.books: dict[JobKey, Bookkeeping] = {}
        """The bookkeeping of each job, newer than its ConfigMap."""
        self.applied: dict[JobKey, AppliedDefaults] = {}
        """Defaults with which a job's pod was dry-run, until its status holds them."""
        self._admitted: dict[JobKey, int] = {}
        """Generations of the jobs whose pod was accepted."""
        self._accepted: dict[str, datetime] = {}
        """By digest of what a pod is made from: when the API server accepted it in a dry run."""

    def accept(self, job: Job, digest: str, now: datetime) -> None:
        self._admitted[job.key] = job.generation
        if not self.accepts(digest, now):
            self._accepted = {d: at for d, at in self._accepted.items() if now - at < ACCEPTED_FOR}
            self._accepted[digest] = now

    def accepts(self, digest: str, now: datetime) -> bool:
        """Returns whether the API server has accepted such a pod lately."""
        at = self._accepted.get(digest)
        return at is not None and now - at < ACCEPTED_FOR

    def reject(self, key: JobKey, no: Refusal) -> None:
        """Records a rejection. The cluster's rules may have changed, so dry runs do not count any more."""
        self.refusals[key] = no
        self._accepted.clear()

    def admitted(self, job: Job) -> bool:
        """Returns whether its pod was accepted, in this process or, by the status, in an earlier one."""
        if self._admitted.get(job.key) == job.generation:
            return True
        condition = job.status.condition(Condition.ACCEPTED)
        said = condition is not None and condition.status == "True"
        return said and condition is not None and condition.observed_generation == job.generation

    def annotated_at(self, key: JobKey, pods: Iterable[PodView], now: datetime) -> dict[str, datetime]:
        """Returns by pod UID when its deadline annotation was first seen, or could not be written."""
        before = self.annotations.get(key, {})
        seen = (pod for pod in pods if pod.notice is not None or pod.uid in before)
        return {pod.uid: before.get(pod.uid, now) for pod in seen}

    def could_not_annotate(self, pod: PodView, now: datetime) -> None:
        """Records that the deadline could not be annotated; the DELETE does not wait for a retry."""
        self.annotations[pod.job] = {pod.uid: now, **self.annotations.get(pod.job, {})}

    def forget(self, key: JobKey) -> None:
        for table in (
            self.refusals,
            self.samples,
            self.silences,
            self.unread,
            self.events,
            self.annotations,
            self.applied,
            self.books,
            self._admitted,
        ):
            table.pop(key, None)
        self.ungrouped.discard(key)
        self.cleanup_refused.pop(key.uid, None)
        self.cleanup_rejected.pop(key.uid, None)


def remember(o: Observed, learned: Learned, caches: Caches, memory: Memory) -> None:
    """Stores in caches and memory what an observation has read, and logs each new failure once."""
    key = o.job.key
    for listed in learned.lists:
        caches.pods.update(listed)
    caches.nodes.update(learned.nodes, learned.absent_nodes)
    if learned.events_error is not None:
        if learned.events_error and not memory.events_failed:
            logger.warning("%s: %s", key, learned.events_error, extra=about(key))
        memory.events_failed = bool(learned.events_error)
    unread = {name: claim.unread for name, claim in o.claims.items() if claim is not None and claim.unread}
    for name, why in unread.items():
        if name not in memory.unread.get(key, ()):
            words = "%s: PersistentVolumeClaim %s cannot be read: %s"
            logger.warning(words, key, name, why, extra=about(key))
    memory.flavors |= learned.flavors
    memory.began = memory.began or o.watched_since  # another worker's may have come first
    _put(memory.events, key, learned.events)
    _put(memory.unread, key, set(unread))
    _put(memory.annotations, key, o.annotated_at)
    if o.applied is not None:
        memory.applied[key] = o.applied
    else:
        memory.applied.pop(key, None)
    _remember_dry_run(o, learned.dry_run, memory)


def _remember_dry_run(o: Observed, dry_run: DryRun | None, memory: Memory) -> None:
    if o.refusal is None:
        memory.refusals.pop(o.job.key, None)
    elif o.refusal is not memory.refusals.get(o.job.key):
        memory.reject(o.job.key, o.refusal)
    if dry_run is not None and dry_run.accepted:
        memory.accept(o.job, dry_run.accepted, o.now)


def _put(table: dict[JobKey, Any], key: JobKey, value: Sized) -> None:
    """Stores a value; an empty one is removed."""
    if value:
        table[key] = value
    else:
        table.pop(key, None)
