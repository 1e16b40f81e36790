"""Updates of a Status: conditions, attempt records, facts from pods and progress. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import islice
from typing import TypeVar

from spottrain.contract import Progress, TerminationMessage

from spottrain_operator.api.observed import NodeView, Observed, PodView, Sample
from spottrain_operator.api.training_job import (
    REASON_LIMIT,
    AttemptRecord,
    ConditionStatus,
    OutputStatus,
    ProgressStatus,
    RankRecord,
    Status,
    with_record,
)
from spottrain_operator.names import NO_RUNTIME_STATE, UNKNOWN_STATE, Cause, Condition
from spottrain_operator.policies import runtime
from spottrain_operator.policies.pod_end import end_time, may_have_run, pod_ended, termination_message_of

N = TypeVar("N", int, Decimal)
MESSAGE_LIMIT = 1000
MOST_RANKS = 8
"""Number of pods of an attempt that its record lists."""
TRAINING_STATE = "Training"
FIRST_SIGNAL = 128
"""From here on an exit code says which signal ended a process."""
ORDER = {str(kind): place for place, kind in enumerate(Condition)}
"""Conditions of other writers and newer operators come last; they stay unchanged."""


def with_condition(
    status: Status, kind: Condition, value: bool | None, reason: str, message: str, *, o: Observed
) -> Status:
    """Sets a condition, Unknown for None; its lastTransitionTime changes only with its value."""
    old = status.condition(kind)
    text = "Unknown" if value is None else str(value)
    flipped = old is None or old.status != text
    new = ConditionStatus(
        type=kind,
        status=text,
        reason=reason[:REASON_LIMIT],
        message=message[:MESSAGE_LIMIT],
        last_transition_time=o.now.replace(microsecond=0)
        if old is None or flipped
        else old.last_transition_time,
        observed_generation=o.job.generation,
    )
    others = tuple(c for c in status.conditions if c.type != kind)
    return replace(
        status, conditions=tuple(sorted((*others, new), key=lambda c: ORDER.get(c.type, len(ORDER))))
    )


def with_pods(status: Status, o: Observed) -> Status:
    """Updates attempt records from their pods: nodes, start, end, steps. Never changes cause or counters."""
    for record in status.attempts:
        pods = sorted((p for p in o.pods if p.attempt == record.number), key=lambda p: p.rank)
        if pods:
            status = _with_words(status, record, pods, o)
            status = with_record(status, _observed_record(record, pods, o))
    return status


def _with_words(status: Status, record: AttemptRecord, pods: Sequence[PodView], o: Observed) -> Status:
    words = [word for pod in pods if (word := termination_message_of(pod)) is not None]
    first = termination_message_of(pods[0]) if pods[0].rank == 0 else None
    if first is not None and record.ended is None:  # once; a later attempt's figures must stay
        status = _with_last_figures(status, o, first, _began(record, first.startStep))
    for word in words:
        status = _known_durable(status, word.durableStep)
    return status


def _observed_record(record: AttemptRecord, pods: Sequence[PodView], o: Observed) -> AttemptRecord:
    now = o.now.replace(microsecond=0)
    bound = record.bound
    if bound is None and len(pods) >= max(record.workers, 1) and all(pod.node for pod in pods):
        bound = max(pod.bound or pod.running_since or now for pod in pods)
    record = replace(
        record,
        started=record.started or min(pod.created for pod in pods),
        bound=bound,
        ran=record.ran or any(may_have_run(pod, o) for pod in pods),
        created_workers=max(record.created_workers, len(pods)),
    )
    for pod in pods:
        if pod.rank == 0:
            record = _of_first(record, pod, o)
        if word := termination_message_of(pod):
            record = _with_steps(record, word.startStep, word.step, word.durableStep)
    record = replace(record, ranks=_different(record, pods))
    if record.ended is None and all(pod_ended(pod, o) for pod in pods):
        ends = [end_time(pod, o) for pod in pods if pod.node or (pod.ended and pod.ended.finished)]
        record = replace(record, ended=max(ends, default=now))
    return record


def _of_first(record: AttemptRecord, pod: PodView, o: Observed) -> AttemptRecord:
    node = o.nodes.get(pod.node) or NodeView(name=pod.node, resource_version=0)
    word = termination_message_of(pod)
    saved = _figure(word.durableSeconds) if word is not None else None
    return replace(
        record,
        node=record.node or pod.node,
        zone=record.zone or node.zone,
        instance_type=record.instance_type or node.instance_type,
        exit_code=pod.ended.exit_code if pod.ended else record.exit_code,
        signal_to_durable_seconds=_or(record.signal_to_durable_seconds, saved),
    )


def _different(record: AttemptRecord, pods: Sequence[PodView]) -> tuple[RankRecord, ...]:
    """Returns the first pods that ended with another exit code than rank 0's."""
    ranks = {rank.rank: rank for rank in record.ranks}
    ranks |= {
        pod.rank: RankRecord(rank=pod.rank, node=pod.node, exit_code=pod.ended.exit_code)
        for pod in pods
        if pod.rank and pod.ended
    }
    different = (ranks[rank] for rank in sorted(ranks) if ranks[rank].exit_code != record.exit_code)
    return tuple(islice(different, MOST_RANKS))


