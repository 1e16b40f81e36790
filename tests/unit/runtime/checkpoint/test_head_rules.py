"""HEAD's rules one by one (test_head_model.py has them all at once), and what a person may do to HEAD."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain.checkpoint.head.admin import COPIED, Adopting, Deleting, Pruning, leftovers, prunable
from spottrain.checkpoint.head.state import (
    BEST,
    Claiming,
    ClaimPolicy,
    Committing,
    Entry,
    Head,
    HeadState,
    Identity,
    Lease,
    Releasing,
    gate_is_open,
    orphans,
)
from spottrain.contract import OnExisting, checkpoint_key
from spottrain.errors import CheckpointError, Superseded

from tests.support.sentences import Told

ME = Identity(job_uid="A", job="digits", attempt=2)


def entry(step: int, *, term: int = 3, kept_as: str = "") -> Entry:
    return Entry(key=checkpoint_key(term, step, "n"), step=step, time=1.5, bytes=10, keptAs=kept_as)


def steps(entries: Iterable[Entry]) -> list[int]:
    return [each.step for each in entries]


def head(
    *checkpoints: Entry,
    state: HeadState = HeadState.RELEASED,
    uid: str = "A",
    attempt: int = 1,
    term: int = 3,
) -> Head:
    return Head(
        jobUID=uid,
        job=f"job-{uid}",
        attempt=attempt,
        term=term,
        nonce="old",
        state=state,
        checkpoints=checkpoints,
    )


def claim(
    seen: Head | None, on_existing: OnExisting = OnExisting.FAIL, known: int | None = None
) -> Head | None:
    policy = ClaimPolicy(on_existing=on_existing, known_durable_step=known)
    return Claiming(who=ME, policy=policy).decide(seen, "new")


# --- the document -----------------------------------------------------------------------------------
entries = st.builds(
    Entry,
    key=st.text(),
    step=st.integers(),
    time=st.floats(allow_nan=False, allow_infinity=False),
    bytes=st.integers(min_value=0),
    keptAs=st.text(),
)
heads = st.builds(
    Head,
    jobUID=st.text(),
    job=st.text(),
    attempt=st.integers(),
    term=st.integers(),
    nonce=st.text(),
    state=st.sampled_from(HeadState),
    checkpoints=st.lists(entries, max_size=4).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(heads, st.data())
def test_a_head_survives_its_json_and_no_part_of_it_passes_for_a_whole_one(
    it: Head, data: st.DataObject
) -> None:
    text = it.to_json()
    assert Head.from_json(text) == it
    cut = data.draw(st.integers(min_value=0, max_value=len(text) - 1))
    with pytest.raises(CheckpointError):
        Head.from_json(text[:cut])


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_json_that_is_no_head_is_said_to_be_damaged(raw: object) -> None:
    with pytest.raises(CheckpointError, match="HEAD cannot be read"):
        Head.from_json(json.dumps(raw).encode())


@pytest.mark.parametrize("field", ["jobUID", "attempt", "term", "nonce", "state", "checkpoints", "format"])
def test_a_head_with_a_wrong_field_is_said_to_be_damaged(field: str) -> None:
    raw = json.loads(head(entry(1)).to_json()) | {field: None}
    with pytest.raises(CheckpointError):
        Head.from_json(json.dumps(raw).encode())


def test_a_newer_format_asks_for_the_newer_image(told: Told) -> None:
    raw = json.loads(head().to_json()) | {"format": 2, "state": "unheard of"}
    told(lambda: Head.from_json(json.dumps(raw).encode()))


# --- claim ------------------------------------------------------------------------------------------
def test_the_first_claim_of_an_empty_store_is_term_1() -> None:
    claimed = claim(None)
    assert claimed is not None
    assert (claimed.term, claimed.attempt, claimed.state) == (1, 2, HeadState.ACTIVE)
    assert claimed.checkpoints == ()


@pytest.mark.parametrize("state", [HeadState.ACTIVE, HeadState.RELEASED])
@pytest.mark.parametrize("attempt", [1, 2])
def test_a_claim_over_a_lower_or_equal_attempt_raises_the_term_and_keeps_all(
    state: HeadState, attempt: int
) -> None:
    claimed = claim(head(entry(7), entry(5), state=state, attempt=attempt))
    assert claimed is not None
    assert (claimed.term, claimed.nonce) == (4, "new")
    assert steps(claimed.checkpoints) == [7, 5]


def test_a_higher_attempt_supersedes_the_claimant() -> None:
    with pytest.raises(Superseded):
        claim(head(attempt=3))


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_a_job_that_is_done_is_left_as_it_is(attempt: int) -> None:
    assert claim(head(entry(7), state=HeadState.DONE, attempt=attempt)) is None


@pytest.mark.parametrize("on_existing", OnExisting)
def test_an_active_foreign_job_is_named_and_left_alone(on_existing: OnExisting, told: Told) -> None:
    told(lambda: claim(head(uid="B", state=HeadState.ACTIVE), on_existing))


@pytest.mark.parametrize("state", [HeadState.RELEASED, HeadState.DONE])
def test_a_foreign_job_that_ended_is_refused_resumed_or_kept_aside(state: HeadState, told: Told) -> None:
    theirs = head(entry(7), uid="B", state=state, attempt=9)
    told(lambda: claim(theirs, OnExisting.FAIL))
    resumed, fresh = claim(theirs, OnExisting.RESUME), claim(theirs, OnExisting.FRESH)
    assert resumed is not None and fresh is not None
    assert resumed.resumable == (entry(7),)
    assert fresh.resumable == ()
    assert fresh.checkpoints == (entry(7, kept_as="job:B"),)


def test_a_foreign_jobs_checkpoints_are_neither_pruned_nor_swept_after_a_fresh_start() -> None:
    fresh = claim(head(entry(7), uid="B"), OnExisting.FRESH)
    lease = Lease(who=ME, term=4)
    for step in range(5):
        assert fresh is not None
        fresh = Committing(lease=lease, entry=entry(step, term=4), keep=2).decide(fresh, "n")
    assert fresh is not None
    assert steps(fresh.checkpoints) == [4, 3, 7]
    assert orphans([f"{entry(7).key}shard"], fresh, lease) == []


@pytest.mark.parametrize(
    ("on_existing", "uid"),
    [(OnExisting.FAIL, "B"), (OnExisting.RESUME, "B"), *((policy, "A") for policy in OnExisting)],
)
def test_a_deleted_head_refuses_its_own_job_and_whoever_does_not_start_fresh(
    on_existing: OnExisting, uid: str, told: Told
) -> None:
    told(lambda: claim(head(uid=uid, state=HeadState.DELETED), on_existing))


def test_another_job_may_start_fresh_where_checkpoints_were_deleted() -> None:
    claimed = claim(head(uid="B", state=HeadState.DELETED), OnExisting.FRESH)
    assert claimed is not None and (claimed.state, claimed.jobUID) == (HeadState.ACTIVE, ME.job_uid)
    assert claimed.term == head().term + 1 and claimed.checkpoints == ()


@pytest.mark.parametrize("seen", [None, head(), head(entry(7, kept_as="job:C"))])
def test_no_fresh_start_where_a_step_is_known_to_be_durable(seen: Head | None, told: Told) -> None:
    told(lambda: claim(seen, known=500))


def test_a_known_step_does_not_hinder_a_resume() -> None:
    assert claim(head(entry(500)), known=500) is not None


# --- commit, prune, release ---------------------------------------------------------------------------
MINE = head(entry(9), entry(5), state=HeadState.ACTIVE, attempt=2)
LEASE = Lease(who=ME, term=3)


def mine(*checkpoints: Entry) -> Head:
    return head(*checkpoints, state=HeadState.ACTIVE, attempt=2)


def commit(
    seen: Head | None, new: Entry, keep: int = 2, damaged: frozenset[str] = frozenset()
) -> Head | None:
    return Committing(lease=LEASE, entry=new, keep=keep, damaged=damaged).decide(seen, "n")


def best(step: int) -> Entry:
    return entry(step, kept_as=BEST)


NINE = frozenset({entry(9).key})
THREE = (entry(9), entry(5), best(4))
COMMITS: dict[str, tuple[Head, Entry, dict[str, Any], dict[int, str]]] = {
    "the oldest falls out, whatever its step": (MINE, entry(6), {}, {6: "", 9: ""}),
    "as many are kept as asked for": (MINE, entry(6), {"keep": 3}, {6: "", 9: "", 5: ""}),
    "a damaged one takes no place": (MINE, entry(6), {"damaged": NINE}, {6: "", 9: "", 5: ""}),
    "the best takes no place": (mine(best(9), entry(5), entry(4)), entry(6), {}, {6: "", 9: BEST, 5: ""}),
    "an old best outlives commits that are not better": (
        mine(*THREE),
        entry(10),
        {},
        {10: "", 9: "", 4: BEST},
    ),
    "the first best is beside the others": (MINE, best(10), {}, {10: BEST, 9: "", 5: ""}),
    "a new best takes the mark of a young one, which stays": (
        mine(best(9), entry(5), entry(4)),
        best(10),
        {},
        {10: BEST, 9: "", 5: ""},
    ),
    "a new best takes the mark of an old one, which goes": (
        mine(*THREE),
        best(10),
        {},
        {10: BEST, 9: "", 5: ""},
    ),
    "a damaged best loses its mark": (
        mine(best(9), entry(5)),
        entry(6),
        {"damaged": NINE},
        {6: "", 9: "", 5: ""},
    ),
    "a damaged best goes the way of all damaged ones": (
        mine(entry(6), entry(5), best(9)),
        entry(7),
        {"damaged": NINE},
        {7: "", 6: ""},
    ),
    "another job's mark is never taken": (
        mine(entry(9, kept_as="job:B")),
        best(10),
        {},
        {10: BEST, 9: "job:B"},
    ),
}


@pytest.mark.parametrize("case", COMMITS)
def test_a_commit_goes_to_the_front_and(case: str) -> None:
    seen, new, more, after = COMMITS[case]
    body = commit(seen, new, **more)
    assert body is not None
    assert [(e.step, e.keptAs) for e in body.checkpoints] == list(after.items())


def test_a_resumed_job_inherits_the_mark_and_a_fresh_one_lays_the_best_aside() -> None:
    own, theirs = head(entry(7, kept_as=BEST)), head(entry(7, kept_as=BEST), uid="B")
    for resumed in (claim(own), claim(theirs, OnExisting.RESUME)):
        assert resumed is not None and resumed.best == entry(7, kept_as=BEST)
        assert resumed.resumable == resumed.checkpoints
    fresh = claim(theirs, OnExisting.FRESH)
    assert fresh is not None and fresh.best is None
    assert fresh.checkpoints == (entry(7, kept_as="job:B"),)


def test_a_commit_that_is_in_head_already_changes_nothing() -> None:
    assert commit(MINE, entry(9)) is None


@pytest.mark.parametrize(
    "seen",
    [
        head(state=HeadState.ACTIVE, attempt=3, term=4),
        head(state=HeadState.ACTIVE, attempt=2, term=4),
        head(state=HeadState.ACTIVE, attempt=1, term=3),
        head(uid="B", state=HeadState.ACTIVE, attempt=2),
    ],
)
def test_a_head_of_another_claim_supersedes(seen: Head) -> None:
    with pytest.raises(Superseded):
        commit(seen, entry(10))
    with pytest.raises(Superseded):
        Releasing(lease=LEASE).decide(seen, "n")


def test_a_head_that_vanished_is_not_created_again(told: Told) -> None:
    for intent in (Committing(lease=LEASE, entry=entry(6), keep=2), Releasing(lease=LEASE)):
        with pytest.raises(CheckpointError) as refused:
            intent.decide(None, "n")
        told(refused)


def test_a_commit_into_a_deleted_head_is_refused(told: Told) -> None:
    told(lambda: commit(head(state=HeadState.DELETED, attempt=2), entry(6)))


def test_keep_below_two_and_a_key_of_another_term_are_programming_errors(told: Told) -> None:
    told(lambda: commit(MINE, entry(6), keep=1))
    told(lambda: commit(MINE, entry(6, term=2)))
    told(lambda: commit(MINE, entry(6, kept_as="job:B")))


@pytest.mark.parametrize(("done", "state"), [(False, HeadState.RELEASED), (True, HeadState.DONE)])
def test_a_release_changes_the_state_alone(done: bool, state: HeadState) -> None:
    body = Releasing(lease=LEASE, done=done).decide(MINE, "n")
    assert body is not None
    assert (body.state, body.checkpoints, body.term) == (state, MINE.checkpoints, MINE.term)
    assert Releasing(lease=LEASE).decide(body, "again") is None


# --- gate and orphans ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("seen", "is_open"),
    [
        (None, True),
        (head(state=HeadState.ACTIVE, attempt=1), False),
        (head(state=HeadState.RELEASED, attempt=1), True),
        (head(state=HeadState.DONE, attempt=1), True),
        (head(state=HeadState.ACTIVE, attempt=2), True),
        (head(state=HeadState.ACTIVE, attempt=3), True),
        (head(state=HeadState.ACTIVE, attempt=1, uid="B"), True),
    ],
)
def test_the_gate_waits_only_for_an_active_lower_attempt_of_its_job(seen: Head | None, is_open: bool) -> None:
    assert gate_is_open(seen, ME, now=10.0, until=20.0) is is_open
    assert gate_is_open(seen, ME, now=20.0, until=20.0)


def test_orphans_are_of_lower_terms_and_not_in_head() -> None:
    keys = [f"{checkpoint_key(term, 1, 'x')}shard" for term in (1, 2, 3, 4)]
    listed = f"{entry(1, term=2).key}shard"
    strangers = ["checkpoints/readme", "final/t000001-s1-x/shard", "HEAD"]
    seen = head(entry(1, term=2), attempt=2)
    assert orphans([*keys, listed, *strangers], seen, LEASE) == keys[:2]


# --- what a person may do -----------------------------------------------------------------------------
LEFT = head(entry(9), entry(8), entry(7), entry(5, kept_as=BEST), entry(4, kept_as="job:B"))


def test_a_pruning_leaves_the_newest_the_best_and_what_earlier_jobs_left(told: Told) -> None:
    assert steps(prunable(LEFT, 2)) == [7]
    assert steps(prunable(LEFT, 1)) == [8, 7]
    assert steps(prunable(LEFT, 3)) == []
    assert steps(prunable(LEFT, 2, earlier_jobs=True)) == [7, 4]
    assert steps(prunable(LEFT, 1, damaged={entry(9).key})) == [7]
    told(lambda: prunable(LEFT, 0))


@pytest.mark.parametrize("state", [HeadState.RELEASED, HeadState.DONE])
def test_a_pruning_drops_what_was_shown_and_keeps_owner_term_and_state(state: HeadState) -> None:
    seen = head(entry(9), entry(8), entry(7), state=state)
    intent = Pruning(seen=seen, doomed=frozenset({entry(7).key}))
    body = intent.decide(seen, "new")
    assert body is not None and steps(body.checkpoints) == [9, 8]
    assert (body.jobUID, body.attempt, body.term, body.state) == ("A", 1, 3, state)
    assert Pruning(seen=body, doomed=frozenset({entry(7).key})).decide(body, "again") is None


def test_a_pruning_under_a_running_job_is_refused_with_its_name(told: Told) -> None:
    running = head(entry(9), entry(8), state=HeadState.ACTIVE)
    told(lambda: Pruning(seen=running, doomed=frozenset({entry(8).key})).decide(running, "n"))


def test_a_pruning_of_a_deleted_or_changed_or_vanished_head_is_refused(told: Told) -> None:
    intent = Pruning(seen=LEFT, doomed=frozenset({entry(7).key}))
    told(lambda: intent.decide(head(entry(9), state=HeadState.DELETED), "n"))
    told(lambda: intent.decide(Head.from_json(LEFT.to_json().replace(b'"old"', b'"new"')), "n"))
    told(lambda: intent.decide(None, "n"))


def test_who_deletes_without_knowing_that_the_job_has_ended_is_refused_while_head_is_active(
    told: Told,
) -> None:
    """Also where the job claimed HEAD only after the person was asked."""
    active = head(entry(9), state=HeadState.ACTIVE)
    told(lambda: Deleting(job_uid=active.jobUID, only_idle=True).decide(active, "n"))
    gone = Deleting(job_uid=active.jobUID, only_idle=True).decide(head(entry(9)), "n")
    assert gone is not None and gone.state is HeadState.DELETED
    assert Deleting(job_uid=active.jobUID).decide(active, "n") is not None, "who knows it is not refused"


@pytest.mark.parametrize(("earlier", "state"), [(False, HeadState.DONE), (True, HeadState.DELETED)])
def test_a_deletion_leaves_what_earlier_jobs_left_unless_it_is_meant_too(
    earlier: bool, state: HeadState
) -> None:
    body = head(entry(9), entry(7, kept_as="job:B"))
    gone = Deleting(job_uid=body.jobUID, earlier_jobs=earlier).decide(body, "n")
    assert gone is not None and (gone.state, len(gone.checkpoints)) == (state, int(not earlier))


def test_leftovers_of_a_running_job_are_of_lower_terms_and_after_its_end_of_its_own_too() -> None:
    keys = [f"{checkpoint_key(term, 1, 'x')}shard" for term in (2, 3, 4)]
    assert leftovers(keys, head(entry(1), state=HeadState.ACTIVE)) == keys[:1]
    assert leftovers(keys, head(entry(1), state=HeadState.RELEASED)) == keys[:2]
    assert leftovers(["checkpoints/readme", f"{entry(1).key}shard"], head(entry(1))) == []


def test_a_copy_makes_a_head_that_belongs_to_no_job(told: Told) -> None:
    body = Adopting(entry=entry(7, term=1), job="copy of elsewhere").decide(None, "n")
    assert body is not None
    assert (body.jobUID, body.state, body.term, body.attempt) == (COPIED, HeadState.RELEASED, 1, 1)
    assert body.resumable == (entry(7, term=1),)
    told(lambda: claim(body))
    resumed = claim(body, OnExisting.RESUME)
    assert resumed is not None and resumed.resumable == body.checkpoints


def test_a_copy_over_a_finished_job_lays_aside_what_it_left() -> None:
    done = head(entry(9, kept_as=BEST), entry(8), uid="B", state=HeadState.DONE)
    body = Adopting(entry=entry(7, term=4), job="copy").decide(done, "n")
    assert body is not None and body.term == 4
    assert [e.keptAs for e in body.checkpoints] == ["", "job:B", "job:B"]
    assert Adopting(entry=entry(7, term=4), job="copy").decide(body, "n") is None


@pytest.mark.parametrize("state", [HeadState.ACTIVE, HeadState.RELEASED, HeadState.DELETED])
def test_a_copy_into_a_uri_whose_job_is_not_done_is_refused(state: HeadState, told: Told) -> None:
    told(lambda: Adopting(entry=entry(7, term=4), job="copy").decide(head(entry(9), state=state), "n"))


def test_a_copy_that_came_too_late_changes_nothing(told: Told) -> None:
    told(lambda: Adopting(entry=entry(7, term=4), job="copy").decide(head(state=HeadState.DONE, term=6), "n"))
