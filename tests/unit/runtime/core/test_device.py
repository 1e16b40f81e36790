"""What a batch may be made of: all of its tensors come to the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from spottrain.core.device import to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])


class Named(UserDict[str, Any]):
    name = "of this batch"


def batches() -> dict[str, Any]:
    one = torch.ones(2)
    return {
        "tensor": one,
        "dict": {"x": one},
        "ordered": OrderedDict(x=one),
        "mapping": MappingProxyType({"x": one}),
        "mutable mapping": Named(x=one),
        "nested": Named(x=[one, {"y": (one, "text")}]),
        "named tuple": Pair(one, {"y": one}),
        "packed sequence": torch.nn.utils.rnn.pack_sequence([torch.ones(1, 2)]),
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if hasattr(value, "values") else value if isinstance(value, list | tuple) else ()
    return [found for each in items for found in _tensors(each)]


@pytest.mark.parametrize("kind", batches())
def test_all_tensors_of_a_batch_come_to_the_device(kind: str) -> None:
    given = batches()[kind]
    moved = to_device(given, META)
    found = [each for each in _tensors(moved) if each.numel() > 1]
    assert found and {each.device for each in found} == {META}
    assert isinstance(moved, dict if kind == "ordered" else type(given))
    assert getattr(moved, "name", None) == getattr(given, "name", None)
    assert {each.device.type for each in _tensors(given)} == {"cpu"}, "the loader's own batch stays"
