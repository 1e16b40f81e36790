"""What the sidecar of checkpoint.mode Sync says about its pod, and what the end of such a pod means. Pure.

The sidecar restores a folder before the script starts, and uploads it as it grows. The script's exit code and
the sidecar's termination message decide together: the exit code alone does not show that the last checkpoint
is in the store. The kubelet restarts a sidecar that ends before the script; what no restart can mend ends the
attempt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from spottrain.contract import Outcome, TerminationMessage
from spottrain.contract import Reason as TrainerReason

from spottrain_operator.api.observed import Ending, PodView
from spottrain_operator.names import Cause, Reason
from spottrain_operator.policies.pod_end import termination_message_of

REFUSALS: Final = {
    Outcome.BAD_CONFIGURATION: Cause.BAD_CONFIGURATION,
    Outcome.SUPERSEDED: Cause.SUPERSEDED,
    Outcome.STORE_UNREACHABLE: Cause.STORE_UNREACHABLE,
    Outcome.FAILED: Cause.FAILED,
}
"""Outcomes with which a sidecar gives up, and what they mean for the attempt."""
BEFORE_THE_SCRIPT: Final = frozenset({Cause.STORE_UNREACHABLE, Cause.FAILED})
"""Those that end an attempt only while its folder is not restored; later the kubelet restarts the sidecar."""
NO_SIDECARS: Final = "InitContainerRestartPolicyForbidden"
"""A pod's reason where the kubelet does not know sidecars."""
OLD_KUBELET: Final = "; checkpoint.mode Sync needs nodes whose kubelet is 1.29 or newer, which runs sidecars"


def refusal(pod: PodView) -> Ending | None:
    """Returns why the pod's sidecar has given up, so that no restart of it helps; None while it goes on."""
    if pod.sync is None or pod.sync.running:
        return None
    ending = refused(termination_message_of(pod))
    began = pod.running_since is not None or pod.uploading is not None
    if ending is not None and ending.cause in BEFORE_THE_SCRIPT and began:
        return None  # the script goes on, and the sidecar is started again
    return ending


def refused(word: TerminationMessage | None) -> Ending | None:
    """Returns what a sidecar's termination message means for the attempt, if it has given up."""
    if word is not None and word.reason == TrainerReason.CHECKPOINT_FOUND:
        return Ending(cause=Cause.INTERRUPTED, evidence=word.message, reason=word.reason)
    cause = REFUSALS.get(word.outcome) if word is not None else None
    if word is None or cause is None:
        return None
    sentence = word.message or f"the sidecar ended with {word.outcome}"
    charged = cause in (Cause.BAD_CONFIGURATION, Cause.FAILED)
    return Ending(cause=cause, evidence=sentence, charged=charged, reason=word.reason if charged else "")


def end(pod: PodView, word: TerminationMessage | None) -> Ending | None:
    """Returns what the end of script and sidecar means; None where the script's own end decides."""
    if pod.ended is not None and pod.ended.exit_code != 0:
        return None
    ending = refused(word)
    if pod.ended is None:
        return ending
    if ending is not None and ending.cause is Cause.FAILED:
        words = f"the script ended with exit code 0, and its last upload failed: {ending.evidence}"
        return replace(ending, evidence=words)
    if ending is not None:
        return ending
    if word is not None and word.outcome is Outcome.DONE:
        words = "the script ended with exit code 0, and all of its folder is in the store"
        return Ending(cause=Cause.DONE, evidence=words)
    return Ending(cause=Cause.INTERRUPTED, evidence=_not_uploaded(pod, word), reason=Reason.NOT_UPLOADED)


def _not_uploaded(pod: PodView, word: TerminationMessage | None) -> str:
    ended = pod.sync.ended if pod.sync is not None else None
    how = f" ({ended.reason}, exit code {ended.exit_code})" if ended is not None else ""
    said = f"; it said: {word.message}" if word is not None and word.message else ""
    return (
        f"exit code 0, and the sidecar ended{how} before the last checkpoint was in the store{said}; see "
        "docs/sync.md, As a sidecar"
    )
