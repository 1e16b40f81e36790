"""Observed -> Plan, pure: no await, clock, client or logger. Called by reconcile.py alone.

The rules are asked in order; the first that answers has decided. What follows from any decision (records,
conditions, which pods must go or come) is worked out after it, from the new status alone, so that a crash
between any two writes is mended by planning again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spottrain.contract import Outcome

from spottrain_operator import render
from spottrain_operator.api import AttemptRecord, Status
from spottrain_operator.conditions import with_conditions
from spottrain_operator.events import events_between
from spottrain_operator.model import (
    Action,
    Annotate,
    Check,
    Create,
    Decision,
    Delete,
    Ending,
    Notice,
    Observed,
    Plan,
    PodView,
    Release,
)
from spottrain_operator.names import Cause, Condition, Reason, pod_name
from spottrain_operator.policies import avoid, restart
from spottrain_operator.policies.cause import by_notice, notice_of, why, word_of
from spottrain_operator.policies.gone import alive, ended, node_dead, over, saving_predecessor
from spottrain_operator.status import (
    progress_due,
    with_back_fill,
    with_condition,
    with_final_word,
    with_pods,
    with_progress,
    with_record,
    with_unknown_progress,
    with_vanished,
)

Rule = Callable[[Observed], Decision | None]
LEAST_GRACE: Final = 2
"""Seconds; a DELETE with less would be a SIGKILL."""
HURRY: Final = timedelta(seconds=10)
"""Before a deadline this near, SIGTERM does not wait for the file."""
PREDECESSOR_LOOK: Final = timedelta(seconds=2)
"""Between two looks at a deleted job's pod, whose events wake that job and not this one."""
AVOIDS_LOOK: Final = timedelta(seconds=30)
"""Between two looks at the nodes that a pod without a node is kept off; they wake no job."""


def plan(o: Observed) -> Plan:
    decision = decide(o)
    status = _settled(o, decision.status)
    changed = status != o.job.status
    before = (*_stale_first(o), *decision.before)
    return Plan(
        reason=decision.reason,
        message=decision.message,
        before=before,
        status=status if changed else None,
        after=tuple(_after(o, status, before)),
        events=events_between(o, status) if changed else (),
        recheck_after=_recheck_after(o, status),
    )


def decide(o: Observed) -> Decision:
    found = next((d for rule in RULES if (d := rule(o)) is not None), None)
    return found or Decision(reason="Keep", message="nothing to decide", status=o.job.status)


# --- rules --------------------------------------------------------------------------------------------
def finished(o: Observed) -> Decision | None:
    """Terminal is terminal, whatever is deleted around it."""
    return _keep(o, "Finished", "the job has ended") if o.job.status.terminal else None


def leaving(o: Observed) -> Decision | None:
    return _keep(o, "Leaving", "the job is being deleted") if o.job.deleting else None


def unreadable(o: Observed) -> Decision | None:
    return _keep(o, Reason.INVALID_SPEC, o.job.invalid) if o.job.spec is None else None


def done_by_any(o: Observed) -> Decision | None:
    """Only the owner of HEAD can say done, so it holds whichever attempt says it."""
    said = ((p, word_of(p)) for p in o.pods)
    pod = next((p for p, word in said if word is not None and word.outcome is Outcome.DONE), None)
    return _completed(o, pod, why(pod, o)) if pod is not None else None


def attempt_over(o: Observed) -> Decision | None:
    pod = _current(o)
    if pod is None or not over(pod, o):
        return None
    ending = why(pod, o)
    if ending.cause is Cause.DONE:
        return _completed(o, pod, ending)
    before = () if ended(pod) else (_removal(o, pod),)
    return replace(_given_up(o, ending), before=before)


def attempt_vanished(o: Observed) -> Decision | None:
    """It was seen and is no more (observe.py has asked the API server): somebody took our finalizer off."""
    record = o.job.status.record(o.job.status.attempt)
    if _current(o) is not None or record is None or record.started is None:
        return None
    return _given_up(o, Ending(cause=Cause.POD_DELETED, evidence=f"pod {record.pod} exists no more"))


def under_notice(o: Observed) -> Decision | None:
    """Tell it, delete it with the time that is left, and make its successor at once where that is wanted."""
    pod = _current(o)
    notice = notice_of(pod, o) if pod is not None else None
    if pod is None or notice is None or o.job.spec is None:
        return None
    left = (notice.deadline - o.now - o.limits.margin).total_seconds()
    grace = max(LEAST_GRACE, min(int(left), pod.grace))
    before: tuple[Action, ...] = ()
    if pod.deleted is None:
        before = () if pod.notice is not None else (Annotate(pod=pod, notice=notice),)
        if o.now < _delete_at(o, notice):
            return replace(_keep(o, Cause.SPOT_NOTICE, "the trainer is being told"), before=before)
        before = (*before, Delete(pod=pod, grace=grace))
    if not o.job.spec.replaces_during_notice:
        return replace(_keep(o, Cause.SPOT_NOTICE, "the attempt is told to save and end"), before=before)
    gate = (pod.deleted or o.now + timedelta(seconds=grace)) + o.limits.gate_slack
    decision = _given_up(o, by_notice(notice))
    gate = max(gate, decision.status.gate_until or gate)
    return replace(decision, status=replace(decision.status, gate_until=gate), before=before)


