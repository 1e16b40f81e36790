"""What a change of status says in seconds and counts, for the operator's metrics. Pure.

Each is measured once: with the write that records the end of an attempt, or the change of a condition.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from spottrain_operator.api.bookkeeping import Bookkeeping
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, Status
from spottrain_operator.io import metrics
from spottrain_operator.io.metrics import Measurement
from spottrain_operator.names import Cause, Condition
from spottrain_operator.policies.cause import SKEW, notices_of
from spottrain_operator.policies.pod_end import termination_message_of


def measurements_between(o: Observed, new: Status, books: Bookkeeping) -> tuple[Measurement, ...]:
    rules = (_causes, _ends, _recovery, _first_step)
    found = tuple(measurement for rule in rules for measurement in rule(o, new))
    return (*found, *_lost(o, books))


def _causes(o: Observed, new: Status) -> Iterator[Measurement]:
    """Yields the attempts that were given up, and those of them that are interruptions."""
    interrupted = new.interruptions > o.job.status.interruptions
    for record in new.attempts:
        before = o.job.status.record(record.number)
        if not record.cause or (before is not None and before.cause):
            continue
        yield Measurement(metrics.ATTEMPTS_ENDED, 1, (record.cause,))
        if interrupted:
            labels = (record.cause, _source(record, o), record.capacity_type)
            yield Measurement(metrics.INTERRUPTIONS, 1, labels)


def _ends(o: Observed, new: Status) -> Iterator[Measurement]:
    """Yields how long the trainers of an attempt that has ended took to know of its end, and to save."""
    for record in new.attempts:
        before = o.job.status.record(record.number)
        if record.ended is None or (before is not None and before.ended is not None):
            continue
        for pod in (p for p in o.pods if p.attempt == record.number):
            yield from _end(pod, o)


def _end(pod: PodView, o: Observed) -> Iterator[Measurement]:
    word = termination_message_of(pod)
    if word is None or word.signalledAt is None:
        return
    seen = min((n.seen for n in notices_of(pod, o) if n.seen is not None), default=None)
    # Earlier it was stopped for another cause, and later than now by no clock.
    if seen is not None and seen.timestamp() <= word.signalledAt <= (o.now + SKEW).timestamp():
        yield Measurement(metrics.NOTICE_TO_SIGNAL, word.signalledAt - seen.timestamp())
    if word.durableSeconds is not None:
        yield Measurement(metrics.SIGNAL_TO_DURABLE, min(word.durableSeconds, _seconds(pod.created, o.now)))


def _recovery(o: Observed, new: Status) -> Iterator[Measurement]:
    """Yields how long an interruption lasted, until the next attempt ran and until it trained."""
    old = o.job.status
    if (since := old.interruption_time) is None:
        return
    if not old.is_true(Condition.RUNNING) and new.is_true(Condition.RUNNING):
        yield Measurement(metrics.INTERRUPTION_TO_RUNNING, _seconds(since, o.now))
    if new.interruption_time is None and not new.terminal:
        yield Measurement(metrics.INTERRUPTION_TO_TRAINING, _seconds(since, o.now))


def _first_step(o: Observed, new: Status) -> Iterator[Measurement]:
    """Yields how long the attempt took from its nodes to its first own step."""
    now, before = new.current, o.job.status.record(new.attempt)
    if now is None or now.stepped is None or now.bound is None or (before and before.stepped):
        return
    resumed = "true" if now.start_step else "false"
    yield Measurement(metrics.START_TO_STEP, _seconds(now.bound, now.stepped), (resumed,))


def _source(record: AttemptRecord, o: Observed) -> str:
    """Returns who announced it, such as `AWS spot/instance-action`; "" without an announcement."""
    if record.cause != Cause.SPOT_NOTICE:
        return ""
    found = (n.source for p in o.pods if p.attempt == record.number for n in notices_of(p, o))
    return next(found, "")


def _lost(o: Observed, books: Bookkeeping) -> Iterator[Measurement]:
    """Yields the GPU-seconds of steps that attempts which are over have lost."""
    spec, lost = o.job.spec, books.times.closed.rollback - o.books.times.closed.rollback
    if lost > 0 and spec is not None and spec.gpus.count:
        yield Measurement(metrics.LOST_GPU_SECONDS, float(lost) * spec.gpus.count * spec.workers)


def _seconds(begin: datetime, end: datetime) -> float:
    return max(0.0, (end - begin).total_seconds())
