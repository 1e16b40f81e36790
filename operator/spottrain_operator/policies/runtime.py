"""Detects whether the spottrain runtime trains in a job's containers, and handles its absence. Pure.

The operator detects the runtime by rank 0's responses on the progress port and its termination message. Once
it was seen to train, the condition RuntimeAttached stays True for the rest of the job, even if the operator
restarts. A script without the runtime saves nothing: each attempt begins at step 0, two attempts may
overlap, and exit code 0 does not show that the training is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from spottrain.contract import PROGRESS_PORT, WAITING_FOR_STORE

from spottrain_operator.api.observed import Ending, Observed, PodView
from spottrain_operator.api.training_job import Status
from spottrain_operator.names import UNKNOWN_STATE, Condition, Reason
from spottrain_operator.policies.pod_end import pod_ended

LOOK: Final = timedelta(seconds=10)
"""Recheck interval while this process has not yet queried the progress port of a late runtime."""
STARTING_STATE: Final = "Starting"
"""Progress state of a script that runs under our runtime and has not begun a training with it."""
NOT_BEGUN: Final = ("", UNKNOWN_STATE, STARTING_STATE, WAITING_FOR_STORE)
SIGKILLED: Final = 128 + 9
"""Exit code after SIGKILL; a killed runtime leaves no termination message either."""
REMEDY: Final = "see docs/own-image.md, No runtime found"

Verdict = tuple[bool, str, str]
"""Value, reason, message of a condition."""


def attached(status: Status) -> bool:
    """Returns whether the runtime was seen to train, or has saved, in any attempt of the job."""
    stepped = any(r.start_step is not None or r.durable_step is not None for r in status.attempts)
    return status.is_true(Condition.RUNTIME_ATTACHED) or status.known_durable_step is not None or stepped


def trains(state: str) -> bool:
    """Returns whether this `status.progress.state` shows a training that has begun with our runtime."""
    return state not in NOT_BEGUN


def managed(o: Observed) -> bool:
    return o.job.spec is not None and o.job.spec.checkpoint.managed


# --- conditions -----------------------------------------------------------------------------------------
def missed(status: Status, o: Observed) -> Verdict | None:
    """Returns RuntimeAttached=False once an import must be complete; None while nothing new is known."""
    pod = _first(status, o)
    if pod is None or not _late(status, o, pod) or status.state == WAITING_FOR_STORE:
        return None
    limit = f"within {o.limits.runtime_patience.total_seconds():.0f} s of its start"
    if status.state == STARTING_STATE:
        return (
            False,
            Reason.NOT_TRAINING,
            f"the script in pod {pod.name} runs under `spottrain run` and has not started a training with "
            f"the runtime {limit}; unless it still prepares its data, nothing is saved: {REMEDY}",
        )
    if o.silence is None or o.silence.pod_uid != pod.uid:
        return None
    if not o.silence.refused:
        return (
            False,
            Reason.RUNTIME_UNREACHABLE,
            f"the operator could not reach port {PROGRESS_PORT} of pod {pod.name} {limit}; check that "
            "NetworkPolicies let the operator's pod connect to that port",
        )
    return (
        False,
        Reason.NO_RUNTIME,
        f"no spottrain runtime has responded on port {PROGRESS_PORT} of pod {pod.name} {limit}: nothing is "
        f"saved, and the first interruption fails the job; {REMEDY}",
    )


def waiting(status: Status, o: Observed) -> tuple[Reason, str] | None:
    """Returns why Running's reason is not Training although all containers run: reason and sentence."""
    state = status.state
    pod = _first(status, o)
    if not managed(o) or trains(state) or pod is None or pod.running_since is None:
        return None
    if state == STARTING_STATE:
        words = f"the runtime of attempt {status.attempt} responds; the script has not started a training yet"
        return Reason.WAITING_FOR_TRAINING, words
    words = f"the container of attempt {status.attempt} runs; its runtime has not responded yet"
    return Reason.WAITING_FOR_RUNTIME, words


def times(status: Status, o: Observed) -> Iterator[datetime]:
    """Yields when a runtime counts as missing, or when to look again for how its port responds."""
    pod = _first(status, o)
    if pod is None or pod.running_since is None or not managed(o) or attached(status):
        return
    if not _late(status, o, pod):
        yield pod.running_since + o.limits.runtime_patience
    elif missed(status, o) is None:
        yield o.now + LOOK


def _late(status: Status, o: Observed, pod: PodView) -> bool:
    began = pod.running_since
    return (
        managed(o)
        and not attached(status)
        and began is not None
        and o.now - began >= o.limits.runtime_patience
    )


def _first(status: Status, o: Observed) -> PodView | None:
    """Returns the pod of rank 0 of this status' attempt, while its trainer runs."""
    found = (p for p in o.pods if p.attempt == status.attempt and p.rank == 0)
    return next((p for p in found if p.running_since is not None and not pod_ended(p, o)), None)


# --- ends -----------------------------------------------------------------------------------------------
def starts_over(o: Observed, status: Status, ending: Ending, silent_end: bool) -> str:
    """Returns a sentence about why an interruption fails the job: the next attempt would restart at step 0.

    "" where the runtime was seen, or was interrupted before it could be seen. `silent_end`: whether rank 0's
    container ended without a termination message of the runtime.
    """
    if not managed(o) or attached(status):
        return ""
    known = status.condition(Condition.RUNTIME_ATTACHED)
    noticed = known is not None and known.reason == Reason.NO_RUNTIME
    same_spec = known is not None and known.observed_generation == o.job.generation
    if not (noticed and same_spec) and not (silent_end and _ran_long_enough(o)):
        return ""
    return (
        f"attempt {status.attempt} was interrupted ({ending.evidence}) without a checkpoint and without a "
        f"spottrain runtime, so the next one would start at step 0 again; {REMEDY}"
    )


def _ran_long_enough(o: Observed) -> bool:
    """Returns whether rank 0 ran long enough for a runtime to respond or to leave its message."""
    first = (p for p in o.pods if p.attempt == o.job.status.attempt and p.rank == 0)
    end = next((p.ended for p in first), None)
    if end is None or end.started is None or end.finished is None or end.exit_code == SIGKILLED:
        return False
    return end.finished - end.started >= o.limits.runtime_patience
