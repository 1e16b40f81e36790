"""Whether a training gets on no more. Pure; called by plan.py.

The trainer measures by its own clock how long it has not got on, and which limit holds in what it does now
(none while it waits at its gate, restores or compiles); the operator ends it. A trainer that does not answer
is no hang by that alone, for the network between may be at fault: only where a person has set hangTimeout.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from spottrain_operator.model import Ending, Observed, Sample
from spottrain_operator.names import Cause


def stalled(o: Observed) -> Ending | None:
    sample, until = _sample(o), due(o)
    if sample is None or until is None or o.now < until:
        return None
    progress = sample.progress
    asked = f"it was asked at {sample.at:%H:%M:%S} UTC"
    idle, limit = (progress.idleSeconds or 0.0), (progress.hangSeconds or 0.0)
    words = (
        f"no progress since step {progress.step} ({progress.state}) for {idle:.0f} s when {asked}, and the "
        f"limit is {limit:.0f} s (failurePolicy.hangTimeoutSeconds, else by the measured step time); the "
        "stacks of its threads are in its log"
    )
    return Ending(cause=Cause.STALLED, evidence=words, charged=True)


def due(o: Observed) -> datetime | None:
    """When the running attempt counts as stalled, by what its trainer said last."""
    sample = _sample(o)
    if sample is None or sample.progress.hangSeconds is None or sample.progress.idleSeconds is None:
        return None
    left = timedelta(seconds=sample.progress.hangSeconds - sample.progress.idleSeconds)
    silence_counts = o.job.spec is not None and o.job.spec.failure_policy.hang_timeout_seconds is not None
    if left > timedelta(0) and not silence_counts:
        return None  # the next answer will tell
    return sample.at + max(left, timedelta(0))


def _sample(o: Observed) -> Sample | None:
    found = o.sample
    return found if found is not None and found.progress.attempt == o.job.status.attempt else None
