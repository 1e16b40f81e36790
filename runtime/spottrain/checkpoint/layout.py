"""Layout of a rank's shards: safetensors files, one after the other in one staging buffer.

A layout is computed once and serves every save. `staging_buffer` copies the tensors to their places, and the
upload process sends the files from there unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar

import torch

from spottrain.checkpoint.manifest import TYPES, Piece, StoredTensor, file_header
from spottrain.checkpoint.tree import Leaf
from spottrain.contract import Reason
from spottrain.distributed.dtensor import box_of, holders, is_sharded, local
from spottrain.errors import CheckpointError

SHARD_BYTES: Final = 2 * 2**30
"""Largest size of a shard in bytes; a larger tensor has a shard of its own."""
PAGE: Final = 4096

SAFETENSORS: Final = {getattr(torch, name): kind for name, (kind, _) in TYPES.items()}
"""Names of torch's dtypes in the header."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """Place of this rank's part of leaf `number`."""

    number: int
    offset: int
    """Byte offset in the staging buffer."""
    piece: Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    name: str
    offset: int
    """Byte offset of the file in the staging buffer."""
    header: bytes
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Places and files of one rank. The layout fits all leaves that have an equal `signature`."""

    signature: tuple[Any, ...]
    places: tuple[ShardPlace, ...]
    shards: tuple[ShardFile, ...]
    bytes: int


def describe(leaf: Leaf, pieces: tuple[Piece, ...] = ()) -> StoredTensor:
    tensor = leaf.tensor
    return StoredTensor(
        name=leaf.path, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), pieces=pieces
    )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def signature(leaves: Sequence[Leaf], mine: Sequence[int]) -> tuple[Any, ...]:
    return tuple((n, leaves[n].path, leaves[n].tensor.dtype, _part(leaves[n].tensor)) for n in mine)


def _part(tensor: torch.Tensor) -> Any:
    """What this rank holds of a tensor, in a form to compare; cheap, because each save compares it."""
    return box_of(tensor) if is_sharded(tensor) else tensor.shape


def divide(leaves: Sequence[Leaf], ranks: int, by_rank0: Collection[str] = ()) -> list[list[int]]:
    """Divides the shared leaves among the ranks, so that none is stored twice and the loads are about equal.

    Every rank computes the same result without communication. The ranks that hold a DTensor's parts store
    them; of replicas of a part, the first stores it. A whole tensor goes to the rank with the least bytes so
    far, or to rank 0 if `by_rank0` has its path, or a prefix of its path that ends in a dot.
    """
    if ranks == 1:
        return [list(range(len(leaves)))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    beginnings = tuple(each for each in by_rank0 if each.endswith("."))
    by_size = sorted(range(len(leaves)), key=lambda n: (-leaves[n].tensor.nbytes, n))
    for number in by_size:
        tensor = leaves[number].tensor
        if is_sharded(tensor):
            for rank in holders(tensor):
                shares[rank].append(number)
                loads[rank] += tensor.nbytes // ranks
            continue
        path = leaves[number].path
        rank = 0 if path in by_rank0 or path.startswith(beginnings) else loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += tensor.nbytes
    return [sorted(share) for share in shares]


def plan(
    leaves: Sequence[Leaf], mine: Sequence[int], *, rank: int = 0, shard_bytes: int = SHARD_BYTES
) -> Layout:
    """Computes the layout of the leaves `mine`. Raises CheckpointError if a tensor cannot be stored."""
    for number in mine:
        _require_storable(leaves[number])
    # Wide dtypes first aligns every tensor to its element size without gaps, which the format forbids.
    order = sorted(mine, key=lambda n: -leaves[n].tensor.element_size())
    places: list[ShardPlace] = []
    shards: list[ShardFile] = []
    base = 0
    for group in grouped({n: local(leaves[n].tensor).nbytes for n in order}, shard_bytes):
        name = f"r{rank:05d}-{len(shards):02d}.safetensors"
        tensors = [leaves[number].tensor for number in group]
        parts = zip(_names(leaves, group), map(local, tensors), strict=True)
        header, (*offsets, end) = file_header(
            (key, dtype_name(part.dtype), part.shape) for key, part in parts
        )
        for number, tensor, offset in zip(group, tensors, offsets, strict=True):
            box = box_of(tensor)
            piece = Piece(shard=name, offset=offset, start=box.start, shape=box.shape)
            places.append(ShardPlace(number=number, offset=base + offset, piece=piece))
        shards.append(ShardFile(name=name, offset=base, bytes=end, header=header))
        base = -(-(base + end) // PAGE) * PAGE
    return Layout(signature=signature(leaves, mine), places=tuple(places), shards=tuple(shards), bytes=base)


def grouped(sizes: Mapping[T, int], most: int) -> list[list[T]]:
    """Divides things of these sizes, in order, into files of `most` bytes; a larger one gets its own file."""
    groups: list[list[T]] = []
    room = 0
    for each, size in sizes.items():
        if size > room or not groups:
            groups.append([])
            room = max(most, size)
        groups[-1].append(each)
        room -= size
    return groups


def _names(leaves: Sequence[Leaf], group: Sequence[int]) -> list[str]:
    """Returns a name for each tensor of a file; parts of tensors are named by where they begin."""
    found: dict[str, None] = {}
    for number in group:
        leaf = leaves[number]
        key = leaf.path
        if local(leaf.tensor).shape != leaf.tensor.shape:
            key += f"@{','.join(map(str, box_of(leaf.tensor).start))}"
        taken = key in found or key == "__metadata__"  # the format reserves this key
        found[f"{number}:{key}" if taken else key] = None
    return list(found)


def _require_storable(leaf: Leaf) -> None:
    tensor = local(leaf.tensor)
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.dtype not in SAFETENSORS:
        raise CheckpointError(
            f"the state has a tensor of dtype {tensor.dtype} and layout {tensor.layout} on "
            f"{tensor.device} at {leaf.path}, which cannot be stored; keep it out of state_dict() "
            "(persistent=False for a buffer), or store it as a dense tensor",
            reason=Reason.CHECKPOINT_INCOMPATIBLE,
        )
