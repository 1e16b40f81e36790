"""Determines why an attempt ended: the first matching rule wins. Pure.

The trainer's termination message comes first (done, then bad configuration), then external evidence whose
time window overlaps the pod's, then the exit code. An exit code of 0 on SIGTERM is therefore not a success,
and a crash in the last seconds of a reclaimed node is not a failure.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from spottrain.contract import ExitCode, Outcome, TerminationMessage, gpu_fault
from spottrain.contract import Reason as TrainerReason

from spottrain_operator.api.observed import Ending, Notice, Observed, PodView
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.names import Cause, Reason
from spottrain_operator.policies import runtime, sync
from spottrain_operator.policies.pod_end import node_lost, termination_message_of, trainer_ended

AFTERMATH: Final = timedelta(seconds=60)
"""A node may outlive its deadline by this; an end within it is still attributed to the notice."""
SKEW: Final = timedelta(seconds=5)
"""Allowed clock skew between nodes and API server; container times are also in whole seconds."""
ONE_SECOND: Final = timedelta(seconds=1)
"""Equal times in whole seconds may have occurred in either order."""
SHUTDOWN_REASONS: Final = frozenset({"Terminated", "NodeShutdown", "Shutdown"})
LOST_REASONS: Final = frozenset({"NodeLost", "ContainerStatusUnknown"})
SIGNALLED: Final = frozenset(
    {128 + signal.SIGTERM, 128 + signal.SIGKILL, int(ExitCode.INTERRUPTED), int(ExitCode.INTERRUPTED_LOST)}
)
"""Exit codes of a trainer that a signal ended."""
STOPPED: Final = frozenset({Outcome.INTERRUPTED, Outcome.INTERRUPTED_LOST})
STOPPED_CODES: Final = frozenset({ExitCode.INTERRUPTED, ExitCode.INTERRUPTED_LOST})
ENDED_BY_KUBELET: Final = frozenset({"Evicted", "DeadlineExceeded"})
"""The pod exceeded a limit of its own: storage, activeDeadlineSeconds."""
MAX_CHARACTERS: Final = 2000


NO_MESSAGE: Final = "exit code 0, and no termination message of the spottrain runtime"
NOT_DONE_SENTENCE: Final = (
    f"{NO_MESSAGE} that the training is done; let the script return normally, and go on in a new job with "
    "checkpoint.onExisting: Resume"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One pod that has ended or is to be given up, with all known facts."""

    pod: PodView
    o: Observed
    word: TerminationMessage | None
    """The trainer's; with checkpoint.mode Sync it has none, and only its exit code counts."""
    sidecar: TerminationMessage | None = None
    """That of the sidecar that uploads a folder."""

    @property
    def end(self) -> datetime:
        """When the trainer ended, or an upload that it needed; now, where that is unknown."""
        finished = self.pod.ended.finished if self.pod.ended else None
        unsaved = self.sidecar is None or self.sidecar.outcome is not Outcome.DONE
        if finished is not None and self.pod.sync is not None and unsaved and _exit_code(self.pod) == 0:
            last = self.pod.sync.ended.finished if self.pod.sync.ended else None
            finished = max(finished, last or finished)
        return finished or self.o.now

    @property
    def managed(self) -> bool:
        """Whether the trainer's exit codes are our runtime's."""
        return self.o.job.spec is None or self.o.job.spec.checkpoint.managed


def ending_of(pod: PodView, o: Observed) -> Ending:
    """Returns the ending of a pod that has ended or is to be given up: the first rule that matches."""
    said = termination_message_of(pod)
    by_sidecar = pod.sync is not None
    case = Case(pod=pod, o=o, word=None if by_sidecar else said, sidecar=said if by_sidecar else None)
    found = next((ending for rule in RULES for ending in rule(case)), None)
    return found or Ending(cause=Cause.POD_DELETED, evidence="the pod ended, and nothing shows why")


