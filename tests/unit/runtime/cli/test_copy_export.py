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
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from spottrain.checkpoint.final_weights import FinalWeights, digest, load_weights
from spottrain.checkpoint.head.owner import ClaimPolicy, HeadOwner, Identity
from spottrain.checkpoint.head.state import Entry, Head
from spottrain.checkpoint.manifest import Manifest, Piece, StoredTensor
from spottrain.cli.checkpoints import main
from spottrain.cli.exporting import assemble, weights_of
from spottrain.cli.reading import Shards
from spottrain.contract import OnExisting
from spottrain.storage.base import Store
from spottrain.storage.open import open_store

from tests.support.headcheckpoints import Made, save, sums

SHARD = "r00001-00.safetensors"


def owner(store: Store, uid: str = "A", on_existing: OnExisting = OnExisting.FAIL) -> HeadOwner:
    who = Identity(job_uid=uid, job=f"job-{uid}", attempt=1)
    return HeadOwner(store, who, ClaimPolicy(on_existing=on_existing))


@pytest.fixture
def source(tmp_path: Path) -> Store:
    """A run that is still under way, with steps 9, 7 (best) and 5."""
    store = open_store(str(tmp_path / "run"))
    it = owner(store)
    it.claim()
    for step in (5, 7, 9):
        save(store, it, step, best=step == 7)
    return store


def head(store: Store) -> Head:
    found = store.get("HEAD")
    assert found is not None
    return Head.from_json(found.body)


def entry(store: Store, step: int) -> Entry:
    return next(each for each in head(store).checkpoints if each.step == step)


def copied(source: Store, target: Path, *words: str) -> int:
    return main(["copy", source.uri, "--to", str(target), *words])


# --- copy -------------------------------------------------------------------------------------------
def test_a_copy_is_whole_and_belongs_to_nobody(source: Store, tmp_path: Path) -> None:
    assert copied(source, tmp_path / "branch", "--step", "7") == 0
    target = open_store(str(tmp_path / "branch"))
    assert main(["verify", target.uri]) == 0
    it = head(target)
    assert (it.state, it.jobUID, it.term) == ("released", "copied", 1)
    assert [(e.step, e.keptAs) for e in it.checkpoints] == [(7, "")]
    bodies = [target.get(it.checkpoints[0].key + name) for name in Made().objects()]
    assert [b.body if b else None for b in bodies] == list(Made(step=7).objects().values())


def test_a_job_goes_on_from_a_copy_only_when_told_to(source: Store, tmp_path: Path) -> None:
    copied(source, tmp_path / "branch")
    target = open_store(str(tmp_path / "branch"))
    with pytest.raises(Exception, match="onExisting"):
        owner(target, "B").claim()
    claim = owner(target, "B", OnExisting.RESUME).claim()
    assert claim is not None and [e.step for e in claim.resume] == [9]


def test_a_copy_into_a_finished_run_keeps_what_that_one_left(source: Store, tmp_path: Path) -> None:
    target = open_store(str(tmp_path / "old"))
    old = owner(target, "B")
    old.claim()
    save(target, old, 100, best=True)
    old.release(done=True)
    assert copied(source, tmp_path / "old") == 0
    assert [(e.step, e.keptAs) for e in head(target).checkpoints] == [(9, ""), (100, "job:B")]
    assert main(["verify", target.uri]) == 0


@pytest.mark.parametrize("release", [True, False])
def test_a_copy_never_overwrites_a_run_that_is_not_done(
    source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], release: bool
) -> None:
    target = open_store(str(tmp_path / "busy"))
    it = owner(target, "B")
    it.claim()
    save(target, it, 100)
    if release:
        it.release()
    before = target.list(""), target.get("HEAD")
    assert copied(source, tmp_path / "busy") == 1
    assert "copy to a URI that is empty or whose job is done" in capsys.readouterr().err
    assert (target.list(""), target.get("HEAD")) == before


