"""One job on the local cluster, from its creation to its end, and the notices that its nodes get."""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spottrain.contract import PROGRESS_PORT, Progress

from spottrain_cli.errors import UsageError
from spottrain_cli.pods import JOB_LABEL, TRAINERS
from spottrain_cli.rehearsal.local_cluster import LocalCluster, Watch
from spottrain_cli.rehearsal.record import Attempt, Reclaim, Record

Json = dict[str, Any]
LOOK_SECONDS: Final = 0.1
PROGRESS_SECONDS: Final = 0.5
"""For one response of a trainer."""
SLACK_SECONDS: Final = 5.0
"""After a node's end, until what was on it has ended for the API server too."""
WAITING_SECONDS: Final = 20.0
"""From a job's start, after which it is said what it waits for."""
LEAST_SECONDS: Final = 1.0
"""Of an attempt whose steps nobody sees, before its node is reclaimed."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where jobs of a rehearsal run."""

    cluster: LocalCluster
    namespace: str
    seconds: float
    """Longest time of one job."""
    say: Callable[[str], None]


Look = Callable[[Record], bool]
"""Called ten times a second with what was seen so far; True ends the job's run."""


def to_end(stage: Stage, job: Json, look: Look) -> Record:
    """Creates the job and follows it to its end, or to the limit of time.

    Raises UsageError where the API server or the operator refuses the job.
    """
    name = job["metadata"]["name"]
    record = Record(name=name, began_at=time.time())
    scope = ("-n", stage.namespace)
    stage.cluster.apply(stage.namespace, [job])
    watches = [
        Watch(
            stage.cluster,
            ["pods", *scope, "-l", f"{TRAINERS},{JOB_LABEL}={name}"],
            lambda pod: record.on_pod(pod, time.time()),
        ),
        Watch(stage.cluster, ["tj", *scope, f"--field-selector=metadata.name={name}"], record.on_job),
    ]
    said: set[str] = set()
    try:
        while not record.over and not record.timed_out:
            _ask_trainer(record)
            _say_news(stage, record, said)
            if look(record):
                break
            _go_on(stage, record, watches)
            time.sleep(LOOK_SECONDS)
        _say_news(stage, record, said)
    finally:
        for watch in watches:
            watch.stop()
    record.ended_at = time.time()
    return record


def _go_on(stage: Stage, record: Record, watches: Sequence[Watch]) -> None:
    """Raises UsageError, or ends the run, where waiting is of no use."""
    if record.refused:
        raise UsageError(f"the operator does not accept the job: {record.refused}")
    record.timed_out = time.time() - record.began_at > stage.seconds
    if any(watch.broken for watch in watches):  # the API server ends a watch after an hour at most
        stage.cluster.ask("status")
        record.on_job(_job(stage, record.name))


def _job(stage: Stage, name: str) -> Json:
    found = stage.cluster.items("tj", "-n", stage.namespace)
    return next((job for job in found if job["metadata"]["name"] == name), {})


def _ask_trainer(record: Record) -> None:
    """Reads the progress of rank 0. A trainer that does not respond is one that starts or ends."""
    attempt = record.latest
    if attempt is None or not attempt.trains or not attempt.address:
        return
    connection = http.client.HTTPConnection(attempt.address, PROGRESS_PORT, timeout=PROGRESS_SECONDS)
    try:
        connection.request("GET", "/progress")
        seen = Progress.from_json(connection.getresponse().read().decode())
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return
    finally:
        connection.close()
    if seen.attempt == attempt.number:
        record.on_progress(attempt.number, seen, time.time())


def _say_news(stage: Stage, record: Record, said: set[str]) -> None:
    texts = [text for attempt in record.in_order() for text in _news(attempt)]
    if time.time() - record.began_at > WAITING_SECONDS and (why := record.waits):
        texts.append(f"waits: {why}")
    for text in texts:
        if text not in said:
            said.add(text)
            stage.say(f"{record.name}: {text}")


def _news(attempt: Attempt) -> list[str]:
    news = []
    if attempt.running_at is not None:
        news.append(f"attempt {attempt.number} runs on {attempt.nodes.get(0, 'a node')}")
    if attempt.first_step_at is not None:
        begin = f" from step {attempt.start_step}" if attempt.start_step else ""
        news.append(f"attempt {attempt.number} trains{begin}")
    if attempt.ended_at is not None:
        news.append(f"attempt {attempt.number} ended with exit code {attempt.exit_code}")
    return news


@dataclass
class Reclaimer:
    """Takes nodes away from a job at its moments, one at a time: in steps, or in seconds of training."""

    stage: Stage
    moments: Sequence[float]
    by_steps: bool
    notice_seconds: float
    chance: random.Random
    _pending: Reclaim | None = None
    _deadline: float = 0.0
    _taken: int = field(default=0)

    def __call__(self, record: Record) -> bool:
        if self._pending is not None:
            self._restore_when_over(record)
        elif self._taken < len(self.moments):
            attempt = record.latest
            if attempt is not None and attempt.trains and self._is_due(record, attempt):
                self._reclaim(record, attempt)
        return False

    def _is_due(self, record: Record, attempt: Attempt) -> bool:
        moment, now = self.moments[self._taken], time.time()
        if self.by_steps:
            return attempt.steps_of_its_own >= 1 and (attempt.step or 0) >= moment
        return attempt.seconds(now) >= LEAST_SECONDS and record.seconds(now) >= moment

    def _reclaim(self, record: Record, attempt: Attempt) -> None:
        node = self.chance.choice(sorted(set(attempt.nodes.values())))
        published = self.stage.cluster.reclaim(node, self.notice_seconds)
        step = attempt.step if self.by_steps else None
        self._pending = Reclaim(
            attempt=attempt.number, node=node, step=step, state=attempt.state, published=published,
            notice_seconds=self.notice_seconds,
        )  # fmt: skip
        record.reclaims.append(self._pending)
        self._taken += 1
        self._deadline = published + self.notice_seconds
        where = f" after step {step}" if step is not None else ""
        self.stage.say(f"{record.name}: notice: {node} ends in {self.notice_seconds:.0f} s{where}")

    def _restore_when_over(self, record: Record) -> None:
        """Once nothing of the job is on the node, or the node has ended."""
        assert self._pending is not None
        attempt = record.attempts[self._pending.attempt]
        ended = bool(record.of_status(attempt.number).get("endTime"))
        if ended or time.time() > self._deadline + SLACK_SECONDS:
            self.stage.cluster.restore(self._pending.node)
            self._pending = None
