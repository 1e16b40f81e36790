"""What this process knows beyond the caches; correctness does not depend on it.

It is empty after a restart: a rejected pod is tried once more, and progress is queried again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from spottrain_operator.api.bookkeeping import Bookkeeping
from spottrain_operator.api.kueue import Assigned
from spottrain_operator.api.node_pools import NOTHING
from spottrain_operator.api.observed import PodEvents, PodView, Refusal, Sample, Silence
from spottrain_operator.api.training_job import AppliedDefaults, Job, JobKey
from spottrain_operator.errors import ApiError
from spottrain_operator.names import Condition

ACCEPTED_FOR = timedelta(minutes=10)
"""A dry run counts for so long: rules of the cluster may change, and creations that are rejected tell."""


@dataclass(kw_only=True, slots=True)
class JobMemory:
    """Of one job."""

    refusal: Refusal | None = None
    admitted: int = 0
    """Generation of the job whose pod was accepted."""
    undecided: ApiError | None = None
    """Why the last dry run of its pod has no result."""
    applied: AppliedDefaults | None = None
    """Defaults with which its pod was dry-run, until its status holds them."""
    books: Bookkeeping | None = None
    """Its bookkeeping, newer than its ConfigMap."""
    sample: Sample | None = None
    silence: Silence | None = None
    """Its trainer did not respond to the last query."""
    events: dict[str, tuple[datetime, PodEvents]] = field(default_factory=dict)
    """By pod UID: its Events, and when they were read."""
    annotated_at: dict[str, datetime] = field(default_factory=dict)
    """By pod UID: when its deadline annotation was first seen, or could not be written."""
    alone_since: datetime | None = None
    """Since when no pod of an earlier attempt that may still write has been seen."""
    ungrouped: bool = False
    """Whether its group could not be created; retried after the next discovery."""
    cleanup_refused: str = ""
    """The API server's final rejection of its cleanup pod."""
    cleanup_rejected: str = ""
    """The last rejection of its cleanup pod, which may be created later."""


class Memory:
    def __init__(self) -> None:
        self.jobs: defaultdict[JobKey, JobMemory] = defaultdict(JobMemory)
        self.write_interval = timedelta(0)
        """Interval of writes that report only further steps, which the number of jobs allows."""
        self.began: datetime | None = None
        """When this process first reconciled a job."""
        self.has_gangs = False
        """Whether this cluster serves Kubernetes' own gang scheduling."""
        self.flavors: dict[str, tuple[datetime, Assigned | None]] = {}
        """ResourceFlavors by name, and when they were read; None: it did not exist."""
        self.node_pools = NOTHING
        """What all Karpenter NodePools seen so far offer."""
        self.events_failed = False
        """Whether the last attempt to read Events failed, which is logged once."""
        self._accepted: dict[str, datetime] = {}
        """By digest of what a pod is made from: when the API server accepted it in a dry run."""

    def of(self, key: JobKey) -> JobMemory:
        return self.jobs[key]

    def forget(self, key: JobKey) -> None:
        self.jobs.pop(key, None)

    def accept(self, job: Job, digest: str, now: datetime) -> None:
        self.of(job.key).admitted = job.generation
        if not self.accepts(digest, now):
            self._accepted = {d: at for d, at in self._accepted.items() if now - at < ACCEPTED_FOR}
            self._accepted[digest] = now

    def accepts(self, digest: str, now: datetime) -> bool:
        """Returns whether the API server has accepted such a pod lately."""
        at = self._accepted.get(digest)
        return at is not None and now - at < ACCEPTED_FOR

    def reject(self, key: JobKey, no: Refusal) -> None:
        """Records a rejection. The cluster's rules may have changed, so dry runs do not count any more."""
        self.of(key).refusal = no
        self._accepted.clear()

    def admitted(self, job: Job) -> bool:
        """Returns whether its pod was accepted, in this process or, by the status, in an earlier one."""
        if self.of(job.key).admitted == job.generation:
            return True
        said = job.status.condition(Condition.ACCEPTED)
        return said is not None and (said.status, said.observed_generation) == ("True", job.generation)

    def see_annotations(self, key: JobKey, pods: Iterable[PodView], now: datetime) -> dict[str, datetime]:
        """Returns `annotated_at` of these pods, with those whose annotation is seen for the first time."""
        known = self.of(key)
        seen = (pod.uid for pod in pods if pod.notice is not None or pod.uid in known.annotated_at)
        known.annotated_at = {uid: known.annotated_at.get(uid, now) for uid in seen}
        return known.annotated_at

    def could_not_annotate(self, pod: PodView, now: datetime) -> None:
        """Records that the deadline could not be annotated; the DELETE does not wait for a retry."""
        known = self.of(pod.job)
        known.annotated_at = {pod.uid: now} | known.annotated_at
