"""Detects whether the spottrain runtime trains in a job's containers, and handles its absence. Pure.

The operator detects the runtime by rank 0's responses on the progress port and its termination message: an
attempt that it has trained in has a first step in its record. A script without the runtime saves nothing:
each attempt begins at step 0, two attempts may overlap, and exit code 0 does not show that the training is
done.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from spottrain.contract import PROGRESS_PORT, WAITING_FOR_STORE

from spottrain_operator.api.observed import Ending, Observed, PodView
from spottrain_operator.api.training_job import Status
from spottrain_operator.names import NO_RUNTIME_STATE, UNKNOWN_STATE, Reason
from spottrain_operator.policies.pod_end import pod_ended

LOOK: Final = timedelta(seconds=10)
"""Recheck interval while this process has not yet queried the progress port of a late runtime."""
STARTING_STATE: Final = "Starting"
"""Progress state of a script that runs under our runtime and has not begun a training with it."""
NOT_BEGUN: Final = ("", UNKNOWN_STATE, NO_RUNTIME_STATE, STARTING_STATE, WAITING_FOR_STORE)
REMEDY: Final = "see docs/own-image.md, No runtime found"

UNSEEN: Final = frozenset(
    {
        Reason.WAITING_FOR_RUNTIME,
        Reason.WAITING_FOR_TRAINING,
        Reason.NO_RUNTIME,
        Reason.RUNTIME_UNREACHABLE,
        Reason.NOT_TRAINING,
    }
)
"""Reasons of Running=True before the runtime was seen to train."""

Verdict = tuple[bool, str, str]
"""Value, reason, message of a condition."""


def attached(status: Status) -> bool:
    """Returns whether the runtime was seen to train, or has saved, in any attempt of the job."""
    stepped = any(r.start_step is not None or r.durable_step is not None for r in status.attempts)
    return status.known_durable_step is not None or stepped or trains(status.state)


def trains(state: str) -> bool:
    """Returns whether this `status.progress.state` shows a training that has begun with our runtime."""
    return state not in NOT_BEGUN


# --- why Running's reason is not Training ---------------------------------------------------------------
def missing(status: Status, o: Observed) -> bool:
    """Returns whether no runtime responds in rank 0's container although an import must be complete."""
    pod = _first(status, o)
    return pod is not None and _late(status, o, pod) and _silent(o, pod, refused=True)


def waiting(status: Status, o: Observed) -> tuple[Reason, str] | None:
    """Returns why Running's reason is not Training although all containers run: reason and sentence."""
    state, pod = status.state, _first(status, o)
    if not o.job.managed or trains(state) or pod is None:
        return None
    late = _late(status, o, pod)
    limit = f"within {o.limits.runtime_patience.total_seconds():.0f} s of its start"
    if state == STARTING_STATE and late:
        return Reason.NOT_TRAINING, (
            f"the script in pod {pod.name} runs under `spottrain run` and has not started a training with "
            f"the runtime {limit}; unless it still prepares its data, nothing is saved: {REMEDY}"
        )
    if state == STARTING_STATE:
        return Reason.WAITING_FOR_TRAINING, (
            f"the runtime of attempt {status.attempt} responds; the script has not started a training yet"
        )
    if state == NO_RUNTIME_STATE:
        return Reason.NO_RUNTIME, (
            f"no spottrain runtime has responded on port {PROGRESS_PORT} of pod {pod.name} {limit}: nothing "
            f"is saved, and the first interruption fails the job; {REMEDY}"
        )
    if late and _silent(o, pod):
        return Reason.RUNTIME_UNREACHABLE, (
            f"the operator could not reach port {PROGRESS_PORT} of pod {pod.name} {limit}; check that "
            "NetworkPolicies let the operator's pod connect to that port"
        )
    words = f"the container of attempt {status.attempt} runs; its runtime has not responded yet"
    return Reason.WAITING_FOR_RUNTIME, words


def times(status: Status, o: Observed) -> Iterator[datetime]:
    """Yields when a runtime counts as missing, or when to look again for how its port responds."""
    pod = _first(status, o)
    if pod is None or pod.running_since is None or not o.job.managed or attached(status):
        return
    if not _late(status, o, pod):
        yield pod.running_since + o.limits.runtime_patience
    elif not _silent(o, pod):
        yield o.now + LOOK


def _silent(o: Observed, pod: PodView, *, refused: bool = False) -> bool:
    """Returns whether the last query of this pod failed, and, if asked, because its port is closed."""
    known = o.silence
    return known is not None and known.pod_uid == pod.uid and (known.refused or not refused)


def _late(status: Status, o: Observed, pod: PodView) -> bool:
    began = pod.running_since
    return (
        o.job.managed
        and not attached(status)
        and began is not None
        and o.now - began >= o.limits.runtime_patience
    )


def _first(status: Status, o: Observed) -> PodView | None:
    """Returns the pod of rank 0 of this status' attempt, while its trainer runs."""
    pod = o.first(status.attempt)
    return pod if pod is not None and pod.running_since is not None and not pod_ended(pod, o) else None


# --- ends -----------------------------------------------------------------------------------------------
def starts_over(o: Observed, status: Status, ending: Ending) -> str:
    """Returns a sentence about why an interruption fails the job: the next attempt would restart at step 0.

    "" where no runtime is known to be missing.
    """
    if not o.job.managed or attached(status) or status.state != NO_RUNTIME_STATE:
        return ""
    return (
        f"attempt {status.attempt} was interrupted ({ending.evidence}) without checkpoint and runtime, so "
        f"the next one would start at step 0; {REMEDY}"
    )
