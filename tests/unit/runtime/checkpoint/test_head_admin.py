"""What a person may do to HEAD (`headcare.py`), rule by rule."""

from __future__ import annotations

import pytest
from spottrain.checkpoint.head.admin import COPIED, Adopting, Pruning, leftovers, prunable
from spottrain.checkpoint.head.state import (
    BEST,
    Claiming,
    ClaimPolicy,
    Entry,
    Head,
    HeadState,
    Identity,
)
from spottrain.contract import OnExisting, Reason, checkpoint_key
from spottrain.errors import CheckpointError, ConfigurationError


def entry(step: int, *, term: int = 3, kept_as: str = "") -> Entry:
    return Entry(key=checkpoint_key(term, step, "n"), step=step, time=1.5, bytes=10, keptAs=kept_as)


def head(*checkpoints: Entry, state: HeadState = HeadState.RELEASED, uid: str = "A", term: int = 3) -> Head:
    return Head(
        jobUID=uid,
        job=f"job-{uid}",
        attempt=1,
        term=term,
        nonce="old",
        state=state,
        checkpoints=checkpoints,
    )


def claim(seen: Head, on_existing: OnExisting = OnExisting.FAIL) -> Head | None:
    who = Identity(job_uid="new", job="new", attempt=1)
    return Claiming(who=who, policy=ClaimPolicy(on_existing=on_existing)).decide(seen, "new")


LEFT = head(entry(9), entry(8), entry(7), entry(5, kept_as=BEST), entry(4, kept_as="job:B"))


def steps(entries: tuple[Entry, ...]) -> list[int]:
    return [each.step for each in entries]


def test_a_pruning_leaves_the_newest_the_best_and_what_earlier_jobs_left() -> None:
    assert steps(prunable(LEFT, 2)) == [7]
    assert steps(prunable(LEFT, 1)) == [8, 7]
    assert steps(prunable(LEFT, 3)) == []
    assert steps(prunable(LEFT, 2, earlier_jobs=True)) == [7, 4]
    assert steps(prunable(LEFT, 1, damaged={entry(9).key})) == [7]
    with pytest.raises(ValueError, match="at least 1"):
        prunable(LEFT, 0)


@pytest.mark.parametrize("state", [HeadState.RELEASED, HeadState.DONE])
def test_a_pruning_drops_what_was_shown_and_keeps_owner_term_and_state(state: HeadState) -> None:
    seen = head(entry(9), entry(8), entry(7), state=state)
    intent = Pruning(seen=seen, doomed=frozenset({entry(7).key}))
    body = intent.decide(seen, "new")
    assert body is not None and steps(body.checkpoints) == [9, 8]
    assert (body.jobUID, body.attempt, body.term, body.state) == ("A", 1, 3, state)
    assert Pruning(seen=body, doomed=frozenset({entry(7).key})).decide(body, "again") is None


def test_a_pruning_under_a_running_job_is_refused_with_its_name() -> None:
    running = head(entry(9), entry(8), state=HeadState.ACTIVE)
    with pytest.raises(ConfigurationError, match=r"job job-A \(UID A, attempt 1\) is using") as refused:
        Pruning(seen=running, doomed=frozenset({entry(8).key})).decide(running, "n")
    assert refused.value.reason == Reason.URI_IN_USE


def test_a_pruning_of_a_deleted_or_changed_or_vanished_head_is_refused() -> None:
    intent = Pruning(seen=LEFT, doomed=frozenset({entry(7).key}))
    with pytest.raises(ConfigurationError, match="deleted"):
        intent.decide(head(entry(9), state=HeadState.DELETED), "n")
    with pytest.raises(ConfigurationError, match="HEAD changed"):
        intent.decide(Head.from_json(LEFT.to_json().replace(b'"old"', b'"new"')), "n")
    with pytest.raises(CheckpointError, match="HEAD was deleted"):
        intent.decide(None, "n")


def test_leftovers_of_a_running_job_are_of_lower_terms_and_after_its_end_of_its_own_too() -> None:
    keys = [f"{checkpoint_key(term, 1, 'x')}shard" for term in (2, 3, 4)]
    assert leftovers(keys, head(entry(1), state=HeadState.ACTIVE)) == keys[:1]
    assert leftovers(keys, head(entry(1), state=HeadState.RELEASED)) == keys[:2]
    assert leftovers(["checkpoints/readme", f"{entry(1).key}shard"], head(entry(1))) == []


def test_a_copy_makes_a_head_that_belongs_to_no_job() -> None:
    body = Adopting(entry=entry(7, term=1), job="copy of elsewhere").decide(None, "n")
    assert body is not None
    assert (body.jobUID, body.state, body.term, body.attempt) == (COPIED, HeadState.RELEASED, 1, 1)
    assert body.resumable == (entry(7, term=1),)
    with pytest.raises(ConfigurationError, match="onExisting"):
        claim(body)
    resumed = claim(body, OnExisting.RESUME)
    assert resumed is not None and resumed.resumable == body.checkpoints


def test_a_copy_over_a_finished_job_lays_aside_what_it_left() -> None:
    done = head(entry(9, kept_as=BEST), entry(8), uid="B", state=HeadState.DONE)
    body = Adopting(entry=entry(7, term=4), job="copy").decide(done, "n")
    assert body is not None and body.term == 4
    assert [e.keptAs for e in body.checkpoints] == ["", "job:B", "job:B"]
    assert Adopting(entry=entry(7, term=4), job="copy").decide(body, "n") is None


@pytest.mark.parametrize("state", [HeadState.ACTIVE, HeadState.RELEASED, HeadState.DELETED])
def test_a_copy_into_a_uri_whose_job_is_not_done_is_refused(state: HeadState) -> None:
    with pytest.raises(ConfigurationError, match="empty or whose job is done"):
        Adopting(entry=entry(7, term=4), job="copy").decide(head(entry(9), state=state), "n")


def test_a_copy_that_came_too_late_changes_nothing() -> None:
    with pytest.raises(ConfigurationError, match="changed during the copy"):
        Adopting(entry=entry(7, term=4), job="copy").decide(head(state=HeadState.DONE, term=6), "n")
