"""Determines why an attempt ended: the first matching rule wins. Pure.

The trainer's termination message comes first (done, then bad configuration), then external evidence whose
time window overlaps the pod's, then the exit code. An exit code of 0 on SIGTERM is therefore not a success,
and a crash in the last seconds of a reclaimed node is not a failure.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from spottrain.contract import ExitCode, Outcome, TerminationMessage, gpu_fault
from spottrain.contract import Reason as TrainerReason

from spottrain_operator.api.observed import Ending, Notice, Observed, PodView
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.names import Cause, Reason
from spottrain_operator.policies import runtime, sync
from spottrain_operator.policies.pod_end import node_lost, trainer_ended
from spottrain_operator.policies.termination import termination_message_of

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
ENDED_BY_KUBELET: Final = frozenset({"Evicted", "DeadlineExceeded"})
"""The pod exceeded a limit of its own: storage, activeDeadlineSeconds."""
MAX_CHARACTERS: Final = 2000


NO_MESSAGE: Final = "exit code 0, and no termination message of the spottrain runtime"
NOT_DONE_SENTENCE: Final = (
    f"{NO_MESSAGE} says that the training is done. The checkpoints are kept. Let the script return normally, "
    "without os._exit() or exec, and continue in a new job with the same checkpoint.uri and "
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

    @property
    def notices(self) -> tuple[Notice, ...]:
        return notices_of(self.pod, self.o)


Rule = Callable[[Case], Ending | None]


def ending_of(pod: PodView, o: Observed) -> Ending:
    """Returns the ending of a pod that has ended or is to be given up: the first rule that matches."""
    said = termination_message_of(pod)
    by_sidecar = pod.sync is not None
    case = Case(pod=pod, o=o, word=None if by_sidecar else said, sidecar=said if by_sidecar else None)
    found = next((e for rule in RULES if (e := rule(case)) is not None), None)
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


def _ended_by_signal(pod: PodView) -> bool:
    """Returns whether the trainer ended like one that obeyed a signal."""
    return pod.ended is not None and pod.ended.exit_code in SIGNALLED and not _oom_killed(pod)


def _exit_code(pod: PodView) -> int | None:
    return pod.ended.exit_code if pod.ended is not None else None


def _deletion_requested(pod: PodView) -> datetime:
    """Returns the latest time at which its deletion was requested."""
    assert pod.deleted is not None
    return pod.deleted - timedelta(seconds=pod.deletion_grace)


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


# --- the trainer's termination message ---------------------------------------------------------------
def _done(case: Case) -> Ending | None:
    if case.word is None or case.word.outcome is not Outcome.DONE:
        return None
    return Ending(cause=Cause.DONE, evidence="the trainer reports that the training is done")


def _synced(case: Case) -> Ending | None:
    """A script that ended with 0 before anything asked it to end is done, once all of its folder is stored.

    What comes afterwards, such as a notice during the last upload, does not count.
    """
    if case.pod.sync is None or case.pod.reason in SHUTDOWN_REASONS or not _ended_by_itself(case):
        return None
    ending = sync.end(case.pod, case.sidecar)
    return ending if ending is not None and ending.cause is Cause.DONE else None


def _ended_by_itself(case: Case) -> bool:
    asked = [notice.seen or case.pod.created for notice in case.notices]
    asked += [case.pod.disrupted] if case.pod.disrupted is not None else []
    return all(case.end < at - SKEW for at in asked) and (case.pod.deleted is None or _ended_first(case))


def _sidecar_refuses(case: Case) -> Ending | None:
    """A configuration that the sidecar refuses, such as another job's URI."""
    refusal = sync.refused(case.sidecar)
    return refusal if refusal is not None and refusal.cause is Cause.BAD_CONFIGURATION else None


def _bad_configuration(case: Case) -> Ending | None:
    word, code = case.word, case.pod.ended.exit_code if case.pod.ended else None
    if word is not None and word.outcome is Outcome.BAD_CONFIGURATION:
        sentence = word.message or "the trainer rejects its configuration"
        return Ending(cause=Cause.BAD_CONFIGURATION, evidence=sentence, charged=True, reason=word.reason)
    if word is None and code == ExitCode.BAD_CONFIGURATION:
        return Ending(
            cause=Cause.BAD_CONFIGURATION, evidence=_with_message(case, f"exit code {code}"), charged=True
        )
    return None


# --- external evidence -------------------------------------------------------------------------------
def _under_notice(case: Case) -> Ending | None:
    for notice in case.notices:
        seen, last = (notice.seen or case.pod.created) - SKEW, notice.deadline + AFTERMATH
        if case.pod.created <= last and seen <= case.end <= last:
            return ending_by_notice(notice)
    return None


