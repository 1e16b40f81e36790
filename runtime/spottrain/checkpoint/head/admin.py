"""Changes of HEAD that a person may make while no job runs: prune, delete, add a copied checkpoint.

`compare_and_swap.py` carries out these intents like those of `state.py`.
tests/unit/runtime/checkpoint/test_head_model.py checks every interleaving with claims. No I/O here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from spottrain.checkpoint.head.state import (
    KEPT_FOR_JOB,
    Entry,
    Head,
    HeadState,
    deleted,
    present,
    survivors,
    unnamed,
)
from spottrain.contract import Reason, term_of_key
from spottrain.core.log_format import counted
from spottrain.errors import ConfigurationError

COPIED: Final = "copied"
"""`jobUID` in a HEAD that `spottrain checkpoints copy` wrote. No job has this UID, so a job that resumes from
it needs onExisting: Resume."""


REPAIRED: Final = "repaired"
"""`jobUID` in a HEAD that `spottrain checkpoints repair` wrote. No job has this UID either."""


def require_idle(head: Head) -> None:
    """Raises ConfigurationError if a job owns HEAD, or if its checkpoints were deleted with the job."""
    if head.state is HeadState.ACTIVE:
        raise ConfigurationError(
            f"job {head.job} (UID {head.jobUID}, attempt {head.attempt}) is using this URI; nothing "
            "was changed. It prunes its checkpoints by itself (checkpoint.keep). Wait until it ends. "
            "If it was killed and none of its pods is left, free the URI with spottrain "
            "checkpoints release URI",
            reason=Reason.URI_IN_USE,
        )
    if head.state is HeadState.DELETED:
        raise deleted(head)


def require_ended(head: Head) -> None:
    """Raises ConfigurationError if a job owns HEAD."""
    if head.state is HeadState.ACTIVE:
        raise ConfigurationError(
            f"job {head.job} (UID {head.jobUID}, attempt {head.attempt}) is using this URI; nothing was "
            "deleted. Delete that job first, and wait until its pods have ended. If it was killed and none "
            f"of its pods is left (kubectl get pods -A -l spottrain.io/job-uid={head.jobUID}), free the URI "
            "with spottrain checkpoints release URI",
            reason=Reason.URI_IN_USE,
        )


def prunable(
    head: Head, keep: int, *, earlier_jobs: bool = False, damaged: Collection[str] = ()
) -> tuple[Entry, ...]:
    """Returns the entries to remove, so that the newest `keep` intact ones and the best one stay.

    Entries of earlier jobs stay too, unless `earlier_jobs` is set: then all of them are removed.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: it must be at least 1")
    stay = survivors(head.checkpoints, keep, damaged)
    kept = {entry.key for entry in stay if not (earlier_jobs and entry.foreign)}
    return tuple(entry for entry in head.checkpoints if entry.key not in kept)


