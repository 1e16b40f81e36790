"""`spottrain checkpoints download` over folders: what a person gets, and that it is whole or not there."""

from __future__ import annotations

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
from spottrain.checkpoint.final_files import FinalFiles
from spottrain.checkpoint.final_weights import FinalWeights, digest
from spottrain.checkpoint.manifest import Damaged, Manifest, Piece, StoredTensor
from spottrain.checkpoint.weights_files import load_weights
from spottrain.storage.outage import Outage
from spottrain_cli.checkpoints.source import is_uri, unknown_here
from spottrain_cli.checkpoints.weights import Target, weights_of
from spottrain_cli.jobs import Job

from tests.support.headcheckpoints import Made, sums
from tests.unit.cli.conftest import Place, Ran

SHARD = "r00001-00.safetensors"
WEIGHTS = {"w": torch.arange(6.0), "n": torch.tensor(3), "extra.loss.w": torch.ones(2)}


@pytest.fixture
def source(place: Place) -> Place:
    """A run that is still under way, with steps 9, 7 (best) and 5."""
    place.holds(5, 7, 9, best=7)
    return place


@pytest.fixture
def done(place: Place) -> Place:
    """A run that is done with step 9."""
    place.ended(5, 9, done=True)
    return place


def downloaded(source: Place, target: Path, *words: str) -> Ran:
    return source("download", "--to", str(target), *words)


def names(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(each for each in found if each != ".spottrain-download.json")


def damage(source: Place, step: int) -> None:
    key = source.entry(step).key + SHARD
    source.store.put(key, bytes(len(source.body(key))))


def put_folder(source: Place, key: str, *paths: str) -> bytes:
    """A checkpoint of another library, with these files."""
    body = b"what the library wrote"
    shards = [{"name": f"f{n}", "bytes": len(body), "chunks": sums(body)} for n in range(len(paths))]
    files = [{"path": path, "shard": f"f{n}"} for n, path in enumerate(paths)]
    Made(more={"kind": "folder", "tensors": [], "shards": shards, "files": files}).put(source.store, key)
    for n in range(len(paths)):
        source.store.put(f"{key}f{n}", body)
    return body


def finish(
    source: Place, tmp_path: Path, *beside: str, most: int = 2**31, saved: dict[str, Path] | None = None
) -> None:
    """Leaves final weights as a finished run does, and files beside them."""
    files = FinalFiles(source.store, Outage())
    described = []
    for name in beside:
        (tmp_path / name).write_text("{}")
        described.append((name, tmp_path / name))
    facts = {"step": 9, "checkpoint": source.entry(9).key}
    files.write(FinalWeights(WEIGHTS, beside=["extra.loss.w"], most=most), described, facts)
    if saved:
        files.add_saved(saved)


# --- a checkpoint of ours ---------------------------------------------------------------------------------
def test_the_weights_have_plain_names_and_join_what_several_ranks_stored(
    source: Place, tmp_path: Path
) -> None:
    head = source.body("HEAD")
    ran = downloaded(source, tmp_path / "m", "--step", "best")
    assert ran.code == 0 and "step 7, 1 file" in ran.out and source.body("HEAD") == head
    weights = load_file(tmp_path / "m" / "model.safetensors")
    assert weights["bias"].tolist() == [1.0, 2.0, 3.0]
    assert weights["weight"].tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert weights["weight"].dtype == numpy.float32
    assert downloaded(source, tmp_path / "newest").out.startswith(f"{tmp_path}/newest: step 9")


def test_tied_tensors_are_written_under_each_name_and_what_is_no_tensor_is_left_out(
    source: Place, tmp_path: Path
) -> None:
    model = {"a": {"$tensor": 0}, "b": {"$tensor": 0}, "extra": 3, "$dict": []}
    tree = {"model": {"$dict": [[name, value] for name, value in model.items()]}}
    Made(tree=tree).put(source.store, source.entry(9).key)
    assert downloaded(source, tmp_path / "m").code == 0
    assert sorted(load_file(tmp_path / "m/model.safetensors")) == ["a", "b"]


def test_torch_load_reads_pt(source: Place, tmp_path: Path) -> None:
    assert downloaded(source, tmp_path / "m", "--format", "pt").code == 0
    assert torch.load(tmp_path / "m/model.pt")["bias"].tolist() == [1.0, 2.0, 3.0]
    assert names(tmp_path / "m") == ["model.pt"]
    assert downloaded(source, tmp_path / "n", "--format", "onnx").code == 2


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

    written = bytearray(whole.nbytes)
    tensor = StoredTensor(name="t", dtype="float32", shape=tuple(shape), pieces=tuple(pieces))
    for piece in pieces:
        for at, to, count in Target(tensor=tensor, piece=piece, begin=0).runs():
            begin = piece.offset + at
            written[to : to + count] = body[begin : begin + count]
    assert bytes(written) == whole.tobytes()


def test_where_the_weights_are_averaged_the_average_is_written_under_all_names() -> None:
    """As evaluations and the final weights have it. Tied weights are one tensor with two names."""
    tensors = tuple(StoredTensor(name=str(n), dtype="float32", shape=(1,), pieces=()) for n in range(4))
    model = {"tied": {"$tensor": 0}, "head": {"$tensor": 0}, "buffer": {"$tensor": 1}}
    ema = {"average": {"tied": {"$tensor": 3}}, "updated": 5}
    manifest = Manifest(step=1, tree={"model": model, "ema": ema}, tensors=tensors)
    found = {name: tensor.name for name, tensor in weights_of(manifest).items()}
    assert found == {"tied": "3", "head": "3", "buffer": "1"}
    without = {name: t.name for name, t in weights_of(replace(manifest, tree={"model": model})).items()}
    assert without == {"tied": "0", "head": "0", "buffer": "1"}


# --- a checkpoint of a library ----------------------------------------------------------------------------
def test_of_a_librarys_folder_come_the_files_that_are_the_model(source: Place, tmp_path: Path) -> None:
    key = source.entry(9).key
    files = ("model.safetensors", "config.json", "optimizer.pt", "rng_state_0.pth", "best-model/config.json")
    body = put_folder(source, key, *files)
    assert downloaded(source, tmp_path / "m").code == 0
    assert names(tmp_path / "m") == ["config.json", "model.safetensors"]
    assert (tmp_path / "m/model.safetensors").read_bytes() == body
    put_folder(source, key, "lightning.ckpt")
    assert downloaded(source, tmp_path / "n").code == 0 and names(tmp_path / "n") == ["lightning.ckpt"]
    code, _, err = downloaded(source, tmp_path / "o", "--format", "pt")
    assert code == 1 and "only lightning.ckpt" in err


def test_a_file_outside_the_folder_is_not_written(source: Place, tmp_path: Path) -> None:
    put_folder(source, source.entry(9).key, "../model.safetensors")
    code, _, err = downloaded(source, tmp_path / "m")
    assert code == 1 and "outside its folder" in err and not (tmp_path / "model.safetensors").exists()


# --- a run that is done -----------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [2**31, 20], ids=["one file", "several files"])
def test_the_final_weights_come_with_what_the_library_needs(done: Place, tmp_path: Path, most: int) -> None:
    finish(done, tmp_path, "config.json", "tokenizer.json", most=most)
    ran = downloaded(done, tmp_path / "m")
    assert ran.code == 0 and "the final weights of step 9" in ran.out and "AutoModel" in ran.out
    found = [name for name in names(tmp_path / "m") if not name.startswith("model")]
    assert found == ["config.json", "tokenizer.json"]
    stored: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "m").glob("*.safetensors"):
        stored |= safetensors.torch.load_file(path)
    assert digest(stored) == digest(WEIGHTS)
    assert load_weights(tmp_path / "m").keys() == {"w", "n"}, "what is beside the model is known as that"


