"""A training state as a plain JSON tree and a list of tensors, and back. Used by `saver`, `restore`.

A tensor is {"$tensor": number}; tuples, bytes, keys that are no strings and non-finite numbers are tagged
alike. Reading a tree executes nothing.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spottrain.contract import Reason
from spottrain.distributed import dtensor
from spottrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaf:
    """One tensor of the tree, under the path at which it was first met."""

    path: str
    tensor: torch.Tensor


class Flattened:
    """`plain` is JSON and shares nothing with the tree; `leaves` are the tree's own tensors, not copies.

    Tensors that are tied in the tree are one leaf. Raises CheckpointError for what cannot be stored.
    """

    def __init__(self, tree: Any) -> None:
        self.leaves: list[Leaf] = []
        self._number_of: dict[tuple[Any, ...], int] = {}
        self._objects: dict[int, tuple[int, torch.Tensor]] = {}
        """With the tensor, so that the id stays its own."""
        self.plain = self._plain(tree, "")

    def _plain(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._number(value, path)}
        if value is None or isinstance(value, bool | int | str):
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
            f"the state holds a {type(value).__name__} at {path or 'its top'}, which cannot be stored; "
            "use numbers, strings, bytes, lists, dicts and tensors in state_dict()",
            reason=Reason.CHECKPOINT_INCOMPATIBLE,
        )

    def _number(self, tensor: torch.Tensor, path: str) -> int:
        """The same on every rank, also where a rank holds no part of a tied tensor: by the object first."""
        if id(tensor) not in self._objects:
            identity = _identity(tensor.detach())
            if identity not in self._number_of:
                self._number_of[identity] = len(self.leaves)
                self.leaves.append(Leaf(path=path, tensor=tensor.detach()))
            self._objects[id(tensor)] = (self._number_of[identity], tensor)
        return self._objects[id(tensor)][0]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two views of the very same numbers."""
    local = dtensor.local(tensor)
    if not local.numel() or local.device.type == "meta" or local.layout is not torch.strided:
        return (id(tensor), tensor)  # the tensor, so that the id stays its own
    turned = (local.is_conj(), local.is_neg())  # of such views the same bytes are other numbers
    return (local.device, local.data_ptr(), local.dtype, tensor.shape, local.shape, local.stride(), turned)


def unflatten(plain: Any, tensor: Callable[[int], torch.Tensor]) -> Any:
    """The tree again; `tensor` gives the tensor of a number."""
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
    """The same tree where each tensor's number is higher by so many."""
    if isinstance(plain, list):
        return [renumber(item, by) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return {"$tensor": plain["$tensor"] + by}
    return {key: renumber(item, by) for key, item in plain.items()}
