"""One reconcile of one job: observe, plan, apply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.observed import Observed, PodView, without_reports
from spottrain_operator.api.training_job import Job, JobKey
from spottrain_operator.api.validation import parse_job
from spottrain_operator.control.actions import Context, Plan
from spottrain_operator.control.apply import apply
from spottrain_operator.control.observe import Sources, not_processed, observe
from spottrain_operator.control.plan import plan
from spottrain_operator.errors import ApiError, ApiFailure, Incomplete
from spottrain_operator.io.cluster import release_pod, set_finalizer
from spottrain_operator.io.logs import about
from spottrain_operator.policies import cleanup

logger = logging.getLogger(__name__)
LARGE: Final = 100
"""Number of pods from which on a plan takes some tens of milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciler:
    sources: Sources
    now: Callable[[], datetime]

    async def __call__(self, key: JobKey) -> timedelta | None:
        """Reconciles a job; returns the delay until the next reconcile if no event comes before.

        None: only an event changes anything. So it is with a job that has ended, or is suspended without
        pods; any other is looked at again with the next resync at the latest.
        """
        caches = self.sources.caches
        job = caches.jobs.get(key)
        if job is None and not caches.jobs.is_removed(key):
            # Pods' events may come first. A deleted job is read once: each of its pods has more events.
            job = await caches.read_job(key, self.sources.cluster)
        if job is None:
            await self._release_orphans(key)
            return None
        try:
            again = await self._reconcile(job)
            return timedelta.max if again is None and not self._rests(key) else again
        except ApiError as error:
            if error.kind is not ApiFailure.FORBIDDEN or not await self._ends_with_its_namespace(job):
                raise
            await self._let_go(job)
            return None

    def _rests(self, key: JobKey) -> bool:
        job, pods = self.sources.caches.jobs.get(key), self.sources.caches.pods.of(key)
        if job is None or job.deleting:
            return job is None
        return job.status.terminal or (job.spec is not None and job.spec.suspend and not pods)

    async def _reconcile(self, job: Job) -> timedelta | None:
        observed = await observe(job, self.sources, self.now())
        made, given = await self._plan(observed), self.sources
        context = Context(cluster=given.cluster, caches=given.caches, memory=given.memory, now=observed.now)
        again = await apply(job, made, context)
        if (error := given.memory.of(job.key).undecided) is not None:
            raise error
        return again

    async def _ends_with_its_namespace(self, job: Job) -> bool:
        """Returns whether the job is deleted with its namespace, and waits for our finalizer.

        Our RoleBinding is deleted with the namespace too, maybe first: then nothing else is in reach.
        """
        if not job.deleting or not job.holds_checkpoints:
            return False
        namespace = await self.sources.cluster.get("namespaces", job.key.namespace)
        return namespace is not None and "deletionTimestamp" in namespace["metadata"]

    async def _let_go(self, job: Job) -> None:
        key, uri = job.key, job.spec.checkpoint.uri if job.spec is not None else "URI"
        raw = await set_finalizer(self.sources.cluster, key.name, key.namespace, uid=key.uid, on=False)
        self.sources.caches.jobs.put(parse_job(raw))
        by_hand = cleanup.DELETE.format(uri=uri, uid=key.uid)
        words = "%s: its namespace is deleted with it, so its checkpoints are left; delete them with %s"
        logger.warning(words, key, by_hand, extra=about(key))

    async def _plan(self, observed: Observed) -> Plan:
        """Plans a job; in a thread where the plan may compute for some tenths of a second.

        That is a sum of costs, or the pods of a large gang. Other jobs are reconciled meanwhile.
        """
        spec, record = observed.job.spec, observed.job.status.current
        limited = spec is not None and spec.capacity.max_cost_usd is not None
        wanted = spec.workers if spec is not None else 1
        pods = max(wanted, record.workers if record is not None else 0, len(observed.pods))
        if limited or pods >= LARGE:
            return await asyncio.to_thread(planned, observed)
        return planned(observed)

    async def _release_orphans(self, key: JobKey) -> None:
        """Releases the pods of a deleted job; our finalizer would keep them for ever."""
        self.sources.memory.forget(key)
        held = [pod for pod in self.sources.caches.pods.of(key) if pod.holds_outcome]
        failed = [words for words in await asyncio.gather(*map(self._release, held)) if words]
        if failed:
            raise Incomplete(f"{len(failed)} of {len(held)} pods could not be released: {failed[0]}")

    async def _release(self, pod: PodView) -> str:
        """Removes a pod's finalizer; returns why it failed, or ""."""
        try:
            raw = await release_pod(self.sources.cluster, pod.name, pod.namespace, uid=pod.uid)
        except ApiError as error:
            return "" if error.stale else f"{pod.name}: {error}"
        self.sources.caches.pods.remember(raw)  # else an event from before would release it again
        return ""


def planned(o: Observed) -> Plan:
    """Plans a job; after an unexpected error as one whose spec, and what its containers say, is unknown."""
    try:
        return plan(o)
    except Exception as error:
        job = replace(o.job, spec=None, invalid=not_processed(o.job.key, error))
        pods = tuple(map(without_reports, o.pods))
        return plan(replace(o, job=job, pods=pods, sample=None, silence=None, heard={}))
