"""The files of a checkpoint: valid safetensors, aligned without holes, and the copy that fills them."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain.checkpoint import staging_buffer
from spottrain.checkpoint.layout import SAFETENSORS, Layout, divide, plan, signature
from spottrain.checkpoint.manifest import ALIGNMENT
from spottrain.checkpoint.saver import Saver
from spottrain.checkpoint.staging_buffer import StagingBuffer, require_memory
from spottrain.checkpoint.tree import Flattened, Leaf
from spottrain.core.container import ContainerMemory
from spottrain.distributed.world import World
from spottrain.storage.local import FolderStore

from tests.support.sentences import Told
from tests.support.snapshots import KEY, InProcessTransfer, pack, same

shapes = st.lists(st.integers(0, 5), max_size=3)
leaf_lists = st.lists(st.tuples(st.sampled_from(list(SAFETENSORS)), shapes), max_size=8)


def leaves(*specs: tuple[torch.dtype, list[int]]) -> list[Leaf]:
    return [
        Leaf(path=f"t.{n}", tensor=(torch.arange(math.prod(shape)).reshape(shape) % 2).to(dtype))
        for n, (dtype, shape) in enumerate(specs)
    ]


def all_of(found: list[Leaf], **more: Any) -> Layout:
    return plan(found, range(len(found)), **more)


# --- layout -------------------------------------------------------------------------------------------
@settings(max_examples=50, deadline=None)
@given(leaf_lists, st.sampled_from([1, 40, 1 << 30]))
def test_every_tensor_is_aligned_and_no_byte_of_a_file_is_unused(specs: Any, shard_bytes: int) -> None:
    found = leaves(*specs)
    layout = all_of(found, shard_bytes=shard_bytes)
    places = {place.number: place for place in layout.places}
    assert sorted(places) == list(range(len(found)))
    for shard in layout.shards:
        assert shard.offset % mmap.PAGESIZE == 0 and len(shard.header) % ALIGNMENT == 0
        at = len(shard.header)
        here = [place for place in layout.places if place.piece.shard == shard.name]
        for place in sorted(here, key=lambda place: place.offset):
            tensor = found[place.number].tensor
            assert place.piece.offset == at and place.offset == shard.offset + at
            assert place.offset % tensor.element_size() == 0
            at += tensor.nbytes
        assert at == shard.bytes
    ends = [shard.offset + shard.bytes for shard in layout.shards]
    assert all(end <= shard.offset for end, shard in zip(ends, layout.shards[1:], strict=False))
    assert layout.bytes >= (ends[-1] if ends else 0)


def test_every_type_is_written_as_the_safetensors_library_reads_it() -> None:
    tree = {str(n): (torch.arange(6).reshape(2, 3) % 2).to(dtype) for n, dtype in enumerate(SAFETENSORS)}
    tree |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(5), "__metadata__": torch.ones(2)}
    store = pack({"model": tree, "__metadata__": torch.ones(3)}, shard_bytes=100)
    found: dict[str, torch.Tensor] = {}
    for key, body in store.bodies.items():
        if key.endswith(".safetensors"):
            found |= safetensors.torch.load(body)
    assert len(found) == len(tree) + 1
    assert all(same(found[f"model.{name}"], tensor) for name, tensor in tree.items())


def test_two_leaves_of_one_name_are_both_there() -> None:
    store = pack({1: torch.zeros(2), "1": torch.ones(2)})
    found = safetensors.torch.load(store.bodies[KEY + "r00000-00.safetensors"])
    assert sorted(tensor.tolist() for tensor in found.values()) == [[0, 0], [1, 1]]


def test_shards_stay_below_their_limit_and_a_larger_tensor_has_one_of_its_own() -> None:
    found = leaves(*[(torch.float32, [3])] * 10, (torch.float32, [100]), *[(torch.uint8, [5])] * 3)
    layout = all_of(found, shard_bytes=48)
    sizes = {shard.name: shard.bytes - len(shard.header) for shard in layout.shards}
    large = next(place.piece.shard for place in layout.places if place.number == 10)
    assert sizes.pop(large) == 400
    assert [place.number for place in layout.places if place.piece.shard == large] == [10]
    assert all(size <= 48 for size in sizes.values())
    assert len(sizes) == 4, "4 + 4 + 2 and then the bytes, as few as can be"
    assert [shard.name for shard in layout.shards] == [f"r00000-0{n}.safetensors" for n in range(5)]


def test_the_signature_tells_whether_a_layout_still_fits() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def now() -> tuple[Any, ...]:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        found = Flattened(state).leaves
        return signature(found, range(len(found)))

    before = now()
    with torch.no_grad():
        model.weight += 1
    assert now() == before, "other numbers have the same places"
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert (with_state := now()) != before
    optimizer.step()
    assert now() == with_state
    model.half()
    assert now() != with_state
    found = leaves((torch.float32, [2, 3]))
    assert all_of(found).signature == signature(found, [0]) != signature(leaves((torch.float32, [3, 2])), [0])


# --- who stores what ----------------------------------------------------------------------------------
@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_the_leaves_are_divided_once_each_and_evenly_and_alike_on_every_rank(
    sizes: list[int], ranks: int
) -> None:
    found = leaves(*[(torch.uint8, [size]) for size in sizes])
    shares = divide(found, ranks)
    assert len(shares) == ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(sizes)))
    loads = [sum(sizes[n] for n in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0), "by no more than one tensor"
    assert divide(leaves(*[(torch.uint8, [size]) for size in sizes]), ranks) == shares


def test_what_only_rank_0_has_right_is_its_own_by_path_or_by_how_the_path_begins() -> None:
    its_own = ["model.running", "objects.ema.w", "objects.", "loose.0"]
    others = ["model.w", "objects", "objectsx.w", "model.objects.w"]
    found = [Leaf(path=path, tensor=torch.ones(100)) for path in its_own]
    found += [Leaf(path=path, tensor=torch.ones(1)) for path in others]
    shares = divide(found, 4, frozenset({"model.running", "objects.", "loose."}))
    assert [found[n].path for n in shares[0]] == its_own, "and no more, for it has the most"
    assert sorted(found[n].path for share in shares[1:] for n in share) == sorted(others)


# --- memory -------------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None)
@given(leaf_lists)
def test_what_is_filled_in_equals_what_it_was_filled_from(specs: Any) -> None:
    found = leaves(*specs)
    buffer = StagingBuffer(all_of(found, shard_bytes=64))
    for turn in range(2):
        if turn:
            found = [Leaf(path=leaf.path, tensor=(leaf.tensor == 0).to(leaf.tensor.dtype)) for leaf in found]
        buffer.fill(found)
        for place in buffer.layout.places:
            tensor = found[place.number].tensor
            body = buffer.map[place.offset : place.offset + tensor.nbytes]
            assert body == bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def test_a_copy_on_the_cpu_is_whole_when_the_snapshot_is_and_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behind: list[bool] = []
    copy = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        behind.append(non_blocking)
        return copy(self, source, non_blocking)

    found = leaves((torch.float32, [3]))
    buffer = StagingBuffer(all_of(found))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    buffer.fill(found)
    assert behind == [False]
    at = buffer.layout.places[0].offset
    before = buffer.map[at : at + 12]
    found[0].tensor.add_(1)
    assert buffer.map[at : at + 12] == before


def test_the_first_copy_waits_until_the_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, order = threading.Event(), list[str]()
    touch = StagingBuffer._touch

    def slowly(self: StagingBuffer, start: int, length: int) -> None:
        assert gate.wait(10), "nobody opened the gate"
        order.append("resident")
        touch(self, start, length)

    monkeypatch.setattr(StagingBuffer, "_touch", slowly)
    found = leaves((torch.float32, [3]))
    buffer = StagingBuffer(all_of(found))
    threading.Timer(0.05, gate.set).start()
    buffer.fill(found)
    order.append("filled")
    assert order == ["resident", "filled"]
    assert buffer.map[: len(buffer.layout.shards[0].header)] == buffer.layout.shards[0].header


def test_an_older_kernel_s_memory_is_made_resident_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_buffer, "MADV_POPULATE_WRITE", 12345)
    found = leaves((torch.float32, [3000]))
    buffer = StagingBuffer(all_of(found))
    buffer.fill(found)
    at = buffer.layout.places[0].offset
    body = bytearray(buffer.map[at : at + 12000])
    assert torch.equal(torch.frombuffer(body, dtype=torch.float32), found[0].tensor)


def test_the_memory_of_a_layout_that_fits_no_more_is_given_back() -> None:
    def mine() -> int:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum("spottrain-staging" in os.readlink(link) for link in links if os.path.islink(link))

    before = mine()
    found = leaves((torch.float32, [3]))
    buffer = StagingBuffer(all_of(found))
    buffer.fill(found)
    assert mine() > before
    del buffer
    assert mine() == before


def test_too_little_memory_for_a_copy_is_told_with_what_to_raise(
    monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    gib = 2**30
    monkeypatch.setattr(staging_buffer, "memory", lambda: None)
    require_memory(2**60)
    require_memory(2 * gib, ContainerMemory(limit=8 * gib, used=6 * gib))
    told(lambda: require_memory(3 * gib, ContainerMemory(limit=8 * gib, used=6 * gib)))


def test_the_ranks_of_a_pod_need_their_copies_at_once_and_the_memory_given_up_before_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(staging_buffer, "require_memory", asked.append)
    layout = all_of(leaves((torch.float32, [3000])))
    assert StagingBuffer(layout, ranks_here=4, freed=2 * mmap.PAGESIZE).size == layout.bytes
    world = World(rank=9, size=16, local_rank=1, local_size=8)
    saver = Saver(world, lambda: InProcessTransfer(FolderStore(tmp_path)))
    saver.prepare({}, {"t": torch.ones(1000)})
    before = saver.bytes
    saver.prepare({}, {"t": torch.ones(3000)})
    assert asked == [4 * (layout.bytes - 2 * mmap.PAGESIZE), 8 * before, 8 * (saver.bytes - before)]