def _with_steps(
    record: AttemptRecord, start: int | None, last: int | None, durable: int | None
) -> AttemptRecord:
    old = (record.start_step, record.last_step, record.durable_step)
    new = (_or(old[0], start), _larger(old[1], last), _larger(old[2], durable))
    return record if new == old else replace(record, start_step=new[0], last_step=new[1], durable_step=new[2])


def with_vanished(status: Status, o: Observed) -> Status:
    """Sets `ended` of past attempts whose pod objects are gone."""
    present = {pod.attempt for pod in o.pods}
    for record in status.attempts:
        past = record.number < status.attempt or bool(record.cause)
        if past and record.ended is None and record.number not in present:
            ran = True if record.ran is not None else None  # what its pod did last was not seen
            status = with_record(status, replace(record, ended=o.now.replace(microsecond=0), ran=ran))
    return status


def with_back_fill(status: Status) -> Status:
    """Fills an attempt's unreported last and durable step from the next attempt's start step."""
    for before, after in zip(status.attempts, status.attempts[1:], strict=False):
        if after.start_step is not None:
            status = with_record(status, _with_steps(before, None, after.start_step, after.start_step))
            status = _known_durable(status, after.start_step or None)
    return status


def with_heard_steps(status: Status, o: Observed) -> Status:
    """Takes the steps of the trainer's last response, of which the status has only one a minute.

    Where the attempt ends without a message, no later response comes.
    """
    if o.sample is None or (record := status.record(o.sample.progress.attempt)) is None:
        return status
    progress = o.sample.progress
    steps = _with_steps(record, progress.startStep, progress.step, progress.durableStep)
    return _known_durable(with_record(status, steps), progress.durableStep)


def lost_steps(status: Status, record: AttemptRecord, o: Observed) -> int:
    """Returns how many steps of an attempt that has ended are in no checkpoint that is known."""
    if not o.job.managed or not record.cause or record.ended is None or record.cause == Cause.DONE:
        return 0
    saved = max(status.known_durable_step or 0, record.durable_step or 0, record.start_step or 0)
    return max(0, (record.last_step or 0) - saved)


def loss_is_certain(status: Status, record: AttemptRecord) -> bool:
    """Returns whether no later checkpoint of an attempt can turn up.

    The trainer has told its end itself, which a killed one cannot, or the next attempt has read the newest
    checkpoint.
    """
    told = record.exit_code is not None and record.exit_code < FIRST_SIGNAL
    after = (r for r in status.attempts if r.number > record.number)
    return told or any(r.start_step is not None for r in after)


def between_attempts(status: Status) -> Status:
    """Returns the status of a job none of whose attempts runs: the next continues from the saved step."""
    shown, saved = status.progress, status.known_durable_step
    if shown is None:
        return status
    step = shown.step if shown.step is None or saved is None else min(shown.step, saved)
    return replace(status, progress=replace(shown, state="", eta_seconds=None, waiting_for="", step=step))


def _known_durable(status: Status, step: int | None) -> Status:
    known = _larger(status.known_durable_step, step)
    return status if known == status.known_durable_step else replace(status, known_durable_step=known)


