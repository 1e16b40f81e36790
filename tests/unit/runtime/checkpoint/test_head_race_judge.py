"""The judge of the races for HEAD (tests/support/headrace.py) condemns what it should."""

from __future__ import annotations

import pytest
from spottrain.checkpoint.head.state import Entry, Head, HeadState

from tests.support.faultproxy import Landing, Request
from tests.support.headrace import chain, unlawful
from tests.support.headrules import Violation


def head(attempt: int, term: int, *steps: int) -> Head:
    entries = tuple(Entry(key=f"k{step}", step=step, time=0.0, bytes=1) for step in steps)
    return Head(
        jobUID="A",
        job="race",
        attempt=attempt,
        term=term,
        nonce=f"{term}{steps}",
        state=HeadState.ACTIVE,
        checkpoints=entries,
    )


def put(body: Head, over: str, etag: str) -> Landing:
    headers = {"if-match": over} if over else {"if-none-match": "*"}
    request = Request(
        client=0,
        number=0,
        method="PUT",
        path="/b/p/HEAD",
        headers=headers,
        raw_head=b"",
        body=body.to_json(),
    )
    return Landing(request=request, status=200, etag=etag)


FIRST = put(head(1, 1), "", "a")
COMMIT = put(head(1, 1, 1), "a", "b")
TAKEN = put(head(2, 2, 1), "b", "c")


def test_claims_and_commits_in_one_chain_are_lawful_in_whatever_order_they_were_recorded() -> None:
    assert chain([TAKEN, FIRST, COMMIT]) == [FIRST, COMMIT, TAKEN]
    assert list(unlawful([TAKEN, FIRST, COMMIT])) == []


def test_two_writes_over_one_etag_are_no_chain() -> None:
    with pytest.raises(Violation, match="same ETag"):
        chain([FIRST, COMMIT, put(head(2, 2), "a", "c")])


def test_a_write_over_an_etag_that_was_never_there_is_no_chain() -> None:
    with pytest.raises(Violation, match="never there"):
        chain([FIRST, put(head(1, 1, 1), "x", "b")])


def test_a_commit_after_the_successors_claim_is_stale() -> None:
    stale = put(head(1, 1, 2, 1), "c", "d")
    assert list(unlawful([FIRST, COMMIT, TAKEN, stale])) == ["the term went from 2 to 1"]


def test_a_claim_that_forgets_a_commit_is_unlawful() -> None:
    forgetful = put(head(2, 2), "b", "c")
    assert list(unlawful([FIRST, COMMIT, forgetful])) == ["a claim lost a checkpoint"]
