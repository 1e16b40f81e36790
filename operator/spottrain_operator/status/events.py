"""Kubernetes Events for a change of status, limited to what needs the user's attention. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    rules = (
        *(_interrupted, _interrupt_requested, _store_unreachable, _attempt, _lost, _restored, _edited),
        *(_notes, _warned, _ignored, _cannot_start, _running, _conditions),
    )
    return tuple(event for rule in rules for event in rule(o, old, new))


def _conditions(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    for kind, warn in WARN_WHEN.items():
        before, after = old.condition(kind), new.condition(kind)
        if after is None or after.reason in QUIET or not _differs(before, after):
            continue
        # The conditions Suspended and Admitted say it.
        suspended = after.reason in (Reason.SUSPENDED, Reason.MAX_COST_REACHED)
        queued = after.reason == Reason.WAITING_FOR_QUEUE and bool(o.job.queue)
        if (suspended and kind is not Condition.SUSPENDED) or (queued and kind is Condition.SCHEDULED):
            continue
        alarming = (after.status == warn and after.reason not in ORDERLY) or after.reason in ALARMING
        yield Event(warning=alarming, reason=after.reason, message=after.message)


def _running(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    running, before = new.condition(Condition.RUNNING), old.condition(Condition.RUNNING)
    if running is not None and running.reason in LOUD and _differs(before, running):
        yield Event(warning=True, reason=running.reason, message=running.message)


def _differs(before: ConditionStatus | None, after: ConditionStatus) -> bool:
    return before is None or (before.status, before.reason) != (after.status, after.reason)


def _interrupted(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    record, counted = new.record(old.attempt), new.interruptions != old.interruptions
    if record is not None and counted and record.cause != Cause.STORE_UNREACHABLE:
        message = f"attempt {record.number}: {record.evidence}"
        yield Event(warning=True, reason=record.cause, message=message)


def _interrupt_requested(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    """Says once what becomes of a request to interrupt the job."""
    now, before = new.interrupt, old.interrupt
    if now is None or (before is not None and before.request == now.request):
        return
    record = new.record(now.attempt) if now.attempt is not None else None
    if record is None:
        yield Event(warning=True, reason=Reason.INTERRUPT_IGNORED, message=now.message)
    else:
        words = f"attempt {record.number} saves and ends: {record.evidence}"
        yield Event(warning=False, reason=Cause.INTERRUPT_REQUESTED, message=words)


def _store_unreachable(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    """Warns once at the first sign of an outage: from a trainer that runs, or from the end of an attempt."""
    if old.store_unreachable_time is None and new.store_unreachable_time is not None:
        record = new.record(old.attempt)
        said = new.progress.waiting_for if new.progress is not None else ""
        words = f"attempt {old.attempt}: {said or (record.evidence if record is not None else '')}"
        yield Event(warning=True, reason=Reason.STORE_UNREACHABLE, message=words)


def _attempt(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    """Reports each attempt after the first, which the job's conditions and its pods show by themselves."""
    past, record = new.previous, new.current
    if new.attempt == old.attempt or past is None:
        return
    why = ", ".join(filter(None, (past.cause, past.evidence)))
    ended = f"; attempt {past.number} ended: {why}" if past.cause else ""
    chose = f"; {record.capacity_type}: {record.choice}" if record is not None and record.choice else ""
    message = f"Started attempt {new.attempt}{ended}{chose}"
    yield Event(warning=False, reason=Reason.ATTEMPT_STARTED, message=message)


def _lost(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    """Warns once an attempt has ended with steps that are in no checkpoint, as soon as that is certain."""
    for record in new.attempts:
        if lost_steps(new, record, o) and _loss_known(new, record) and not _loss_known(old, record):
            yield Event(warning=True, reason=Reason.STEPS_LOST, message=lost_words(new, record, o))


def _loss_known(status: Status, record: AttemptRecord) -> bool:
    known = status.record(record.number)
    over = known is not None and bool(known.cause) and known.ended is not None
    return known is not None and over and (status.terminal or loss_is_certain(status, known))


def _restored(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    """Reports the step from which an attempt continues, once it has read its checkpoint."""
    before, now = old.record(new.attempt), new.record(new.attempt)
    if now is not None and now.start_step and (before is None or before.start_step is None):
        message = f"attempt {now.number} continues from step {now.start_step}"
        yield Event(warning=False, reason=Reason.RESTORED, message=message)


def _edited(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    """Warns at each change of an ended job's spec that it has no effect."""
    if old.terminal and old.observed_generation != new.observed_generation and (words := edited(new, o)):
        yield Event(warning=True, reason=Reason.JOB_HAS_ENDED, message=f"the job has ended{words}")


def _cannot_start(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    """Reports a start error once per occurrence: the reason alternates (ErrImagePull, ImagePullBackOff)."""
    before, now = old.record(new.attempt), new.record(new.attempt)
    began = now is not None and now.start_error_since and not (before and before.start_error_since)
    if began and (found := starting.blocked(o)) is not None:
        yield Event(warning=True, reason=found[1].reason, message=starting.sentence(o, new))


def _notes(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    if not old.attempt and new.attempt:
        for reason, words in trainer_pod.notes(o, new).items():
            yield Event(warning=True, reason=reason, message=words)


def _warned(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    """Reports a trainer's warning once; the same sentence with other numbers is not reported again."""
    before, now = old.progress.warning if old.progress else "", new.progress
    if now is not None and now.warning and _shape(now.warning) != _shape(before):
        tight = (now.emergency_seconds or 0) > TIGHT * (now.grace_seconds or 0)
        reason = Reason.CHECKPOINT_MAY_NOT_FIT if tight else Reason.TRAINER_WARNS
        yield Event(warning=True, reason=reason, message=now.warning)


def _ignored(o: Observed, old: Status, new: Status) -> Iterator[Event]:
    """Names once the fields of spec.training that the script's loop does not apply."""
    before, now = (s.progress.ignored_settings if s.progress else "" for s in (old, new))
    if now and now != before:
        message = (
            f"the script's loop does not apply these fields of spec.training: {now.replace(',', ', ')}; use "
            "what spottrain.job_settings(...) returns for them, or remove them (docs/job-settings.md)"
        )
        yield Event(warning=True, reason=Reason.FIELDS_IGNORED, message=message)


def _shape(sentence: str) -> str:
    return re.sub(r"[0-9]+([.,][0-9]+)*", "#", sentence)
