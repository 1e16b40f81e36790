"""Derives the conditions and the phase from an Observed. Pure.

Succeeded and Failed are decided in control/plan.py and only kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spottrain.contract import WAITING_FOR_STORE

from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, Status
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.names import NODE_SILENCE, UNKNOWN_STATE, Condition, Phase, Reason
from spottrain_operator.policies import (
    admission,
    capacity,
    cleanup,
    cost_limit,
    gang,
    handover,
    lifecycle,
    on_time,
    placement,
    restart,
    runtime,
    starting,
)
from spottrain_operator.policies.pod_end import pod_ended, saving_predecessor
from spottrain_operator.policies.runtime import Verdict
from spottrain_operator.status.changes import (
    TRAINING_STATE,
    loss_is_certain,
    lost_steps,
    with_condition,
)

NOT_FOR_NODES = frozenset(
    {
        Reason.QUOTA_EXCEEDED,
        Reason.WAITING_FOR_QUEUE,
        Reason.WAITING_FOR_BACKOFF,
        Reason.PREDECESSOR_SAVES,
    }
)
"""Reasons of Scheduled=False that are not caused by missing nodes."""
MOOT: Final[dict[Condition, Callable[[Observed], bool]]] = {
    Condition.ADMITTED: lambda o: not o.job.queue,
    Condition.ON_TIME: lambda o: o.job.spec is not None and o.job.spec.capacity.cheapest.deadline is None,
    Condition.STALLED: lambda o: True,
}
"""Conditions that a job does not always have, and when one without a verdict goes. All others stay."""
PHASES: Final[dict[str, Phase]] = {
    Reason.STOPPING: Phase.STOPPING,
    Reason.STILL_TRAINING: Phase.STOPPING,
    Reason.NODE_NOT_READY: Phase.WAITING,
}
"""Phases that follow from the reason of Running alone."""
STOP_DELAY: Final = timedelta(seconds=5)
"""A trainer that was told to end stops training within this time, except during a very long step."""
TRAINING_STATES = frozenset({"Training", "Evaluating", "Saving", "Done"})


def with_conditions(status: Status, o: Observed, *, note: str = "") -> Status:
    """Sets conditions, phase and the number of workers. `note`: a remark on an accepted job."""
    record = status.current
    current = status.attempt if record is None or not record.cause or status.terminal else None
    pods = sorted((p for p in o.pods if p.attempt == current), key=lambda p: p.rank)
    accepted = None if status.terminal else _accepted(status, o, note)
    verdicts: dict[Condition, tuple[bool | None, str, str] | None] = {
        Condition.ACCEPTED: accepted,
        Condition.ADMITTED: None if status.terminal else _admitted(status, o),
        Condition.SCHEDULED: None if status.terminal else _scheduled(status, o, pods),
        Condition.RUNNING: _running(status, o, pods),
        Condition.CHECKPOINT_DURABLE: _durable(status, o),
        Condition.ON_TIME: on_time.verdict(o, status),
        Condition.SUSPENDED: _suspended(status, o, pods),
        Condition.STALLED: _stalled(status, accepted),
    }
    moot = {kind for kind in MOOT if verdicts[kind] is None and MOOT[kind](o)}
    status = replace(status, conditions=tuple(c for c in status.conditions if c.type not in moot))
    for kind, verdict in verdicts.items():
        if verdict is not None:
            status = with_condition(status, kind, *verdict, o=o)
    # The API server has judged this spec's pod, or need not yet.
    quota = o.refusal is not None and o.refusal.accepted
    judged = accepted is not None or quota or status.terminal or lifecycle.suspended(o) is not None
    ready = sum(p.running_since is not None and not pod_ended(p, o) and _node_ready(p, o) for p in pods)
    return replace(
        status,
        phase=_phase(status, pods),
        workers=gang.size_of(o, status),
        ready_workers=ready,
        observed_generation=o.job.generation if judged else status.observed_generation,
        interruption_time=None if _recovered(status, o, pods) else status.interruption_time,
        store_unreachable_time=_store_unreachable_since(status, o),
    )


def with_deletion(status: Status, o: Observed) -> Status:
    """Sets what a job that is being deleted shows: what it waits for."""
    status = with_condition(status, Condition.RUNNING, False, *cleanup.state(o), o=o)
    return status if status.terminal else replace(status, phase=Phase.STOPPING)


def _accepted(status: Status, o: Observed, note: str = "") -> Verdict | None:
    if o.job.spec is None:
        return False, Reason.INVALID_SPEC, o.job.invalid
    if problem := capacity.problem(o):
        return False, Reason.INVALID_SPEC, problem
    no = o.refusal
    if no is not None and not no.accepted and no.generation == o.job.generation:
        return False, no.reason, no.message
    if not o.admitted:
        return None  # not checked yet
    if cost := cost_limit.doubt(o):
        return True, Reason.PRICE_UNKNOWN, cost
    return True, Reason.VALID, note or "the pod template passed a dry run"


def _stalled(status: Status, accepted: Verdict | None) -> Verdict | None:
    """Returns what kstatus reports as failed. It reads all else from observedGeneration."""
    failed = status.condition(Condition.FAILED)
    if failed is not None and failed.status == "True":
        return True, failed.reason, failed.message
    return (True, *accepted[1:]) if accepted is not None and not accepted[0] else None


def _suspended(status: Status, o: Observed, pods: Sequence[PodView]) -> Verdict | None:
    """Returns Suspended=True once no pod runs any more."""
    halt, known = lifecycle.suspended(o), status.condition(Condition.SUSPENDED)
    if halt is not None and not status.terminal and all(pod_ended(p, o) for p in o.pods):
        if known is not None and (known.reason, known.observed_generation) == (halt.reason, o.job.generation):
            return True, halt.reason, known.message  # its figures change with each idle second of a node
        words = f"{halt.why}{halt.figures}; {halt.remedy} to continue from the last checkpoint"
        return True, halt.reason, words
    if known is None or known.status != "True":
        return None
    return False, Reason.RESUMED, "the job is not suspended"


def _admitted(status: Status, o: Observed) -> Verdict | None:
    """Returns whether the job's queue lets it run; None where it names none, or has not been asked."""
    if not o.job.queue:
        return None
    known = status.condition(Condition.ADMITTED)
    if (halt := lifecycle.suspended(o)) is not None:
        return (False, halt.reason, f"the job does not ask its queue while {halt.why}") if known else None
    if (halt := lifecycle.halted(o)) is not None:
        return (False, halt.reason, halt.why) if known or o.admitted else None
    found = o.admission.workload if o.admission is not None else None
    if found is None or not found.admitted or o.job.spec is None:
        return None
    flavors = f" with {', '.join(found.flavors)}" if found.flavors else ""
    words = f"ClusterQueue {found.cluster_queue} has admitted the job{flavors}, by its queue {found.queue}"
    return True, Reason.ADMITTED, words


