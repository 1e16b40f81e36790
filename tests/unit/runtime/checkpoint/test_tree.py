"""What goes into a checkpoint comes out of it, and nothing in it is executed."""

from __future__ import annotations

import dataclasses
import enum
import math
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain.checkpoint.final_weights import digest
from spottrain.checkpoint.layout import SHARD_BYTES
from spottrain.checkpoint.manifest import Piece, StoredTensor
from spottrain.checkpoint.tree import Flattened, renumber, unflatten

from tests.support.sentences import Told
from tests.support.snapshots import change, pack, same, unpack

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
)
tensors = st.builds(
    lambda dtype, shape: (torch.arange(math.prod(shape)).reshape(shape) % 5).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
)
keys = st.text(max_size=4) | st.integers() | st.binary(max_size=2) | st.sampled_from(["$tensor", "$bytes"])
trees = st.recursive(
    scalars | tensors,
    lambda child: (
        st.lists(child, max_size=3)
        | st.lists(child, max_size=3).map(tuple)
        | st.dictionaries(keys, child, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(trees, st.sampled_from([8, 50, SHARD_BYTES]), st.sampled_from([16, 1 << 20]))
def test_any_tree_comes_back_as_it_was(tree: Any, shard_bytes: int, chunk_bytes: int) -> None:
    back = unpack(pack(tree, shard_bytes=shard_bytes, chunk_bytes=chunk_bytes))
    assert same(back, tree)


@settings(max_examples=30, deadline=None)
@given(trees, st.integers(0, 9))
def test_a_tree_that_is_renumbered_names_the_same_tensors(tree: Any, by: int) -> None:
    flattened = Flattened(tree)
    back = unflatten(renumber(flattened.plain, by), lambda number: flattened.leaves[number - by].tensor)
    assert same(back, tree)


def test_numbers_that_are_not_finite_come_back() -> None:
    back = unpack(pack({"a": [math.nan, math.inf, -math.inf, -0.0], "t": torch.tensor([math.nan, -0.0])}))
    assert math.isnan(back["a"][0]) and back["a"][1:3] == [math.inf, -math.inf]
    assert math.copysign(1, back["a"][3]) == -1
    assert math.isnan(back["t"][0]) and torch.signbit(back["t"])[1]


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    weight = torch.randn(4, 4)
    tree = {"a": weight, "b": weight.detach(), "c": weight.t()}
    leaves = Flattened(tree).leaves
    assert len(leaves) == 2, "a and b; c is another view"
    assert leaves[0].tensor.data_ptr() == weight.data_ptr(), "not a copy"
    back = unpack(pack(tree))
    assert back["a"] is back["b"] and torch.equal(back["c"], weight.t())


def test_views_of_the_same_memory_that_mean_other_numbers_are_not_tied() -> None:
    wave = torch.tensor([1 + 2j, 3 - 4j])
    back = unpack(pack({"a": wave, "b": wave.conj(), "c": wave[:1]}))
    assert torch.equal(back["b"], wave.conj()) and torch.equal(back["c"], wave[:1])


def test_views_with_any_strides_and_tensors_of_any_shape_come_back() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tree = {"columns": base[:, ::2], "expanded": torch.ones(1).expand(3, 2), "turned": base.t()}
    tree |= {
        "empty": torch.empty(0, 3),
        "none": torch.empty(0),
        "scalar": torch.tensor(7),
        "one": torch.ones(1),
    }
    assert same(unpack(pack(tree)), tree)


Pair = namedtuple("Pair", "a b")


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Record:
    a: int = 1


TYPED = {
    "counter": Counter({30: 1, 60: 2}),
    "ordered": OrderedDict([("z", 1), ("a", torch.ones(2))]),
    "lists": defaultdict(list, {"a": [1]}),
    "numbers": defaultdict(int, {3: 4}),
    "without a factory": defaultdict(None, {"a": 1}),
    "deque": deque([1.5, torch.ones(1)], maxlen=3),
    "endless": deque("ab"),
    "sets": ({1, "a", (2, 3)}, frozenset({None})),
    "bytes": bytearray(b"ab"),
    "complex": complex(1.5, math.inf),
    "torch": [torch.Size((2, 3)), torch.bfloat16, torch.device("cpu")],
    "numpy": [
        numpy.float64(1.5),
        numpy.int32(7),
        numpy.bool_(True),
        numpy.str_("a"),
        numpy.float32(math.inf),
    ],
    "arrays": {"a": numpy.eye(2), "b": numpy.arange(3, dtype=numpy.uint8), "c": numpy.array(1.0)},
    "not in order": {"z": 1, "y": {2: "a", 1: "b"}, "a": 2},
    "keys": {(1, "a"): 1, True: 2, 1.5: 3, None: 4, numpy.int64(9): 5},
}


def typed(value: Any) -> Any:
    """With the type and the order of each part."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return (type(value), str(value.dtype), value.tolist())
    if isinstance(value, dict):
        more = getattr(value, "default_factory", None)
        return (type(value), more, [(typed(key), typed(item)) for key, item in value.items()])
    if isinstance(value, list | tuple | deque):
        return (type(value), getattr(value, "maxlen", None), list(map(typed, value)))
    return (type(value), value)


@pytest.mark.parametrize("case", TYPED)
def test_what_is_stored_comes_back_as_the_type_that_it_was(case: str) -> None:
    assert typed(unpack(pack({"it": TYPED[case]}))["it"]) == typed(TYPED[case])


@pytest.mark.parametrize(
    "value",
    [
        print,
        object(),
        Pair(1, 2),
        Colour.RED,
        Record(),
        {Colour.RED: 1},
        defaultdict(lambda: 1),
        types.MappingProxyType({}),
        numpy.array(["a"]),
    ],
    ids=["function", "object", "pair", "enum", "record", "key", "factory", "mapping", "strings"],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: object, told: Told) -> None:
    told(lambda: Flattened({"optimizer": {"seen": value}}))


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta"), torch.ones(1, dtype=torch.complex128)],
)
def test_a_tensor_that_cannot_be_stored_is_named_with_its_place(tensor: torch.Tensor, told: Told) -> None:
    told(lambda: pack({"model": {"w": tensor}}))


@pytest.mark.parametrize("dtype", ["load", "save", "hub", "nothing", "float32.__class__"])
def test_a_manifest_that_names_a_function_for_a_type_is_damaged(dtype: str, told: Told) -> None:
    store = pack({"w": torch.ones(2)})
    piece = Piece(shard="r00000-00.safetensors", offset=0, start=(0,), shape=(2,))
    evil = StoredTensor(name="w", dtype=dtype, shape=(2,), pieces=(piece,))
    told(lambda: unpack(change(store, tensors=(evil,))))


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": 5},
        {"$tensor": "x"},
        {"$float": "__import__('os')"},
        {"$bytes": 5},
        {"$dict": [1]},
        {"$dict": [[{"$dict": []}, 1]]},
        {"$type": ["nothing", 1]},
        {"$type": ["dtype", "load"]},
        {"$type": ["defaultdict", ["print", {}]]},
        {"$type": ["bytearray", 1 << 40]},
        {"$type": ["numpy", ["V8", 1 << 40]]},
        {"$type": ["numpy", ["O", 1]]},
    ],
)
def test_a_tree_that_was_made_by_no_writer_is_damaged(tree: Any, told: Told) -> None:
    told(lambda: unpack(change(pack({"w": torch.ones(2)}), tree=tree)))


def test_the_digest_depends_on_names_shapes_and_bytes_only() -> None:
    weights = {"b": torch.ones(2, 3), "a": torch.zeros(1)}
    same_weights = {"a": torch.zeros(1), "b": torch.ones(3, 2).t().contiguous()}
    assert digest(weights) == digest(same_weights)
    assert digest(weights) != digest(weights | {"b": torch.ones(3, 2)})