def _delete_at(o: Observed, notice: Notice) -> datetime:
    """A moment after it was told, so that its file has the deadline; at once where every second counts."""
    hurry = notice.deadline - o.now < HURRY
    return o.now if hurry else (o.told_at or o.now) + o.limits.told_lead


def avoids_in_vain(o: Observed) -> Decision | None:
    """Its pod is kept off a node that can be used again: one without that rule takes its place, uncounted."""
    pod = _current(o)
    free = avoid.free_again(o, pod) if pod is not None and avoid.may_be_in_vain(pod) else ()
    if pod is None or not free:
        return None
    evidence = f"pod {pod.name} was kept off {', '.join(free)}, which can be used again"
    ending = Ending(cause=Cause.REPLACED, evidence=evidence)
    status = _next_attempt(o, _judged(o, with_pods(o.job.status, o), pod.attempt, ending))
    return Decision(reason=Cause.REPLACED, message=evidence, status=status, before=(_removal(o, pod),))


def running(o: Observed) -> Decision | None:
    pod = _current(o)
    return _keep(o, "Running", f"pod {pod.name} has the attempt") if pod is not None else None


def not_admitted(o: Observed) -> Decision | None:
    return None if o.admitted else _keep(o, "Checking", "the API server has not accepted the pod yet")


def predecessor_saves(o: Observed) -> Decision | None:
    """The deleted job of this name still owns the checkpoints: a claim now would be refused for ever."""
    words = saving_predecessor(o)
    return _keep(o, Reason.PREDECESSOR_SAVES, words) if words and not o.job.status.attempt else None


def first_attempt(o: Observed) -> Decision | None:
    if o.job.status.attempt:
        return None
    return Decision(reason="Start", message="first attempt", status=_next_attempt(o, o.job.status))


RULES: Final[tuple[Rule, ...]] = (
    finished,
    leaving,
    unreadable,
    done_by_any,
    attempt_over,
    attempt_vanished,
    under_notice,
    avoids_in_vain,
    running,
    not_admitted,
    predecessor_saves,
    first_attempt,
)


# --- what rules are made of ---------------------------------------------------------------------------
def _current(o: Observed) -> PodView | None:
    return next((p for p in o.pods if p.attempt == o.job.status.attempt), None)


def _keep(o: Observed, reason: str, message: str) -> Decision:
    return Decision(reason=reason, message=message, status=o.job.status)


def _completed(o: Observed, pod: PodView, ending: Ending) -> Decision:
    status = with_final_word(_judged(o, o.job.status, pod.attempt, ending), o, word_of(pod))
    message = f"attempt {pod.attempt}: {ending.evidence}"
    status = with_condition(status, Condition.SUCCEEDED, True, Reason.COMPLETED, message, o=o)
    return Decision(reason=Reason.COMPLETED, message=message, status=status)


def _judged(o: Observed, status: Status, attempt: int, ending: Ending) -> Status:
    record = status.record(attempt)
    if record is None or record.cause:
        return status  # judged already (an interrupted attempt that got done after all keeps its cause)
    cause, evidence = str(ending.cause), ending.evidence[:4000]
    return with_record(status, replace(record, cause=cause, evidence=evidence, charged=ending.charged))


def _given_up(o: Observed, ending: Ending) -> Decision:
    """The current attempt is over or doomed: charge it, and go on or stop."""
    assert o.job.spec is not None
    policy, old = o.job.spec.failure_policy, o.job.status
    status = restart.counted(_judged(o, with_pods(old, o), old.attempt, ending), ending)
    stop: tuple[str, str] | None = restart.exhausted(status, policy, ending)
    if ending.cause is Cause.BAD_CONFIGURATION:  # no restart mends it
        stop = (ending.reason or ending.cause, ending.evidence)
    if not ending.charged:
        message = f"attempt {old.attempt}: {ending.evidence}"
        status = with_condition(status, Condition.INTERRUPTED, True, ending.cause, message, o=o)
    if stop is not None:
        status = with_condition(status, Condition.FAILED, True, *stop, o=o)
        return Decision(reason=stop[0], message=stop[1], status=status)
    status = replace(status, next_start=restart.next_start(status, policy, ending, o.now))
    return Decision(reason=ending.cause, message=ending.evidence, status=_next_attempt(o, status))


