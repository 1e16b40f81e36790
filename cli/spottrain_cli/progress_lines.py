"""What `spottrain watch` says: one line of figures, and a sentence for each change. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from spottrain.core.log_format import duration

from spottrain_cli import figures, timeline
from spottrain_cli.jobs import Attempt, Job

STALE_SECONDS: Final = 90.0
"""The operator writes further steps once a minute; older figures are said to be old."""


def line(job: Job, now: datetime) -> str:
    """Returns step, loss, speed, time left and the age of the checkpoint; the phase without them."""
    shown = job.progress
    parts = [f"{figures.steps_word(job)} {figures.step(job)}"] if shown.step is not None else []
    parts += [f"loss {figures.loss(job)}"] if shown.loss is not None else []
    if not job.ended:
        parts += [f"{shown.samplesPerSecond:,.4g} samples/s"] if shown.samplesPerSecond else []
        parts += [f"{figures.left(job)} left"] if shown.etaSeconds is not None else []
        parts += [f"saved {figures.since(shown.saved, now)} ago"] if shown.saved is not None else []
        parts += _age(job, now)
    return ", ".join(parts) or f"{job.phase or timeline.UNSEEN}"


def _age(job: Job, now: datetime) -> list[str]:
    seconds = (now - job.progress.pollTime).total_seconds() if job.progress.pollTime is not None else 0.0
    return [f"as of {duration(seconds)} ago"] if seconds > STALE_SECONDS else []


def share(job: Job) -> float | None:
    """Returns which part of the steps is done; None where their number is not known."""
    step, total = job.progress.step, job.progress.totalSteps
    return min(1.0, step / total) if step is not None and total else None


def news(before: Job | None, job: Job) -> Iterator[str]:
    """Yields what has changed since the last look: phase, reasons, attempts that ended or began."""
    told = set()
    if before is None or before.phase != job.phase:
        yield timeline.title(job)
    else:
        told = {each.reason for each in timeline.sentences(before)}
    for each in timeline.sentences(job):
        if each.reason not in told:
            yield f"{each.type}: {each.message}"
    lost = timeline.losses(job)
    for attempt in job.attempts if before is not None else ():
        old = before.record(attempt.number) if before is not None else None
        yield from _attempt(attempt, old, lost.get(attempt.number))


def _attempt(attempt: Attempt, old: Attempt | None, lost: timeline.Loss | None) -> Iterator[str]:
    name = f"attempt {attempt.number}"
    if old is None:
        yield f"{name} begins"
    if attempt.cause and not (old is not None and old.cause):
        yield ": ".join(filter(None, (f"{name} ended, {attempt.cause}", attempt.evidence)))
    if attempt.stopping and not attempt.cause and not (old is not None and old.stopping):
        yield ": ".join(filter(None, (f"{name} is stopping, {attempt.stopping}", attempt.evidence)))
    if attempt.node and old is not None and not old.node:
        yield f"{name} is on node {attempt.node}"
    if attempt.firstStepTime is not None and old is not None and old.firstStepTime is None:
        yield f"{name} trains, from step {attempt.startStep or 0:,} on"
    if lost is not None and lost.steps and old is not None and old.endTime is None:
        yield f"{name} {timeline.loss_words(lost)}"
