"""Computes a Plan from an Observed. Pure: no await, clock, client or logger.

The rules run in order; the first that returns a decision wins. follow.py then derives the consequences
(records, conditions, pods to delete or create) from the new status alone. After a crash between any two
writes, planning again therefore completes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Final

from spottrain.contract import Outcome

from spottrain_operator.api.observed import Ending, Event, Notice, Observed, PodView
from spottrain_operator.api.training_job import (
    EVIDENCE_LIMIT,
    AttemptRecord,
    FailurePolicy,
    Status,
    with_record,
)
from spottrain_operator.api.wire import deadline_annotations
from spottrain_operator.control import follow
from spottrain_operator.control.actions import (
    Action,
    Annotate,
    Delete,
    DeleteJob,
    Hold,
    Plan,
    WriteBooks,
)
from spottrain_operator.control.measurements import measurements_between
from spottrain_operator.names import Cause, Condition, Reason
from spottrain_operator.policies import (
    accounting,
    capacity,
    cheapest,
    cleanup,
    cost_limit,
    gang,
    handover,
    hang,
    interrupt,
    lifecycle,
    placement,
    restart,
    runtime,
    starting,
)
from spottrain_operator.policies.cause import ending_by_notice, ending_of, notice_of
from spottrain_operator.policies.pod_end import saving_predecessor, termination_message_of, trainer_ended
from spottrain_operator.rendering import objects
from spottrain_operator.status.changes import (
    between_attempts,
    with_condition,
    with_final_word,
    with_heard_steps,
    with_pods,
)
from spottrain_operator.status.events import events_between

Rule = Callable[[Observed], Plan | None]
NOTHING: Final = Plan(reason="Keep", message="nothing to decide")
MIN_GRACE: Final = 2
"""Seconds; a DELETE with less would amount to a SIGKILL."""


def plan(o: Observed) -> Plan:
    o = cost_limit.with_costs(accounting.with_nodes(o))
    made = next((made for rule in RULES if (made := rule(o)) is not None), NOTHING)
    status, books = made.status or o.job.status, o.books
    if not (o.job.deleting and any(isinstance(a, Hold) for a in made.before)):  # else it is gone
        status, books = follow.settled(o, status)
    changed = status != o.job.status
    before = (*follow.stale_first(o), *follow.hold_first(o), *made.before)
    if accounting.write_due(o, status, books):  # before the status, after which pods are released
        books = replace(books, written=o.now)
        before = (WriteBooks(manifest=objects.books(o.job, books)), *before)
    actions = tuple(follow.after(o, status, before))
    return replace(
        made,
        before=before,
        status=status if changed else None,
        after=actions,
        events=(*made.events, *(events_between(o, status) if changed else ())),
        measurements=measurements_between(o, status, books) if changed else (),
        recheck_after=follow.recheck_after(o, status, books, actions),
        books=books,
    )


# --- rules: finished, deleted and invalid jobs ----------------------------------------------------------
def finished(o: Observed) -> Plan | None:
    """Keeps a terminal status, whatever is deleted afterwards."""
    if not o.job.status.terminal or o.job.deleting:
        return None
    made = Plan(reason="Finished", message="the job has ended")
    if o.job.holds_checkpoints != cleanup.wanted(o) and o.job.spec is not None:
        return replace(made, before=(Hold(on=cleanup.wanted(o)),))
    if (end := lifecycle.ends_of_life(o, o.job.status)) is None or o.now < end:
        return made
    return replace(made, before=(DeleteJob(),), message="ttlSecondsAfterFinished has passed")


def leaving(o: Observed) -> Plan | None:
    """Deletes a job's pods, then its checkpoints if requested, then releases the job."""
    if not o.job.deleting:
        return None
    made = Plan(reason="Leaving", message="the job is being deleted")
    ended, left = cleanup.trainers_ended(o), cleanup.gives_up(o)
    if not o.job.holds_checkpoints or not (left or ended):
        return made
    kept = o.job.spec is not None and not cleanup.wanted(o)
    if kept or cleanup.finished(o) or (ended and cleanup.never_ran(o)):
        return replace(made, before=(Hold(on=False),))
    if left:
        event = Event(warning=True, reason=Reason.CHECKPOINTS_LEFT, message=left)
        return replace(made, before=(Hold(on=False),), events=(event,))
    return replace(made, message="its checkpoints are being deleted")


