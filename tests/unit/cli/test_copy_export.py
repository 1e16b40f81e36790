"""`spottrain checkpoints copy|export` over folders."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from spottrain.checkpoint.final_weights import FinalWeights, digest, load_weights
from spottrain.checkpoint.manifest import Manifest, Piece, StoredTensor
from spottrain.cli.reading import Shards
from spottrain.contract import OnExisting
from spottrain_cli.checkpoints.exporting import assemble, weights_of

from tests.support.headcheckpoints import Made, sums
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
    assert copied(source, target, "--step", "6").code == 1
    assert not target.folder.exists()


def test_a_copy_onto_itself_is_refused(source: Place) -> None:
    code, _, err = copied(source, source)
    assert code == 1 and "the same" in err


# --- export -----------------------------------------------------------------------------------------
def exported(source: Place, target: Path, *words: str) -> Ran:
    return source("export", "--to", str(target), *words)


def test_an_export_has_the_plain_names_and_joins_what_several_ranks_stored(
    source: Place, tmp_path: Path
) -> None:
    assert exported(source, tmp_path / "model.safetensors", "--step", "best").code == 0
    weights = load_file(tmp_path / "model.safetensors")
    assert sorted(weights) == ["bias", "weight"]
    assert weights["bias"].tolist() == [1.0, 2.0, 3.0]
    assert weights["weight"].tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert weights["weight"].dtype == numpy.float32


def test_an_export_writes_tied_tensors_under_each_name_and_leaves_out_what_is_no_tensor(
    source: Place, tmp_path: Path
) -> None:
    model = {"a": {"$tensor": 0}, "b": {"$tensor": 0}, "extra": 3, "$dict": []}
    tree = {"model": {"$dict": [[name, value] for name, value in model.items()]}}
    Made(tree=tree).put(source.store, source.entry(9).key)
    assert exported(source, tmp_path / "m").code == 0
    assert sorted(load_file(tmp_path / "m")) == ["a", "b"]


def test_an_export_never_overwrites_and_leaves_no_part_of_a_file(source: Place, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert "not overwritten" in exported(source, tmp_path / "there").err
    damage(source, 9)
    assert "cannot be exported" in exported(source, tmp_path / "new").err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]
    code, _, err = exported(source, tmp_path / "nowhere" / "new")
    assert code == 1 and "cannot be written" in err


def test_an_export_to_a_uri_is_refused(
    tmp_path: Path, source: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        source("export", "--to", "s3://bucket/x.safetensors")
    assert "'s3://bucket/x.safetensors' is a URI; name a file" in capsys.readouterr().err
    assert not (tmp_path / "s3:").exists()


def put_folder(source: Place, key: str, path: str) -> bytes:
    """A checkpoint of another library, with one file."""
    body = b"what the library wrote"
    shards = [{"name": "f0", "bytes": len(body), "chunks": sums(body)}]
    folder = {"kind": "folder", "tensors": [], "shards": shards, "files": [{"path": path, "shard": "f0"}]}
    Made(more=folder).put(source.store, key)
    source.store.put(f"{key}f0", body)
    return body


def test_an_export_of_a_librarys_folder_is_the_librarys_own_file(source: Place, tmp_path: Path) -> None:
    key = source.entry(9).key
    body = put_folder(source, key, "model.safetensors")
    assert exported(source, tmp_path / "m").code == 0
    assert (tmp_path / "m").read_bytes() == body
    put_folder(source, key, "model.bin")
    code, _, err = exported(source, tmp_path / "n")
    assert code == 1 and "its files are: model.bin" in err


def final(source: Place, key: str, step: int, most: int = 2**31, beside: tuple[str, ...] = ()) -> Any:
    """Leaves final weights as a finished run does."""
    weights = {"w": torch.arange(6.0), "n": torch.tensor(3), "extra.loss.w": torch.ones(2)}
    made = FinalWeights(weights, beside=beside, most=most)
    files = []
    for name, body in made.files(first=True, keep=True):
        source.store.put(f"final/{name}", body)
        files.append({"name": name, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()})
    facts = {"format": 1, "step": step, "digest": made.digest, "files": files, "checkpoint": key}
    source.store.put("final/manifest.json", json.dumps(facts).encode())
    return weights


@pytest.mark.parametrize("most", [2**31, 20], ids=["one file", "several files"])
def test_an_export_of_a_folder_without_weights_is_the_final_weights_of_that_step(
    source: Place, tmp_path: Path, most: int
) -> None:
    key = source.entry(9).key
    put_folder(source, key, "lightning.ckpt")
    weights = final(source, key, 9, most, beside=("extra.loss.w",))
    assert "3 tensors of the final weights of step 9" in exported(source, tmp_path / "m").out
    assert digest(safetensors.torch.load_file(tmp_path / "m")) == digest(weights)
    known = load_weights(tmp_path / "m").keys()
    assert known == {"w", "n"}, "what is beside the model is still known as that"


def test_final_weights_of_another_step_are_no_stand_in_and_are_named(source: Place, tmp_path: Path) -> None:
    put_folder(source, source.entry(7).key, "lightning.ckpt")
    code, _, err = exported(source, tmp_path / "m", "--step", "final")
    assert code == 1 and "there are no final weights" in err
    final(source, source.entry(9).key, 9)
    code, _, err = exported(source, tmp_path / "m", "--step", "7")
    assert code == 1 and "The final weights, of step 9, can be exported: --step final" in err
    assert exported(source, tmp_path / "m", "--step", "final").code == 0
    source.flip_a_bit("final/model.safetensors")
    code, _, err = exported(source, tmp_path / "n", "--step", "final")
    assert code == 1 and "does not match its checksum" in err and not (tmp_path / "n").exists()


@pytest.mark.parametrize("body", [b'{"format": 1, "step": 9, "checkpoint": "k", "digest": "d"}', b"[]", b"{"])
def test_final_weights_that_another_version_wrote_are_refused_and_hold_up_no_other_export(
    source: Place, tmp_path: Path, body: bytes
) -> None:
    source.store.put("final/manifest.json", body)
    code, _, err = exported(source, tmp_path / "m", "--step", "final")
    assert code == 1 and not (tmp_path / "m").exists()
    assert "does not name the files of the final weights" in err and "copy it as it is" in err
    assert exported(source, tmp_path / "m", "--step", "9").code == 0


@settings(max_examples=50)
@given(st.data())
def test_pieces_of_any_cut_come_together_as_the_tensor_they_were(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(min_value=1, max_value=4), max_size=4))
    whole = numpy.arange(numpy.prod(shape, dtype=int), dtype=numpy.float32).reshape(shape)
    cuts = [sorted({0, n, *data.draw(st.sets(st.integers(0, n), max_size=2))}) for n in shape]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    pieces, body = [], b""
    for box in itertools.product(*spans):
        part = whole[tuple(slice(a, b) for a, b in box)]
        start, sides = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        pieces.append(Piece(shard="s", offset=len(body), start=start, shape=sides))
        body += part.tobytes()

    class InMemory(Shards):
        def __init__(self) -> None: ...

        def read(self, name: str, offset: int, count: int) -> bytearray:
            return bytearray(body[offset : offset + count])

    tensor = StoredTensor(name="t", dtype="float32", shape=tuple(shape), pieces=tuple(pieces))
    assert bytes(assemble(tensor, InMemory())) == whole.tobytes()


def test_the_reader_in_the_documentation_reads_a_checkpoint(source: Place) -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    model = names["read"](source.folder / source.entry(9).key)
    assert {name: value.tolist() for name, value in model.items()} == {
        "bias": [1.0, 2.0, 3.0],
        "weight": [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]],
    }


def test_facts_are_told_as_json(source: Place, tmp_path: Path) -> None:
    facts = source.facts("export", "--to", str(tmp_path / "m"))
    assert (facts["step"], facts["tensors"]) == (9, 2)
    assert facts["bytes"] == (tmp_path / "m").stat().st_size


def test_where_the_weights_are_averaged_the_average_is_exported_under_all_names() -> None:
    """As evaluations and the final weights have it. Tied weights are one tensor with two names."""
    tensors = tuple(StoredTensor(name=str(n), dtype="float32", shape=(1,), pieces=()) for n in range(4))
    model = {"tied": {"$tensor": 0}, "head": {"$tensor": 0}, "buffer": {"$tensor": 1}}
    ema = {"average": {"tied": {"$tensor": 3}}, "updated": 5}
    manifest = Manifest(step=1, tree={"model": model, "ema": ema}, tensors=tensors)
    found = {name: tensor.name for name, tensor in weights_of(manifest).items()}
    assert found == {"tied": "3", "head": "3", "buffer": "1"}
    without = {name: t.name for name, t in weights_of(replace(manifest, tree={"model": model})).items()}
    assert without == {"tied": "0", "head": "0", "buffer": "1"}
