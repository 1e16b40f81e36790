"""Whether a training gets on no more. Pure; called by plan.py.

The trainer measures by its own clock how long it has not got on, and which limit holds in what it does now
(none while it waits at its gate, restores or compiles); the operator ends it. A trainer that does not answer
is no hang by that alone, for the network between may be at fault: only where a person has set hangTimeout.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.model import Ending, Observed, Sample
from spottrain_operator.names import Cause
from spottrain_operator.policies import gang

LEAST_START: Final = 120
"""Seconds that a trainer has in any case until it first answers: imports from a cold disk are no hang."""


def stalled(o: Observed) -> Ending | None:
    until = due(o)
    if until is None or o.now < until:
        return None
    hint = "the stacks of its threads are in its log"
    limit = "failurePolicy.hangTimeoutSeconds, else by the measured step time"
    sample = _sample(o)
    if sample is None:
        words = (
            f"the trainer has not answered since it was started, for longer than {limit} allows (at least "
            f"{LEAST_START} s); {hint}"
        )
        return Ending(cause=Cause.STALLED, evidence=words, charged=True)
    progress = sample.progress
    idle, most = (progress.idleSeconds or 0.0), (progress.hangSeconds or 0.0)
    words = (
        f"no progress since step {progress.step} ({progress.state}) for {idle:.0f} s when it was asked at "
        f"{sample.at:%H:%M:%S} UTC, and the limit is {most:.0f} s ({limit}); {hint}"
    )
    return Ending(cause=Cause.STALLED, evidence=words, charged=True)


def due(o: Observed) -> datetime | None:
    """When the running attempt counts as stalled, by what its trainer said last."""
    sample, by_person = _sample(o), _by_person(o)
    if sample is None:
        return _silent_from_the_start(o, by_person)
    if sample.progress.hangSeconds is None or sample.progress.idleSeconds is None:
        return None
    left = timedelta(seconds=sample.progress.hangSeconds - sample.progress.idleSeconds)
    if left > timedelta(0) and by_person is None:
        return None  # the next answer will tell
    return sample.at + max(left, timedelta(0))


def _by_person(o: Observed) -> int | None:
    return o.job.spec.failure_policy.hang_timeout_seconds if o.job.spec is not None else None


def _silent_from_the_start(o: Observed, seconds: int | None) -> datetime | None:
    """Counted from when this process could first hear of it, and all of a gang runs: before that its ranks
    wait for each other, as long as it takes. An image without our runtime need not answer."""
    managed = o.job.spec is not None and o.job.spec.checkpoint.managed
    began = [p.running_since for p in gang.team(o) if p.running_since is not None]
    if seconds is None or len(began) < gang.size(o) or not managed:
        return None
    return max(*began, o.watched_since or o.now) + timedelta(seconds=max(seconds, LEAST_START))


def _sample(o: Observed) -> Sample | None:
    found = o.sample
    return found if found is not None and found.progress.attempt == o.job.status.attempt else None
