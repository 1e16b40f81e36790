"""Converts a training state to a JSON tree and a list of tensors, and back.

A tensor becomes {"$tensor": number}. Tuples, bytes, keys that are not strings and non-finite floats get
similar tags. Reading a tree executes no code.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from spottrain.contract import Reason
from spottrain.distributed import dtensor
from spottrain.errors import CheckpointError

PLAIN: Final = (bool, int, str)


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
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._number(value, path)}
        if value is None or isinstance(value, PLAIN):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, list | tuple):
            items = [self._plain(item, f"{path}.{n}") for n, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, Mapping):
            pairs = [
                (key, self._plain(item, f"{path}.{key}" if path else str(key))) for key, item in value.items()
            ]
            if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
                return dict(pairs)
            return {"$dict": [[self._plain(key, path), item] for key, item in pairs]}
        raise CheckpointError(
            f"the state has a {type(value).__name__} at {path or 'its top'}, which cannot be stored; "
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
    return {key: unflatten(item, tensor) for key, item in plain.items()}


def renumber(plain: Any, by: int) -> Any:
    """Returns the tree with each tensor's number increased by `by`."""
    if isinstance(plain, list):
        return [renumber(item, by) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return {"$tensor": plain["$tensor"] + by}
    return {key: renumber(item, by) for key, item in plain.items()}