def reported_done(o: Observed) -> Plan | None:
    """Completes the job on rank 0's `done`; any attempt's is valid, as only the owner of HEAD reports it.

    With checkpoint.mode Sync the script's exit code counts too (policies/sync.py).
    """
    said = ((p, termination_message_of(p)) for p in o.pods if p.rank == 0 and p.sync is None)
    pod = next((p for p, word in said if word is not None and word.outcome is Outcome.DONE), None)
    return _completed(o, pod, ending_of(pod, o)) if pod is not None else None


# --- rules: the current attempt -------------------------------------------------------------------------
def attempt_over(o: Observed) -> Plan | None:
    """Completes an attempt that is done; ends one whose pods have all ended, and starts the next.

    It stops an attempt in which only some pods have ended.
    """
    if _attempt_ended(o) or _success_unknown(o):
        return None
    if gang.done(o):
        first = gang.team(o)[0]
        return _completed(o, first, ending_of(first, o))
    if not gang.broken(o) and not (_stopping(o) and not gang.working(o)):
        return None
    if gang.working(o):  # while it is being stopped, later rules handle the pods with a notice
        return None if _stopping(o) else _stop(o, gang.preliminary_verdict(o))
    if not gang.team(o) and not gang.vanished(o):
        return None  # stopped before any pod was created
    dead = tuple(follow.removal(o, p) for p in gang.team(o) if not trainer_ended(p))
    return replace(_end_attempt(o, gang.verdict(o)), before=dead)


def _success_unknown(o: Observed) -> bool:
    """Returns whether an exit code of 0 cannot be judged yet: its meaning depends on checkpoint.mode."""
    first = next((p for p in gang.team(o) if p.rank == 0 and p.sync is None), None)
    silent = first is not None and termination_message_of(first) is None
    ended = first.ended if first is not None else None
    return o.job.spec is None and silent and ended is not None and ended.exit_code == 0


def under_notice(o: Observed) -> Plan | None:
    """Annotates the pods that have a notice, and deletes them with the remaining time as grace period.

    Where the job and its volumes allow it, the next attempt starts once they are. Its pods wait at the gate
    until the old ones have saved (policies/handover.py). Otherwise `attempt_over` starts it.
    """
    noticed = [(p, n) for p in gang.working(o) if (n := notice_of(p, o)) is not None]
    if not noticed:
        return None
    before = tuple(action for pod, notice in noticed for action in _notify(o, pod, notice))
    keep = Plan(reason=Cause.SPOT_NOTICE, message="the trainer is asked to save and end", before=before)
    all_deleted = all(pod.deleted is not None for pod, _ in noticed)
    no_successor = lifecycle.halted(o) is not None or _attempt_ended(o) or _stopping(o)
    overlaps = o.job.spec is not None and o.job.spec.replaces_during_notice and handover.overlaps(o)
    if not all_deleted or no_successor or not overlaps:
        return keep
    return _end_attempt(o, ending_by_notice(noticed[0][1]))


def _notify(o: Observed, pod: PodView, notice: Notice) -> Iterator[Action]:
    if pod.deleted is not None:
        return
    if pod.notice is None:
        words = deadline_annotations(notice.deadline, notice.source)
        until = max(notice.deadline - follow.URGENT, o.now + follow.AT_ONCE)
        yield Annotate(pod=pod, words=words, until=until)
    if o.now >= follow.delete_at(o, pod, notice):
        left = (notice.deadline - o.now - o.limits.margin).total_seconds()
        yield Delete(pod=pod, grace=max(MIN_GRACE, min(int(left), pod.grace)))


def advised(o: Observed) -> Plan | None:
    """Passes on a rebalance recommendation: an extra save is cheap, and training continues."""
    words = tuple(follow.advice(o))
    return Plan(reason="SaveAdvised", message="an extra save is advised", before=words) if words else None