def _scheduled(status: Status, o: Observed, pods: Sequence[PodView]) -> Verdict | None:
    if pods:
        return _placed(status, o, pods)
    if o.refusal is not None and o.refusal.accepted:
        return False, o.refusal.reason, o.refusal.message
    if (halt := lifecycle.suspended(o)) is not None:
        return False, halt.reason, f"no pods are created while {halt.why}"
    if (halt := lifecycle.halted(o)) is not None:
        return False, Reason.WAITING_FOR_QUEUE, halt.why
    if not status.attempt and (words := saving_predecessor(o)):
        return False, Reason.PREDECESSOR_SAVES, words
    if status.next_start is not None and status.next_start > o.now:
        when = rfc3339(status.next_start, timespec="seconds")
        why = f": {words}" if (words := restart.backoff_reason(status)) else ""
        return False, Reason.WAITING_FOR_BACKOFF, f"attempt {status.attempt} starts at {when}{why}"
    if not status.attempt:
        return None
    usable = o.job.spec is not None and not capacity.problem(o)
    if usable and (words := admission.problem(o, capacity.pool_of(o, status))):
        return False, Reason.WAITING_FOR_QUEUE, words
    return False, Reason.WAITING_FOR_POD, f"attempt {status.attempt} has no pod yet"


def _placed(status: Status, o: Observed, pods: Sequence[PodView]) -> Verdict:
    waiting, size = [p for p in pods if not p.node], gang.size_of(o, status)
    if not waiting and len(pods) == size:
        nodes = ", ".join(dict.fromkeys(p.node for p in pods))
        return True, Reason.BOUND, f"attempt {status.attempt} is on node{'s' if size > 1 else ''} {nodes}"
    count = f"{len(pods) - len(waiting)} of {size} pods have a node; " if size > 1 else ""
    if held := next((p for p in waiting if p.queued), None):
        return False, Reason.WAITING_FOR_QUEUE, f"{count}pod {held.name} waits for its queue to admit it"
    if stuck := next((p for p in waiting if p.unschedulable), None):
        name = f"pod {stuck.name}: " if size > 1 else ""
        said = f"{stuck.unschedulable}{capacity.labels_note(status)}{placement.zone_note(o, stuck)}"
        return False, Reason.UNSCHEDULABLE, f"{count}{name}{said}"
    if not waiting:
        why = o.refusal.message if o.refusal is not None else f"{size - len(pods)} are still to be created"
        return False, Reason.WAITING_FOR_POD, count + why
    scheduler = o.job.spec.pod.get("schedulerName") if o.job.spec is not None else None
    own = f" {scheduler}" if scheduler not in (None, "", "default-scheduler") else ""  # it may not exist
    return False, Reason.WAITING_FOR_POD, f"{count}pod {waiting[0].name} waits for the scheduler{own}"


