"""`spottrain checkpoints copy` over folders."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from spottrain.contract import OnExisting

from tests.support.headcheckpoints import Made
from tests.support.sentences import Told
from tests.unit.cli.conftest import Place, Ran

SHARD = "r00001-00.safetensors"


@pytest.fixture
def source(place: Place) -> Place:
    """A run that is still under way, with steps 9, 7 (best) and 5."""
    place.holds(5, 7, 9, best=7)
    return place


@pytest.fixture
def target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path / "target", capsys)


def copied(source: Place, target: Place, *words: str) -> Ran:
    return source("copy", "--to", str(target.folder), *words)


def damage(source: Place, step: int) -> None:
    key = source.entry(step).key + SHARD
    source.store.put(key, bytes(len(source.body(key))))


# --- copy -------------------------------------------------------------------------------------------
def test_a_copy_is_whole_belongs_to_nobody_and_a_job_goes_on_from_it_only_when_told_to(
    source: Place, target: Place, told: Told
) -> None:
    code, out, _ = copied(source, target, "--step", "7")
    assert code == 0
    assert "checkpoint.onExisting: Resume (spottrain run --on-existing resume)" in out
    assert target("verify").code == 0
    it = target.head
    assert (it.state, it.jobUID, it.term) == ("released", "copied", 1)
    assert [(e.step, e.keptAs) for e in it.checkpoints] == [(7, "")]
    bodies = {name: target.body(it.checkpoints[0].key + name) for name in Made().objects()}
    assert bodies == Made(step=7).objects()
    told(lambda: target.owner("B"))
    claim = target.owner("B", on_existing=OnExisting.RESUME, claims=False).claim()
    assert claim is not None and [e.step for e in claim.resume] == [7]


def test_a_copy_into_a_finished_run_keeps_what_that_one_left(source: Place, target: Place) -> None:
    target.ended(100, uid="B", best=100, done=True)
    assert copied(source, target).code == 0
    assert [(e.step, e.keptAs) for e in target.head.checkpoints] == [(9, ""), (100, "job:B")]
    assert target("verify").code == 0


@pytest.mark.parametrize("release", [True, False])
def test_a_copy_never_overwrites_a_run_that_is_not_done(source: Place, target: Place, release: bool) -> None:
    it = target.holds(100, uid="B")
    if release:
        it.release()
    before = target.store.list(""), target.head
    code, _, err = copied(source, target)
    assert code == 1 and "copy to a URI that is empty or whose job is done" in err
    assert (target.store.list(""), target.head) == before


def test_a_damaged_checkpoint_is_not_copied_and_leaves_nothing(source: Place, target: Place) -> None:
    damage(source, 9)
    code, _, err = copied(source, target)
    assert code == 1 and "do not match their checksum" in err
    assert target.store.list("") == []
    assert copied(source, target, "--step", "best").code == 0


def test_a_copy_that_fails_before_its_first_object_makes_no_folder(source: Place, target: Place) -> None:
    source.store.delete([source.entry(9).key + "manifest.json"])
    assert "manifest.json is missing" in copied(source, target).err
    assert copied(source, target, "--step", "6").code == 3
    assert not target.folder.exists()


def test_a_copy_onto_itself_is_refused(source: Place) -> None:
    code, _, err = copied(source, source)
    assert code == 2 and "the same" in err


def test_the_reader_in_the_documentation_reads_a_checkpoint(source: Place) -> None:
    reader = Path(__file__).parents[3] / "examples" / "recipes" / "read_checkpoint.py"
    model = runpy.run_path(str(reader))["read"](source.folder / source.entry(9).key)
    assert {name: value.tolist() for name, value in model.items()} == {
        "bias": [1.0, 2.0, 3.0],
        "weight": [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]],
    }
