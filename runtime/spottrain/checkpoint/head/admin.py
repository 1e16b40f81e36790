"""What a person may do to HEAD while no job runs: drop old checkpoints from it, put a copied one into it.

Place in the cycle: none; `cli/` calls it, and `owner` for `leftovers` at a job's end. The intents are carried
out by `cas.py` like those of `head.py`, and driven through every interleaving with claims by
tests/unit/runtime/test_head_model.py. Nothing here does I/O.
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
from spottrain.core.text import counted
from spottrain.errors import ConfigurationError

COPIED: Final = "copied"
"""`jobUID` in a HEAD that `spottrain checkpoints copy` made: no job has it, so whoever goes on from there
must say so (onExisting: resume)."""


def require_idle(head: Head) -> None:
    """Raises while a job owns HEAD, and where its checkpoints were deleted with it."""
    if head.state is HeadState.ACTIVE:
        raise ConfigurationError(
            f"job {head.job} (UID {head.jobUID}, attempt {head.attempt}) runs on this URI; nothing was "
            "changed. It prunes by itself (checkpoint.keep). Wait for its end, or, where it was killed and "
            "no pod of it is left, free the URI with spottrain release --checkpoint URI",
            reason=Reason.URI_IN_USE,
        )
    if head.state is HeadState.DELETED:
        raise deleted(head)


def prunable(
    head: Head, keep: int, *, earlier_jobs: bool = False, damaged: Collection[str] = ()
) -> tuple[Entry, ...]:
    """What may go so that the newest `keep` sound ones, and the best, stay.

    What earlier jobs left stays as well, unless `earlier_jobs`: then all of it goes.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1")
    stay = survivors(head.checkpoints, keep, damaged)
    kept = {entry.key for entry in stay if not (earlier_jobs and entry.foreign)}
    return tuple(entry for entry in head.checkpoints if entry.key not in kept)


def leftovers(keys: Iterable[str], head: Head) -> list[str]:
    """Of the object keys below `checkpoints/`, those that no HEAD can ever name again.

    Only a claim adds keys, each of its own term. While a job runs those of its own term may be under way;
    when it has given HEAD up, it can commit no more.
    """
    return unnamed(keys, head, below=head.term + (head.state is not HeadState.ACTIVE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """Take the entries `doomed` out of the HEAD that a person was shown, if it is still that one.

    Term, owner and state stay, so a claim that comes between simply wins: one of both sees its ETag refused.
    """

    seen: Head
    doomed: frozenset[str]
    """Keys."""

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        head = present(head)
        require_idle(head)
        if head.nonce != self.seen.nonce:
            raise ConfigurationError(
                "HEAD changed while this command was at work: another one pruned, or a job came and went; "
                "look again with spottrain checkpoints list"
            )
        left = tuple(entry for entry in head.checkpoints if entry.key not in self.doomed)
        return replace(head, nonce=nonce, checkpoints=left) if left != head.checkpoints else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleting:
    """Take all entries of this job's own out of HEAD, for its checkpoints are deleted with it.

    The job's pods are known to have ended; one that is a ghost finds HEAD taken. Where earlier jobs have left
    something, HEAD stays as that of a finished job; else it says deleted, and nobody begins anew by mistake.
    """

    job_uid: str

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        head = present(head)
        left = tuple(entry for entry in head.checkpoints if entry.foreign)
        if head.jobUID != self.job_uid:
            raise ConfigurationError(
                f"the checkpoints belong to job {head.job} (UID {head.jobUID}) and not to UID "
                f"{self.job_uid}; nothing was deleted",
                reason=Reason.URI_IN_USE,
            )
        state = HeadState.DONE if left else HeadState.DELETED
        if head.state is state and head.checkpoints == left:
            return None
        return replace(head, nonce=nonce, term=head.term + 1, state=state, checkpoints=left)


def term_for_copy(head: Head | None) -> int:
    """Term under which a copy is to be uploaded. Raises unless the target is empty or its job is done."""
    if head is None:
        return 1
    if head.state is not HeadState.DONE:
        raise ConfigurationError(
            f"the target holds {counted(len(head.checkpoints), 'checkpoint')} of job {head.job} (UID "
            f"{head.jobUID}), which is {head.state}; a copy goes to a URI that is empty or whose job is done",
            reason=Reason.URI_IN_USE,
        )
    return head.term + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopting:
    """Put a copied checkpoint, whose objects are all there, into the HEAD of an empty or finished URI.

    What the finished job left stays, marked as by a claim that starts afresh.
    """

    entry: Entry
    job: str
    """Where it was copied from, for sentences."""

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        if head is not None and self.entry.key in head.keys:
            return None
        term = term_for_copy(head)
        if term_of_key(self.entry.key) != term:
            raise ConfigurationError(
                f"the target's HEAD changed while the copy was under way; the objects at {self.entry.key} "
                "are named by nothing (spottrain checkpoints prune --orphans removes them)"
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
