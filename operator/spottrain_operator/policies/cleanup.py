"""Deletes a deleted job's checkpoints with it, if its deletionPolicy is Delete. Pure.

A pod with the job's own image and identity does it, because the operator has no access to the store. It has
DEADLINE from the deletion on. After that, or where no pod can be created (the namespace is being deleted
too), the job is released and its checkpoints stay, with an Event. An outage of the store therefore blocks
no deletion.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import DeletionPolicy, Status
from spottrain_operator.policies.pod_end import pod_ended

DEADLINE: Final = timedelta(minutes=15)
RECHECK: Final = timedelta(seconds=5)
"""Interval of rechecking the cleanup pod, which is not watched."""

CUT: Final = 300
"""Maximum number of characters of an error in an Event, which must have room for the URI and the command."""

DELETE: Final = "spottrain checkpoints delete {uri} --job-uid {uid}"


def wanted(o: Observed) -> bool:
    spec = o.job.spec
    return spec is not None and spec.deletion_policy is DeletionPolicy.DELETE and bool(spec.checkpoint.uri)


def trainers_ended(o: Observed) -> bool:
    """Returns whether no trainer of the job is left that could write a checkpoint."""
    return all(pod_ended(pod, o) for pod in o.pods)


def finished(o: Observed) -> bool:
    return o.cleanup is not None and o.cleanup.exit_code == 0


def gives_up(o: Observed) -> str:
    """Returns a sentence about why the checkpoints are left; "" while they may still be deleted."""
    if o.job.spec is None:
        shown = _last_known_uri(o.job.status)
        where = f" at {shown}" if shown else ""
        return (
            f"the job's spec cannot be read, so its checkpoints{where} are left; "
            f"delete them with {DELETE.format(uri=shown or 'URI', uid=o.job.key.uid)}; "
            f"the error: {o.job.invalid[:CUT]}"
        )
    uri = o.job.spec.checkpoint.uri
    by_hand = DELETE.format(uri=uri, uid=o.job.key.uid)
    left = f"the checkpoints at {uri} are left; delete them with {by_hand}"
    if o.cleanup_refused:
        return f"no pod can be created to delete them; {left}; the error: {o.cleanup_refused[:CUT]}"
    until = due(o)
    if until is None or o.now < until:
        return ""
    said = o.cleanup.message.strip()[-CUT:] if o.cleanup is not None else ""
    error = f"; the error: {said}" if said else ""
    return f"they could not be deleted within {DEADLINE.seconds // 60} min; {left}{error}"


def _last_known_uri(status: Status) -> str:
    if status.progress is not None and status.progress.checkpoint_uri:
        return status.progress.checkpoint_uri
    place = status.defaults.checkpoint if status.defaults is not None else None
    return place.uri if place is not None else ""


def due(o: Observed) -> datetime | None:
    return o.job.deleted + DEADLINE if o.job.deleted is not None else None