def test_a_damaged_checkpoint_is_not_copied_and_leaves_nothing(
    source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.put(entry(source, 9).key + SHARD, bytes(len(Made().objects()[SHARD])))
    assert copied(source, tmp_path / "branch") == 1
    assert "do not match their checksum" in capsys.readouterr().err
    assert open_store(str(tmp_path / "branch")).list("") == []
    assert copied(source, tmp_path / "branch", "--step", "best") == 0


def test_a_copy_that_fails_before_its_first_object_makes_no_folder(
    source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.delete([entry(source, 9).key + "manifest.json"])
    assert copied(source, tmp_path / "branch") == 1
    assert copied(source, tmp_path / "branch", "--step", "6") == 1
    assert "manifest.json is missing" in capsys.readouterr().err
    assert not (tmp_path / "branch").exists()


def test_a_copy_says_how_a_job_goes_on_from_it(
    source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert copied(source, tmp_path / "branch") == 0
    assert "checkpoint.onExisting: Resume (spottrain run --on-existing resume)" in capsys.readouterr().out


def test_a_copy_onto_itself_is_refused(source: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["copy", source.uri, "--to", source.uri]) == 1
    assert "the same" in capsys.readouterr().err


# --- export -----------------------------------------------------------------------------------------
def exported(source: Store, target: Path, *words: str) -> int:
    return main(["export", source.uri, "--to", str(target), *words])


def test_an_export_has_the_plain_names_and_joins_what_several_ranks_stored(
    source: Store, tmp_path: Path
) -> None:
    assert exported(source, tmp_path / "model.safetensors", "--step", "best") == 0
    weights = load_file(tmp_path / "model.safetensors")
    assert sorted(weights) == ["bias", "weight"]
    assert weights["bias"].tolist() == [1.0, 2.0, 3.0]
    assert weights["weight"].tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert weights["weight"].dtype == numpy.float32


def test_an_export_writes_tied_tensors_under_each_name_and_leaves_out_what_is_no_tensor(
    source: Store, tmp_path: Path
) -> None:
    model = {"a": {"$tensor": 0}, "b": {"$tensor": 0}, "extra": 3, "$dict": []}
    tree = {"model": {"$dict": [[name, value] for name, value in model.items()]}}
    Made(tree=tree).put(source, entry(source, 9).key)
    assert exported(source, tmp_path / "m") == 0
    assert sorted(load_file(tmp_path / "m")) == ["a", "b"]


def test_an_export_never_overwrites_and_leaves_no_part_of_a_file(
    source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("mine")
    assert exported(source, tmp_path / "there") == 1
    assert "not overwritten" in capsys.readouterr().err
    source.put(entry(source, 9).key + SHARD, bytes(len(Made().objects()[SHARD])))
    assert exported(source, tmp_path / "new") == 1
    assert "cannot be exported" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]
    assert exported(source, tmp_path / "nowhere" / "new") == 1
    assert "cannot be written" in capsys.readouterr().err


def test_an_export_to_a_uri_is_refused(
    tmp_path: Path, source: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["export", source.uri, "--to", "s3://bucket/x.safetensors"])
    assert "'s3://bucket/x.safetensors' is a URI; name a file" in capsys.readouterr().err
    assert not (tmp_path / "s3:").exists()


def test_an_export_of_a_librarys_folder_is_the_librarys_own_file(
    source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = b"what the library wrote"
    key = entry(source, 9).key
    shards = [{"name": "f0", "bytes": len(body), "chunks": sums(body)}]
    folder = {"kind": "folder", "tensors": [], "shards": shards}
    files = [{"path": "model.safetensors", "shard": "f0"}]
    Made(more=folder | {"files": files}).put(source, key)
    source.put(f"{key}f0", body)
    assert exported(source, tmp_path / "m") == 0
    assert (tmp_path / "m").read_bytes() == body
    Made(more=folder | {"files": [{"path": "model.bin", "shard": "f0"}]}).put(source, key)
    assert exported(source, tmp_path / "n") == 1
    assert "its files are: model.bin" in capsys.readouterr().err


def final(store: Store, key: str, step: int, most: int = 2**31, beside: tuple[str, ...] = ()) -> Any:
    """Leaves final weights as a finished run does."""
    weights = {"w": torch.arange(6.0), "n": torch.tensor(3), "extra.loss.w": torch.ones(2)}
    made = FinalWeights(weights, beside=beside, most=most)
    files = []
    for name, body in made.files(first=True, keep=True):
        store.put(f"final/{name}", body)
        files.append({"name": name, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()})
    facts = {"format": 1, "step": step, "digest": made.digest, "files": files, "checkpoint": key}
    store.put("final/manifest.json", json.dumps(facts).encode())
    return weights


def put_folder(source: Store, key: str) -> None:
    body = b"a pickle"
    shards = [{"name": "f0", "bytes": len(body), "chunks": sums(body)}]
    folder = {"kind": "folder", "tensors": [], "shards": shards}
    Made(more=folder | {"files": [{"path": "lightning.ckpt", "shard": "f0"}]}).put(source, key)
    source.put(f"{key}f0", body)


@pytest.mark.parametrize("most", [2**31, 20], ids=["one file", "several files"])
def test_an_export_of_a_folder_without_weights_is_the_final_weights_of_that_step(
    source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], most: int
) -> None:
    put_folder(source, entry(source, 9).key)
    weights = final(source, entry(source, 9).key, 9, most, beside=("extra.loss.w",))
    assert exported(source, tmp_path / "m") == 0
    assert "3 tensors of the final weights of step 9" in capsys.readouterr().out
    assert digest(safetensors.torch.load_file(tmp_path / "m")) == digest(weights)
    assert load_weights(tmp_path / "m").keys() == {"w", "n"}, (
        "what is beside the model is still known as that"
    )


def test_final_weights_of_another_step_are_no_stand_in_and_are_named(
    source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_folder(source, entry(source, 7).key)
    assert exported(source, tmp_path / "m", "--step", "final") == 1
    assert "there are no final weights" in capsys.readouterr().err
    final(source, entry(source, 9).key, 9)
    assert exported(source, tmp_path / "m", "--step", "7") == 1
    assert "The final weights, of step 9, can be exported: --step final" in capsys.readouterr().err
    assert exported(source, tmp_path / "m", "--step", "final") == 0
    found = source.get("final/model.safetensors")
    assert found is not None
    source.put("final/model.safetensors", found.body[:-1] + b"x")
    assert exported(source, tmp_path / "n", "--step", "final") == 1
    assert "does not match its checksum" in capsys.readouterr().err and not (tmp_path / "n").exists()


@pytest.mark.parametrize("body", [b'{"format": 1, "step": 9, "checkpoint": "k", "digest": "d"}', b"[]", b"{"])
def test_final_weights_that_another_version_wrote_are_refused_and_hold_up_no_other_export(
    source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes
) -> None:
    source.put("final/manifest.json", body)
    assert exported(source, tmp_path / "m", "--step", "final") == 1
    said = capsys.readouterr().err
    assert "does not name the files of the final weights" in said and "copy it as it is" in said
    assert not (tmp_path / "m").exists()
    assert exported(source, tmp_path / "m", "--step", "9") == 0


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


def test_the_reader_in_the_documentation_reads_a_checkpoint(source: Store, tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "checkpoints.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    model = names["read"](tmp_path / "run" / entry(source, 9).key)
    assert {name: value.tolist() for name, value in model.items()} == {
        "bias": [1.0, 2.0, 3.0],
        "weight": [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]],
    }


def test_facts_are_told_as_json(source: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(source, tmp_path / "m", "-o", "json")
    facts = json.loads(capsys.readouterr().out)
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