def test_of_an_adapter_comes_what_peft_writes_and_no_frozen_model(done: Place, tmp_path: Path) -> None:
    finish(done, tmp_path, "adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    ran = downloaded(done, tmp_path / "m")
    assert "the adapter of step 9" in ran.out and "AutoPeftModel" in ran.out
    assert names(tmp_path / "m") == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]


def test_what_the_script_has_saved_comes_as_it_was(done: Place, tmp_path: Path) -> None:
    safetensors.torch.save_file(WEIGHTS, tmp_path / "same")
    (tmp_path / "other").write_text("another model")
    (tmp_path / "notes").write_text("")
    same, other, notes = (tmp_path / name for name in ("same", "other", "notes"))
    saved = {"model.safetensors": same, "half/model.safetensors": other, "notes.md": notes}
    finish(done, tmp_path, "config.json", saved=saved)
    assert "what the script saved" in downloaded(done, tmp_path / "m").out
    assert names(tmp_path / "m") == ["half/model.safetensors", "model.safetensors", "notes.md"]
    assert digest(safetensors.torch.load_file(tmp_path / "m/model.safetensors")) == digest(WEIGHTS)
    assert (tmp_path / "m/half/model.safetensors").read_text() == "another model"
    assert "final/saved/model.safetensors" not in done.store.list("final/")


def test_a_step_of_a_run_that_is_done_gets_the_configuration_too(done: Place, tmp_path: Path) -> None:
    finish(done, tmp_path, "config.json")
    assert downloaded(done, tmp_path / "m", "--step", "5").code == 0
    assert names(tmp_path / "m") == ["config.json", "model.safetensors"]


def test_final_weights_of_an_earlier_run_are_named_and_not_taken_for_this_one(
    source: Place, tmp_path: Path
) -> None:
    code, _, err = downloaded(source, tmp_path / "m", "--step", "final")
    assert code == 3 and "no final weights" in err
    finish(source, tmp_path)
    ran = downloaded(source, tmp_path / "m")
    assert "step 9" in ran.out and "an earlier run, of step 9, are there too: --step final" in ran.out
    source.flip_a_bit("final/model.safetensors")
    code, _, err = downloaded(source, tmp_path / "n", "--step", "final")
    assert code == 1 and "does not match its checksum" in err and not (tmp_path / "n").exists()