def _next_attempt(o: Observed, status: Status) -> Status:
    assert o.job.spec is not None
    number, key = status.attempt + 1, o.job.key
    record = AttemptRecord(
        number=number,
        pod=pod_name(key.name, key.uid, number),
        capacity_type=o.job.spec.capacity.type,
    )
    progress = replace(status.progress, state="", eta_seconds=None) if status.progress else None
    gate = status.gate_until if status.gate_until is not None and status.gate_until > o.now else None
    return with_record(replace(status, attempt=number, gate_until=gate, progress=progress), record)


# --- what follows from every decision -----------------------------------------------------------------
def _settled(o: Observed, status: Status) -> Status:
    """The status with all that pods and progress tell. Progress alone is written once in a while only."""
    unseen = not status.attempt and o.job.spec is not None and not o.admitted and o.refusal is None
    if o.job.deleting or unseen:
        return status
    told = _facts(o, with_unknown_progress(status, o))
    sample = o.sample
    if sample is None or status.terminal or sample.progress.attempt != status.attempt:
        return told
    if told == o.job.status and not progress_due(status, sample, o.limits.progress_interval):
        return told
    return _facts(o, with_progress(status, o, sample))


def _facts(o: Observed, status: Status) -> Status:
    status = with_back_fill(with_vanished(with_pods(status, o), o))
    note = render.grace_note(o.job.spec, o.default_pool) if o.job.spec else ""
    return with_conditions(status, o, note=note)


def _stale_first(o: Observed) -> Iterator[Action]:
    """First act of every reconcile: no pod of an attempt below the current one stays."""
    for pod in o.pods:
        if pod.attempt < o.job.status.attempt and pod.deleted is None:
            yield _removal(o, pod)


def _removal(o: Observed, pod: PodView) -> Delete:
    """With the pod's own grace, or by force where no kubelet would ever end it."""
    return Delete(pod=pod, grace=0 if node_dead(pod, o) and not ended(pod) else None)


def _after(o: Observed, status: Status, before: tuple[Action, ...]) -> Iterator[Action]:
    going = {a.pod.uid for a in before if isinstance(a, Delete)}
    for pod in o.pods:
        yield from _clear(o, status, pod, pod.uid in going)
    if not (status.terminal or o.job.deleting or o.job.spec is None):
        yield from _make(o, status)


def _clear(o: Observed, status: Status, pod: PodView, going: bool) -> Iterator[Action]:
    """Pods that have no future go, and are released once their outcome is written."""
    stale = pod.attempt < status.attempt
    # A finished job's pod stays for its logs, unless a container of it still holds the node.
    unwanted = stale or (status.terminal and alive(pod))
    stuck = pod.deleted is not None and bool(node_dead(pod, o)) and not ended(pod)
    if unwanted and not going and (pod.deleted is None or stuck):
        yield _removal(o, pod)
    outcome_written = stale or status.terminal
    if pod.holds_outcome and (o.job.deleting or (outcome_written and over(pod, o))):
        yield Release(pod=pod)


def _make(o: Observed, status: Status) -> Iterator[Action]:
    if not o.admitted:
        if not _refused(o):
            manifest = render.pod(o.job, replace(status, attempt=status.attempt + 1), o.default_pool)
            yield Check(manifest=manifest, generation=o.job.generation)
        return
    if not status.attempt:
        return
    missing = not any(p.attempt == status.attempt for p in o.pods)
    due = status.next_start is None or status.next_start <= o.now
    if missing and due and not _refused(o):
        manifest = render.pod(o.job, status, o.default_pool, avoid.doomed(o, status))
        yield Create(manifest=manifest, generation=o.job.generation, attempt=status.attempt)


def _refused(o: Observed) -> bool:
    """The API server has said no to this generation, and it is not yet time to ask again."""
    no = o.refusal
    return no is not None and no.generation == o.job.generation and o.now < no.at + no.retry


def _recheck_after(o: Observed, status: Status) -> timedelta | None:
    """When time alone will change the answer."""
    times = []
    if status.next_start is not None and not status.terminal:
        times.append(status.next_start)
    current = _current(o)
    if current is not None and current.deleted is None and (notice := notice_of(current, o)) is not None:
        times.append(_delete_at(o, notice))
    if o.refusal is not None and not status.terminal:
        times.append(o.refusal.at + o.refusal.retry)
    if not status.attempt and saving_predecessor(o):
        times.append(o.now + PREDECESSOR_LOOK)
    if current is not None and avoid.may_be_in_vain(current):
        times.append(o.now + AVOIDS_LOOK)
    times += [p.deleted + o.limits.dead_slack for p in o.pods if p.deleted is not None and p.node]
    later = [t - o.now for t in times if t > o.now]
    return min(later) + timedelta(milliseconds=50) if later else None