def stopped(o: Observed) -> Plan | None:
    """Stops an attempt for the first reason to do so; its cause is set once all of its pods have ended."""
    if _attempt_ended(o) or _stopping(o) or not gang.team(o):
        return None
    ending = next((ending for ending in _reasons_to_stop(o) if ending is not None), None)
    return _stop(o, ending) if ending is not None else None


def _reasons_to_stop(o: Observed) -> Iterator[Ending | None]:
    """Yields that its owner wants it to end, that it hangs, and why its pods cannot start as they are."""
    if (halt := lifecycle.halted(o)) is not None:
        yield Ending(cause=Cause.SUSPENDED, evidence=halt.why + halt.figures, reason=halt.reason)
    yield lifecycle.past_deadline(o)
    yield hang.stalled(o)
    if o.job.spec is None:  # what runs goes on
        return
    yield interrupt.stops(o)
    if not handover.overlaps(o) and (found := handover.wanted(o)) is not None:
        # On demand, and its successor cannot ask beside it; SIGTERM saves, so no work is lost.
        yield Ending(cause=Cause.MOVED, evidence=found.reason)
    yield handover.unreleased(o)
    yield from _useless_pods(o)
    if (words := capacity.gives_up_waiting(o)) and not cheapest.keeps_waiting(o):
        yield Ending(cause=Cause.SCHEDULING_TIMEOUT, evidence=words)
    yield starting.gives_up(o)


def _useless_pods(o: Observed) -> Iterator[Ending]:
    """Yields why pods that have no node must be created again."""
    team, allowed = gang.team(o), placement.allowed(o)
    for pod in filter(placement.is_kept_off, team):
        if free := [name for name in pod.avoids if name in allowed]:
            words = f"pod {pod.name} avoids {', '.join(free)}, which can be used again"
            yield Ending(cause=Cause.REPLACED, evidence=words)
    if any(p.grouped for p in team) and gang.missing(o, o.job.status) and not o.has_gangs:
        words = f"the group of pod {team[0].name} lacks ranks, and no pod can join it any more"
        yield Ending(cause=Cause.REPLACED, evidence=words)


def unreadable(o: Observed) -> Plan | None:
    """Keeps what runs, and starts nothing, while the stored spec cannot be read.

    What befalls a running attempt (a notice, its end, a hang, an eviction by its queue) is handled before.
    """
    if o.job.spec is not None:
        return None
    return Plan(reason=Reason.INVALID_SPEC, message=o.job.invalid, before=tuple(follow.advice(o)))


def asks_for_spot(o: Observed) -> Plan | None:
    """Asks for spot beside an attempt on demand, and hands over to the request's pods once they run."""
    asked, status = o.job.status.asking, o.job.status
    if asked is None:
        begun = handover.begins(o)
        return Plan(reason="Asks", message="asks for spot", status=begun) if begun is not None else None
    if words := handover.gives_up(o, asked):
        cause = str(Cause.SCHEDULING_TIMEOUT)
        ended = replace(asked, cause=cause, evidence=words[:500], charged=False)
        return Plan(reason=ended.cause, message=words, status=with_record(status, ended))
    if (at := handover.ready_at(o, asked)) is None or o.now < at:
        return None
    words = f"attempt {asked.number} has its spot nodes"
    return _end_attempt(o, Ending(cause=Cause.MOVED, evidence=words))


def running(o: Observed) -> Plan | None:
    """Keeps an attempt that has pods; the rules after it are about starting one."""
    team = gang.team(o)
    return Plan(reason="Running", message=f"attempt {o.job.status.attempt} has its pods") if team else None


# --- rules: the next attempt ----------------------------------------------------------------------------
def suspended(o: Observed) -> Plan | None:
    halt = lifecycle.halted(o)
    if halt is None:
        return None
    made = Plan(reason=Cause.SUSPENDED, message=halt.why)
    return replace(made, status=replace(o.job.status, active_since=None))  # the deadline does not run