def ending_by_notice(notice: Notice) -> Ending:
    """Returns the ending of a pod that a notice explains."""
    source, when = notice.source or "notice", rfc3339(notice.deadline, timespec="seconds")
    return Ending(cause=Cause.SPOT_NOTICE, evidence=f"{source}: the node ends at {when}")


def _node_silent(case: Case) -> Ending | None:
    """Attributes a deletion on an unreachable node to the node: Kubernetes itself deletes such pods."""
    node = case.o.nodes.get(case.pod.node)
    if node is None or node.ready or node.leaving or trainer_ended(case.pod):
        return None
    return _node_gone(case)


def _disrupted(case: Case) -> Ending | None:
    really = case.pod.deleted is not None or case.pod.phase in ("Succeeded", "Failed")
    if not case.pod.disruption or not really:
        return None
    shutdown = case.pod.reason in SHUTDOWN_REASONS
    return Ending(cause=Cause.NODE_SHUTDOWN if shutdown else Cause.DISRUPTED, evidence=case.pod.disruption)


def _leaving(case: Case) -> Ending | None:
    """A node that is taken out of service explains an end by a signal, but not a crash of the trainer."""
    node, word = case.o.nodes.get(case.pod.node), case.word
    if node is None or not node.leaving:
        return None
    code = case.pod.ended.exit_code if case.pod.ended else None
    saved = word is not None and word.outcome in (Outcome.INTERRUPTED, Outcome.INTERRUPTED_LOST)
    signalled = code in SIGNALLED or case.pod.deleted is not None
    crashed = _oom_killed(case.pod) or (_ended_first(case) and not _ended_by_signal(case.pod))
    if not (saved or signalled) or crashed:
        return None
    return Ending(cause=Cause.DISRUPTED, evidence=f"node {case.pod.node}: {node.leaving}")


def _ended_first(case: Case) -> bool:
    """Returns whether the trainer ended by itself before its deletion was requested.

    After a container's end, the kubelet deletes the pod again with a grace of 0, and the API server then
    reports that time (seen on 1.34). With so small a grace, the first request may have been much earlier.
    """
    pod = case.pod
    if pod.deleted is None or pod.ended is None:
        return False
    return case.end < _deletion_requested(pod) - (SKEW if pod.deletion_grace > 1 else AFTERMATH)


def _node_gone(case: Case) -> Ending | None:
    sentence = node_lost(case.pod, case.o) if not trainer_ended(case.pod) else ""
    return Ending(cause=Cause.NODE_LOST, evidence=sentence) if sentence else None


def _pod_reason(case: Case) -> Ending | None:
    pod = case.pod
    said = f"{pod.reason}: {pod.message}" if pod.message else pod.reason
    if pod.reason in SHUTDOWN_REASONS:
        return Ending(cause=Cause.NODE_SHUTDOWN, evidence=said)
    if pod.reason in LOST_REASONS:
        return Ending(cause=Cause.NODE_LOST, evidence=said)
    if pod.lost and pod.deleted is None and pod.reason not in ENDED_BY_KUBELET:
        return Ending(cause=Cause.NODE_LOST, evidence=f"node {pod.node} has lost the pod: {pod.lost}")
    if pod.reason and pod.reason not in ENDED_BY_KUBELET and pod.phase == "Failed":
        # OutOfcpu, UnexpectedAdmissionError, ...: the kubelet rejected it, before the trainer ran or when the
        # machine was started again.
        hint = sync.OLD_KUBELET if pod.sync is not None and pod.reason == sync.NO_SIDECARS else ""
        return Ending(cause=Cause.POD_REJECTED, evidence=f"{said}{hint}")
    return None


def _deleted(case: Case) -> Ending | None:
    pod = case.pod
    if pod.deleted is None:
        return None
    if _ended_first(case):
        return None
    return Ending(
        cause=Cause.POD_DELETED, evidence=f"the pod was deleted at {rfc3339(_deletion_requested(pod))}"
    )


def _ended_by_kubelet(case: Case) -> Ending | None:
    """A trainer that the kubelet stopped for a limit of its own has failed, whatever its exit code."""
    pod = case.pod
    if pod.phase != "Failed" or pod.reason not in ENDED_BY_KUBELET:
        return None
    said = f"{pod.reason}: {pod.message[-MAX_CHARACTERS:]}" if pod.message else pod.reason
    return Ending(cause=Cause.FAILED, evidence=said, charged=True, reason=pod.reason)