@pytest.mark.parametrize("body", [b'{"format": 1, "step": 9, "checkpoint": "k", "digest": "d"}', b"[]", b"{"])
def test_final_weights_that_another_version_wrote_are_refused(
    done: Place, tmp_path: Path, body: bytes
) -> None:
    done.store.put("final/manifest.json", body)
    code, _, err = downloaded(done, tmp_path / "m", "--step", "final")
    assert code == 1 and not (tmp_path / "m").exists()
    assert "does not name the files of the final weights" in err


def test_final_weights_of_0_3_are_read_with_the_files_beside_that_it_did_not_list(
    done: Place, tmp_path: Path
) -> None:
    finish(done, tmp_path, "config.json")
    facts = json.loads(done.body("final/manifest.json"))
    del facts["beside"]
    done.store.put("final/manifest.json", json.dumps(facts).encode())
    assert downloaded(done, tmp_path / "m").code == 0
    assert names(tmp_path / "m") == ["config.json", "model.safetensors"]


# --- the folder -------------------------------------------------------------------------------------------
def test_a_folder_with_other_files_is_refused_and_a_complete_one_is_left_as_it_is(
    source: Place, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    code, _, err = downloaded(source, tmp_path / "mine")
    assert code == 2 and "nothing is overwritten" in err
    assert downloaded(source, tmp_path / "mine/file").code == 2
    assert downloaded(source, tmp_path / "m").code == 0
    first = (tmp_path / "m/model.safetensors").stat().st_mtime_ns
    assert downloaded(source, tmp_path / "m").code == 0
    assert (tmp_path / "m/model.safetensors").stat().st_mtime_ns == first
    assert downloaded(source, tmp_path / "m", "--step", "5").code == 2, "another download"


def test_an_empty_folder_is_filled_and_stays_the_one_that_it_was(
    done: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a mount, or where the person is."""
    finish(done, tmp_path, "config.json")
    (tmp_path / "m" / "lost+found").mkdir(parents=True)
    inode = (tmp_path / "m").stat().st_ino
    monkeypatch.chdir(tmp_path / "m")
    assert downloaded(done, Path(".")).code == 0
    assert names(tmp_path / "m") == ["config.json", "model.safetensors"]
    assert (tmp_path / "m").stat().st_ino == inode
    assert downloaded(done, tmp_path / "m").code == 0, "it is the same download"


def test_a_damaged_checkpoint_makes_no_folder(source: Place, tmp_path: Path) -> None:
    damage(source, 9)
    code, _, err = downloaded(source, tmp_path / "m")
    assert code == 1 and "cannot be downloaded" in err and not (tmp_path / "m").exists()


def test_a_download_goes_on_where_it_was_cut_off(
    done: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(done, tmp_path, "config.json")
    read, store, seen = done.store.read_into, type(done.store), list[str]()

    def cut(self: Any, key: str, *where: Any, **how: Any) -> Any:
        seen.append(key)
        if key.endswith("config.json"):
            raise Damaged("cut off")
        return read(key, *where, **how)

    with monkeypatch.context() as patch:
        patch.setattr(store, "read_into", cut)
        assert downloaded(done, tmp_path / "m").code == 1 and not (tmp_path / "m").exists()
    seen.clear()

    def note(self: Any, key: str, *where: Any, **how: Any) -> Any:
        seen.append(key)
        return read(key, *where, **how)

    monkeypatch.setattr(store, "read_into", note)
    assert downloaded(done, tmp_path / "m").code == 0
    assert seen == ["final/config.json"] and not (tmp_path / "m.part").exists()


def test_what_is_no_folder_of_this_machine_is_refused(source: Place, tmp_path: Path) -> None:
    code, _, err = source("download", "--to", "s3://bucket/x")
    assert code == 2 and "name a folder on this machine" in err


def test_facts_are_told_as_json(source: Place, tmp_path: Path) -> None:
    facts = source.facts("download", "--to", str(tmp_path / "m"))
    assert facts["step"] == 9 and facts["files"] == ["model.safetensors"]
    assert facts["bytes"] == (tmp_path / "m/model.safetensors").stat().st_size


# --- where the checkpoints are ----------------------------------------------------------------------------
def test_what_begins_as_a_path_or_has_a_scheme_is_a_uri_and_all_else_a_job() -> None:
    assert all(map(is_uri, ("s3://b/x", "./run", "/run", "../run", "~/run", " '/run'")))
    assert not any(map(is_uri, ("run", "ml/run")))


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("http://minio:9000", "kubectl -n ml port-forward service/minio 9000:9000`"),
        ("http://minio.store.svc.cluster.local", "kubectl -n store port-forward service/minio 9000:80`"),
        ("https://s3.office.example", "connect to its network"),
    ],
)
def test_an_endpoint_that_only_the_cluster_knows_is_explained(endpoint: str, says: str) -> None:
    assert says in unknown_here(Job(namespace="ml", name="bert"), endpoint)