def without_our_deletion(pod: PodView, o: Observed) -> PodView:
    """Returns the pod without its deletion, if something else than the operator's deletion ended it.

    A trainer may end at the moment when the operator stops it with the rest of a gang. The operator's own
    deletions are no evidence, so they get no clock-skew tolerance.
    """
    if pod.deleted is None:
        return pod
    finished = pod.ended.finished if pod.ended is not None else None
    known = pod.deletion_grace > 1  # else the kubelet's later delete request has overwritten the time
    earlier = (
        known
        and finished is not None
        and finished < _deletion_requested(pod) + ONE_SECOND
        and not _ended_by_signal(pod)
    )
    of_its_own = pod.phase == "Failed" and pod.reason in ENDED_BY_KUBELET
    return replace(pod, deleted=None) if earlier or of_its_own else pod


def notice_of(pod: PodView, o: Observed) -> Notice | None:
    """Returns the pending notice for this pod: its own, otherwise its node's."""
    return next((n for n in notices_of(pod, o) if n.deadline > o.now), None)


def notices_of(pod: PodView, o: Observed) -> tuple[Notice, ...]:
    """Returns the notices for this pod, pending or past: its own, and its node's."""
    node = o.nodes.get(pod.node)
    of_node = _in_its_pool(node.notice, pod, o) if node is not None and node.notice is not None else None
    return tuple(n for n in (pod.notice, of_node) if n is not None)


def _in_its_pool(notice: Notice, pod: PodView, o: Observed) -> Notice:
    """Returns a node's notice with the time that the pod's pool gives, where that is longer than usual."""
    record = o.job.status.record(pod.attempt)
    if not notice.assumed or notice.seen is None or record is None or not record.notice_seconds:
        return notice
    until = notice.seen + timedelta(seconds=record.notice_seconds)
    return replace(notice, deadline=max(notice.deadline, until))


def ending_by_notice(notice: Notice) -> Ending:
    """Returns the ending of a pod that a notice explains."""
    source, when = notice.source or "notice", rfc3339(notice.deadline, timespec="seconds")
    return Ending(cause=Cause.SPOT_NOTICE, evidence=f"{source}: the node ends at {when}")


# --- the rules, in order --------------------------------------------------------------------------------
def _by_report(case: Case) -> Iterator[Ending]:
    """What the trainer reports of its end, or the sidecar of an upload."""
    pod, word, code = case.pod, case.word, _exit_code(case.pod)
    if word is not None and word.outcome is Outcome.DONE:
        yield Ending(cause=Cause.DONE, evidence="the trainer reports that the training is done")
    # The script is done once all of its folder is stored; a notice during the last upload does not count.
    asked = [notice.seen or pod.created for notice in notices_of(pod, case.o)]
    asked += [pod.disrupted] if pod.disrupted is not None else []
    unasked = all(case.end < at - SKEW for at in asked) and (pod.deleted is None or _ended_first(case))
    if pod.sync is not None and pod.reason not in SHUTDOWN_REASONS and unasked:
        ending = sync.end(pod, case.sidecar)
        if ending is not None and ending.cause is Cause.DONE:
            yield ending
    refused = sync.refused(case.sidecar)  # for example another job's URI
    if refused is not None and refused.cause is Cause.BAD_CONFIGURATION:
        yield refused
    if word is not None and word.outcome is Outcome.BAD_CONFIGURATION:
        said = word.message or "the trainer rejects its configuration"
        yield Ending(cause=Cause.BAD_CONFIGURATION, evidence=said, charged=True, reason=word.reason)
    if word is None and code == ExitCode.BAD_CONFIGURATION:
        said = _with_message(case, f"exit code {code}")
        yield Ending(cause=Cause.BAD_CONFIGURATION, evidence=said, charged=True)


def _by_node(case: Case) -> Iterator[Ending]:
    """What happened to its node, or was about to."""
    pod, node = case.pod, case.o.nodes.get(case.pod.node)
    for notice in notices_of(pod, case.o):
        seen, last = (notice.seen or pod.created) - SKEW, notice.deadline + AFTERMATH
        if pod.created <= last and seen <= case.end <= last:
            yield ending_by_notice(notice)
    lost = "" if trainer_ended(pod) else node_lost(pod, case.o)
    if lost and node is not None and not node.ready and not node.leaving:
        # Kubernetes itself deletes the pods of such a node.
        yield Ending(cause=Cause.NODE_LOST, evidence=lost)
    if pod.disruption and (pod.deleted is not None or pod.phase in ("Succeeded", "Failed")):
        shutdown = pod.reason in SHUTDOWN_REASONS
        yield Ending(cause=Cause.NODE_SHUTDOWN if shutdown else Cause.DISRUPTED, evidence=pod.disruption)
    if node is not None and node.leaving and _as_if_signalled(case):
        yield Ending(cause=Cause.DISRUPTED, evidence=f"node {pod.node}: {node.leaving}")
    if lost:
        yield Ending(cause=Cause.NODE_LOST, evidence=lost)


