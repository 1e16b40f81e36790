"""Polls trainers for their progress, concurrently with the reconciles.

Results are stored in memory. A new state enqueues the job; further steps are written from here, at intervals.
The number of queries per second is bounded: with many jobs each is asked less often, but not those near a
decision.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import aiohttp
from spottrain.contract import PROGRESS_PORT, STOP_PATH, Progress, Stop

from spottrain_operator.api.observed import Observed, PodView, Sample, Silence
from spottrain_operator.api.reports import bounded
from spottrain_operator.api.training_job import Job
from spottrain_operator.control.apply import patch_status
from spottrain_operator.control.caches import is_ending
from spottrain_operator.control.observe import Sources
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import OperatorError
from spottrain_operator.policies import accounting
from spottrain_operator.status.changes import progress_due, with_display, with_progress
from spottrain_operator.status.conditions import STOP_DELAY

logger = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=2.0)
LIMIT = 64 * 1024
"""Maximum bytes of a response, which comes from an untrusted container."""
NO_RESPONSE = (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
MAX_CONCURRENT = 64
"""Maximum number of concurrent queries."""
MAX_PER_SECOND: Final = 50
"""Maximum number of queries, but for those that must not wait. Each takes up to a millisecond of processor
time, so all of them a twentieth of a core."""
MAX_WRITES_PER_SECOND: Final = 6
"""Maximum number of status writes that report only further steps and costs. Each takes the API server 15 to
20 ms of processor time (`make bench NAME="scale --scenario capacity"`), and etcd 4 KB: a tenth of a core."""
ENDING_SECONDS: Final = 0.5
"""Interval of looking for pods that are to end, whose trainers are asked at once."""


def chosen(trainers: Iterable[tuple[PodView, Job]], number: int, most: float) -> list[PodView]:
    """Returns the pods to ask in a round with this number.

    These are the ones on whose next response a decision depends, and of the others `most`, in turn.
    """
    near: list[PodView] = []
    others: list[PodView] = []
    for pod, job in trainers:
        limited = job.spec is not None and job.spec.failure_policy.hang_timeout_seconds
        (near if limited or is_ending(pod) else others).append(pod)
    rounds = max(1, math.ceil(len(others) / max(most, 1.0)))
    return near + [pod for pod in others if (_place(pod) + number) % rounds == 0]


def _place(pod: PodView) -> int:
    """Returns the pod's place among others: the same in each round, so that its queries are evenly spaced."""
    return zlib.crc32(pod.uid.encode())


def missed_the_signal(pod: PodView, now: datetime) -> bool:
    """Returns whether a responding trainer's pod was deleted so long ago that it should be saving or gone.

    The kernel drops a SIGTERM to PID 1 without a handler, and the kubelet sends no second one.
    """
    return pod.deleted is not None and now > pod.deleted - timedelta(seconds=pod.deletion_grace) + STOP_DELAY