def _running(status: Status, o: Observed, pods: Sequence[PodView]) -> Verdict | None:
    if status.terminal:
        return False, Reason.ENDED, f"the job has ended{edited(status, o)}"
    known = status.condition(Condition.RUNNING)
    record = status.current
    if record is not None and record.stopping:
        return False, Reason.STOPPING, f"attempt {status.attempt} saves and ends: {record.evidence}"
    there = [p for p in pods if not pod_ended(p, o)]
    if not there and known is None:
        return None
    if not there:
        accepted, halt = _accepted(status, o), lifecycle.halted(o)
        words = f"the pod of attempt {status.attempt} is being created"
        if accepted is not None and not accepted[0]:
            words = f"no pod is created while {Condition.ACCEPTED} is False"
        return False, Reason.WAITING_FOR_POD, halt.why if halt is not None else words
    if silent := [p for p in there if not _node_ready(p, o)]:
        return _node_not_ready(o, silent[0])
    if going := [p for p in there if p.running_since is not None and p.deleted is not None]:
        return _ending(o, going[0])
    if uploading := [p for p in there if p.uploading is not None]:
        return _uploading(status, uploading[0])
    late = [p for p in there if p.running_since is None]
    if len(pods) == gang.size_of(o, status) and not late:
        return _beside(o, pods, _training(status, o))
    return _starting(status, o, late[0] if late else pods[0])


def _uploading(status: Status, pod: PodView) -> Verdict:
    """Describes a pod whose script has ended, and whose sidecar uploads the rest (checkpoint.mode Sync)."""
    assert pod.uploading is not None
    words = (
        f"the script of attempt {status.attempt} has ended with exit code {pod.uploading.exit_code}, and its "
        f"last checkpoint is being uploaded, for {pod.grace} s at most (terminationGracePeriodSeconds)"
    )
    if pod.others_run:
        words += "; that begins when the pod's other containers have ended too"
    stops = pod.deleted is not None
    return not stops, Reason.STOPPING if stops else Reason.UPLOADING, words


def _node_ready(pod: PodView, o: Observed) -> bool:
    node = o.nodes.get(pod.node)
    return node is None or node.ready