def renewed(o: Observed) -> Plan | None:
    """Resumes an attempt that had no pod yet: its deadline counts from now, and prices may have changed."""
    if not o.job.status.attempt or o.job.status.active_since is not None or _attempt_ended(o):
        return None
    status = replace(o.job.status, active_since=o.now.replace(microsecond=0))
    record = status.current
    if cheapest.applies(o) and record is not None and record.started is None and not capacity.problem(o):
        before = replace(status, attempt=status.attempt - 1, attempts=status.attempts[:-1])
        status = _with_next_attempt(o, before)
    return Plan(reason="Start", message="resumed", status=status)


def deadline_exceeded(o: Observed) -> Plan | None:
    """Fails a job that is past its deadline while nothing runs."""
    ending = lifecycle.past_deadline(o)
    return _failed(o, o.job.status, ending.reason, ending.evidence) if ending is not None else None


def held_back(o: Observed) -> Plan | None:
    """Waits with the next attempt for what must come before it; a running one goes on."""
    first = not o.job.status.attempt
    unheld = first and cleanup.wanted(o) and not o.job.holds_checkpoints
    obstacles = (
        (Reason.INVALID_SPEC, capacity.problem(o)),
        ("NotAccepted", "" if o.admitted else "the API server has not accepted the job's pod"),
        # A job that is deleted without our finalizer would leave its checkpoints.
        (
            "Holding",
            "the job waits for its finalizer, which deletes its checkpoints with it" if unheld else "",
        ),
        # Its checkpoints cannot be claimed meanwhile, and that failure is final.
        (Reason.PREDECESSOR_SAVES, saving_predecessor(o) if first else ""),
    )
    return next((Plan(reason=reason, message=words) for reason, words in obstacles if words), None)


def next_attempt(o: Observed) -> Plan | None:
    """Starts the first attempt, or the one after a suspension."""
    if o.job.status.attempt and not _attempt_ended(o):
        return None
    message = "resumed" if o.job.status.attempt else "first attempt"
    status = replace(o.job.status, active_since=o.now.replace(microsecond=0))
    return Plan(reason="Start", message=message, status=_with_next_attempt(o, status))


RULES: Final[tuple[Rule, ...]] = (
    finished,
    leaving,
    reported_done,
    attempt_over,
    under_notice,
    stopped,
    unreadable,
    advised,
    asks_for_spot,
    running,
    suspended,
    renewed,
    deadline_exceeded,
    held_back,
    next_attempt,
)


# --- helpers of the rules -------------------------------------------------------------------------------
def _attempt_ended(o: Observed) -> bool:
    """Returns whether the current attempt has ended and the next one is not created yet."""
    record = o.job.status.current
    return record is not None and bool(record.cause)


def _stopping(o: Observed) -> bool:
    """Returns whether all pods of the current attempt were asked to end."""
    record = o.job.status.current
    return record is not None and bool(record.stopping)


def _completed(o: Observed, pod: PodView, ending: Ending) -> Plan:
    word = termination_message_of(pod)
    status = with_final_word(_with_ending(o.job.status, pod.attempt, ending), o, word)
    reason, said = Reason.COMPLETED, ending.evidence
    if word is not None and word.reason == Reason.EARLY_STOPPED:
        reason, said = Reason.EARLY_STOPPED, word.message or said
    message = f"attempt {pod.attempt}: {said}"
    status = with_condition(status, Condition.SUCCEEDED, True, reason, message, o=o)
    return Plan(reason=reason, message=message, status=lifecycle.completed(o, status))


def _failed(o: Observed, status: Status, reason: str, message: str) -> Plan:
    status = with_condition(status, Condition.FAILED, True, reason, message, o=o)
    return Plan(reason=reason, message=message, status=lifecycle.completed(o, status))


def _stop(o: Observed, ending: Ending) -> Plan:
    """Asks all pods of the attempt to end (follow.py deletes them)."""
    record = o.job.status.current
    message = f"attempt {o.job.status.attempt}: {ending.evidence}"
    if record is None or record.stopping:
        return Plan(reason="Stopping", message="the attempt is being stopped")
    status = with_record(o.job.status, _judged(record, ending, stopping=str(ending.cause)))
    return Plan(reason=ending.cause, message=message, status=status)


