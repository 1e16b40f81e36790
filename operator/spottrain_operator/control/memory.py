"""What this process remembers of a job beyond the caches; nothing here is needed for correctness.

After a restart it is empty: a pod that was refused is tried once more, progress is asked for again,
patience for nodes begins anew where a volume may have been waited for.
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
        """Of jobs whose trainer did not answer when it was last asked."""
        self.began: datetime | None = None
        """When this process first looked at a job."""
        self.cleanup_refused: dict[str, str] = {}
        """By job UID: the API server's no to a cleanup pod."""
        self.gang_api: GangApi | None = None
        """The version of Kubernetes' own gang scheduling that this cluster serves."""
        self.node_pools = NOTHING
        """What Karpenter's NodePools offer, by all that were seen."""
        self.node_pools_failed = False
        self.discovery_failed = False
        self.ungrouped: set[JobKey] = set()
        """Jobs whose group could not be made; tried again after the next discovery."""
        self.unread: dict[JobKey, set[str]] = {}
        """Names of claims that could not be read at the last look; each is logged once."""
        self.heard: dict[JobKey, dict[str, tuple[datetime, PodEvents, bool]]] = {}
        """By UID of a pod: when its Events were read, what they say, and whether it had ended by then."""
        self.deaf = False
        """Whether the last try to read Events failed, which is logged once."""
        self._told: dict[JobKey, dict[str, datetime]] = {}
        self._volume_waits: dict[JobKey, tuple[datetime, bool]] = {}
        self._admitted: dict[JobKey, int] = {}

    def admit(self, key: JobKey, generation: int) -> None:
        self._admitted[key] = generation
        self.refusals.pop(key, None)

    def admitted(self, job: Job) -> bool:
        """By a dry run of this process, or by one that an earlier process has put down in the status."""
        if self._admitted.get(job.key) == job.generation:
            return True
        condition = job.status.condition(Condition.ACCEPTED)
        said = condition is not None and condition.status == "True"
        return said and condition is not None and condition.observed_generation == job.generation

    def told(self, key: JobKey, pods: Iterable[PodView], now: datetime) -> dict[str, datetime]:
        """By UID of a pod: when its deadline was first seen on it, or could not be put there."""
        before = self._told.get(key, {})
        seen = (pod for pod in pods if pod.notice is not None or pod.uid in before)
        told = {pod.uid: before.get(pod.uid, now) for pod in seen}
        if told:
            self._told[key] = told
        else:
            self._told.pop(key, None)
        return told

    def not_told(self, pod: PodView, now: datetime) -> None:
        """Its deadline could not be put on it. Its DELETE does not wait until that succeeds."""
        self._told.setdefault(pod.job, {}).setdefault(pod.uid, now)

    def volume_wait(self, key: JobKey, waits: bool, now: datetime) -> datetime | None:
        """Up to when a pod of the job may have waited for a volume.

        The wait ended at any time between the last look at which it did and the first at which it does not.
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