def _node_not_ready(o: Observed, pod: PodView) -> Verdict:
    """Describes a pod on a node that is not ready: Kubernetes reports it as running, but that is unknown."""
    known = f"node {pod.node} of pod {pod.name} is not ready {o.nodes[pod.node].unready}"
    if pod.deleted is not None:
        until = rfc3339(pod.deleted + o.limits.dead_slack, timespec="seconds")
        todo = f"the pod counts as lost at {until} unless the node comes back"
    else:
        slack = o.limits.dead_slack.seconds
        todo = f"the pod is deleted after {NODE_SILENCE} s, and lost {slack} s after its grace period"
    return False, Reason.NODE_NOT_READY, f"{known}; {todo}"


def _ending(o: Observed, pod: PodView) -> Verdict:
    """Describes a deleted pod, whose trainer has until the end of its grace period."""
    assert pod.deleted is not None
    asked, sample = pod.deleted - timedelta(seconds=pod.deletion_grace), o.sample
    words = (
        f"pod {pod.name} was deleted at {rfc3339(asked, timespec='seconds')}, and its trainer has until "
        f"{rfc3339(pod.deleted, timespec='seconds')} to save and end"
    )
    late = sample is not None and sample.at > asked + STOP_DELAY and sample.progress.attempt == pod.attempt
    if pod.rank == 0 and sample is not None and late and sample.progress.state == TRAINING_STATE:
        still = f"at {sample.at:%H:%M:%S} UTC it still trained (step {sample.progress.step})"
        return False, Reason.STILL_TRAINING, f"{words}; {still}: it may have missed the signal"
    return False, Reason.STOPPING, words


def edited(status: Status, o: Observed) -> str:
    """Returns a note about a spec that was changed after the job's end; "" where it was not."""
    ends = (status.condition(kind) for kind in (Condition.SUCCEEDED, Condition.FAILED))
    end = next((c for c in ends if c is not None and c.status == "True"), None)
    if end is None or end.observed_generation in (None, o.job.generation):
        return ""
    words = ", and a change of its spec does not start it again"
    uri = o.job.spec.checkpoint.uri if o.job.spec is not None else ""
    if not uri:
        return f"{words}. Create a new job"
    return (
        f"{words}. To continue from its checkpoints, create a new job with checkpoint.uri: {uri} and "
        "checkpoint.onExisting: Resume"
    )


def _training(status: Status, o: Observed) -> Verdict:
    state = status.state
    if state == handover.GATED_STATE:
        return True, Reason.GATED, f"attempt {status.attempt} waits until its predecessor has saved"
    unreachable = status.progress.waiting_for if status.progress is not None else ""
    if state == WAITING_FOR_STORE and not o.job.synced:  # there the script goes on
        words = f"attempt {status.attempt} waits for its checkpoint store: {unreachable}"
        return True, Reason.WAITING_FOR_STORE, words
    if unreachable:
        words = f"attempt {status.attempt} trains on, and its saves fail: {unreachable}"
        return True, Reason.STORE_UNREACHABLE, words
    if (waits := runtime.waiting(status, o)) is not None:
        return True, *waits
    silent = "; its progress is unknown, because spec.checkpoint.mode is Self"
    words = f"the trainer of attempt {status.attempt} runs"
    return True, Reason.TRAINING, words + silent if state == UNKNOWN_STATE else words


def _starting(status: Status, o: Observed, pod: PodView) -> Verdict:
    if (found := starting.blocked(o)) is not None:
        return False, found[1].reason, starting.sentence(o, status)
    if not pod.node:
        return False, Reason.WAITING_FOR_NODE, f"pod {pod.name} has no node yet; condition Scheduled says why"
    if pod.sync is not None and pod.sync.running:  # it restores the folder, before the script starts
        words = f"the sidecar of attempt {status.attempt}"
        if status.state == WAITING_FOR_STORE:
            said = status.progress.waiting_for if status.progress else ""
            return False, Reason.WAITING_FOR_STORE, f"{words} waits for its checkpoint store: {said}"
        words += " restores the last checkpoint; the script starts after that"
        return False, Reason.RESTORING, words
    events = o.heard.get(pod.uid)
    slow = f": {events.slow}" if events is not None and events.slow else ""
    return False, Reason.CONTAINER_STARTING, f"pod {pod.name} is being started{slow}"