def _by_status(case: Case) -> Iterator[Ending]:
    """What the pod's status says of an end from outside."""
    pod, reason = case.pod, case.pod.reason
    said = f"{reason}: {pod.message}" if pod.message else reason
    if reason in SHUTDOWN_REASONS:
        yield Ending(cause=Cause.NODE_SHUTDOWN, evidence=said)
    if reason in LOST_REASONS:
        yield Ending(cause=Cause.NODE_LOST, evidence=said)
    if pod.lost and pod.deleted is None and reason not in ENDED_BY_KUBELET:
        yield Ending(cause=Cause.NODE_LOST, evidence=f"node {pod.node} has lost the pod: {pod.lost}")
    if reason and reason not in ENDED_BY_KUBELET and pod.phase == "Failed":
        # OutOfcpu, UnexpectedAdmissionError, ...: the kubelet rejected it, before the trainer ran or when the
        # machine was started again.
        hint = sync.OLD_KUBELET if pod.sync is not None and reason == sync.NO_SIDECARS else ""
        yield Ending(cause=Cause.POD_REJECTED, evidence=f"{said}{hint}")
    if pod.deleted is not None and not _ended_first(case):
        when = rfc3339(_deletion_requested(pod))
        yield Ending(cause=Cause.POD_DELETED, evidence=f"the pod was deleted at {when}")


def _by_limits(case: Case) -> Iterator[Ending]:
    """A limit of the pod's own, for which the kubelet stopped it whatever its exit code; a failed GPU."""
    pod = case.pod
    if pod.phase == "Failed" and pod.reason in ENDED_BY_KUBELET:
        said = f"{pod.reason}: {pod.message[-MAX_CHARACTERS:]}" if pod.message else pod.reason
        yield Ending(cause=Cause.FAILED, evidence=said, charged=True, reason=pod.reason)
    if (fault := _gpu_fault(case)) and _exit_code(pod):
        said = f"node {pod.node}: {fault[:MAX_CHARACTERS]}"
        yield Ending(cause=Cause.NODE_FAULT, evidence=said, node=pod.node)


def _gpu_fault(case: Case) -> str:
    """Returns what the trainer, its driver or a health monitor reports of a GPU; "" without a failure."""
    pod, word = case.pod, case.word
    if word is not None and word.reason == TrainerReason.NODE_FAULT:
        return word.message or "the trainer's GPU has failed"
    said = pod.ended.message if pod.ended is not None and word is None else ""
    node = case.o.nodes.get(pod.node)
    return pod.unhealthy or (node.fault if node is not None else "") or gpu_fault(said)


def _by_exit_code(case: Case) -> Iterator[Ending]:
    """What the exit code means, with the outcome that the trainer reports."""
    pod, word, code = case.pod, case.word, _exit_code(case.pod)
    if pod.sync is not None and (ending := sync.end(pod, case.sidecar)) is not None:
        yield ending
    # A rank that lost a peer, and ran out of memory itself, would do so again.
    if not (_oom_killed(pod) and word is not None and word.reason == TrainerReason.PEER_LOST):
        yield from _by_outcome(case)
    if pod.ended is not None and _oom_killed(pod):
        limit = (
            f"its limit is {pod.memory_limit}" if pod.memory_limit else "it has no limit, so the node ran out"
        )
        known = f"out of memory (exit code {code}, OOMKilled): {limit}"
        advice = "raise resources.limits.memory or lower training.microBatchSize"
        yield Ending(cause=Cause.OUT_OF_MEMORY, evidence=f"{known}; {advice}", charged=True)
    if pod.ended is not None or pod.phase == "Failed":
        known = _code(pod.ended.exit_code) if pod.ended else pod.init_failure or pod.reason or "phase Failed"
        reason = word.reason if word else pod.reason
        yield Ending(cause=Cause.FAILED, evidence=_with_message(case, known), charged=True, reason=reason)


