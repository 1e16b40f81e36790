"""A URI whose HEAD was removed or went back: nobody starts over there, and nothing there is deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from spottrain.checkpoint.head.owner import ClaimPolicy, HeadOwner, Identity
from spottrain.checkpoint.head.state import Head
from spottrain.contract import FINAL_PREFIX, HEAD_KEY, OnExisting
from spottrain.errors import CheckpointError
from spottrain.storage.local import FolderStore

from tests.support.headcheckpoints import save
from tests.support.sentences import Told


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "run")


def owner(
    store: FolderStore, attempt: int, uid: str = "A", on_existing: OnExisting = OnExisting.FAIL
) -> HeadOwner:
    who = Identity(job_uid=uid, job="digits", attempt=attempt)
    return HeadOwner(store, who, ClaimPolicy(on_existing=on_existing))


def trained(store: FolderStore, attempt: int, *steps: int, done: bool = False) -> bytes:
    """Trains to these steps. Returns HEAD as it was after the claim."""
    it = owner(store, attempt)
    it.claim()
    claimed = body(store)
    for step in steps:
        save(store, it, step)
    it.release(done)
    return claimed


def body(store: FolderStore) -> bytes:
    found = store.get(HEAD_KEY)
    assert found is not None
    return found.body


def removed(store: FolderStore) -> None:
    trained(store, 1, 10, 14, 18)
    store.delete([HEAD_KEY])


def removed_while_it_trains(store: FolderStore) -> None:
    it = owner(store, 1)
    it.claim()
    save(store, it, 10)
    store.delete([HEAD_KEY])
    with pytest.raises(CheckpointError, match="checkpoints repair"):
        save(store, it, 14)


def went_back(store: FolderStore) -> None:
    before = trained(store, 1, 10)
    trained(store, 2, 14, 18)
    store.put(HEAD_KEY, before)


def final_weights_alone(store: FolderStore) -> None:
    """Such as those that somebody has put there by hand: the end of a run would replace them."""
    store.put(FINAL_PREFIX + "model.safetensors", b"weights")


LOST = [removed, removed_while_it_trains, went_back, final_weights_alone]


@pytest.mark.parametrize("policy", list(OnExisting))
@pytest.mark.parametrize("uid", ["A", "B"])
@pytest.mark.parametrize("lose", LOST)
def test_no_job_starts_over_where_head_is_lost(
    store: FolderStore, lose: Callable[[FolderStore], None], uid: str, policy: OnExisting
) -> None:
    lose(store)
    before = {key: store.get(key) for key in store.list("")}
    for _ in range(2):
        it = owner(store, 9, uid, policy)
        with pytest.raises(CheckpointError):
            it.claim()
        it.release()
    assert {key: store.get(key) for key in store.list("")} == before


@pytest.mark.parametrize("lose", LOST)
def test_what_is_found_and_the_way_out_are_said(
    store: FolderStore, lose: Callable[[FolderStore], None], told: Told
) -> None:
    lose(store)
    told(lambda: owner(store, 9).claim())


@pytest.mark.parametrize("text", [b"", b"{", b"\x00\xff", b"[]", b"null", b'{"format": 1}', b'"HEAD"'])
def test_a_head_that_cannot_be_read_is_left_as_it_is(store: FolderStore, text: bytes) -> None:
    trained(store, 1, 10)
    store.put(HEAD_KEY, text)
    with pytest.raises(CheckpointError, match="spottrain checkpoints repair URI"):
        owner(store, 2).claim()
    assert body(store) == text


def test_what_is_not_a_checkpoint_of_ours_holds_nobody_up(store: FolderStore) -> None:
    """Somebody else's files, and half a copy: without a manifest it is nothing that could be resumed."""
    others = ["checkpoints/epoch-1.pt", "checkpoints/run/manifest.json", "model.safetensors", "logs/x"]
    for key in [*others, "checkpoints/t000001-s000000005-cut/r00000-00.safetensors"]:
        store.put(key, b"x")
    claim = owner(store, 1).claim()
    assert claim is not None and not claim.resume
    trained(store, 2, 3)
    assert set(others) <= set(store.list(""))


def test_a_head_that_is_of_the_newest_claim_is_taken_up(store: FolderStore) -> None:
    trained(store, 1, 10, 14)
    trained(store, 2)
    it = owner(store, 3)
    assert it.wait_at_gate(0.0)
    claim = it.claim()
    assert claim is not None and [entry.step for entry in claim.resume] == [14, 10]
    assert Head.from_json(body(store)).term == 3
