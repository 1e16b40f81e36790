"""What must hold in every state of the world of `headworld.py`, whatever the way it is brought about."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from spottrain.checkpoint.head.admin import COPIED, REPAIRED
from spottrain.checkpoint.head.state import BEST, Entry, Head, HeadState, Lease
from spottrain.contract import term_of_key
from spottrain.errors import RunError, Superseded


class Violation(AssertionError):
    pass


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def check_change(old: Head | None, new: Head) -> None:
    """The whole of what may ever happen to HEAD, from one value to the next."""
    demand(_survives_its_json(new), "HEAD does not survive its own JSON")
    if old is None:
        copied = new.state is HeadState.RELEASED and new.jobUID == COPIED and len(new.checkpoints) == 1
        begun = new.term == 1 and (copied or not new.checkpoints)
        again = (new.jobUID, new.state) == (REPAIRED, HeadState.RELEASED) and _newest_first(new)
        demand(begun or again, "HEAD was created out of something old")
    elif new.term == old.term:
        demand((new.jobUID, new.attempt) == (old.jobUID, old.attempt), "a stale attempt changed HEAD")
        (_check_by_owner if old.state is HeadState.ACTIVE else _check_by_person)(old, new)
    else:
        demand(new.term == old.term + 1, f"the term went from {old.term} to {new.term}")
        (_check_claim if new.state is HeadState.ACTIVE else _check_copy)(old, new)
    demand(sum(entry.keptAs == BEST for entry in new.checkpoints) <= 1, "HEAD has two bests")


def _newest_first(head: Head) -> bool:
    terms = [term_of_key(entry.key) or 0 for entry in head.checkpoints]
    return terms == sorted(terms, reverse=True) and head.term > max(terms)


@functools.cache
def _survives_its_json(head: Head) -> bool:
    return Head.from_json(head.to_json()) == head


def _check_by_owner(old: Head, new: Head) -> None:
    if new.state is not HeadState.ACTIVE:
        demand(new.checkpoints == old.checkpoints, "a release changed the checkpoints")
        return
    demand(bool(new.checkpoints), "HEAD was emptied")
    first = new.checkpoints[0]
    demand(first.key not in old.keys, "a commit committed nothing new")
    demand(first.keptAs in ("", BEST), "a commit left a mark that is not its own")
    there = [first, *(_demoted(entry) if first.keptAs == BEST else entry for entry in old.checkpoints)]
    before, after = _own(there), _own(new.checkpoints)
    demand(_kept(new.checkpoints) == _kept(there), "a commit dropped or marked what is kept for a reason")
    demand(after == before[: len(after)], "a commit dropped another than the oldest commit")
    demand(len(after) >= min(2, len(before)), "fewer than two checkpoints are left")


def _demoted(entry: Entry) -> Entry:
    return replace(entry, keptAs="") if entry.keptAs == BEST else entry


def _own(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if not entry.keptAs]


def _kept(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.keptAs]


def _check_by_person(old: Head, new: Head) -> None:
    """A pruning: HEAD keeps owner and state, and loses old checkpoints alone."""
    demand(new.state is old.state, "a pruning, or a late release, changed the state")
    demand(set(new.checkpoints) < set(old.checkpoints), "HEAD changed after its release")
    demand(new.checkpoints == tuple(e for e in old.checkpoints if e in new.checkpoints), "pruning reordered")
    demand(new.resumable[:1] == old.resumable[:1], "a pruning dropped the newest checkpoint")
    demand(new.best == old.best, "a pruning dropped the best checkpoint")


def _check_copy(old: Head, new: Head) -> None:
    demand(old.state is HeadState.DONE, "a copy took HEAD from a job that is not done")
    demand((new.jobUID, new.state) == (COPIED, HeadState.RELEASED), "a claim that is not active")
    demand(new.checkpoints[0].key not in old.keys, "a copy copied nothing new")
    demand(
        [e.key for e in new.checkpoints[1:]] == [e.key for e in old.checkpoints], "a copy lost a checkpoint"
    )
    demand(all(e.foreign for e in new.checkpoints[1:]), "a copy may resume from what was there before")


def _check_claim(old: Head, new: Head) -> None:
    demand([e.key for e in new.checkpoints] == [e.key for e in old.checkpoints], "a claim lost a checkpoint")
    demand(all(e.foreign or e in old.checkpoints for e in new.checkpoints), "a claim changed a mark")
    if new.jobUID == old.jobUID:
        demand(old.state is not HeadState.DONE, "a job that was done was claimed again")
        demand(old.state is not HeadState.DELETED, "a job claimed a HEAD that was deleted with it")
        demand(new.attempt >= old.attempt, "a lower attempt claimed HEAD from a higher")
    else:
        demand(old.state is not HeadState.ACTIVE, "HEAD was taken from another job while active")


def check_finished(phase: str, lease: Lease, entry: Entry | None, head: Head | None) -> None:
    """A process that believes it has claimed, committed or released is right."""
    demand(head is not None and lease.covers(head), f"{phase}: it believes to own HEAD, and does not")
    assert head is not None
    if phase == "release":
        demand(head.state in (HeadState.RELEASED, HeadState.DONE), "it believes HEAD released, and it is not")
    else:
        demand(head.state is HeadState.ACTIVE, f"{phase}: it believes HEAD active, and it is not")
    if phase == "commit":
        assert entry is not None
        demand(entry.key in head.keys, "it believes its commit in HEAD, and it is not")


def check_copied(entry: Entry | None, head: Head | None) -> None:
    assert entry is not None
    demand(head is not None and entry.key in head.keys, "it believes its copy in HEAD, and it is not")


def check_start(first: Head | None, claimed: Head, whole: Iterable[str]) -> None:
    """A run that begins at step 0 has not overlooked what an earlier HEAD named."""
    overlooked = first.keys.intersection(whole) if first is not None and claimed.term == 1 else ()
    demand(not overlooked, f"a run starts over beside {len(overlooked)} checkpoints")


def check_end(phase: str, lease: Lease | None, error: RunError, head: Head | None) -> None:
    """A process that believes to be superseded is right."""
    if isinstance(error, Superseded) and lease is not None:
        demand(head is None or not lease.covers(head), f"{phase}: it believes to be superseded, and is not")


def check_leases(leases: list[Lease]) -> None:
    claims = [(lease.who.job_uid, lease.term) for lease in leases]
    demand(len(set(claims)) == len(claims), "two processes believe to own HEAD under the same term")
