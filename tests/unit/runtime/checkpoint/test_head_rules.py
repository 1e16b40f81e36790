"""HEAD's rules one by one (tests/unit/runtime/checkpoint/test_head_model.py has them all at once)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spottrain.checkpoint.head.state import (
    BEST,
    Claiming,
    ClaimPolicy,
    Committing,
    Entry,
    Head,
    HeadState,
    Identity,
    Releasing,
    Tenure,
    gate_is_open,
    orphans,
)
from spottrain.contract import OnExisting, Reason, checkpoint_key
from spottrain.errors import CheckpointError, ConfigurationError, Superseded

ME = Identity(job_uid="A", job="digits", attempt=2)


def entry(step: int, *, term: int = 3, kept_as: str = "") -> Entry:
    return Entry(key=checkpoint_key(term, step, "n"), step=step, time=1.5, bytes=10, keptAs=kept_as)


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


@given(heads)
def test_a_head_survives_its_json(it: Head) -> None:
    assert Head.from_json(it.to_json()) == it


@given(heads, st.data())
def test_no_part_of_a_head_passes_for_a_whole_one(it: Head, data: st.DataObject) -> None:
    text = it.to_json()
    cut = data.draw(st.integers(min_value=0, max_value=len(text) - 1))
    with pytest.raises(CheckpointError):
        Head.from_json(text[:cut])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_json_that_is_no_head_is_said_to_be_damaged(raw: object) -> None:
    with pytest.raises(CheckpointError, match="HEAD cannot be read"):
        Head.from_json(json.dumps(raw).encode())


@pytest.mark.parametrize("field", ["jobUID", "attempt", "term", "nonce", "state", "checkpoints", "format"])
def test_a_head_with_a_wrong_field_is_said_to_be_damaged(field: str) -> None:
    raw = json.loads(head(entry(1)).to_json()) | {field: None}
    with pytest.raises(CheckpointError):
        Head.from_json(json.dumps(raw).encode())


def test_a_newer_format_asks_for_the_newer_image() -> None:
    raw = json.loads(head().to_json()) | {"format": 2, "state": "unheard of"}
    with pytest.raises(ConfigurationError, match="newer image"):
        Head.from_json(json.dumps(raw).encode())


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
    assert [e.step for e in claimed.checkpoints] == [7, 5]


def test_a_higher_attempt_supersedes_the_claimant() -> None:
    with pytest.raises(Superseded):
        claim(head(attempt=3))


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_a_job_that_is_done_is_left_as_it_is(attempt: int) -> None:
    assert claim(head(entry(7), state=HeadState.DONE, attempt=attempt)) is None


@pytest.mark.parametrize("on_existing", OnExisting)
def test_an_active_foreign_job_is_named_and_left_alone(on_existing: OnExisting) -> None:
    with pytest.raises(ConfigurationError, match="job-B") as refused:
        claim(head(uid="B", state=HeadState.ACTIVE), on_existing)
    assert refused.value.reason == Reason.URI_IN_USE


@pytest.mark.parametrize("state", [HeadState.RELEASED, HeadState.DONE])
def test_a_foreign_job_that_ended_is_refused_resumed_or_kept_aside(state: HeadState) -> None:
    theirs = head(entry(7), uid="B", state=state, attempt=9)
    with pytest.raises(ConfigurationError, match=r"1 checkpoint of .*onExisting \(spottrain run --on-exist"):
        claim(theirs, OnExisting.FAIL)
    resumed, fresh = claim(theirs, OnExisting.RESUME), claim(theirs, OnExisting.FRESH)
    assert resumed is not None and fresh is not None
    assert resumed.resumable == (entry(7),)
    assert fresh.resumable == ()
    assert fresh.checkpoints == (entry(7, kept_as="job:B"),)


def test_a_foreign_jobs_checkpoints_are_neither_pruned_nor_swept_after_a_fresh_start() -> None:
    fresh = claim(head(entry(7), uid="B"), OnExisting.FRESH)
    tenure = Tenure(who=ME, term=4)
    for step in range(5):
        assert fresh is not None
        fresh = Committing(tenure=tenure, entry=entry(step, term=4), keep=2).decide(fresh, "n")
    assert fresh is not None
    assert [e.step for e in fresh.checkpoints] == [4, 3, 7]
    assert orphans([f"{entry(7).key}shard"], fresh, tenure) == []


@pytest.mark.parametrize("on_existing", OnExisting)
@pytest.mark.parametrize("uid", ["A", "B"])
def test_a_deleted_head_refuses_everybody(on_existing: OnExisting, uid: str) -> None:
    with pytest.raises(ConfigurationError, match="deleted"):
        claim(head(uid=uid, state=HeadState.DELETED), on_existing)


@pytest.mark.parametrize("seen", [None, head(), head(entry(7, kept_as="job:C"))])
def test_no_fresh_start_where_a_step_is_known_to_be_durable(seen: Head | None) -> None:
    with pytest.raises(ConfigurationError, match="step 500") as refused:
        claim(seen, known=500)
    assert refused.value.reason == Reason.CHECKPOINT_MISSING


def test_a_known_step_does_not_hinder_a_resume() -> None:
    assert claim(head(entry(500)), known=500) is not None


# --- commit, prune, release ---------------------------------------------------------------------------
MINE = head(entry(9), entry(5), state=HeadState.ACTIVE, attempt=2)
TENURE = Tenure(who=ME, term=3)


def commit(seen: Head | None, new: Entry, keep: int = 2, damaged: frozenset[str] = frozenset()) -> list[int]:
    body = Committing(tenure=TENURE, entry=new, keep=keep, damaged=damaged).decide(seen, "n")
    return [] if body is None else [e.step for e in body.checkpoints]


def test_a_commit_goes_to_the_front_and_the_oldest_commit_falls_out_whatever_its_step() -> None:
    assert commit(MINE, entry(6)) == [6, 9]
    assert commit(MINE, entry(6), keep=3) == [6, 9, 5]


def test_a_damaged_entry_takes_no_place_among_the_kept() -> None:
    assert commit(MINE, entry(6), damaged=frozenset({entry(9).key})) == [6, 9, 5]


def test_what_is_kept_for_a_reason_is_not_pruned_and_takes_no_place() -> None:
    seen = head(entry(9, kept_as="best"), entry(5), entry(4), state=HeadState.ACTIVE, attempt=2)
    assert commit(seen, entry(6)) == [6, 9, 5]


def marks(seen: Head, new: Entry, keep: int = 2, damaged: frozenset[str] = frozenset()) -> dict[int, str]:
    body = Committing(tenure=TENURE, entry=new, keep=keep, damaged=damaged).decide(seen, "n")
    assert body is not None
    return {e.step: e.keptAs for e in body.checkpoints}


def mine(*checkpoints: Entry) -> Head:
    return head(*checkpoints, state=HeadState.ACTIVE, attempt=2)


def test_the_first_best_is_kept_beside_the_others() -> None:
    assert marks(MINE, entry(10, kept_as=BEST)) == {10: BEST, 9: "", 5: ""}


def test_a_new_best_takes_the_mark_and_the_old_one_stays_as_long_as_its_age_lets_it() -> None:
    young = mine(entry(9, kept_as=BEST), entry(5), entry(4))
    old = mine(entry(9), entry(5), entry(4, kept_as=BEST))
    assert marks(young, entry(10, kept_as=BEST)) == {10: BEST, 9: "", 5: ""}
    assert marks(old, entry(10, kept_as=BEST)) == {10: BEST, 9: "", 5: ""}


def test_an_old_best_outlives_all_commits_that_are_not_better() -> None:
    assert marks(mine(entry(9), entry(5), entry(4, kept_as=BEST)), entry(10)) == {10: "", 9: "", 4: BEST}


def test_a_best_found_damaged_loses_its_mark_and_goes_the_way_of_all_damaged_ones() -> None:
    damaged = frozenset({entry(9).key})
    assert marks(mine(entry(9, kept_as=BEST), entry(5)), entry(6), damaged=damaged) == {6: "", 9: "", 5: ""}
    assert marks(mine(entry(6), entry(5), entry(9, kept_as=BEST)), entry(7), damaged=damaged) == {
        7: "",
        6: "",
    }


def test_a_resumed_job_inherits_the_mark_and_a_fresh_one_lays_the_best_aside() -> None:
    own, theirs = head(entry(7, kept_as=BEST)), head(entry(7, kept_as=BEST), uid="B")
    for resumed in (claim(own), claim(theirs, OnExisting.RESUME)):
        assert resumed is not None and resumed.best == entry(7, kept_as=BEST)
        assert resumed.resumable == resumed.checkpoints
    fresh = claim(theirs, OnExisting.FRESH)
    assert fresh is not None and fresh.best is None
    assert fresh.checkpoints == (entry(7, kept_as="job:B"),)


def test_another_jobs_mark_is_never_taken_by_a_new_best() -> None:
    assert marks(mine(entry(9, kept_as="job:B")), entry(10, kept_as=BEST)) == {10: BEST, 9: "job:B"}


def test_a_commit_that_is_in_head_already_changes_nothing() -> None:
    assert Committing(tenure=TENURE, entry=entry(9), keep=2).decide(MINE, "n") is None


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
        Releasing(tenure=TENURE).decide(seen, "n")


def test_a_head_that_vanished_is_not_created_anew() -> None:
    for intent in (Committing(tenure=TENURE, entry=entry(6), keep=2), Releasing(tenure=TENURE)):
        with pytest.raises(CheckpointError, match="HEAD was deleted"):
            intent.decide(None, "n")


def test_a_commit_into_a_deleted_head_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="deleted"):
        commit(head(state=HeadState.DELETED, attempt=2), entry(6))


def test_keep_below_two_and_a_key_of_another_term_are_programming_errors() -> None:
    with pytest.raises(ValueError, match="keep"):
        commit(MINE, entry(6), keep=1)
    with pytest.raises(ValueError, match="term"):
        commit(MINE, entry(6, term=2))
    with pytest.raises(ValueError, match="kept as"):
        commit(MINE, entry(6, kept_as="job:B"))


@pytest.mark.parametrize(("done", "state"), [(False, HeadState.RELEASED), (True, HeadState.DONE)])
def test_a_release_changes_the_state_alone(done: bool, state: HeadState) -> None:
    body = Releasing(tenure=TENURE, done=done).decide(MINE, "n")
    assert body is not None
    assert (body.state, body.checkpoints, body.term) == (state, MINE.checkpoints, MINE.term)
    assert Releasing(tenure=TENURE).decide(body, "again") is None


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
    assert orphans([*keys, listed, *strangers], seen, TENURE) == keys[:2]
