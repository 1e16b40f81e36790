"""Detects a hung training. Pure.

The trainer measures the time without progress by its own clock, and which limit applies to its present phase
(none while it waits at its gate, restores or compiles). The operator ends it. A trainer that does not respond
counts as hung only if the user has set hangTimeout, because the network may be at fault.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.observed import Ending, Observed, Sample
from spottrain_operator.names import Cause
from spottrain_operator.policies import gang

LEAST_START: Final = 120
"""Minimum seconds until a trainer's first response: imports from a cold disk are not a hang."""


LIMIT: Final = "failurePolicy.hangTimeoutSeconds, or by the time of a step"
UNANSWERED: Final = timedelta(seconds=30)
"""Minimum silence that counts as the trainer's fault; it is polled every 10 s, and a response may be lost."""


def stalled(o: Observed) -> Ending | None:
    until = due(o)
    if until is None or o.now < until:
        return None
    ending = Ending(cause=Cause.STALLED, evidence=_words(o), charged=True)
    return _hardware(o, ending) or ending


def _words(o: Observed) -> str:
    sample = _sample(o)
    if sample is None:
        return f"the trainer has not responded since its start, {LEAST_START} s at least (limit: {LIMIT})"
    progress, most = sample.progress, f"limit {sample.progress.hangSeconds or 0:.0f} s: {LIMIT}"
    where = f"step {progress.step} ({progress.state})"
    if _idle(sample):
        return f"{_short(o, sample)} since {where} ({most}); its stack traces are in its log"
    return f"{_short(o, sample)}, since {where} ({most}): it is stopped, or its network is cut"


def _short(o: Observed, sample: Sample) -> str:
    if _idle(sample):
        return f"no progress for {sample.progress.idleSeconds or 0:.0f} s"
    return f"the trainer has not responded for {(o.now - sample.at).total_seconds():.0f} s"


def _idle(sample: Sample) -> bool:
    """Returns whether the trainer itself reports that it is past its limit; otherwise it is silent."""
    return (sample.progress.idleSeconds or 0.0) >= (sample.progress.hangSeconds or 0.0)


def _hardware(o: Observed, ending: Ending) -> Ending | None:
    """Attributes a hang on known faulty hardware to the node, so that it is not charged."""
    sample = _sample(o)
    hang = _short(o, sample) if sample is not None else ending.evidence
    for pod in gang.team(o):
        node = o.nodes.get(pod.node)
        if pod.unhealthy or (node is not None and node.fault):
            why = pod.unhealthy or (node.fault if node is not None else "")
            words = f"node {pod.node}: {why}; {hang}"
            return Ending(cause=Cause.NODE_FAULT, evidence=words, node=pod.node)
        if node is not None and not node.ready:
            words = f"node {pod.node} is not ready {node.unready}; {hang}"
            return Ending(cause=Cause.NODE_LOST, evidence=words)
    return None


def due(o: Observed) -> datetime | None:
    """Returns when the running attempt counts as stalled, by its trainer's last response."""
    sample, spec = _sample(o), o.job.spec
    by_person = spec.failure_policy.hang_timeout_seconds if spec is not None else None
    if sample is None:
        return _silent_from_the_start(o, by_person)
    if sample.progress.hangSeconds is None or sample.progress.idleSeconds is None:
        return None
    left = timedelta(seconds=sample.progress.hangSeconds - sample.progress.idleSeconds)
    if left <= timedelta(0):
        return sample.at
    if by_person is None:
        return None  # the next response decides
    return sample.at + max(left, UNANSWERED)


def _silent_from_the_start(o: Observed, seconds: int | None) -> datetime | None:
    """Returns when a trainer that never responded counts as stalled. The time starts when this process polls
    and the whole gang runs: until then ranks wait for each other. Without our runtime there is no limit."""
    managed = o.job.spec is not None and o.job.spec.checkpoint.managed
    began = [p.running_since for p in gang.team(o) if p.running_since is not None]
    if seconds is None or len(began) < gang.size(o) or not managed:
        return None
    return max(*began, o.watched_since or o.now) + timedelta(seconds=max(seconds, LEAST_START))


def _sample(o: Observed) -> Sample | None:
    found = o.sample
    return found if found is not None and found.progress.attempt == o.job.status.attempt else None
