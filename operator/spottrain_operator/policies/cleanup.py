"""Deletes a deleted job's checkpoints with it, if its deletionPolicy is Delete. Pure.

A pod with the job's identity does it, because the operator has no access to the store; its image is ours. It
has DEADLINE from the deletion on. After that, or where no pod can be created (the namespace is being deleted
too), the job is released and its checkpoints stay, with an Event. An outage of the store therefore blocks
no deletion. A job of which no container ran has no checkpoints, and is released at once.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import DeletionPolicy
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.names import Reason
from spottrain_operator.policies.pod_end import may_have_run, pod_ended

DEADLINE: Final = timedelta(minutes=15)
CUT: Final = 300
"""Maximum number of characters of an error in an Event, which must have room for the URI and the command."""

DELETE: Final = "spottrain checkpoints delete {uri} --job-uid {uid}"


def wanted(o: Observed) -> bool:
    spec = o.job.spec
    return spec is not None and spec.deletion_policy is DeletionPolicy.DELETE and bool(spec.checkpoint.uri)


def trainers_ended(o: Observed) -> bool:
    """Returns whether no trainer of the job is left that could write a checkpoint."""
    return all(pod_ended(pod, o) for pod in o.pods)


def never_ran(o: Observed) -> bool:
    """Returns whether no container of the job has run, so that it has no checkpoints."""
    records = o.job.status.attempts
    complete = len(records) == o.job.status.attempt  # else the oldest were dropped
    ran = any(bool(r.node) if r.ran is None else r.ran for r in records)
    return complete and not ran and not any(may_have_run(pod, o) for pod in o.pods)


def state(o: Observed) -> tuple[Reason, str]:
    """Returns what a job that is being deleted waits for, as reason and sentence."""
    begun = "the job is being deleted"
    if not wanted(o) or not o.job.holds_checkpoints or o.job.spec is None or never_ran(o):
        return Reason.BEING_DELETED, begun
    what = f"its checkpoints at {o.job.spec.checkpoint.uri}"
    if not trainers_ended(o):
        then = f"its trainer ends, and then {what} are deleted (deletionPolicy Delete)"
        return Reason.BEING_DELETED, f"{begun}: {then}"
    until = due(o)
    limit = f" until {rfc3339(until, timespec='seconds')}" if until is not None else ""
    if not o.cleanup_trouble:
        return Reason.DELETING_CHECKPOINTS, f"{begun}: pod {o.job.cleanup_name} deletes {what}"
    return Reason.CANNOT_DELETE_CHECKPOINTS, (
        f"{what} cannot be deleted; retried{limit}, then left (deletionPolicy Retain: at once); the error: "
        f"{o.cleanup_trouble[:CUT]}"
    )


def finished(o: Observed) -> bool:
    return o.cleanup is not None and o.cleanup.exit_code == 0


def gives_up(o: Observed) -> str:
    """Returns a sentence about why the checkpoints are left; "" while they may still be deleted."""
    if o.job.spec is None:
        progress, defaults = o.job.status.progress, o.job.status.defaults
        place = defaults.checkpoint if defaults is not None else None
        shown = (progress.checkpoint_uri if progress else "") or (place.uri if place else "")
        where = f" at {shown}" if shown else ""
        return (
            f"the job's spec cannot be read, so its checkpoints{where} are left; "
            f"delete them with {DELETE.format(uri=shown or 'URI', uid=o.job.key.uid)}; "
            f"the error: {o.job.invalid[:CUT]}"
        )
    uri = o.job.spec.checkpoint.uri
    by_hand = f"delete them with {DELETE.format(uri=uri, uid=o.job.key.uid)}"
    if o.cleanup_refused:
        error = o.cleanup_refused[:CUT]
        return f"no pod can be created to delete the checkpoints; {by_hand}; the error: {error}"
    until = due(o)
    if until is None or o.now < until:
        return ""
    said = o.cleanup.message.strip()[-CUT:] if o.cleanup is not None else ""
    error = f"; the error: {said}" if said else ""
    return f"the checkpoints could not be deleted within {DEADLINE.seconds // 60} min; {by_hand}{error}"


def due(o: Observed) -> datetime | None:
    return o.job.deleted + DEADLINE if o.job.deleted is not None else None
