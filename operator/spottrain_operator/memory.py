"""What this process remembers of a job beyond the caches; nothing here is needed for correctness.

After a restart it is empty: a pod that was refused is tried once more, progress is asked for again.
"""

from __future__ import annotations

from datetime import datetime

from spottrain_operator.api import Job, JobKey
from spottrain_operator.model import PodView, Refusal, Sample
from spottrain_operator.names import Condition


class Memory:
    def __init__(self) -> None:
        self.refusals: dict[JobKey, Refusal] = {}
        self.samples: dict[JobKey, Sample] = {}
        self._told: dict[JobKey, tuple[str, datetime]] = {}
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

    def told_at(self, pod: PodView, now: datetime) -> datetime | None:
        """When its deadline was first seen on this pod."""
        if pod.notice is None:
            return None
        uid, at = self._told.get(pod.job, ("", now))
        if uid != pod.uid:
            self._told[pod.job] = (pod.uid, at := now)
        return at

    def forget(self, key: JobKey) -> None:
        for table in (self.refusals, self.samples, self._told, self._admitted):
            table.pop(key, None)
