"""Where each tensor of a rank lies in its shards: safetensors files, one after the other in one memory.

Made once and used for every save: `arena` copies the tensors to their places, the uploader sends the files as
they lie there. Called by `saver`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from spottrain.checkpoint.manifest import Piece, StoredTensor
from spottrain.checkpoint.tree import Leaf
from spottrain.contract import Reason
from spottrain.distributed.dtensor import box_of, holders, is_sharded, local
from spottrain.errors import CheckpointError

SHARD_BYTES: Final = 2 * 2**30
"""A shard is closed when the next tensor would make it larger; a larger tensor has a shard of its own."""
PAGE: Final = 4096
ALIGNMENT: Final = 64

SAFETENSORS: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""Names of torch's types in the header (safetensors format, huggingface/safetensors README)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """Where the own part of leaf `number` goes."""

    number: int
    offset: int
    """In the memory."""
    piece: Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    name: str
    offset: int
    """Of its first byte in the memory."""
    header: bytes
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """`signature` is equal for leaves that this layout fits."""

    signature: tuple[Any, ...]
    places: tuple[ShardPlace, ...]
    shards: tuple[ShardFile, ...]
    bytes: int


def describe(leaf: Leaf, pieces: tuple[Piece, ...] = ()) -> StoredTensor:
    dtype = str(leaf.tensor.dtype).removeprefix("torch.")
    return StoredTensor(name=leaf.path, dtype=dtype, shape=tuple(leaf.tensor.shape), pieces=pieces)


def signature(leaves: Sequence[Leaf], mine: Sequence[int]) -> tuple[Any, ...]:
    return tuple((n, leaves[n].path, leaves[n].tensor.dtype, box_of(leaves[n].tensor)) for n in mine)


def divide(leaves: Sequence[Leaf], ranks: int, of_first: Collection[str] = ()) -> list[list[int]]:
    """Which of the shared leaves each rank stores, so that none is stored twice and all store about as much.

    Every rank comes to the same answer by itself. Parts of a DTensor are stored by those that hold them;
    where several hold the same part (replicas), by the first. A whole tensor goes to the rank that has the
    least so far, but for those whose path is in `of_first`, or begins with what ends in a dot
    there: these are rank 0's.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    beginnings = tuple(each for each in of_first if each.endswith("."))
    by_size = sorted(range(len(leaves)), key=lambda n: (-leaves[n].tensor.nbytes, n))
    for number in by_size:
        tensor = leaves[number].tensor
        if is_sharded(tensor):
            for rank in holders(tensor):
                shares[rank].append(number)
                loads[rank] += tensor.nbytes // ranks
            continue
        path = leaves[number].path
        rank = 0 if path in of_first or path.startswith(beginnings) else loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += tensor.nbytes
    return [sorted(share) for share in shares]


def plan(
    leaves: Sequence[Leaf], mine: Sequence[int], *, rank: int = 0, shard_bytes: int = SHARD_BYTES
) -> Layout:
    """Raises CheckpointError where a tensor is of a kind that cannot be stored."""
    for number in mine:
        _require_storable(leaves[number])
    # Wide types first: then every tensor is aligned to its own width without holes, which the format forbids.
    order = sorted(mine, key=lambda n: -leaves[n].tensor.element_size())
    places: list[ShardPlace] = []
    shards: list[ShardFile] = []
    base = 0
    for group in _groups(leaves, order, shard_bytes):
        name = f"r{rank:05d}-{len(shards):02d}.safetensors"
        header, starts = _header(leaves, group)
        size = len(header)
        for number, start in zip(group, starts, strict=True):
            box = box_of(leaves[number].tensor)
            offset = len(header) + start
            piece = Piece(shard=name, offset=offset, start=box.start, shape=box.shape)
            places.append(ShardPlace(number=number, offset=base + offset, piece=piece))
            size = offset + local(leaves[number].tensor).nbytes
        shards.append(ShardFile(name=name, offset=base, bytes=size, header=header))
        base = -(-(base + size) // PAGE) * PAGE
    return Layout(signature=signature(leaves, mine), places=tuple(places), shards=tuple(shards), bytes=base)


def _groups(leaves: Sequence[Leaf], order: Sequence[int], shard_bytes: int) -> list[list[int]]:
    groups: list[list[int]] = []
    room = 0
    for number in order:
        size = local(leaves[number].tensor).nbytes
        if size > room or not groups:
            groups.append([])
            room = max(shard_bytes, size)
        groups[-1].append(number)
        room -= size
    return groups


def _header(leaves: Sequence[Leaf], group: Sequence[int]) -> tuple[bytes, list[int]]:
    """The file's header, and where each tensor's bytes begin after it."""
    entries: dict[str, Any] = {}
    starts, at = [], 0
    for number in group:
        leaf = leaves[number]
        part = local(leaf.tensor)
        start = box_of(leaf.tensor).start
        key = leaf.path if part.shape == leaf.tensor.shape else f"{leaf.path}@{','.join(map(str, start))}"
        taken = key in entries or key == "__metadata__"  # which means something else in the format
        entries[f"{number}:{key}" if taken else key] = {
            "dtype": SAFETENSORS[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [at, at + part.nbytes],
        }
        starts.append(at)
        at += part.nbytes
    return header_bytes(entries), starts


def header_bytes(entries: Mapping[str, Any]) -> bytes:
    """A safetensors header: its length, JSON, blanks up to the alignment."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _require_storable(leaf: Leaf) -> None:
    tensor = local(leaf.tensor)
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.dtype not in SAFETENSORS:
        raise CheckpointError(
            f"the state holds a tensor of type {tensor.dtype}, layout {tensor.layout} on {tensor.device} at "
            f"{leaf.path}, which cannot be stored; keep it out of state_dict() (persistent=False for a "
            "buffer), or store it as a dense tensor",
            reason=Reason.CHECKPOINT_INCOMPATIBLE,
        )
