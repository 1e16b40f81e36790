"""Kubernetes Events for a change of status, limited to what needs the user's attention. Pure."""

from __future__ import annotations

import re
from decimal import Decimal

from spottrain_operator.api.observed import Event, Observed
from spottrain_operator.api.training_job import AttemptRecord, ConditionStatus, Status
from spottrain_operator.names import Cause, Condition, Reason
from spottrain_operator.policies import starting
from spottrain_operator.rendering import trainer_pod
from spottrain_operator.status.changes import loss_is_certain, lost_steps
from spottrain_operator.status.conditions import edited, lost_words

WARN_WHEN = {
    Condition.ACCEPTED: "False",
    Condition.ADMITTED: None,
    Condition.SCHEDULED: "False",
    Condition.ON_TIME: "False",
    Condition.SUSPENDED: None,
    Condition.SUCCEEDED: None,
    Condition.FAILED: "True",
}
TIGHT = Decimal("0.8")
"""Share of the grace period above which a save at a notice may not fit; the runtime warns from there on."""
LOUD = frozenset(
    {
        Reason.SIDECAR_CANNOT_START,
        Reason.NODE_NOT_READY,
        Reason.STILL_TRAINING,
        Reason.CANNOT_DELETE_CHECKPOINTS,
        Reason.NO_RUNTIME,
        Reason.RUNTIME_UNREACHABLE,
        Reason.NOT_TRAINING,
    }
)
"""Reasons of Running that create an Event."""
QUIET = frozenset(
    {
        Reason.WAITING_FOR_POD,
        Reason.VALID,
        Reason.BOUND,
        Reason.ON_SCHEDULE,
        Reason.WORK_UNKNOWN,
    }
)
ALARMING = frozenset({Reason.MAX_COST_REACHED, Reason.PRICE_UNKNOWN})
"""Reasons that need action whatever the condition."""
ORDERLY = frozenset({Reason.WAITING_FOR_BACKOFF, Reason.WAITING_FOR_QUEUE, Reason.PREDECESSOR_SAVES})
"""Reasons of Scheduled=False that need no action."""


def events_between(o: Observed, new: Status) -> tuple[Event, ...]:
    old = o.job.status
    found = [
        *_interrupted(old, new),
        *_interrupt_requested(old, new),
        *_store_unreachable(old, new),
        *_attempt(old, new),
        *_lost(o, old, new),
        *_restored(old, new),
        *_edited(o, old, new),
        *_grace(o, old, new),
        *_warned(old, new),
        *_ignored(old, new),
        *_cannot_start(o, old, new),
    ]
    running, before = new.condition(Condition.RUNNING), old.condition(Condition.RUNNING)
    if running is not None and running.reason in LOUD and _differs(before, running):
        found.append(Event(warning=True, reason=running.reason, message=running.message))
    for kind, warn in WARN_WHEN.items():
        before, after = old.condition(kind), new.condition(kind)
        if after is None or after.reason in QUIET or not _differs(before, after):
            continue
        if kind is Condition.SCHEDULED and after.reason in (Reason.SUSPENDED, Reason.MAX_COST_REACHED):
            continue  # the condition Suspended says it
        if kind is Condition.SCHEDULED and after.reason == Reason.WAITING_FOR_QUEUE and o.job.queue:
            continue  # the condition Admitted says it
        if kind is Condition.ADMITTED and after.reason in (Reason.SUSPENDED, Reason.MAX_COST_REACHED):
            continue
        alarming = (after.status == warn and after.reason not in ORDERLY) or after.reason in ALARMING
        found.append(Event(warning=alarming, reason=after.reason, message=after.message))
    return tuple(found)


def _differs(before: ConditionStatus | None, after: ConditionStatus) -> bool:
    return before is None or (before.status, before.reason) != (after.status, after.reason)


def _interrupted(old: Status, new: Status) -> list[Event]:
    record = new.record(old.attempt)
    if record is None or new.interruptions == old.interruptions or record.cause == Cause.STORE_UNREACHABLE:
        return []
    message = f"attempt {record.number}: {record.evidence}"
    return [Event(warning=True, reason=record.cause, message=message)]


def _interrupt_requested(old: Status, new: Status) -> list[Event]:
    """Says once what becomes of a request to interrupt the job."""
    now, before = new.interrupt, old.interrupt
    if now is None or (before is not None and before.request == now.request):
        return []
    record = new.record(now.attempt) if now.attempt is not None else None
    if record is None:
        return [Event(warning=True, reason=Reason.INTERRUPT_IGNORED, message=now.message)]
    words = f"attempt {record.number} saves and ends: {record.evidence}"
    return [Event(warning=False, reason=Cause.INTERRUPT_REQUESTED, message=words)]


