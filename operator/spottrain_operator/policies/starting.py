"""Handles pods that have a node and do not start: the kubelet's error, and when the attempt gives up. Pure.

An error of an image, a Secret or a container is in the pod's status. An error of a volume or a sandbox is
only in the pod's Events. These are read only for a pod that has had its node for some seconds and has not
started.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.observed import Ending, Observed, PodEvents, PodView, Waiting
from spottrain_operator.api.training_job import REASON_LIMIT, FailurePolicy, Status, with_record
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.names import Cause
from spottrain_operator.policies import gang
from spottrain_operator.policies.pod_end import pod_ended

READ_INTERVAL: Final = timedelta(seconds=20)
"""A pod's Events are read when it has had its node for this time, and again at this interval."""
NEXT_BATCH: Final = timedelta(seconds=1)
"""Recheck interval while more pods' Events are to be read than one reconcile reads."""
ATTACH_WAIT: Final = timedelta(minutes=15)
"""Minimum wait for a volume that is still attached to another node. Kubernetes itself detaches it from a dead
node after about six minutes."""
MAX_WORDS: Final = 2000
"""Maximum characters of the kubelet's message, which may contain a registry's whole response."""
MULTI_ATTACH: Final = "Multi-Attach error"
BAD_NAME: Final = "InvalidImageName"
BAD_CONFIG: Final = "CreateContainerConfigError"
TRANSIENT: Final = "failed to sync"
"""In the message of a CreateContainerConfigError that an unreachable API server causes."""
VOLUME_REASON: Final = "FailedMount"
MISSING: Final = ('configmap "', 'secret "', "references non-existent")
"""In the message of a FailedMount for an object, or a key in one, that the job names and that is missing."""


def pods_to_read(o: Observed) -> tuple[PodView, ...]:
    """Returns the pods whose Events are to be read now.

    A new image pull is looked for before giving up: meanwhile the status keeps the last error.
    """
    until = due(o)
    gives_up = until is not None and o.now >= until
    waits = (p for p in gang.team(o) if _waits(p, o))
    return tuple(p for p in waits if _sets_up(p, o) or (gives_up and start_error(p, o) is not None))


def _waits(pod: PodView, o: Observed) -> bool:
    """Returns whether the pod has a node, and its trainer has not started."""
    never_started = bool(pod.node) and not _began(pod) and pod.deleted is None
    return never_started and not pod_ended(pod, o)


def _began(pod: PodView) -> bool:
    return pod.running_since is not None or pod.uploading is not None


def _sets_up(pod: PodView, o: Observed) -> bool:
    known = o.heard.get(pod.uid, PodEvents())
    return not (_has_error(pod) or known.set_up) and o.now >= _first_read(pod)


def _first_read(pod: PodView) -> datetime:
    return (pod.bound or pod.created) + READ_INTERVAL


def next_read(o: Observed) -> datetime | None:
    """Returns when to read Events again."""
    if reads := pods_to_read(o):
        unread = any(p.uid not in o.heard for p in reads)
        return o.now + (NEXT_BATCH if unread else READ_INTERVAL)
    return min((_first_read(p) for p in gang.team(o) if _waits(p, o) and not _has_error(p)), default=None)


def _has_error(pod: PodView) -> bool:
    return pod.waiting is not None and pod.waiting.error


# --- start errors ---------------------------------------------------------------------------------------
def start_error(pod: PodView, o: Observed) -> Waiting | None:
    """Returns the kubelet's error; None while startup is in progress."""
    if pod.deleted is not None or pod_ended(pod, o):
        return None
    if _has_error(pod):
        return pod.waiting
    known = o.heard.get(pod.uid)
    return known.trouble if known is not None and not _began(pod) else None


def blocked(o: Observed) -> tuple[PodView, Waiting] | None:
    """Returns the first pod of the attempt that cannot start, and why."""
    found = ((p, w) for p in gang.team(o) if not _began(p) and (w := start_error(p, o)) is not None)
    return next(found, None)


def words(pod: PodView, waiting: Waiting) -> str:
    where = f"container {waiting.container} of pod {pod.name}" if waiting.container else f"pod {pod.name}"
    said = f"{waiting.reason}: {waiting.message[:MAX_WORDS]}" if waiting.message else waiting.reason
    return f"{where} cannot start: {said}"


def sentence(o: Observed, status: Status) -> str:
    """Returns a sentence about what cannot start, why, and the consequence; "" without an error."""
    found, record = blocked(o), status.current
    if found is None:
        return ""
    since = record.start_error_since if record is not None else None
    when = rfc3339((since or o.now) + _patience(o, found[1]), timespec="seconds")
    what = "the job fails" if configuration(found[1]) else "it is tried again"
    return f"{words(*found)}; {what} at {when} (failurePolicy.startTimeoutSeconds)"


def configuration(waiting: Waiting) -> bool:
    """Returns whether the job's configuration is wrong, so that a retry does not help."""
    if waiting.reason == VOLUME_REASON:
        text = waiting.message.lower()
        return any(word in text for word in MISSING) and TRANSIENT not in text
    return waiting.reason == BAD_NAME or (waiting.reason == BAD_CONFIG and TRANSIENT not in waiting.message)


# --- giving up --------------------------------------------------------------------------------------------
def with_start_error(status: Status, o: Observed) -> Status:
    """Records the time of the kubelet's first error in the status, so that it survives operator restarts."""
    record = status.current
    if record is None or record.cause or record.stopping or status.attempt != o.job.status.attempt:
        return status  # while it is being stopped, its pods' states do not show the error
    since = record.start_error_since
    if blocked(o) is not None:
        since = since or o.now.replace(microsecond=0)
    elif not any(_waits(p, o) and p.uid not in o.heard and o.now >= _first_read(p) for p in gang.team(o)):
        since = None
    if since == record.start_error_since:
        return status
    return with_record(status, replace(record, start_error_since=since))


def due(o: Observed) -> datetime | None:
    """Returns when the attempt is given up."""
    found, record = blocked(o), o.job.status.current
    if found is None or record is None or record.start_error_since is None:
        return None
    return record.start_error_since + _patience(o, found[1])


def _patience(o: Observed, waiting: Waiting) -> timedelta:
    policy = o.job.spec.failure_policy if o.job.spec is not None else FailurePolicy()
    most = timedelta(seconds=policy.start_timeout_seconds)
    return max(most, ATTACH_WAIT) if waiting.message.startswith(MULTI_ATTACH) else most


def gives_up(o: Observed) -> Ending | None:
    """Returns the ending of an attempt that fails to start for too long, except during an image pull."""
    found, until = blocked(o), due(o)
    if found is None or until is None or o.now < until:
        return None
    pod, waiting = found
    known = o.heard.get(pod.uid)
    if known is not None and known.pulling:
        return None
    seconds, reason = _patience(o, waiting).total_seconds(), waiting.reason[:REASON_LIMIT]
    evidence = f"{words(pod, waiting)}, for {seconds:.0f} s (failurePolicy.startTimeoutSeconds)"
    if configuration(waiting):
        return Ending(cause=Cause.BAD_CONFIGURATION, evidence=evidence, charged=True, reason=reason)
    return Ending(cause=Cause.START_FAILED, evidence=evidence, reason=reason)