def _beside(o: Observed, pods: Sequence[PodView], verdict: Verdict) -> Verdict:
    """Reports another container that fails to start beside a running trainer; nothing is ended for it."""
    found = next(((p, w) for p in pods if (w := starting.start_error(p, o)) is not None), None)
    if found is None or not verdict[0]:
        return verdict
    return True, Reason.SIDECAR_CANNOT_START, f"{verdict[2]}; {starting.words(*found)}"


def _store_unreachable_since(status: Status, o: Observed) -> datetime | None:
    """Returns the time of an outage's first sign until an attempt has restored. A response to the first
    request alone does not prove a recovery."""
    since, record = status.store_unreachable_time, status.current
    if status.terminal:
        return None if status.is_true(Condition.SUCCEEDED) else since
    if status.progress is not None and status.progress.waiting_for:
        return since or o.now.replace(microsecond=0)
    begun = record is not None and record.start_step is not None and not record.cause
    return None if begun else since


def _durable(status: Status, o: Observed) -> Verdict:
    synced = o.job.synced
    warning = status.progress.warning if synced and status.progress is not None else ""
    note = f"; {warning}" if warning else ""  # such as a marker that does not come
    note += _lost(status, o)
    if status.known_durable_step is None:
        return False, Reason.NO_CHECKPOINT, f"no durable checkpoint yet{note}"
    what = "commit" if synced else "step"
    return True, Reason.DURABLE, f"{what} {status.known_durable_step} is in the store{note}"


def _lost(status: Status, o: Observed) -> str:
    """Returns a note about steps of the last attempt that were not saved, until they are done again."""
    past = (r for r in reversed(status.over) if r.ended is not None)
    record, now = next(past, None), status.current
    if record is None or not lost_steps(status, record, o):
        return ""
    done_again = now is not None and not now.cause and (now.last_step or 0) >= (record.last_step or 0)
    return "" if done_again else f"; {lost_words(status, record, o)}"


def lost_words(status: Status, record: AttemptRecord, o: Observed) -> str:
    lost = lost_steps(status, record, o)
    words = f"attempt {record.number} ended at step {record.last_step}, and its last {lost} step(s) are"
    if not loss_is_certain(status, record):
        return f"{words} not known to be saved"
    return f"{words} lost" if status.terminal else f"{words} lost, and will be repeated"


def _recovered(status: Status, o: Observed, pods: Sequence[PodView]) -> bool:
    """Returns whether an attempt trains, so that no interruption lasts; also of a job that has ended.

    Without our runtime it is enough that all pods run.
    """
    all_run = bool(pods) and all(p.running_since is not None and not pod_ended(p, o) for p in pods)
    if status.terminal or not all_run or status.state == WAITING_FOR_STORE:
        return status.terminal
    record, managed = status.current, o.job.spec is None or o.job.spec.checkpoint.managed
    stepped = record is not None and (record.last_step or 0) > (record.start_step or 0)
    return not managed or stepped or status.state in TRAINING_STATES


def _phase(status: Status, pods: Sequence[PodView]) -> Phase:
    for kind in (Condition.SUCCEEDED, Condition.FAILED, Condition.SUSPENDED):
        if status.is_true(kind):
            return Phase(kind)
    running = status.condition(Condition.RUNNING)
    if running is not None and running.reason in PHASES:
        return PHASES[running.reason]
    if running is not None and running.status == "True":
        begins = running.reason in runtime.UNSEEN or status.state == handover.GATED_STATE
        return Phase.STARTING if begins else Phase.RUNNING
    if (accepted := status.condition(Condition.ACCEPTED)) is not None and accepted.status == "False":
        return Phase.INVALID
    if pods and all(pod.node for pod in pods):
        return Phase.STARTING
    scheduled = status.condition(Condition.SCHEDULED)
    if scheduled is not None and scheduled.reason in NOT_FOR_NODES:
        return Phase.WAITING
    return Phase.PENDING
