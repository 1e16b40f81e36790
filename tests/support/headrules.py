"""What must hold in every state of the world of `headworld.py`, whatever the way it is brought about."""

from __future__ import annotations

from spottrain.errors import RunError, Superseded
from spottrain.head import Entry, Head, State, Tenure


class Violation(AssertionError):
    pass


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def check_change(old: Head | None, new: Head) -> None:
    """The whole of what may ever happen to HEAD, from one value to the next."""
    demand(Head.from_json(new.to_json()) == new, "HEAD does not survive its own JSON")
    if old is None:
        demand(new.term == 1 and not new.checkpoints, "HEAD was created out of something old")
    elif new.term == old.term:
        _check_by_owner(old, new)
    else:
        demand(new.term == old.term + 1, f"the term went from {old.term} to {new.term}")
        _check_claim(old, new)


def _check_by_owner(old: Head, new: Head) -> None:
    demand((new.jobUID, new.attempt) == (old.jobUID, old.attempt), "a stale attempt changed HEAD")
    demand(old.state is State.ACTIVE, "HEAD changed after its release")
    if new.state is not State.ACTIVE:
        demand(new.checkpoints == old.checkpoints, "a release changed the checkpoints")
        return
    before, after = _own(old), _own(new)
    demand(_kept(new) == _kept(old), "a commit dropped what is kept for a reason")
    demand(after[0].key not in old.keys, "a commit committed nothing new")
    demand(after[1:] == before[: len(after) - 1], "a commit dropped another than the oldest commit")
    demand(len(after) >= min(2, len(before) + 1), "fewer than two checkpoints are left")


def _own(head: Head) -> list[Entry]:
    return [entry for entry in head.checkpoints if not entry.keptAs]


def _kept(head: Head) -> list[Entry]:
    return [entry for entry in head.checkpoints if entry.keptAs]


def _check_claim(old: Head, new: Head) -> None:
    demand(new.state is State.ACTIVE, "a claim that is not active")
    demand(old.state is not State.DELETED, "a deleted HEAD was claimed")
    demand([e.key for e in new.checkpoints] == [e.key for e in old.checkpoints], "a claim lost a checkpoint")
    if new.jobUID == old.jobUID:
        demand(old.state is not State.DONE, "a job that was done was claimed again")
        demand(new.attempt >= old.attempt, "a lower attempt claimed HEAD from a higher")
    else:
        demand(old.state in (State.RELEASED, State.DONE), "HEAD was taken from another job while active")


def check_finished(phase: str, tenure: Tenure, entry: Entry | None, head: Head | None) -> None:
    """A process that believes it has claimed, committed or released is right."""
    demand(head is not None and tenure.covers(head), f"{phase}: it believes to own HEAD, and does not")
    assert head is not None
    if phase == "release":
        demand(head.state in (State.RELEASED, State.DONE), "it believes HEAD released, and it is not")
    else:
        demand(head.state is State.ACTIVE, f"{phase}: it believes HEAD active, and it is not")
    if phase == "commit":
        assert entry is not None
        demand(entry.key in head.keys, "it believes its commit in HEAD, and it is not")


def check_end(phase: str, tenure: Tenure | None, error: RunError, head: Head | None) -> None:
    """A process that believes to be superseded is right."""
    if isinstance(error, Superseded) and tenure is not None:
        demand(head is None or not tenure.covers(head), f"{phase}: it believes to be superseded, and is not")


def check_tenures(tenures: list[Tenure]) -> None:
    claims = [(tenure.who.job_uid, tenure.term) for tenure in tenures]
    demand(len(set(claims)) == len(claims), "two processes believe to own HEAD under the same term")
