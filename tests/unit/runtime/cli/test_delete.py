"""`spottrain checkpoints delete` over a folder: what a job's deletion asks for, and nothing more."""

from __future__ import annotations

import pytest
from spottrain.checkpoint.head.state import HeadState
from spottrain.contract import OnExisting
from spottrain.errors import RunError
from spottrain.storage.base import Store

from tests.support.headcheckpoints import save
from tests.unit.runtime.cli.test_checkpoints import ended, head, owner, ran, store

__all__ = ["store"]


def test_all_of_the_job_goes_but_its_final_weights(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    ended(store, 1, 2, best=1, done=True)
    left = ("logs/attempt-000001/rank-00000/000001.log", "profiles/attempt-000001/rank-00000/x.top.txt")
    for key in ("final/model.safetensors", *left, "compile-cache/x", "out-of-memory/a1/000000008.json"):
        store.put_if_absent(key, b"x")
    store.put_if_absent("checkpoints/t000001-s000000009-orphan/shard", b"half")
    code, said, _ = ran(store, capsys, "delete", "--job-uid", "A", "--yes")
    assert code == 0 and "the final weights stay" in said
    assert sorted(store.list("")) == ["HEAD", "final/model.safetensors"]
    assert head(store).state is HeadState.DELETED
    with pytest.raises(RunError, match="deleted"):
        owner(store, "B")


def test_it_can_be_done_again_and_where_nothing_is_there(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(store, capsys, "delete", "--job-uid", "A", "--yes")[0] in (0, 1)  # a folder that is not there
    ended(store, 1)
    for _ in range(2):
        assert ran(store, capsys, "delete", "--job-uid", "A", "--yes")[0] == 0


def test_the_checkpoints_of_another_job_are_not_touched(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ended(store, 1)
    code, _, said = ran(store, capsys, "delete", "--job-uid", "B", "--yes")
    assert code == 1 and "belong to job job-A (UID A)" in said and head(store) == before


def test_what_an_earlier_job_left_stays_and_can_be_gone_on_from(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (kept,) = ended(store, 7).checkpoints
    later = owner(store, "B", on_existing=OnExisting.FRESH)
    save(store, later, 3)
    later.release(True)
    assert ran(store, capsys, "delete", "--job-uid", "B", "--yes")[0] == 0
    assert [e.key for e in head(store).checkpoints] == [kept.key] and head(store).state is HeadState.DONE
    assert store.list(kept.key), "its objects are there"


def test_a_trainer_that_still_runs_finds_head_taken(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    ghost = owner(store)
    save(store, ghost, 1)
    assert ran(store, capsys, "delete", "--job-uid", "A", "--yes")[0] == 0
    with pytest.raises(RunError):
        save(store, ghost, 2)


def test_without_a_yes_nothing_goes(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    before = ended(store, 1)
    code, _, said = ran(store, capsys, "delete", "--job-uid", "A")
    assert code == 1 and "nothing was changed" in said and head(store) == before
