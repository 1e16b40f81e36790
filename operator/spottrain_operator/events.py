"""Kubernetes Events that a change of status is worth: only what a person acts on. Pure; called by plan.py."""

from __future__ import annotations

import re

from spottrain_operator import render
from spottrain_operator.api import ConditionStatus, Status
from spottrain_operator.conditions import TIGHT
from spottrain_operator.model import Event, Observed
from spottrain_operator.names import Condition, Reason
from spottrain_operator.policies import starting

WARN_WHEN = {
    Condition.ACCEPTED: "False",
    Condition.SCHEDULED: "False",
    Condition.STORE_REACHABLE: "False",
    Condition.INTERRUPTED: "True",
    Condition.RUNTIME_ATTACHED: "False",
    Condition.SETTINGS_APPLIED: "False",
    Condition.SUSPENDED: None,
    Condition.SUCCEEDED: None,
    Condition.FAILED: "True",
}
LOUD = frozenset({Reason.SIDECAR_CANNOT_START, Reason.NODE_NOT_READY, Reason.STILL_TRAINING})
"""Reasons of Running that are an Event."""
QUIET = frozenset(
    {Reason.WAITING_FOR_POD, Reason.VALID, Reason.BOUND, Reason.RECOVERED, Reason.RUNTIME_TRAINS}
)


def events_between(o: Observed, new: Status) -> tuple[Event, ...]:
    old = o.job.status
    found = [*_attempt(old, new), *_grace(o, old, new), *_warned(old, new), *_cannot_start(o, old, new)]
    running, before = new.condition(Condition.RUNNING), old.condition(Condition.RUNNING)
    if running is not None and running.reason in LOUD and _differs(before, running):
        found.append(Event(warning=True, reason=running.reason, message=running.message))
    for kind, warn in WARN_WHEN.items():
        before, after = old.condition(kind), new.condition(kind)
        if after is not None and after.reason not in QUIET and _differs(before, after):
            found.append(Event(warning=after.status == warn, reason=after.reason, message=after.message))
    return tuple(found)


def _differs(before: ConditionStatus | None, after: ConditionStatus) -> bool:
    return before is None or (before.status, before.reason) != (after.status, after.reason)


def _attempt(old: Status, new: Status) -> list[Event]:
    if new.attempt == old.attempt:
        return []
    since = f", from step {new.known_durable_step}" if new.known_durable_step is not None else ""
    return [Event(warning=False, reason=Reason.ATTEMPT_STARTED, message=f"attempt {new.attempt}{since}")]


def _cannot_start(o: Observed, old: Status, new: Status) -> list[Event]:
    """Once for each time that it begins: the kubelet's reason alternates (ErrImagePull, ImagePullBackOff)."""
    before, now = old.record(new.attempt), new.record(new.attempt)
    began = now is not None and now.start_error_since and not (before and before.start_error_since)
    found = starting.blocked(o)
    if not began or found is None:
        return []
    return [Event(warning=True, reason=found[1].reason, message=starting.sentence(o, new))]


def _grace(o: Observed, old: Status, new: Status) -> list[Event]:
    if o.job.spec is None or old.attempt or not new.attempt:
        return []
    return [Event(warning=True, reason=r, message=words) for r, words in render.notes(o, new).items()]


def _warned(old: Status, new: Status) -> list[Event]:
    """What the trainer warns of, once: the same sentence with other figures is no news."""
    before, now = old.progress.warning if old.progress else "", new.progress
    if now is None or not now.warning or _shape(now.warning) == _shape(before):
        return []
    tight = (now.emergency_seconds or 0.0) > TIGHT * (now.grace_seconds or 0.0)
    reason = Reason.CHECKPOINT_MAY_NOT_FIT if tight else Reason.TRAINER_WARNS
    return [Event(warning=True, reason=reason, message=now.warning)]


def _shape(sentence: str) -> str:
    return re.sub(r"[0-9]+([.,][0-9]+)*", "#", sentence)
