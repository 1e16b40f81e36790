"""A fire drill: an annotation of the job asks for an interruption, once for each of its values. Pure.

Its pods are deleted with their own grace period, which is that of a termination notice: SIGTERM, a save, an
end. The next attempt starts after that, where there is room: the nodes stay. Neither budgets nor pools count
it. A job that does not train is left alone; what became of a request is in `status.interrupt`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from spottrain.contract import Outcome

from spottrain_operator.api.observed import Ending, Observed
from spottrain_operator.api.training_job import InterruptStatus, Status
from spottrain_operator.names import INTERRUPT_ANNOTATION, Cause, Phase
from spottrain_operator.policies.pod_end import termination_message_of

SAVED: Final = frozenset({Outcome.INTERRUPTED, Outcome.DONE})
"""Done is the word of a sidecar that has uploaded all of its folder (checkpoint.mode Sync)."""


def stops(o: Observed) -> Ending | None:
    """Ends an attempt that trains, for a request that has not been answered yet."""
    if not _unanswered(o) or o.job.status.phase != Phase.RUNNING:
        return None
    words = f"requested by annotation {INTERRUPT_ANNOTATION}: {o.job.interrupt}"
    return Ending(cause=Cause.INTERRUPT_REQUESTED, evidence=words)


def answered(o: Observed, status: Status) -> Status:
    """Records what became of a request, in the same write that stops the attempt for it."""
    if not _unanswered(o):
        return status
    request, record, before = o.job.interrupt, status.current, o.job.status.current
    stops_now = before is None or not before.stopping
    if record is not None and record.stopping == Cause.INTERRUPT_REQUESTED and stops_now:
        return replace(status, interrupt=InterruptStatus(request=request, attempt=record.number))
    phase = status.phase or Phase.PENDING
    why = "its attempt ends for another reason" if phase == Phase.RUNNING else f"it is {phase}"
    words = f"no attempt was interrupted, because the job does not train: {why}"
    return replace(status, interrupt=InterruptStatus(request=request, message=words))


def _unanswered(o: Observed) -> bool:
    last = o.job.status.interrupt
    return bool(o.job.interrupt) and (last is None or last.request != o.job.interrupt)


def outcome(o: Observed, evidence: str) -> str:
    """Returns the evidence of an attempt that was interrupted on request, with what it has saved."""
    pod = o.first(o.job.status.attempt)
    word = termination_message_of(pod) if pod is not None else None
    if pod is None or word is None:
        code = f" (exit code {pod.ended.exit_code})" if pod is not None and pod.ended is not None else ""
        return f"{evidence}; rank 0 ended{code} and reported no save"
    if word.outcome in SAVED and word.durableStep is not None:
        what = "step" if pod.sync is None else "commit"  # of a script that a sidecar uploads
        took = f", {word.durableSeconds:.1f} s after its signal" if word.durableSeconds is not None else ""
        return f"{evidence}; {what} {word.durableStep} was saved{took}"
    said = f": {word.message}" if word.message else ""
    return f"{evidence}; rank 0 did not save its last step ({word.outcome}){said}"
