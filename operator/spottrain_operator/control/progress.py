"""Polls trainers for their progress, concurrently with the reconciles.

Results are stored in `Memory.samples`. A new state enqueues the job; further steps are written from here, at
intervals. The number of queries per second is bounded: with many jobs each is asked less often, but not those
near a decision.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Final

import aiohttp
from spottrain.contract import PROGRESS_PORT, STOP_PATH, Progress, Stop

from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Limits, Observed, PodView, Sample, Silence
from spottrain_operator.api.reports import bounded
from spottrain_operator.api.training_job import Job
from spottrain_operator.control.apply import patch_status
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.errors import OperatorError
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.policies.runtime import trains
from spottrain_operator.status.changes import progress_due, with_progress
from spottrain_operator.status.conditions import STOP_DELAY

logger = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=2.0)
LIMIT = 64 * 1024
"""Maximum bytes of a response, which comes from an untrusted container."""
JITTER: Final = 0.05
"""Of the interval: queries of several processes do not come together."""
NO_RESPONSE = (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
MAX_CONCURRENT = 64
"""Maximum number of concurrent queries."""
MAX_PER_SECOND: Final = 50
"""Maximum number of queries, but for those that must not wait. Each takes up to a millisecond of processor
time, so all of them a twentieth of a core."""
MAX_WRITES_PER_SECOND: Final = 10
"""Maximum number of status writes that report only further steps. Each takes the API server 15 to 20 ms of
processor time (`make bench NAME="scale --scenario capacity"`), so all of them a fifth of a core."""
ENDING_SECONDS: Final = 0.5
"""Interval of looking for pods that are to end, whose trainers are asked at once."""
PATIENCE: Final = Limits().runtime_patience


class Turn(Enum):
    """How often a trainer is asked."""

    NEVER = "never"
    EACH_ROUND = "each round"
    """A decision depends on its next response."""
    SOON = "soon"
    """It has not responded with a training yet: a half of the queries is for these, if they need so many."""
    IN_TURN = "in turn"


def turn(
    pod: PodView,
    job: Job | None,
    *,
    silence: Silence | None,
    sample: Sample | None,
    late: bool,
    patience: timedelta = PATIENCE,
) -> Turn:
    """Returns how often to ask a trainer. `late`: it has run for longer than `patience`, the time that a
    runtime takes to respond."""
    if job is None:
        return Turn.NEVER
    spec = job.spec
    limited = spec is not None and spec.failure_policy.hang_timeout_seconds
    if _is_ending(pod) or limited:
        return Turn.EACH_ROUND
    heard = sample is not None and sample.progress.attempt == pod.attempt
    known = heard and sample is not None and trains(sample.progress.state)
    silent = silence if silence is not None and silence.pod_uid == pod.uid else None
    own_image = spec is not None and not spec.checkpoint.ours
    if own_image and not heard and silent is not None and silent.lasted >= patience:
        return Turn.NEVER  # it need not respond. One that has responded may do so again
    return Turn.IN_TURN if known or (silent is not None and late) else Turn.SOON


def chosen(turns: Sequence[tuple[PodView, Turn]], number: int, most: float) -> list[PodView]:
    """Returns the pods to ask in a round with this number: `most`, and those that are asked in each round."""
    by_turn: dict[Turn, list[PodView]] = {kind: [] for kind in Turn}
    for pod, kind in turns:
        by_turn[kind].append(pod)
    soon, others = by_turn[Turn.SOON], by_turn[Turn.IN_TURN]
    for_others = max(most / 2, most - len(soon))
    return [
        *by_turn[Turn.EACH_ROUND],
        *_share(soon, number, most / 2 if others else most),
        *_share(others, number, for_others),
    ]


def spaced(interval: timedelta, turns: Sequence[tuple[PodView, Turn]]) -> timedelta:
    """Returns the interval at which a job's further steps are written: longer with many jobs."""
    asked = sum(kind is not Turn.NEVER for _, kind in turns)
    return max(interval, timedelta(seconds=asked / MAX_WRITES_PER_SECOND))


def _share(pods: list[PodView], number: int, most: float) -> list[PodView]:
    rounds = max(1, math.ceil(len(pods) / max(most, 1.0)))
    return [pod for pod in pods if (_place(pod) + number) % rounds == 0]


def _place(pod: PodView) -> int:
    """Returns the pod's place among others: the same in each round, so that its queries are evenly spaced."""
    return zlib.crc32(pod.uid.encode())


def missed_the_signal(pod: PodView, now: datetime) -> bool:
    """Returns whether a responding trainer's pod was deleted so long ago that it should be saving or gone.

    The kernel drops a SIGTERM to PID 1 without a handler, and the kubelet sends no second one.
    """
    return pod.deleted is not None and now > pod.deleted - timedelta(seconds=pod.deletion_grace) + STOP_DELAY


def _is_ending(pod: PodView) -> bool:
    return pod.deleted is not None or pod.notice is not None


