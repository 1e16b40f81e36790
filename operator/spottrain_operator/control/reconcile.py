"""One reconcile of one job: observe, plan, remember, apply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Limits, Observed, Plan, PodView
from spottrain_operator.api.prices import NO_PRICES, PriceList
from spottrain_operator.api.training_job import Job, JobKey
from spottrain_operator.control.apply import Changed, Context, Done, Unfinished, apply
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory, remember
from spottrain_operator.control.observe import list_pods, observe, read_job
from spottrain_operator.control.plan import plan
from spottrain_operator.errors import ApiError, Incomplete
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.logs import about

logger = logging.getLogger(__name__)
AT_ONCE = timedelta(0)
SOON = timedelta(milliseconds=100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciler:
    cluster: Cluster
    caches: Caches
    memory: Memory
    default_pool: Pool
    pools: Mapping[str, Pool]
    limits: Limits
    now: Callable[[], datetime]
    prices: Callable[[], PriceList] = lambda: NO_PRICES

    async def __call__(self, key: JobKey) -> timedelta | None:
        """Reconciles a job; returns the delay until the next reconcile if no event comes before."""
        job = self.caches.jobs.get(key) or await self._read(key)  # pods' events may come first
        if job is None:
            await self._release_orphans(key)
            return None
        observed, learned = await observe(
            job,
            caches=self.caches,
            cluster=self.cluster,
            memory=self.memory,
            default_pool=self.default_pool,
            pools=self.pools,
            limits=self.limits,
            prices=self.prices(),
            now=self.now(),
        )
        made = self._planned(observed)
        remember(observed, learned, self.caches, self.memory)
        context = Context(cluster=self.cluster, caches=self.caches, memory=self.memory, now=observed.now)
        match await apply(job, made, context):
            case Done(again=again):
                return AT_ONCE if again else made.recheck_after
            case Changed(why=why):
                logger.info("%s", why)
                return SOON
            case Unfinished() as result:
                again_after = SOON if result.again else made.recheck_after
                raise Incomplete(str(result), again=again_after, unreachable=result.unreachable)

    async def _read(self, key: JobKey) -> Job | None:
        """Reads a job into the cache, which refuses it where it was deleted meanwhile."""
        if (job := await read_job(key, self.cluster)) is not None:
            self.caches.jobs.put(job)
        return self.caches.jobs.get(key)

    def _planned(self, observed: Observed) -> Plan:
        """Plans a job; on an unexpected error the plan reports the job as invalid."""
        try:
            return plan(observed)
        except Exception as error:
            job = observed.job
            logger.exception("%s: planning failed", job.key, extra=about(job.key))
            words = (
                f"the operator cannot process this spec ({type(error).__name__}: {error}); its log has more"
            )
            unreadable = replace(job, spec=None, invalid=job.invalid or words)
            return plan(replace(observed, job=unreadable))

    async def _release_orphans(self, key: JobKey) -> None:
        """Releases the pods of a deleted job; our finalizer would keep them for ever."""
        self.memory.forget(key)
        listed = await list_pods(key, self.caches, self.cluster)
        self.caches.pods.update(listed)
        held = [pod for pod in listed.pods if pod.holds_outcome]
        failed = [words for words in await asyncio.gather(*map(self._release, held)) if words]
        if failed:
            raise Incomplete(f"{len(failed)} of {len(held)} pods could not be released: {failed[0]}")

    async def _release(self, pod: PodView) -> str:
        """Removes a pod's finalizer; returns why it failed, or ""."""
        try:
            await self.cluster.release_pod(pod.namespace, pod.name, uid=pod.uid)
        except ApiError as error:
            return "" if error.stale else f"{pod.name}: {error}"
        return ""
