"""`spottrain checkpoints delete|release` over a folder: a URI whose owner is gone, and nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.checkpoint.head.state import HeadState
from spottrain.contract import OnExisting
from spottrain.errors import RunError, Superseded

from tests.support.command import checkpoints as main
from tests.support.headcheckpoints import save
from tests.support.sentences import Told
from tests.unit.cli.conftest import Place

DELETE = ("delete", "--job-uid", "A", "--yes")


# --- delete -----------------------------------------------------------------------------------------
def test_all_of_the_job_goes_but_its_final_weights(place: Place, told: Told) -> None:
    place.ended(1, 2, best=1, done=True)
    left = ["logs/attempt-000001/rank-00000/000001.log", "profiles/attempt-000001/rank-00000/x.top.txt"]
    left += [f"compile-cache/{'0a' * 32}.json", f"compile-cache/{'0a' * 32}-{'1b' * 32}.tar.gz"]
    left += ["out-of-memory/a1/000000008.json", "series/t000001.jsonl.gz"]
    for key in ("final/model.safetensors", *left):
        place.store.put_if_absent(key, b"x")
    place.store.put_if_absent("checkpoints/t000001-s000000009-orphan/shard", b"half")
    code, said, _ = place(*DELETE)
    assert code == 0 and "the final weights stay" in said
    assert sorted(place.store.list("")) == ["HEAD", "final/model.safetensors"]
    assert place.head.state is HeadState.DELETED
    told(lambda: place.owner("B"))


def test_what_is_not_of_spottrain_stays(place: Place) -> None:
    """Somebody's files below the same prefix, some of which look much like ours."""
    others = [
        "checkpoints/epoch-1.pt",
        "checkpoints/t5-small/model.safetensors",
        "blobs/t5-small/x",
        "logs/tensorboard/events.1",
        "profiles/mine.json",
        "compile-cache/notes.json",
        "out-of-memory/report.txt",
        "series/notes.jsonl",
        "data/train.bin",
    ]
    for attempt in range(1, 8):
        place.owner("A", attempt=attempt).release()
    for key in others:
        place.store.put(key, b"x")
    assert place("prune", "--orphans", "--yes").code == 0
    place.owner("A", attempt=9).sweep_orphans()
    assert place(*DELETE).code == 0
    assert place.store.list("") == sorted(["HEAD", *others])


def test_it_can_be_done_again_and_where_nothing_is_there(place: Place) -> None:
    assert place(*DELETE).code == 3  # a folder that is not there
    place.ended(1)
    assert [place(*DELETE).code for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--job-uid", "B", "--yes"), "belong to job job-A (UID A)"),
        (("--job-uid", "A"), "nothing was changed"),
    ],
)
def test_another_job_s_checkpoints_and_those_that_nobody_confirmed_are_not_touched(
    place: Place, words: tuple[str, ...], said: str
) -> None:
    before = place.ended(1)
    code, _, err = place("delete", *words)
    assert code in (1, 2) and said in err and place.head == before


def test_what_an_earlier_job_left_stays_and_can_be_gone_on_from(place: Place) -> None:
    (kept,) = place.ended(7).checkpoints
    later = place.owner("B", on_existing=OnExisting.FRESH)
    save(place.store, later, 3)
    later.release(True)
    assert place("delete", "--job-uid", "B", "--yes").code == 0
    assert [e.key for e in place.head.checkpoints] == [kept.key] and place.head.state is HeadState.DONE
    assert place.store.list(kept.key), "its objects are there"


def test_a_trainer_that_still_runs_finds_head_taken(place: Place) -> None:
    ghost = place.holds(1)
    assert place(*DELETE).code == 0
    with pytest.raises(RunError):
        save(place.store, ghost, 2)


# --- release ----------------------------------------------------------------------------------------
def test_another_job_may_go_on_from_what_a_dead_owner_left_but_the_owner_may_not(
    place: Place, told: Told
) -> None:
    ghost = place.holds(7)
    told(lambda: place.owner("next"))
    assert "nothing was changed" in place("release").err
    told(lambda: place.owner("next"))
    assert "it keeps 1 checkpoint of" in place("release", "--yes").out
    with pytest.raises(Superseded):
        save(place.store, ghost, 8)
    claim = place.owner("next", on_existing=OnExisting.RESUME, claims=False).claim()
    assert claim is not None and [entry.step for entry in claim.resume] == [7]


def test_a_uri_without_head_and_one_that_is_free_are_said(place: Place) -> None:
    place.folder.mkdir()
    code, _, err = place("release", "--yes")
    assert code == 3 and "there is no HEAD object" in err
    place.ended()
    code, out, _ = place("release")
    assert code == 0 and "released already" in out


def test_a_mistyped_folder_is_said_and_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for uri in (str(tmp_path / "typo"), f"file://{tmp_path}/typo"):
        assert main(["release", uri, "--yes"]) == 3
        assert f"there is no folder {tmp_path}/typo; check the URI" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