def with_progress(status: Status, o: Observed, sample: Sample) -> Status:
    progress = sample.progress
    record = status.record(progress.attempt)
    if record is not None:
        steps = _with_steps(record, progress.startStep, progress.step, progress.durableStep)
        # With mode Sync a step is a commit, and the first says nothing about the time of a start.
        if steps.stepped is None and progress.step > (steps.start_step or 0) and not o.job.synced:
            steps = replace(steps, stepped=sample.at.replace(microsecond=0))
            status = _with_start(status, steps, progress, o)
        status = with_record(status, steps)
    status = _known_durable(status, progress.durableStep)
    old = status.progress or ProgressStatus()
    shown = _progress_status(progress, o, sample.at, old, _began(record, progress.startStep))
    step = progress.step
    if progress.durableStep is None and progress.startStep is None:
        step = max(step, status.known_durable_step or 0)  # until it has restored: its checkpoint's, not 0
    return replace(status, progress=replace(shown, step=step))


def _with_start(status: Status, record: AttemptRecord, progress: Progress, o: Observed) -> Status:
    """Takes the time of an attempt's start. A slower one before it is forgotten by halves."""
    if record.bound is None or record.stepped is None:
        return status
    old, seconds = status.progress or ProgressStatus(), (record.stepped - record.bound).total_seconds()
    pod, split = o.first(progress.attempt), progress.timeSplit
    if split is not None and pod is not None and pod.running_since is not None:
        # By rank 0's own count: an operator that was down sees the first step late.
        own, before = split.startup + split.restore, (pod.running_since - record.bound).total_seconds()
        seconds = min(seconds, max(own, before + own + split.waiting))
    seconds = max(seconds, (seconds + float(old.start_seconds or 0)) / 2, 0.0)
    return replace(status, progress=replace(old, start_seconds=_figure(seconds)))


def _with_last_figures(status: Status, o: Observed, word: TerminationMessage, began: int) -> Status:
    """Takes what the termination message knows: progress may never have been polled."""
    known = (word.step, word.emergencySeconds, word.warning or None, word.ignoredSettings or None)
    if all(value is None for value in known):
        return status
    old = status.progress or ProgressStatus(poll_time=o.now.replace(microsecond=0))
    progress = replace(
        _measured(word, old, began),
        step=_larger(old.step, word.step),
        loss=_last_loss(word, old),
        warning=word.warning,
        ignored_settings=word.ignoredSettings,
    )
    return replace(status, progress=progress)


def _last_loss(word: TerminationMessage, old: ProgressStatus) -> Decimal | None:
    """Returns the loss of the last step; None where only an earlier step's is known."""
    known = None if (word.step or 0) > (old.step or 0) else old.loss
    return _or(_figure(word.loss), known)


def _measured(report: Progress | TerminationMessage, old: ProgressStatus, began: int) -> ProgressStatus:
    """Takes figures of the job and its nodes; the predecessor's hold until an attempt has its own."""
    return replace(
        old,
        total_steps=report.totalSteps or old.total_steps,
        step_seconds=_or(_step_seconds(report, began), old.step_seconds),
        emergency_seconds=_or(_figure(report.emergencySeconds), old.emergency_seconds),
        grace_seconds=_or(_figure(report.graceSeconds), old.grace_seconds),
    )


def with_silent_trainer(status: Status, o: Observed) -> Status:
    """Sets the state of a trainer that does not report: Unknown for an image that saves by itself, so that
    nobody waits for its steps, and NoRuntime where the runtime must have responded by now."""
    spec = o.job.spec
    pod = o.first(status.attempt)
    runs = pod is not None and pod.running_since is not None and not pod_ended(pod, o)
    if spec is None or status.state or status.terminal or not runs:
        return status
    if spec.checkpoint.ours and not runtime.missing(status, o):
        return status
    silent, old = NO_RUNTIME_STATE if spec.checkpoint.ours else UNKNOWN_STATE, status.progress
    shown = replace(old or ProgressStatus(), state=silent, poll_time=o.now.replace(microsecond=0))
    return replace(status, progress=shown)


def _progress_status(
    progress: Progress, o: Observed, at: datetime, old: ProgressStatus, began: int
) -> ProgressStatus:
    unmeasured = progress.emergencySeconds is None and not o.job.synced
    trains = progress.state == TRAINING_STATE
    return replace(
        _measured(progress, old, began),
        state=progress.state,
        step=progress.step,
        loss=_figure(progress.loss),
        samples_per_second=_figure(progress.samplesPerSecond),
        eta_seconds=_figure(progress.etaSeconds),
        durable_step=progress.durableStep,
        durable_time=progress.durableTime,
        checkpoint_uri=o.job.spec.checkpoint.uri if o.job.spec else "",
        save_seconds=_or(_figure(progress.saveSeconds), old.save_seconds),
        warning=progress.warning or (old.warning if unmeasured else ""),
        waiting_for=progress.waitingFor,
        ignored_settings=progress.ignoredSettings or ("" if trains else old.ignored_settings),
        poll_time=at.replace(microsecond=0),
    )


