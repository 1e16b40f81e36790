"""Polls trainers for their progress, concurrently with the reconciles.

Results are stored in `Memory.samples`. A job is enqueued only when its status is due for a write.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
from collections.abc import Callable
from datetime import datetime, timedelta

import aiohttp
from spottrain.contract import PROGRESS_PORT, STOP_PATH, Progress, Stop

from spottrain_operator.api.observed import PodView, Sample, Silence
from spottrain_operator.api.training_job import STATE_LIMIT, TIME_LIMIT, WARNING_LIMIT, Job, Status
from spottrain_operator.api.validation import well_typed
from spottrain_operator.api.wire import cut
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.policies.pod_end import trainer_ended
from spottrain_operator.status.changes import progress_due
from spottrain_operator.status.conditions import STOP_DELAY

logger = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=2.0)
LIMIT = 64 * 1024
"""Maximum bytes of a response, which comes from an untrusted container."""
LIMITS = {
    "state": STATE_LIMIT,
    "durableTime": TIME_LIMIT,
    "warning": WARNING_LIMIT,
    "waitingFor": WARNING_LIMIT,
    "ignoredSettings": WARNING_LIMIT,
}
NO_RESPONSE = (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
MAX_CONCURRENT = 64
"""Maximum number of concurrent queries."""


def missed_the_signal(pod: PodView, now: datetime) -> bool:
    """Returns whether a responding trainer's pod was deleted so long ago that it should be saving or gone.

    The kernel drops a SIGTERM to PID 1 without a handler, and the kubelet sends no second one.
    """
    return pod.deleted is not None and now > pod.deleted - timedelta(seconds=pod.deletion_grace) + STOP_DELAY


class Poller:
    def __init__(
        self,
        *,
        caches: Caches,
        memory: Memory,
        queue: WorkQueue,
        interval: float,
        write_interval: timedelta,
        now: Callable[[], datetime],
        port: int = PROGRESS_PORT,
    ) -> None:
        self._caches, self._memory, self._queue = caches, memory, queue
        self._interval, self._write_interval = interval, write_interval
        self._now, self._port = now, port
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(self) -> None:
        """Runs until cancelled. Each round queries every running trainer once, spread over the interval."""
        async with aiohttp.ClientSession(timeout=TIMEOUT, trust_env=False) as session:
            while True:
                firsts = (p for p in self._caches.pods if p.rank == 0 and p.running_since and p.ip)
                polls = [self._poll_later(session, pod) for pod in firsts if not trainer_ended(pod)]
                await asyncio.gather(asyncio.sleep(self._interval), *polls)

    async def _poll_later(self, session: aiohttp.ClientSession, pod: PodView) -> None:
        await asyncio.sleep(random.uniform(0, self._interval))
        async with self._slots:
            heard = await self._poll(session, pod)
        job = self._caches.jobs.get(pod.job)
        if job is None:
            return  # the job was deleted in the meantime, and its memory must stay empty
        if isinstance(heard, Silence):
            self._memory.silences[pod.job] = heard
            return
        if _is_of(heard, pod, job):
            self._memory.silences.pop(pod.job, None)
            self._keep(pod, job.status, heard)
            if missed_the_signal(pod, self._now()):
                await self._stop(session, pod)

    async def _stop(self, session: aiohttp.ClientSession, pod: PodView) -> None:
        """Tells the trainer to stop. It is repeated in each round, which has no further effect."""
        assert pod.deleted is not None
        order = Stop(podUID=pod.uid, deadline=pod.deleted.timestamp())
        try:
            async with session.post(self._url(pod, STOP_PATH), data=order.to_json()) as reply:
                known = reply.status == 204
        except NO_RESPONSE:
            return  # it may be ending
        words = "it has been told to stop" if known else "it does not stop, because it belongs to another pod"
        logger.info("pod %s was deleted, and its trainer still responds: %s", pod.name, words)

    def _url(self, pod: PodView, path: str) -> str:
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        return f"http://{host}:{self._port}{path}"

    async def _poll(self, session: aiohttp.ClientSession, pod: PodView) -> Progress | Silence:
        try:
            async with session.get(self._url(pod, "/progress"), allow_redirects=False) as reply:
                text = (await reply.content.read(LIMIT)).decode()
            progress = Progress.from_json(text)
        except NO_RESPONSE as error:  # it may not listen yet, be gone, or be another program
            return Silence(pod_uid=pod.uid, refused=_reached(error))
        return cut(progress, LIMITS) if well_typed(progress) else Silence(pod_uid=pod.uid, refused=True)

    def _keep(self, pod: PodView, status: Status, progress: Progress) -> None:
        sample = Sample(progress=progress, at=self._now())
        if pod.attempt == status.attempt:
            self._memory.samples[pod.job] = sample
            if progress_due(status, sample, self._write_interval):
                self._queue.add(pod.job)


def _reached(error: Exception) -> bool:
    """Returns whether the pod was reached: it refused the connection, or returned an unknown response.

    A NetworkPolicy that blocks the connection gives no response at all.
    """
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.errno == errno.ECONNREFUSED
    return not isinstance(error, OSError)


def _is_of(progress: Progress, pod: PodView, job: Job) -> bool:
    """Returns whether the response is this pod's: its address may now belong to another pod.

    The response of an image without our runtime may lack the job's UID.
    """
    managed = job.spec is None or job.spec.checkpoint.managed
    named = progress.jobUID == pod.job.uid or (not managed and not progress.jobUID)
    return named and (progress.attempt, progress.worker) == (pod.attempt, pod.rank)