def _store_unreachable(old: Status, new: Status) -> list[Event]:
    """Warns once at the first sign of an outage: from a trainer that runs, or from the end of an attempt."""
    if old.store_unreachable_time is not None or new.store_unreachable_time is None:
        return []
    record = new.record(old.attempt)
    said = new.progress.waiting_for if new.progress is not None else ""
    words = f"attempt {old.attempt}: {said or (record.evidence if record is not None else '')}"
    return [Event(warning=True, reason=Reason.STORE_UNREACHABLE, message=words)]


def _attempt(old: Status, new: Status) -> list[Event]:
    """Reports each attempt after the first, which the job's conditions and its pods show by themselves."""
    past = new.previous
    if new.attempt == old.attempt or past is None:
        return []
    record = new.current
    why = ", ".join(filter(None, (past.cause, past.evidence)))
    ended = f"; attempt {past.number} ended: {why}" if past.cause else ""
    chose = f"; {record.capacity_type}: {record.choice}" if record is not None and record.choice else ""
    message = f"Started attempt {new.attempt}{ended}{chose}"
    return [Event(warning=False, reason=Reason.ATTEMPT_STARTED, message=message)]


def _lost(o: Observed, old: Status, new: Status) -> list[Event]:
    """Warns once an attempt has ended with steps that are in no checkpoint, as soon as that is certain."""
    return [
        Event(warning=True, reason=Reason.STEPS_LOST, message=lost_words(new, record, o))
        for record in new.attempts
        if lost_steps(new, record, o) and _loss_known(new, record) and not _loss_known(old, record)
    ]


def _loss_known(status: Status, record: AttemptRecord) -> bool:
    known = status.record(record.number)
    over = known is not None and bool(known.cause) and known.ended is not None
    return known is not None and over and (status.terminal or loss_is_certain(status, known))


def _restored(old: Status, new: Status) -> list[Event]:
    """Reports the step from which an attempt continues, once it has read its checkpoint."""
    before, now = old.record(new.attempt), new.record(new.attempt)
    if now is None or not now.start_step or (before is not None and before.start_step is not None):
        return []
    message = f"attempt {now.number} continues from step {now.start_step}"
    return [Event(warning=False, reason=Reason.RESTORED, message=message)]


def _edited(o: Observed, old: Status, new: Status) -> list[Event]:
    """Warns at each change of an ended job's spec that it has no effect."""
    words = edited(new, o)
    if not words or not old.terminal or old.observed_generation == new.observed_generation:
        return []
    return [Event(warning=True, reason=Reason.JOB_HAS_ENDED, message=f"the job has ended{words}")]


def _cannot_start(o: Observed, old: Status, new: Status) -> list[Event]:
    """Reports a start error once per occurrence: the reason alternates (ErrImagePull, ImagePullBackOff)."""
    before, now = old.record(new.attempt), new.record(new.attempt)
    began = now is not None and now.start_error_since and not (before and before.start_error_since)
    found = starting.blocked(o)
    if not began or found is None:
        return []
    return [Event(warning=True, reason=found[1].reason, message=starting.sentence(o, new))]


def _grace(o: Observed, old: Status, new: Status) -> list[Event]:
    if o.job.spec is None or old.attempt or not new.attempt:
        return []
    return [Event(warning=True, reason=r, message=words) for r, words in trainer_pod.notes(o, new).items()]


def _warned(old: Status, new: Status) -> list[Event]:
    """Reports a trainer's warning once; the same sentence with other numbers is not reported again."""
    before, now = old.progress.warning if old.progress else "", new.progress
    if now is None or not now.warning or _shape(now.warning) == _shape(before):
        return []
    tight = (now.emergency_seconds or 0) > TIGHT * (now.grace_seconds or 0)
    reason = Reason.CHECKPOINT_MAY_NOT_FIT if tight else Reason.TRAINER_WARNS
    return [Event(warning=True, reason=reason, message=now.warning)]


def _ignored(old: Status, new: Status) -> list[Event]:
    """Names once the fields of spec.training that the script's loop does not apply."""
    before, now = (s.progress.ignored_settings if s.progress else "" for s in (old, new))
    if not now or now == before:
        return []
    message = (
        f"the script's loop does not apply these fields of spec.training: {now.replace(',', ', ')}; use "
        "what spottrain.job_settings(...) returns for them, or remove them (docs/job-settings.md)"
    )
    return [Event(warning=True, reason=Reason.FIELDS_IGNORED, message=message)]


def _shape(sentence: str) -> str:
    return re.sub(r"[0-9]+([.,][0-9]+)*", "#", sentence)