ENOUGH_STEPS = 5
"""After so many steps of an attempt, the time of one is known well enough."""


def _began(record: AttemptRecord | None, start: int | None) -> int:
    """Returns the step at which the attempt began. Ranks that were restarted in their pod report a later one,
    but their time split goes on."""
    known = record.start_step if record is not None else None
    return min((step for step in (known, start) if step is not None), default=0)


def _step_seconds(report: Progress | TerminationMessage, began: int) -> Decimal | None:
    """Returns the seconds per step: by the trainer's time split, or else by its estimate of the rest."""
    split, steps = report.timeSplit, (report.step or 0) - began - 1
    if split is not None and steps >= ENOUGH_STEPS:  # the first step belongs to the start-up
        seconds = (split.productive + split.dataWait + split.checkpointStall) / steps
    elif isinstance(report, Progress) and report.etaSeconds and report.totalSteps > report.step:
        seconds = report.etaSeconds / (report.totalSteps - report.step)
    else:
        return None
    return _figure(seconds) or None


def with_final_word(status: Status, o: Observed, word: TerminationMessage | None) -> Status:
    """Takes the final step and the URI of the weights from a finished job's termination message."""
    if word is None:
        return status
    # A sidecar does not know the exit code, by which the commit of the end counts.
    durable = word.step if o.job.synced else word.durableStep
    status = _known_durable(status, durable)
    old = status.progress or ProgressStatus(poll_time=o.now.replace(microsecond=0))
    progress = replace(
        old,
        state="Done",
        eta_seconds=Decimal(0),
        step=_or(word.step, old.step),
        loss=_last_loss(word, old),
        total_steps=_or(word.totalSteps, old.total_steps),
        durable_step=_larger(durable, old.durable_step),
        checkpoint_uri=o.job.spec.checkpoint.uri if o.job.spec else "",
    )
    output = OutputStatus(uri=word.outputURI) if word.outputURI else status.output
    return replace(status, progress=progress, output=output)


def with_display(status: Status, o: Observed) -> Status:
    """Sets what the columns of `kubectl get` show of progress: they print a field, and compute nothing."""
    shown = status.progress
    if shown is None:
        return status
    if shown.step is None:
        steps = ""
    elif o.job.synced:
        steps = f"checkpoint {shown.step}"
    else:
        steps = f"{shown.step}/{shown.total_steps}" if shown.total_steps else str(shown.step)
    return replace(status, progress=replace(shown, steps=steps, remaining=_duration(shown.eta_seconds)))


def _duration(seconds: Decimal | None) -> str:
    """Returns a time in its two largest units, such as 2d3h or 1m30s; "" where none is left or known."""
    left, parts = int(seconds or 0), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return "".join(parts[:2])


def progress_due(status: Status, sample: Sample, interval: timedelta) -> bool:
    """Returns whether progress alone requires a write: a new state, a warning or an attempt's first step at
    once, further steps at intervals."""
    old = status.progress
    if old is None or old.poll_time is None or old.state != sample.progress.state:
        return True
    if sample.progress.warning and not old.warning:
        return True
    if bool(sample.progress.waitingFor) != bool(old.waiting_for):
        return True
    return _first_news(status, sample.progress) or sample.at - old.poll_time >= interval


def _first_news(status: Status, progress: Progress) -> bool:
    """Returns whether it is an attempt's first response, or the first with a step or a save of its own."""
    record = status.record(progress.attempt)
    if record is None or record.last_step is None:
        return True
    if record.durable_step is None and progress.durableStep is not None:
        return True
    began = max(record.start_step or 0, progress.startStep or 0)
    return record.last_step <= began < progress.step


def _figure(measured: float | None) -> Decimal | None:
    """Returns six digits of what a trainer has measured. What no training measures is 0, or not known."""
    if measured is None or abs(measured) > 1e15:
        return None
    return Decimal(f"{measured:.6g}") if abs(measured) > 1e-9 else Decimal(0)


def _or(first: N | None, second: N | None) -> N | None:
    return second if first is None else first


def _larger(first: int | None, second: int | None) -> int | None:
    return max((x for x in (first, second) if x is not None), default=None)