def _by_outcome(case: Case) -> Iterator[Ending]:
    """The outcomes of our runtime that are no failures; without its message they are known by exit code."""
    outcome, code = case.word.outcome if case.word else None, _exit_code(case.pod)
    by_code = code if outcome is None and case.managed else None
    if outcome is Outcome.SUPERSEDED or by_code == ExitCode.SUPERSEDED:
        said = _with_message(case, "a newer attempt owns the checkpoints")
        yield Ending(cause=Cause.SUPERSEDED, evidence=said)
    if outcome is Outcome.STORE_UNREACHABLE or by_code == ExitCode.STORE_UNREACHABLE:
        said = _with_message(case, "the checkpoint store does not respond")
        yield Ending(cause=Cause.STORE_UNREACHABLE, evidence=said)
    if outcome in STOPPED or (outcome is None and code in STOPPED_CODES):
        yield Ending(cause=Cause.INTERRUPTED, evidence=_with_message(case, f"exit code {code}"))
    if code == ExitCode.DONE and outcome in (None, Outcome.UNTRAINED):
        yield _exit_0(case)


def _exit_0(case: Case) -> Ending:
    """Exit code 0 is success only without our runtime, or for a rank other than 0."""
    if not case.managed or case.pod.rank:
        return Ending(cause=Cause.DONE, evidence="exit code 0")
    if case.word is not None:
        words, reason = f"{case.word.message.rstrip('.') or NO_MESSAGE}; {runtime.REMEDY}", case.word.reason
    elif runtime.attached(case.o.job.status):
        words, reason = NOT_DONE_SENTENCE, Reason.NOT_DONE
    else:
        words, reason = f"{NO_MESSAGE}, which was never seen to train; {runtime.REMEDY}", Reason.NO_RUNTIME
    return Ending(cause=Cause.BAD_CONFIGURATION, evidence=words, charged=True, reason=reason)


RULES: Final = (_by_report, _by_node, _by_status, _by_limits, _by_exit_code)


# --- when and how it ended ------------------------------------------------------------------------------
def _ended_first(case: Case) -> bool:
    """Returns whether the trainer ended by itself before its deletion was requested.

    After a container's end, the kubelet deletes the pod again with a grace of 0, and the API server then
    reports that time (seen on 1.34). With so small a grace, the first request may have been much earlier.
    """
    pod = case.pod
    if pod.deleted is None or pod.ended is None:
        return False
    return case.end < _deletion_requested(pod) - (SKEW if pod.deletion_grace > 1 else AFTERMATH)


def _as_if_signalled(case: Case) -> bool:
    """Returns whether the trainer ended as on a signal or a deletion: a crash has another reason."""
    pod, saved = case.pod, case.word is not None and case.word.outcome in STOPPED
    crashed = _oom_killed(pod) or (_ended_first(case) and not _ended_by_signal(pod))
    return (saved or _exit_code(pod) in SIGNALLED or pod.deleted is not None) and not crashed


def _ended_by_signal(pod: PodView) -> bool:
    """Returns whether the trainer ended like one that obeyed a signal."""
    return _exit_code(pod) in SIGNALLED and not _oom_killed(pod)


def _oom_killed(pod: PodView) -> bool:
    return pod.ended is not None and pod.ended.reason == "OOMKilled"


def _exit_code(pod: PodView) -> int | None:
    return pod.ended.exit_code if pod.ended is not None else None


def _deletion_requested(pod: PodView) -> datetime:
    """Returns the latest time at which its deletion was requested."""
    assert pod.deleted is not None
    return pod.deleted - timedelta(seconds=pod.deletion_grace)


def _code(code: int) -> str:
    """Formats an exit code: above 128 it is a signal, and one of unknown origin is noted as such."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    unasked = "; no notice, deletion or memory limit explains it" if name in ("SIGTERM", "SIGKILL") else ""
    return f"exit code {code} ({name}{unasked})"


def _with_message(case: Case, known: str) -> str:
    """Appends the trainer's message or last log lines to the known facts."""
    pod = case.pod
    said = case.word.message if case.word else (pod.ended.message if pod.ended else "") or pod.message
    return f"{known}: {said.strip()[-MAX_CHARACTERS:]}" if said.strip() else known
