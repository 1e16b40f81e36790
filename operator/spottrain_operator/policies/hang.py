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
    what, where = _words(o)
    for pod in gang.team(o):  # a hang on known faulty hardware is not charged
        node = o.nodes.get(pod.node)
        if why := pod.unhealthy or (node.fault if node is not None else ""):
            words = f"node {pod.node}: {why}; {what}"
            return Ending(cause=Cause.NODE_FAULT, evidence=words, node=pod.node)
        if node is not None and not node.ready:
            words = f"node {pod.node} is not ready {node.unready}; {what}"
            return Ending(cause=Cause.NODE_LOST, evidence=words)
    return Ending(cause=Cause.STALLED, evidence=what + where, charged=True)


def _words(o: Observed) -> tuple[str, str]:
    """Returns what the trainer has not done, and where, with the limit."""
    sample = _sample(o)
    if sample is None:
        return (
            f"the trainer has not responded since its start, {LEAST_START} s at least",
            f" (limit: {LIMIT})",
        )
    progress, idle = sample.progress, sample.progress.idleSeconds or 0.0
    most = progress.hangSeconds or 0.0
    where = f"step {progress.step} ({progress.state}) (limit {most:.0f} s: {LIMIT})"
    if idle >= most:  # it reports that itself; otherwise it is silent
        return f"no progress for {idle:.0f} s", f" since {where}; its stack traces are in its log"
    silent = (o.now - sample.at).total_seconds()
    what = f"the trainer has not responded for {silent:.0f} s"
    return what, f", since {where}: it is stopped, or its network is cut"


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
    began = [p.running_since for p in gang.team(o) if p.running_since is not None]
    if seconds is None or len(began) < gang.size(o) or not o.job.managed:
        return None
    return max(*began, o.watched_since or o.now) + timedelta(seconds=max(seconds, LEAST_START))


def _sample(o: Observed) -> Sample | None:
    found = o.sample
    return found if found is not None and found.progress.attempt == o.job.status.attempt else None