@dataclass(kw_only=True)
class Poller:
    sources: Sources
    queue: WorkQueue
    interval: float
    """Seconds between two rounds."""
    now: Callable[[], datetime]
    port: int = PROGRESS_PORT
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT))

    async def run(self) -> None:
        """Runs until cancelled. The queries of a round are spread over the interval."""
        caches, memory = self.sources.caches, self.sources.memory
        # What an unknown program sends over a connection that is kept would be stored without a bound.
        connector = aiohttp.TCPConnector(limit=MAX_CONCURRENT, force_close=True)
        session = aiohttp.ClientSession(timeout=TIMEOUT, trust_env=False, connector=connector)
        async with session, asyncio.TaskGroup() as group:
            group.create_task(self._poll_ending(session))
            for number in itertools.count():
                found = ((pod, caches.jobs.get(pod.job)) for pod in caches.pods.trainers())
                trainers = [(pod, job) for pod, job in found if job is not None]
                memory.write_interval = timedelta(seconds=len(trainers) / MAX_WRITES_PER_SECOND)
                pods = chosen(trainers, number, MAX_PER_SECOND * self.interval)
                polls = [self._ask(session, pod, _place(pod) % 997 / 997 * self.interval) for pod in pods]
                await asyncio.gather(asyncio.sleep(self.interval), *polls)

    async def _poll_ending(self, session: aiohttp.ClientSession) -> None:
        """Asks a trainer at once when its pod is to end: it may leave no message, and come to no turn."""
        asked: set[str] = set()
        while True:
            ending = self.sources.caches.pods.trainers(ending=True)
            polls = [self._ask(session, pod) for pod in ending if pod.uid not in asked]
            asked = {pod.uid for pod in ending}
            await asyncio.gather(asyncio.sleep(ENDING_SECONDS), *polls)

    async def _ask(self, session: aiohttp.ClientSession, pod: PodView, wait: float = 0.0) -> None:
        """Asks one trainer after some seconds, and stores what it says."""
        await asyncio.sleep(wait)
        async with self.slots:
            heard = await self._poll(session, pod)
        job = self.sources.caches.jobs.get(pod.job)
        if job is None:
            return  # the job was deleted in the meantime, and its memory must stay empty
        known = self.sources.memory.of(pod.job)
        if isinstance(heard, Silence):
            known.silence = heard
        elif _is_of(heard, pod, job):
            known.silence = None
            await self._keep(pod, job, heard)
            if missed_the_signal(pod, self.now()) or (pod.sync is not None and pod.deleted is not None):
                await self._stop(session, pod)

    async def _stop(self, session: aiohttp.ClientSession, pod: PodView) -> None:
        """Tells the trainer to stop. It is repeated in each round, which has no further effect."""
        assert pod.deleted is not None
        order = Stop(podUID=pod.uid, deadline=pod.deleted.timestamp())
        try:
            request = session.post(self._url(pod, STOP_PATH), data=order.to_json(), allow_redirects=False)
            async with request as reply:
                known = reply.status == 204
        except NO_RESPONSE:
            return  # it may be ending
        words = "it has been told to stop" if known else "it does not stop, because it belongs to another pod"
        logger.info("pod %s was deleted, and its trainer still responds: %s", pod.name, words)

    def _url(self, pod: PodView, path: str) -> str:
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        return f"http://{host}:{self.port}{path}"

    async def _poll(self, session: aiohttp.ClientSession, pod: PodView) -> Progress | Silence:
        try:
            async with session.get(self._url(pod, "/progress"), allow_redirects=False) as reply:
                text = (await _body(reply)).decode()
            progress = Progress.from_json(text)
        except NO_RESPONSE as error:  # it may not listen yet, be gone, or be another program
            return Silence(pod_uid=pod.uid, refused=_reached(error))
        return bounded(progress) or Silence(pod_uid=pod.uid, refused=True)

    async def _keep(self, pod: PodView, job: Job, progress: Progress) -> None:
        """Remembers progress, and enqueues its job or writes it, where either is due."""
        if pod.attempt != job.status.attempt:
            return
        memory, sample = self.sources.memory, Sample(progress=progress, at=self.now())
        memory.of(pod.job).sample = sample
        limits = self.sources.limits.spread(memory.write_interval)
        if progress_due(job.status, sample, timedelta.max):
            self.queue.add(pod.job)
        elif not is_ending(pod) and progress_due(job.status, sample, limits.progress_interval):
            if accounting.sums_due(job.status, sample.at, limits):
                self.queue.add(pod.job)  # its plan writes both at once
            else:
                await self._write(job, sample)

    async def _write(self, job: Job, sample: Sample) -> None:
        """Writes further steps into the status. A failure is no loss: the next ones are due at once."""
        record, given = job.status.current, self.sources
        if job.status.terminal or record is None or record.cause or job.old_status is not None:
            return
        pods = given.caches.pods.of(job.key)
        o = Observed(now=sample.at, job=job, pods=pods, default_pool=given.default_pool)
        try:
            status = with_display(with_progress(job.status, o, sample), o)
            written = await patch_status(job, status, given.cluster)
        except OperatorError as error:
            logger.debug("%s: its progress is not written: %s", job.key, error)
        else:
            given.caches.jobs.put(written)


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    """Returns the body, which may come in several packets, up to about LIMIT."""
    body = b""
    while len(body) < LIMIT and (part := await reply.content.read(LIMIT)):
        body += part
    return body


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
    ours = job.spec is None or job.spec.checkpoint.ours
    named = progress.jobUID == pod.job.uid or (not ours and not progress.jobUID)
    return named and (progress.attempt, progress.worker) == (pod.attempt, pod.rank)
