"""Converts a training state to a JSON tree and a list of tensors, and back.

A tensor becomes {"$tensor": number}. Tuples, bytes, keys that are not strings and non-finite floats get
similar tags, and so do the other types in `TYPES`: what is stored comes back as the type that it was. Reading
a tree executes no code.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from spottrain.contract import Reason
from spottrain.distributed import dtensor
from spottrain.errors import CheckpointError

PLAIN: Final = (bool, int, str)
FACTORIES: Final = {each.__name__: each for each in (bool, int, float, str, list, dict, set)}
"""What may make the missing values of a defaultdict."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaf:
    """One tensor of the tree, with the path of its first occurrence."""

    path: str
    tensor: torch.Tensor


class Flattened:
    """A tree as JSON (`plain`, a copy) and its tensors (`leaves`, not copies).

    Tied tensors are one leaf. Raises CheckpointError for values that cannot be stored.
    """

    def __init__(self, tree: Any) -> None:
        self.leaves: list[Leaf] = []
        self._at: dict[int, list[int]] = {}
        """Numbers of the leaves by the address of their elements; few share one."""
        self._objects: dict[int, tuple[int, torch.Tensor]] = {}
        """By id; the tensor is kept alive so that its id is not reused."""
        self.plain = self._plain(tree, "")

    def _plain(self, value: Any, path: str) -> Any:
        kind = type(value)  # not isinstance: an IntEnum or a namedtuple would come back as another type
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._number(value, path)}
        if value is None or kind in PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind in (list, tuple):
            items = [self._plain(item, f"{path}.{n}") for n, item in enumerate(value)]
            return {"$tuple": items} if kind is tuple else items
        if kind is dict:
            pairs = [
                (key, self._plain(item, f"{path}.{key}" if path else str(key))) for key, item in value.items()
            ]
            if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
                return dict(pairs)
            return {"$dict": [[self._plain(key, path), item] for key, item in pairs]}
        for name, (fits, parts, _) in TYPES.items():
            if fits(value):
                return {"$type": [name, self._plain(parts(value), path)]}
        raise CheckpointError(
            f"the state has a {kind.__name__} at {path or 'its top'}, which cannot be stored; "
            "use numbers, strings, bytes, lists, dicts and tensors in state_dict()",
            reason=Reason.CHECKPOINT_INCOMPATIBLE,
        )

    def _number(self, tensor: torch.Tensor, path: str) -> int:
        """Returns the number, equal on all ranks: by object id, as a rank may hold no part of a tied one."""
        if id(tensor) not in self._objects:
            self._objects[id(tensor)] = (self._number_of_elements(tensor.detach(), path), tensor)
        return self._objects[id(tensor)][0]

    def _number_of_elements(self, tensor: torch.Tensor, path: str) -> int:
        address = _address(tensor)
        same = self._at.setdefault(address, []) if address else []
        for number in same:
            if _same_view(self.leaves[number].tensor, tensor):
                return number
        same.append(len(self.leaves))
        self.leaves.append(Leaf(path=path, tensor=tensor))
        return same[-1]


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of the first element on this rank; 0 if there is none."""
    local = dtensor.local(tensor)
    return local.data_ptr() if local.layout is torch.strided and local.numel() else 0


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors with one address are the same elements, read in the same way."""
    return _view(a) == _view(b)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = dtensor.local(tensor)
    turned = (local.is_conj(), local.is_neg())  # such views read the same bytes as other values
    return (local.device, local.dtype, tensor.shape, local.shape, local.stride(), turned)


# --- other types --------------------------------------------------------------------------------------
def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array of numbers that torch has too."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return False
    dtype = value.dtype
    return bool(dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= 8)


def is_number_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _defaultdict_of(parts: Any) -> Any:
    name, items = parts
    return defaultdict(None if name is None else FACTORIES[name], items)


def _numpy_of(parts: Any) -> Any:
    import numpy  # lazy: torch does not bring it

    dtype, value = numpy.dtype(parts[0]), parts[1]
    if dtype.kind not in "biufcUS":
        raise ValueError(f"{dtype} is not a type of numbers or strings")
    return dtype.type(value)


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return found


TYPES: Final[Mapping[str, tuple[Callable[[Any], bool], Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "OrderedDict": (_is(OrderedDict), dict, OrderedDict),
    "Counter": (_is(Counter), dict, Counter),
    "defaultdict": (
        lambda value: type(value) is defaultdict and value.default_factory in (None, *FACTORIES.values()),
        lambda value: (value.default_factory and value.default_factory.__name__, dict(value)),
        _defaultdict_of,
    ),
    "deque": (_is(deque), lambda value: (value.maxlen, list(value)), lambda parts: deque(parts[1], parts[0])),
    "set": (_is(set), list, set),
    "frozenset": (_is(frozenset), list, frozenset),
    "bytearray": (_is(bytearray), bytes, lambda parts: bytearray(memoryview(parts))),
    "complex": (_is(complex), lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
    "Size": (_is(torch.Size), list, torch.Size),
    "dtype": (_is(torch.dtype), lambda value: str(value).removeprefix("torch."), _dtype_of),
    "device": (_is(torch.device), str, torch.device),
    "numpy": (is_number_of_numpy, lambda value: (value.dtype.str, value.item()), _numpy_of),
    "ndarray": (is_array, torch.tensor, lambda tensor: tensor.numpy()),
}
"""By name: whether a value is of the type, its plainer parts, and what makes a value of these."""


def unflatten(plain: Any, tensor: Callable[[int], Any]) -> Any:
    """Rebuilds the tree; `tensor` returns the tensor of a number."""
    if isinstance(plain, list):
        return [unflatten(item, tensor) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return tensor(plain["$tensor"])
    if "$tuple" in plain:
        return tuple(unflatten(item, tensor) for item in plain["$tuple"])
    if "$dict" in plain:
        return {unflatten(key, tensor): unflatten(item, tensor) for key, item in plain["$dict"]}
    if "$float" in plain:
        return float(plain["$float"])
    if "$bytes" in plain:
        return base64.b64decode(plain["$bytes"])
    if "$type" in plain:
        name, parts = plain["$type"]
        return TYPES[name][2](unflatten(parts, tensor))
    return {key: unflatten(item, tensor) for key, item in plain.items()}


def numbers(plain: Any) -> Iterator[int]:
    """Yields the number of each tensor of the tree."""
    if isinstance(plain, list):
        for item in plain:
            yield from numbers(item)
    elif isinstance(plain, dict):
        if "$tensor" in plain:
            yield plain["$tensor"]
        else:
            yield from numbers(list(plain.values()))


def renumber(plain: Any, by: int) -> Any:
    """Returns the tree with each tensor's number increased by `by`."""
    if isinstance(plain, list):
        return [renumber(item, by) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return {"$tensor": plain["$tensor"] + by}
    return {key: renumber(item, by) for key, item in plain.items()}
