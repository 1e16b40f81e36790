"""State of this process beyond the caches; correctness does not depend on it.

It is empty after a restart: a rejected pod is tried once more, progress is queried again, and the pending
timeout starts again where a pod may have waited for a volume.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from spottrain_operator.api.native_gangs import GangApi
from spottrain_operator.api.node_pools import NOTHING
from spottrain_operator.api.observed import PodEvents, PodView, Refusal, Sample, Silence
from spottrain_operator.api.training_job import Job, JobKey
from spottrain_operator.names import Condition


class Memory:
    def __init__(self) -> None:
        self.refusals: dict[JobKey, Refusal] = {}
        self.samples: dict[JobKey, Sample] = {}
        self.silences: dict[JobKey, Silence] = {}
        """Jobs whose trainer did not respond to the last query."""
        self.began: datetime | None = None
        """When this process first reconciled a job."""
        self.cleanup_refused: dict[str, str] = {}
        """By job UID: the API server's rejection of a cleanup pod."""
        self.gang_api: GangApi | None = None
        """The version of Kubernetes' own gang scheduling that this cluster serves."""
        self.node_pools = NOTHING
        """What all Karpenter NodePools seen so far offer."""
        self.node_pools_failed = False
        self.discovery_failed = False
        self.ungrouped: set[JobKey] = set()
        """Jobs whose group could not be created; retried after the next discovery."""
        self.unread: dict[JobKey, set[str]] = {}
        """Names of claims that could not be read in the last reconcile; each is logged once."""
        self.heard: dict[JobKey, dict[str, tuple[datetime, PodEvents, bool]]] = {}
        """By pod UID: when its Events were read, what they say, and whether it had ended by then."""
        self.deaf = False
        """Whether the last attempt to read Events failed, which is logged once."""
        self._told: dict[JobKey, dict[str, datetime]] = {}
        self._volume_waits: dict[JobKey, tuple[datetime, bool]] = {}
        self._admitted: dict[JobKey, int] = {}

    def admit(self, key: JobKey, generation: int) -> None:
        self._admitted[key] = generation
        self.refusals.pop(key, None)

    def admitted(self, job: Job) -> bool:
        """Returns whether a dry run succeeded, in this process or, by the status, in an earlier one."""
        if self._admitted.get(job.key) == job.generation:
            return True
        condition = job.status.condition(Condition.ACCEPTED)
        said = condition is not None and condition.status == "True"
        return said and condition is not None and condition.observed_generation == job.generation

    def told(self, key: JobKey, pods: Iterable[PodView], now: datetime) -> dict[str, datetime]:
        """Returns by pod UID when its deadline annotation was first seen, or could not be written."""
        before = self._told.get(key, {})
        seen = (pod for pod in pods if pod.notice is not None or pod.uid in before)
        told = {pod.uid: before.get(pod.uid, now) for pod in seen}
        if told:
            self._told[key] = told
        else:
            self._told.pop(key, None)
        return told

    def not_told(self, pod: PodView, now: datetime) -> None:
        """Records that the deadline could not be annotated; the DELETE does not wait for a retry."""
        self._told.setdefault(pod.job, {}).setdefault(pod.uid, now)

    def volume_wait(self, key: JobKey, waits: bool, now: datetime) -> datetime | None:
        """Returns until when a pod of the job may have waited for a volume.

        The wait ended between the last reconcile that saw it and the first that does not.
        """
        last, waited = self._volume_waits.get(key, (None, False))
        if not (waits or waited):
            return last
        self._volume_waits[key] = (now, waits)
        return now

    def forget(self, key: JobKey) -> None:
        for table in (
            self.refusals,
            self.samples,
            self.silences,
            self.unread,
            self.heard,
            self._told,
            self._admitted,
            self._volume_waits,
        ):
            table.pop(key, None)
        self.ungrouped.discard(key)
        self.cleanup_refused.pop(key.uid, None)
