"""Reading a checkpoint: the parts that a rank wants, each chunk of them verified, what is wrong named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain.checkpoint.manifest import FOLDER, Damaged, File, Manifest, canonical
from spottrain.checkpoint.reader import (
    CONNECTIONS,
    fetch_folder,
    read_manifest,
    read_tensors,
    read_trees,
)
from spottrain.contract import MANIFEST_NAME
from spottrain.errors import CheckpointError

from tests.support.sentences import Told
from tests.support.snapshots import (
    KEY,
    Memory,
    boxes,
    change,
    chunks_of,
    inside,
    ordered,
    pack,
    pack_parts,
    same,
    unpack,
)

TREE = {"w": torch.arange(10.0), "x": 1.5, "y": [torch.ones(3, dtype=torch.int8)]}
SHARD = KEY + "r00000-00.safetensors"


# --- damage -------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_byte_that_was_flipped_in_a_shard_is_noticed_by_shard_and_chunk(data: st.DataObject) -> None:
    store = pack(TREE, chunk_bytes=16)
    body = store.bodies[SHARD]
    header = 8 + int.from_bytes(body[:8], "little")
    at = data.draw(st.integers(header, len(body) - 1))
    bit = data.draw(st.integers(0, 7))
    store.bodies[SHARD] = body[:at] + bytes([body[at] ^ (1 << bit)]) + body[at + 1 :]
    with pytest.raises(Damaged, match=rf"r00000-00.safetensors has a wrong checksum in chunk {at // 16}$"):
        unpack(store)


@pytest.mark.parametrize("left", [0, 1, 100, -1])
def test_a_shard_that_was_cut_short_is_noticed(left: int, told: Told) -> None:
    store = pack(TREE)
    store.bodies[SHARD] = store.bodies[SHARD][:left]
    told(lambda: unpack(store))


@pytest.mark.parametrize("name", ["r00000-00.safetensors", "manifest.json"])
def test_an_object_that_is_gone_is_noticed(name: str, told: Told) -> None:
    store = pack(TREE)
    del store.bodies[KEY + name]
    told(lambda: unpack(store))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_manifest_that_was_changed_anywhere_is_noticed(data: st.DataObject) -> None:
    store = pack(TREE)
    text = store.bodies[KEY + MANIFEST_NAME]
    at = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != text[at]))
    store.bodies[KEY + MANIFEST_NAME] = text[:at] + bytes([byte]) + text[at + 1 :]
    with contextlib.suppress(Damaged, CheckpointError):
        assert same(ordered(unpack(store)), ordered(TREE)), "white space"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"format": 2}', b"\xff"])
def test_what_is_no_manifest_is_damaged(text: bytes, told: Told) -> None:
    told(lambda: Manifest.from_bytes(text))


@pytest.mark.parametrize("number", [3, 1])
def test_another_format_is_named_and_not_taken_for_damage(number: int, told: Told) -> None:
    store = pack({})
    body = json.loads(store.bodies[KEY + MANIFEST_NAME]) | {"format": number, "unheard": "of"}
    told(lambda: Manifest.from_bytes(canonical(body)))


def test_a_manifest_comes_back_as_it_was_and_its_checksum_is_of_all_the_rest() -> None:
    text = pack(TREE).bodies[KEY + MANIFEST_NAME]
    manifest = Manifest.from_bytes(text)
    assert manifest.to_bytes() == text
    raw = json.loads(text)
    told = raw.pop("sha256")
    assert told == hashlib.sha256(canonical(raw)).hexdigest()
    assert manifest.step == 3 and manifest.size == sum(shard.bytes for shard in manifest.shards)


# --- parts --------------------------------------------------------------------------------------------
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_parts_that_some_ranks_stored_are_read_by_any_other_number_of_ranks(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    dtype = data.draw(st.sampled_from([torch.float32, torch.int8, torch.float64]))
    tensor = torch.randperm(math.prod(shape)).reshape(shape).to(dtype)
    before, after = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    cut, read = (data.draw(st.integers(0, len(shape) - 1) | st.just(0)) for _ in range(2))
    store = pack_parts(tensor, boxes(shape, before, cut), chunk_bytes=data.draw(st.sampled_from([7, 64])))
    for box in boxes(shape, after, read):
        found = unpack(store, want=lambda stored, box=box: box)["t"]  # type: ignore[misc]
        assert same(found, tensor[inside(box)].contiguous())
    assert same(unpack(store)["t"], tensor)


def test_a_rank_reads_only_the_chunks_of_its_part() -> None:
    tensor = torch.arange(64.0)
    read: list[tuple[int, int]] = []

    class Noting(Memory):
        def read_into(self, key: str, offset: int, *buffers: memoryview, hashed: bool = False) -> str:
            read.append((offset, sum(map(len, buffers))))
            return super().read_into(key, offset, *buffers, hashed=hashed)

    store = Noting(pack_parts(tensor, boxes([64], 1), chunk_bytes=32).bodies)
    half = boxes([64], 2)[1]
    assert same(unpack(store, want=lambda stored: half)["t"], tensor[32:])
    assert sorted(read) == [(offset, min(32, 261 - offset)) for offset in range(128, 261, 32)]


def test_bytes_that_two_tensors_name_are_read_into_both() -> None:
    store = pack_parts(torch.arange(8.0), boxes([8], 1), chunk_bytes=16)
    whole = read_manifest(store, KEY)
    stored = whole.tensors[0]
    piece = stored.pieces[0]
    tail = replace(stored, shape=(4,), pieces=(replace(piece, shape=(4,), offset=piece.offset + 16),))
    found = read_tensors(store, KEY, replace(whole, tensors=(stored, tail)), [0, 1])
    assert same(found[0], torch.arange(8.0)) and same(found[1], torch.arange(4.0, 8.0))


def test_a_tensor_that_is_not_whole_is_noticed(told: Told) -> None:
    store = pack_parts(torch.arange(8.0).reshape(4, 2), boxes([4, 2], 4), chunk_bytes=64)
    stored = read_manifest(store, KEY).tensors[0]
    for pieces in (stored.pieces[:3], stored.pieces[1:], ()):
        with pytest.raises(Damaged) as refused:
            unpack(change(store, tensors=(replace(stored, pieces=pieces),)))
        told(refused)
    first = boxes([4, 2], 4)[0]
    part = change(store, tensors=(replace(stored, pieces=stored.pieces[:1]),))
    assert unpack(part, want=lambda stored: first)["t"].tolist() == [[0, 1]], "what is wanted is there"


@pytest.mark.parametrize(
    "harm",
    [
        {"shard": "r00009-00.safetensors"},
        {"offset": 30},
        {"start": (0, 0)},
        {"start": (-1,)},
        {"shape": (7,)},
    ],
    ids=str,
)
def test_pieces_that_contradict_their_shards_are_damaged(harm: dict[str, Any], told: Told) -> None:
    store = pack_parts(torch.arange(8.0), boxes([8], 1), chunk_bytes=64)
    stored = read_manifest(store, KEY).tensors[0]
    told(
        lambda: unpack(change(store, tensors=(replace(stored, pieces=(replace(stored.pieces[0], **harm),)),)))
    )


def test_what_was_a_rank_s_own_comes_back_to_it_and_a_new_rank_gets_the_first_one_s() -> None:
    store = pack({"shared": 1})
    manifest = replace(read_manifest(store, KEY), ranks=({"mine": 0}, {"mine": 1}), world=2)
    found = [read_trees(store, KEY, manifest, rank=rank) for rank in range(3)]
    assert [shared for shared, _ in found] == [{"shared": 1}] * 3
    assert [own for _, own in found] == [{"mine": 0}, {"mine": 1}, {"mine": 0}]


# --- folders ------------------------------------------------------------------------------------------
def folder(*files: tuple[str, bytes]) -> Memory:
    store, listed, shards = Memory(), [], []
    for number, (path, body) in enumerate(files):
        name = f"f{number:05d}"
        store.put(KEY + name, body)
        listed.append(File(path=path, shard=name))
        shards.append({"name": name, "bytes": len(body), "chunks": chunks_of(body, 4)})
    manifest = Manifest(step=1, kind=FOLDER, files=tuple(listed), chunk_bytes=4)
    raw = json.loads(manifest.to_bytes()) | {"shards": shards}
    raw.pop("sha256")
    raw["sha256"] = hashlib.sha256(canonical(raw)).hexdigest()
    store.put(KEY + MANIFEST_NAME, canonical(raw))
    return store


def test_a_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    files = [("a", b"0123456789"), ("deep/er/b.bin", bytes(range(256))), ("empty", b"")]
    store = folder(*files)
    fetch_folder(store, KEY, read_manifest(store, KEY), tmp_path)
    found = {p.relative_to(tmp_path).as_posix(): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == dict(files)


class Together(Memory):
    """Answers no read of the first CONNECTIONS before all of these are in flight."""

    def __init__(self, bodies: dict[str, bytes]) -> None:
        super().__init__(bodies)
        self._all, self._lock = threading.Barrier(CONNECTIONS), threading.Lock()
        self._began = self._here = self.most = 0

    def read_into(self, key: str, offset: int, *buffers: memoryview, hashed: bool = False) -> str:
        with self._lock:
            self._began, self._here = self._began + 1, self._here + 1
            self.most, first = max(self.most, self._here), self._began <= CONNECTIONS
        if first:
            self._all.wait(10)
        digest = super().read_into(key, offset, *buffers, hashed=hashed)
        with self._lock:
            self._here -= 1
        return digest


def test_files_of_a_folder_and_parts_of_one_file_are_read_at_the_same_time(tmp_path: Path) -> None:
    small = [(f"rng-{number}", b"0123") for number in range(CONNECTIONS - 2)]
    files = [*small, ("model", bytes(range(40))), ("last", b"01")]
    store = Together(folder(*files).bodies)
    fetch_folder(store, KEY, read_manifest(store, KEY), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == dict(files)
    assert store.most == CONNECTIONS, "which bounds the memory"


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "", "deep/.."])
def test_a_file_outside_of_the_folder_is_refused_and_nothing_is_written(
    tmp_path: Path, path: str, told: Told
) -> None:
    target = tmp_path / "here"
    target.mkdir()
    store = folder((path, b"evil"))
    told(lambda: fetch_folder(store, KEY, read_manifest(store, KEY), target))
    assert list(tmp_path.rglob("*")) == [target]


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, told: Told) -> None:
    target = tmp_path / "checkpoint-5"
    target.mkdir()
    (target / "older").write_bytes(b"older")
    store = folder(("a", b"0123456789"), ("b", b"01234"))
    whole = store.bodies[KEY + "f00001"]
    store.bodies[KEY + "f00001"] = b"0123x"
    told(lambda: fetch_folder(store, KEY, read_manifest(store, KEY), target))
    assert list(tmp_path.rglob("*")) == [target, target / "older"]
    store.bodies[KEY + "f00001"] = whole
    fetch_folder(store, KEY, read_manifest(store, KEY), target)
    assert sorted(tmp_path.rglob("*")) == [target, target / "a", target / "b"]
