"""Helpers for DTensors (FSDP2) that do not import them.

That import takes a second or more. Unless other code has done it, there are no DTensors.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The part of a tensor that one rank holds: offset and shape, per dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def is_sharded(value: object) -> TypeGuard[Any]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def any_sharded(module: torch.nn.Module, *, recurse: bool = True) -> bool:
    """Whether FSDP2 has sharded parameters of the module, with `recurse` those of its submodules too."""
    return any(map(is_sharded, module.parameters(recurse=recurse)))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of the tensor that this rank holds."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def box_of(tensor: torch.Tensor) -> Box:
    if not is_sharded(tensor):
        return Box(start=(0,) * tensor.dim(), shape=tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(start=tuple(start), shape=tuple(shape))


def like(here: Any, part: torch.Tensor) -> torch.Tensor:
    """Returns this rank's `part` as a DTensor with the layout of `here`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.to(local(here).device),
        here.device_mesh,
        here.placements,
        run_check=False,
        shape=here.shape,
        stride=here.stride(),
    )


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor; for a DTensor every rank must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def holders(tensor: Any) -> list[int]:
    """Returns the ranks that hold the parts of a DTensor, one rank for each part."""
    ranks = tensor.device_mesh.mesh
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_shard():
            ranks = ranks.narrow(dimension, 0, 1)
    return [int(rank) for rank in ranks.flatten()]