class Poller:
    def __init__(
        self,
        *,
        cluster: Cluster,
        caches: Caches,
        memory: Memory,
        queue: WorkQueue,
        default_pool: Pool,
        interval: float,
        write_interval: timedelta,
        now: Callable[[], datetime],
        patience: timedelta = PATIENCE,
        port: int = PROGRESS_PORT,
    ) -> None:
        self._cluster, self._caches, self._memory, self._queue = cluster, caches, memory, queue
        self._default_pool = default_pool
        self._interval, self._write_interval = interval, write_interval
        self._now, self._patience, self._port = now, patience, port
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(self) -> None:
        """Runs until cancelled. The queries of a round are spread over the interval."""
        # What an unknown program sends over a connection that is kept would be stored without a bound.
        connector = aiohttp.TCPConnector(limit=MAX_CONCURRENT, force_close=True)
        session = aiohttp.ClientSession(timeout=TIMEOUT, trust_env=False, connector=connector)
        async with session, asyncio.TaskGroup() as group:
            group.create_task(self._poll_ending(session))
            for number in itertools.count():
                turns = self._turns()
                self._memory.write_interval = spaced(self._write_interval, turns)
                pods = chosen(turns, number, MAX_PER_SECOND * self._interval)
                polls = [self._poll_later(session, pod) for pod in pods]
                await asyncio.gather(asyncio.sleep(self._interval), *polls)

    def _turns(self) -> list[tuple[PodView, Turn]]:
        now, memory = self._now(), self._memory
        return [
            (
                pod,
                turn(
                    pod,
                    self._caches.jobs.get(pod.job),
                    silence=memory.silences.get(pod.job),
                    sample=memory.samples.get(pod.job),
                    late=pod.running_since is not None and now - pod.running_since > self._patience,
                    patience=self._patience,
                ),
            )
            for pod in self._caches.pods.trainers()
        ]

    async def _poll_later(self, session: aiohttp.ClientSession, pod: PodView) -> None:
        offset = _place(pod) % 997 / 997 + random.uniform(0, JITTER)
        await asyncio.sleep(self._interval * offset / (1 + JITTER))
        await self._ask(session, pod)

    async def _poll_ending(self, session: aiohttp.ClientSession) -> None:
        """Asks a trainer at once when its pod is to end: it may leave no message, and come to no turn."""
        asked: set[str] = set()
        while True:
            ending = [pod for pod in self._caches.pods.trainers() if _is_ending(pod)]
            polls = [self._ask(session, pod) for pod in ending if pod.uid not in asked]
            asked = {pod.uid for pod in ending}
            await asyncio.gather(asyncio.sleep(ENDING_SECONDS), *polls)

    async def _ask(self, session: aiohttp.ClientSession, pod: PodView) -> None:
        async with self._slots:
            heard = await self._poll(session, pod)
        job = self._caches.jobs.get(pod.job)
        if job is None:
            return  # the job was deleted in the meantime, and its memory must stay empty
        if isinstance(heard, Silence):
            self._memory.silences[pod.job] = self._lengthened(heard, self._memory.silences.get(pod.job))
            return
        if _is_of(heard, pod, job):
            self._memory.silences.pop(pod.job, None)
            await self._keep(pod, job, heard)
            if missed_the_signal(pod, self._now()) or (pod.sync is not None and pod.deleted is not None):
                await self._stop(session, pod)

    def _lengthened(self, silence: Silence, before: Silence | None) -> Silence:
        now = self._now()
        began = before.began if before is not None and before.pod_uid == silence.pod_uid else None
        return replace(silence, began=began or now, lasted=now - (began or now))

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
        return f"http://{host}:{self._port}{path}"

    async def _poll(self, session: aiohttp.ClientSession, pod: PodView) -> Progress | Silence:
        try:
            async with session.get(self._url(pod, "/progress"), allow_redirects=False) as reply:
                text = (await _body(reply)).decode()
            progress = Progress.from_json(text)
        except NO_RESPONSE as error:  # it may not listen yet, be gone, or be another program
            return Silence(pod_uid=pod.uid, refused=_reached(error))
        return bounded(progress) or Silence(pod_uid=pod.uid, refused=True)

    async def _keep(self, pod: PodView, job: Job, progress: Progress) -> None:
        sample = Sample(progress=progress, at=self._now())
        if pod.attempt != job.status.attempt:
            return
        self._memory.samples[pod.job] = sample
        if progress_due(job.status, sample, timedelta.max):
            self._queue.add(pod.job)
        elif not _is_ending(pod) and progress_due(job.status, sample, self._memory.write_interval):
            await self._write(job, sample)

    async def _write(self, job: Job, sample: Sample) -> None:
        """Writes further steps into the status. A failure is no loss: the next ones are due at once."""
        record = job.status.current
        if job.status.terminal or record is None or record.cause or job.old_status is not None:
            return
        pods = self._caches.pods.of(job.key)
        o = Observed(now=sample.at, job=job, pods=pods, default_pool=self._default_pool)
        try:
            written = await patch_status(job, with_progress(job.status, o, sample), self._cluster)
        except OperatorError as error:
            logger.debug("%s: its progress is not written: %s", job.key, error)
        else:
            self._caches.jobs.put(written)


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