# --- hardware, and the kubelet's evidence ---------------------------------------------------------------
def _node_fault(case: Case) -> Ending | None:
    """A GPU failure reported by the trainer, its driver or a health monitor is not the script's fault."""
    pod, word, node = case.pod, case.word, case.o.nodes.get(case.pod.node)
    if pod.ended is None or pod.ended.exit_code == 0:
        return None
    said = pod.ended.message if word is None else ""
    found = gpu_fault(said)
    if word is not None and word.reason == TrainerReason.NODE_FAULT:
        found = word.message or "the trainer's GPU has failed"
    elif pod.unhealthy:
        found = pod.unhealthy
    elif node is not None and node.fault:
        found = node.fault
    if not found:
        return None
    return Ending(
        cause=Cause.NODE_FAULT, evidence=f"node {pod.node}: {found[:MAX_CHARACTERS]}", node=pod.node
    )


def _probe(case: Case) -> Ending | None:
    """A failed probe is visible only in the pod's Events; the exit code is that of any signal."""
    heard = case.o.heard.get(case.pod.uid)
    if heard is None or not heard.probe or case.pod.ended is None:
        return None
    code = case.pod.ended.exit_code
    words = f"the kubelet killed the trainer because {heard.probe}; it ended with exit code {code}"
    advice = "a probe must allow for imports, compilation, saves and long steps, or be left out"
    return Ending(cause=Cause.FAILED, evidence=f"{words}; {advice}", charged=True, reason=Reason.PROBE_FAILED)


# --- the exit code -----------------------------------------------------------------------------------
def _sidecar(case: Case) -> Ending | None:
    return sync.end(case.pod, case.sidecar) if case.pod.sync is not None else None


def _own_outcome(case: Case) -> Ending | None:
    outcome = case.word.outcome if case.word else None
    code = case.pod.ended.exit_code if case.pod.ended else None
    if _peer_out_of_memory(case):
        return None
    if outcome is Outcome.SUPERSEDED or (outcome is None and code == ExitCode.SUPERSEDED and case.managed):
        return Ending(
            cause=Cause.SUPERSEDED, evidence=_with_message(case, "a newer attempt owns the checkpoints")
        )
    silent = outcome is None and code == ExitCode.STORE_UNREACHABLE and case.managed
    if outcome is Outcome.STORE_UNREACHABLE or silent:
        said = _with_message(case, "the checkpoint store does not respond")
        return Ending(cause=Cause.STORE_UNREACHABLE, evidence=said)
    stopped = outcome in (Outcome.INTERRUPTED, Outcome.INTERRUPTED_LOST)
    if stopped or (outcome is None and code in (ExitCode.INTERRUPTED, ExitCode.INTERRUPTED_LOST)):
        return Ending(cause=Cause.INTERRUPTED, evidence=_with_message(case, f"exit code {code}"))
    return _exit_0(case) if code == ExitCode.DONE and outcome in (None, Outcome.UNTRAINED) else None


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


def _peer_out_of_memory(case: Case) -> bool:
    """A rank reports a lost peer and the kubelet an OOM kill: a restart would run out of memory again."""
    return case.word is not None and case.word.reason == TrainerReason.PEER_LOST and _oom_killed(case.pod)


def _oom_killed(pod: PodView) -> bool:
    return pod.ended is not None and pod.ended.reason == "OOMKilled"


def _out_of_memory(case: Case) -> Ending | None:
    pod = case.pod
    if pod.ended is None or not _oom_killed(pod):
        return None
    limit = f"its limit is {pod.memory_limit}" if pod.memory_limit else "it has no limit, so the node ran out"
    return Ending(
        cause=Cause.OUT_OF_MEMORY,
        charged=True,
        evidence=f"out of memory (exit code {pod.ended.exit_code}, OOMKilled): {limit};"
        " raise resources.limits.memory or lower training.microBatchSize",
    )


def _failed(case: Case) -> Ending | None:
    pod, word = case.pod, case.word
    if pod.ended is None and pod.phase != "Failed":
        return None
    unstarted = pod.init_failure or pod.reason or "phase Failed"
    known = _code(pod.ended.exit_code) if pod.ended else unstarted
    reason = word.reason if word else pod.reason
    return Ending(cause=Cause.FAILED, evidence=_with_message(case, known), charged=True, reason=reason)


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


RULES: Final[tuple[Rule, ...]] = (
    _done,
    _synced,
    _sidecar_refuses,
    _bad_configuration,
    _under_notice,
    _node_silent,
    _disrupted,
    _leaving,
    _node_gone,
    _pod_reason,
    _deleted,
    _ended_by_kubelet,
    _node_fault,
    _probe,
    _sidecar,
    _own_outcome,
    _out_of_memory,
    _failed,
)