def leftovers(keys: Iterable[str], head: Head) -> list[str]:
    """Returns the object keys below `checkpoints/` that no HEAD can ever list again.

    A claim adds only keys of its own term. While a job runs, uploads of its term may be in progress. Once it
    has released HEAD, it can no longer commit.
    """
    return unnamed(keys, head, below=head.term + (head.state is not HeadState.ACTIVE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """Removes the entries `doomed` from HEAD, if HEAD is still `seen`, the one that the person was shown.

    Term, owner and state stay. If a claim races with this change, one of the two has its ETag refused.
    """

    seen: Head
    doomed: frozenset[str]
    """Keys."""

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        head = present(head)
        require_idle(head)
        if head.nonce != self.seen.nonce:
            raise ConfigurationError(
                "HEAD changed while this command was running: another one pruned, or a job began or "
                "ended; check with spottrain checkpoints list URI, then try again"
            )
        left = tuple(entry for entry in head.checkpoints if entry.key not in self.doomed)
        return replace(head, nonce=nonce, checkpoints=left) if left != head.checkpoints else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleting:
    """Removes all of the job's own entries from HEAD, because its checkpoints are deleted with the job.

    The job's pods have ended; the higher term fences out any that still runs. If entries of earlier jobs
    remain, HEAD becomes DONE. Otherwise it becomes DELETED, so that no job starts over by mistake.
    """

    job_uid: str
    earlier_jobs: bool = False
    """Whether to remove the entries of earlier jobs too."""
    only_idle: bool = False
    """Whether to refuse while HEAD is active: nobody has said that the job has ended."""

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        head = present(head)
        left = () if self.earlier_jobs else tuple(entry for entry in head.checkpoints if entry.foreign)
        if head.jobUID != self.job_uid:
            raise ConfigurationError(
                f"the checkpoints belong to job {head.job} (UID {head.jobUID}) and not to UID "
                f"{self.job_uid}; nothing was deleted",
                reason=Reason.URI_IN_USE,
            )
        if self.only_idle:
            require_ended(head)
        state = HeadState.DONE if left else HeadState.DELETED
        if head.state is state and head.checkpoints == left:
            return None
        return replace(head, nonce=nonce, term=head.term + 1, state=state, checkpoints=left)


def repaired(
    entries: Iterable[Entry], keys: Iterable[str], seen: Head | None, *, nonce: str, finished_with: str = ""
) -> Head:
    """Returns a HEAD for checkpoints whose HEAD is lost.

    Its term is above that of each key, so that whoever owned the lost HEAD can commit nothing more.

    Args:
        entries: The checkpoints, in any order.
        keys: All keys below `checkpoints/`.
        seen: HEAD as it is there, if it is older than the checkpoints.
        nonce: Of the change.
        finished_with: Key of the checkpoint whose run has left final weights, if any.
    """
    newest_first = sorted(entries, key=lambda entry: (term_of_key(entry.key) or 0, entry.step), reverse=True)
    terms = [term_of_key(key) or 0 for key in keys] + ([seen.term] if seen is not None else [])
    done = newest_first[0].key == finished_with
    return Head(
        jobUID=REPAIRED,
        job=seen.job if seen is not None else REPAIRED,
        attempt=1,
        term=max(terms) + 1,
        nonce=nonce,
        state=HeadState.DONE if done else HeadState.RELEASED,
        checkpoints=tuple(newest_first),
    )


def term_for_copy(head: Head | None) -> int:
    """Returns the term of a copy. Raises ConfigurationError unless the target is empty or its job done."""
    if head is None:
        return 1
    if head.state is not HeadState.DONE:
        raise ConfigurationError(
            f"the target has {counted(len(head.checkpoints), 'checkpoint')} of job {head.job} (UID "
            f"{head.jobUID}), which is {head.state}; copy to a URI that is empty or whose job is done",
            reason=Reason.URI_IN_USE,
        )
    return head.term + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopting:
    """Adds a copied checkpoint, whose objects are all uploaded, to the HEAD of an empty or finished URI.

    Entries of the finished job stay, marked as they are by a claim with onExisting: Fresh.
    """

    entry: Entry
    job: str
    """Job that the checkpoint was copied from, for messages."""

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        if head is not None and self.entry.key in head.keys:
            return None
        term = term_for_copy(head)
        if term_of_key(self.entry.key) != term:
            raise ConfigurationError(
                "the target's HEAD changed during the copy; no HEAD refers to the objects at "
                f"{self.entry.key} (spottrain checkpoints prune URI --orphans removes them)"
            )
        mark = KEPT_FOR_JOB + head.jobUID if head else ""
        old = head.checkpoints if head else ()
        return Head(
            jobUID=COPIED,
            job=self.job,
            attempt=1,
            term=term,
            nonce=nonce,
            state=HeadState.RELEASED,
            checkpoints=(self.entry, *(e if e.foreign else replace(e, keptAs=mark) for e in old)),
        )
