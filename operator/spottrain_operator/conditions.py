"""The conditions and the phase that follow from what is observed. Pure; the last step of plan.py.

Succeeded, Failed and Interrupted=True are decided in plan.py and only kept here.
"""

from __future__ import annotations

from dataclasses import replace

from spottrain_operator.api import Status
from spottrain_operator.model import Observed, PodView
from spottrain_operator.names import UNKNOWN_STATE, Condition, Phase, Reason
from spottrain_operator.policies.gone import over, saving_predecessor
from spottrain_operator.status import with_condition
from spottrain_operator.wire import rfc3339

Verdict = tuple[bool, str, str]
"""Value, reason, message of a condition."""
WAITS = frozenset({Reason.QUOTA_EXCEEDED, Reason.WAITING_FOR_BACKOFF, Reason.PREDECESSOR_SAVES})
"""Reasons of Scheduled=False that are no matter of nodes."""
ORDINARY_WAITS = frozenset({"ContainerCreating", "PodInitializing", ""})
GATED_STATE = "Gated"


def with_conditions(status: Status, o: Observed, *, note: str = "") -> Status:
    """`note`: what a person should know about an accepted job (a grace that was cut)."""
    pod = next((p for p in o.pods if p.attempt == status.attempt), None)
    verdicts = {
        Condition.ACCEPTED: _accepted(o, note),
        Condition.SCHEDULED: None if status.terminal else _scheduled(status, o, pod),
        Condition.RUNNING: _running(status, o, pod),
        Condition.CHECKPOINT_DURABLE: _durable(status),
        Condition.INTERRUPTED: _recovered(status, o, pod),
    }
    for kind, verdict in verdicts.items():
        if verdict is not None:
            status = with_condition(status, kind, *verdict, o=o)
    return replace(status, phase=_phase(status, pod), observed_generation=o.job.generation)


def _accepted(o: Observed, note: str) -> Verdict | None:
    if o.job.spec is None:
        return False, Reason.INVALID_SPEC, o.job.invalid
    if o.refusal is not None and not o.refusal.accepted:
        return False, o.refusal.reason, o.refusal.message
    if not o.admitted:
        return None  # being looked at
    return True, Reason.VALID, note or "the API server accepts the pod that the template makes"


def _scheduled(status: Status, o: Observed, pod: PodView | None) -> Verdict | None:
    if pod is not None and pod.node:
        return True, Reason.BOUND, f"attempt {pod.attempt} is on node {pod.node}"
    if pod is not None and pod.unschedulable:
        return False, Reason.UNSCHEDULABLE, pod.unschedulable
    if pod is not None:
        return False, Reason.WAITING_FOR_POD, f"pod {pod.name} waits for the scheduler"
    if o.refusal is not None and o.refusal.accepted:
        return False, o.refusal.reason, o.refusal.message
    if not status.attempt and (words := saving_predecessor(o)):
        return False, Reason.PREDECESSOR_SAVES, words
    if status.next_start is not None and status.next_start > o.now:
        when = rfc3339(status.next_start, timespec="seconds")
        return False, Reason.WAITING_FOR_BACKOFF, f"attempt {status.attempt} starts at {when}"
    return (
        (False, Reason.WAITING_FOR_POD, f"attempt {status.attempt} has no pod yet")
        if status.attempt
        else None
    )


def _running(status: Status, o: Observed, pod: PodView | None) -> Verdict | None:
    if status.terminal:
        return False, Reason.ENDED, "the job has ended"
    if pod is None or over(pod, o):
        known = status.condition(Condition.RUNNING)
        return (False, Reason.WAITING_FOR_POD, _coming(status)) if known else None
    if pod.running_since is not None:
        return _training(status)
    return _starting(pod)


def _coming(status: Status) -> str:
    return f"the pod of attempt {status.attempt} is being made"


def _training(status: Status) -> Verdict:
    state = status.progress.state if status.progress else ""
    if state == GATED_STATE:
        return True, Reason.GATED, f"attempt {status.attempt} waits until its predecessor has saved"
    silent = "; its progress is unknown, because spec.checkpoint.managed is false"
    words = f"the trainer of attempt {status.attempt} runs"
    return True, Reason.TRAINING, words + silent if state == UNKNOWN_STATE else words


def _starting(pod: PodView) -> Verdict:
    waiting = pod.waiting
    if waiting is None or waiting.reason in ORDINARY_WAITS:
        return False, Reason.CONTAINER_STARTING, f"pod {pod.name} is being started"
    return False, waiting.reason, f"{waiting.message or waiting.reason} (pod {pod.name})"


def _durable(status: Status) -> Verdict:
    if status.known_durable_step is None:
        return False, Reason.NO_CHECKPOINT, "no checkpoint is known to be in the store"
    return True, Reason.DURABLE, f"step {status.known_durable_step} is in the store"


def _recovered(status: Status, o: Observed, pod: PodView | None) -> Verdict | None:
    """An interruption is over when the next attempt trains."""
    interrupted = status.is_true(Condition.INTERRUPTED)
    trains = pod is not None and pod.running_since is not None and not over(pod, o) and not _gated(status)
    if not interrupted or not (trains or status.terminal):
        return None
    return False, Reason.RECOVERED, f"attempt {status.attempt} has taken over"


def _gated(status: Status) -> bool:
    return status.progress is not None and status.progress.state == GATED_STATE


def _phase(status: Status, pod: PodView | None) -> Phase:
    if status.is_true(Condition.SUCCEEDED):
        return Phase.SUCCEEDED
    if status.is_true(Condition.FAILED):
        return Phase.FAILED
    if status.is_true(Condition.RUNNING):
        return Phase.GATED if _gated(status) else Phase.RUNNING
    if (accepted := status.condition(Condition.ACCEPTED)) is not None and accepted.status == "False":
        return Phase.INVALID
    if pod is not None and pod.node:
        return Phase.STARTING
    scheduled = status.condition(Condition.SCHEDULED)
    if scheduled is not None and scheduled.reason in WAITS:
        return Phase.WAITING
    return Phase.RESTARTING if status.attempt > 1 else Phase.PENDING
