"""What goes into a checkpoint comes out of it, and nothing in it is executed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain import state
from spottrain.errors import CheckpointError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
tensors = st.builds(
    lambda dtype, shape: (torch.arange(math.prod(shape)).reshape(shape) % 5).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
)
trees = st.recursive(
    scalars | tensors,
    lambda child: (
        st.lists(child, max_size=3)
        | st.lists(child, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers() | st.just("$tensor"), child, max_size=3)
    ),
    max_leaves=12,
)


def pack(tree: Any, shard_bytes: int = state.SHARD_BYTES) -> tuple[bytes, dict[str, bytes]]:
    encoded = state.Encoded(tree, step=3, shard_bytes=shard_bytes)
    bodies = {name: make() for name, make in encoded.shards()}
    shards = [
        state.Shard(name=name, bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        for name, body in bodies.items()
    ]
    return encoded.manifest(shards), bodies


def unpack(manifest: bytes, bodies: dict[str, bytes]) -> Any:
    read = state.Manifest.from_bytes(manifest)
    return read.decode({shard.name: state.open_shard(shard, bodies.get(shard.name)) for shard in read.shards})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


@settings(max_examples=150, deadline=None)
@given(trees, st.sampled_from([8, 50, state.SHARD_BYTES]))
def test_any_tree_comes_back_as_it_was(tree: Any, shard_bytes: int) -> None:
    # In the order of keys: the manifest sorts them.
    copied = state.Snapshotter().take(tree)
    assert same(ordered(unpack(*pack(copied, shard_bytes))), ordered(tree))


def ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=lambda key: (str(type(key)), key))}
    if isinstance(value, list | tuple):
        return type(value)(map(ordered, value))
    return value


def test_shards_stay_below_their_limit_and_large_tensors_are_cut() -> None:
    tree = {"large": torch.arange(100.0), "small": [torch.ones(3), torch.ones(3)]}
    manifest, bodies = pack(tree, shard_bytes=128)
    assert len(bodies) >= 4
    for shard in json.loads(manifest)["shards"]:
        assert shard["bytes"] < 128 + 512, "tensors and a header"
    assert same(ordered(unpack(manifest, bodies)), ordered(tree))


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    weight = torch.randn(4, 4)
    tree = state.Snapshotter().take({"a": weight, "b": weight, "c": weight.t()})
    manifest, bodies = pack(tree)
    assert len(json.loads(manifest)["tensors"]) == 2, "a and b; c is another view"
    back = unpack(manifest, bodies)
    assert back["a"] is back["b"] and torch.equal(back["c"], weight.t())


def test_a_snapshot_is_not_touched_by_what_happens_next() -> None:
    weight = torch.ones(3)
    snapshotter = state.Snapshotter()
    taken = snapshotter.take({"w": weight})
    weight += 1
    assert taken["w"].tolist() == [1, 1, 1]
    assert snapshotter.take({"w": weight})["w"] is taken["w"], "buffers are used again"


def test_an_optimizer_s_state_comes_back() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    back = unpack(*pack(state.Snapshotter().take(optimizer.state_dict())))
    assert list(back["state"]) == [0, 1], "integer keys stay integers"
    assert back["param_groups"][0]["betas"] == (0.9, 0.999)
    torch.optim.AdamW(model.parameters()).load_state_dict(back)


def test_what_cannot_be_stored_is_named_with_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"holds a set at optimizer\.seen, which cannot be stored"):
        state.Encoded({"optimizer": {"seen": {1, 2}}}, step=1)


@pytest.mark.parametrize("harm", ["cut", "flip", "gone"])
def test_a_damaged_shard_is_noticed(harm: str) -> None:
    manifest, bodies = pack({"w": torch.ones(10)})
    (name, body), *_ = bodies.items()
    harmed = {"cut": body[:-1], "flip": body[:-1] + b"x", "gone": None}[harm]
    with pytest.raises(state.Damaged, match=name):
        unpack(manifest, {} if harmed is None else {name: harmed})


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_manifest_that_was_changed_anywhere_is_noticed(data: st.DataObject) -> None:
    manifest, bodies = pack({"w": torch.ones(2), "x": 1.5})
    at = data.draw(st.integers(0, len(manifest) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != manifest[at]))
    changed = manifest[:at] + bytes([byte]) + manifest[at + 1 :]
    with contextlib.suppress(state.Damaged, CheckpointError):
        assert same(ordered(unpack(changed, bodies)), ordered({"w": torch.ones(2), "x": 1.5}))


def test_a_newer_format_is_named() -> None:
    manifest, bodies = pack({})
    with pytest.raises(CheckpointError, match="has format 2, of a newer spottrain; this one reads up to 1"):
        unpack(manifest.replace(b'"format":1', b'"format":2'), bodies)


def test_the_digest_depends_on_names_shapes_and_bytes_only() -> None:
    weights = {"b": torch.ones(2, 3), "a": torch.zeros(1)}
    same_weights = {"a": torch.zeros(1), "b": torch.ones(3, 2).t().contiguous()}
    assert state.digest(weights) == state.digest(same_weights)
    assert state.digest(weights) != state.digest(weights | {"b": torch.ones(3, 2)})


def test_a_copy_on_the_cpu_is_whole_when_the_snapshot_is(monkeypatch: pytest.MonkeyPatch) -> None:
    behind: list[bool] = []
    copy = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        behind.append(non_blocking)
        return copy(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    state.Snapshotter().take({"a": torch.ones(3)})
    assert behind == [False]