def _with_ending(status: Status, attempt: int, ending: Ending) -> Status:
    record = status.record(attempt)
    if record is None or record.cause:
        return status  # it has a cause already: an interrupted attempt that completes afterwards keeps it
    return with_record(status, _judged(record, ending, cause=str(ending.cause)))


def _judged(record: AttemptRecord, ending: Ending, cause: str = "", stopping: str = "") -> AttemptRecord:
    return replace(
        record,
        cause=cause,
        stopping=stopping,
        evidence=ending.evidence[:EVIDENCE_LIMIT],
        charged=ending.charged,
        faulty_node=ending.node or record.faulty_node,
        reason=ending.reason,
    )


def _end_attempt(o: Observed, ending: Ending) -> Plan:
    """Ends the current attempt for any cause, counts its ending, and starts the next one or fails the job."""
    spec, old = o.job.spec, o.job.status
    policy = spec.failure_policy if spec is not None else FailurePolicy()
    status = _with_ending(with_pods(with_heard_steps(old, o), o), old.attempt, ending)
    reports = spec is not None and spec.checkpoint.ours
    status = restart.counted(status, ending, reports=reports)
    if ending.cause is Cause.STORE_UNREACHABLE:
        since = status.store_unreachable_time or o.now.replace(microsecond=0)
        status = replace(status, store_unreachable_time=since)
    stop: tuple[str, str] | None = None
    if spec is not None:  # else its limits are unknown, and nothing is started anyway
        stop = restart.exhausted(status, policy, ending, o.now)
    if ending.cause in (Cause.BAD_CONFIGURATION, Cause.DEADLINE_EXCEEDED):  # restarting will not help
        stop = (ending.reason or ending.cause, ending.evidence)
    uncounted = ending.charged or ending.cause in restart.UNCOUNTED
    if stop is None and not uncounted and (words := runtime.starts_over(o, status, ending)):
        stop = (Reason.NO_RUNTIME, words)
    if not uncounted and ending.cause is not Cause.STORE_UNREACHABLE:
        status = replace(status, interruption_time=status.interruption_time or o.now.replace(microsecond=0))
    if stop is not None:
        return _failed(o, status, *stop)
    status = between_attempts(status)
    status = replace(status, next_start=restart.next_start(status, policy, ending, o.now, o.job.key.uid))
    halted = lifecycle.halted(o) is not None
    if halted:
        status = replace(status, active_since=None)  # the deadline does not run
    elif ending.cause is Cause.SUSPENDED:
        status = replace(status, active_since=o.now.replace(microsecond=0))  # resumed before the end
    if halted or spec is None or capacity.problem(o):
        return Plan(reason=ending.cause, message=ending.evidence, status=status)
    return Plan(reason=ending.cause, message=ending.evidence, status=_with_next_attempt(o, status))


def _with_next_attempt(o: Observed, status: Status) -> Status:
    """Returns the status with a record of the next attempt. follow.py creates its pods from that."""
    assert o.job.spec is not None
    number, ended = status.next_number, status.current
    # The attempt that has ended hands over to this request; others are dropped.
    request = status.asking if ended is not None and ended.cause == Cause.MOVED else None
    status = replace(status, attempts=tuple(r for r in status.attempts if r.number <= status.attempt))
    if request is not None:
        return _started(replace(status, next_start=None), request, o)
    decided = cheapest.decide(o, status)
    if decided is not None and cheapest.without_backoff(o, status, decided):
        # Two partial gangs must not retry at the same time.
        apart = timedelta(seconds=cheapest.SLOP * restart.spread(o.job.key.uid, status.attempt))
        status = replace(status, next_start=o.now + apart if gang.spec_size(o) > 1 else None)
    pool = capacity.choose(o, status, decided.pool if decided is not None else None)
    record = capacity.record_of(o, number, pool, decided.reason if decided is not None else "")
    return _started(status, record, o)


def _started(status: Status, record: AttemptRecord, o: Observed) -> Status:
    progress = replace(status.progress, state="", eta_seconds=None) if status.progress else None
    return with_record(replace(status, attempt=record.number, progress=progress), record)
