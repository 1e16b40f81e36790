"""The model's weights of a checkpoint of our own format, as one safetensors file, without torch.

Names are those of the plain model, however many ranks have stored it. No pickle: reading it executes no code.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import BinaryIO, Final

from spottrain.checkpoint.head.state import Entry
from spottrain.checkpoint.manifest import (
    BESIDE,
    TYPES,
    Damaged,
    Manifest,
    Piece,
    Shard,
    StoredTensor,
    file_header,
    model_tensors,
    names_beside,
)

from spottrain_cli.checkpoints.items import Item, ahead
from spottrain_cli.checkpoints.reading import Shards

FILE: Final = "model.safetensors"


def weights_file(manifest: Manifest, shards: Shards, entry: Entry) -> Item | None:
    """Returns the file; None if the checkpoint has no model.

    A tied tensor is written under each of its names: the format has no aliases. What is no tensor is left
    out.
    """
    weights = weights_of(manifest)
    header = _header(weights, entry, names_beside(manifest))
    size = len(header) + sum(map(_bytes, weights.values()))

    def write(file: BinaryIO) -> Iterator[int]:
        yield file.write(header)
        file.truncate(size)
        file.flush()
        for box, targets in _boxes(manifest, shards, _targets(weights, len(header))):
            for target in targets:
                for at, to, count in target.runs():
                    os.pwrite(file.fileno(), box[at : at + count], to)
                yield len(box)

    return Item(name=FILE, bytes=size, write=write) if weights else None


def weights_of(manifest: Manifest) -> dict[str, StoredTensor]:
    """Returns the weights by name, wide types first, so that each tensor is aligned without gaps."""
    named = model_tensors(manifest)
    return dict(sorted(named.items(), key=lambda item: (-TYPES[item[1].dtype][1], item[0])))


def _bytes(tensor: StoredTensor) -> int:
    return TYPES[tensor.dtype][1] * prod(tensor.shape)


def _header(weights: dict[str, StoredTensor], entry: Entry, beside: list[str]) -> bytes:
    metadata = {"format": "pt", "step": str(entry.step), "checkpoint": entry.key}
    if beside:
        metadata[BESIDE] = json.dumps(beside)
    tensors = ((name, each.dtype, each.shape) for name, each in weights.items())
    return file_header(tensors, metadata)[0]


# --- from what the ranks have stored ----------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A piece of a tensor, and where that tensor begins in the file that is written."""

    tensor: StoredTensor
    piece: Piece
    begin: int

    @property
    def bytes(self) -> int:
        return TYPES[self.tensor.dtype][1] * prod(self.piece.shape)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yields what is contiguous in both: offset in the piece, offset in the file, and bytes."""
        shape, start, part = self.tensor.shape, self.piece.start, self.piece.shape
        if not self.bytes:
            return
        width = TYPES[self.tensor.dtype][1]
        last = len(shape) - 1
        while last > 0 and part[last] == shape[last]:
            last -= 1
        if last < 0:  # a number
            yield 0, self.begin, width
            return
        strides = [width * prod(shape[d + 1 :]) for d in range(last + 1)]
        run = part[last] * strides[last]
        outer = itertools.product(*(range(n) for n in part[:last]))
        for number, index in enumerate(outer):
            at = sum((start[d] + i) * strides[d] for d, i in enumerate(index)) + start[last] * strides[last]
            yield number * run, self.begin + at, run


Targets = dict[Piece, list[Target]]


def _targets(weights: dict[str, StoredTensor], begin: int) -> Targets:
    """Returns where each stored piece goes: of tied tensors to several places."""
    found: Targets = {}
    for tensor in weights.values():
        for piece in tensor.pieces:
            found.setdefault(piece, []).append(Target(tensor=tensor, piece=piece, begin=begin))
        begin += _bytes(tensor)
    return found


def _boxes(manifest: Manifest, shards: Shards, targets: Targets) -> Iterator[tuple[bytearray, list[Target]]]:
    """Yields each piece, shard by shard in the order of their bytes: each is read once. Raises Damaged."""
    for shard in manifest.shards:
        pieces = sorted((each for each in targets if each.shard == shard.name), key=lambda each: each.offset)
        spans = [(each.offset, targets[each][0].bytes) for each in pieces]
        for piece, box in zip(pieces, _in_order(shards, shard, manifest.chunk_bytes, spans), strict=True):
            yield box, targets[piece]


def _in_order(
    shards: Shards, shard: Shard, unit: int, spans: Sequence[tuple[int, int]]
) -> Iterator[bytearray]:
    """Yields the bytes of spans (offset, size) of a shard, in the order of their offsets."""
    numbers = sorted({n for at, size in spans for n in range(at // unit, -(-(at + size) // unit))})
    chunks = zip(numbers, ahead(lambda i: shards.chunk(shard, numbers[i]), len(numbers)), strict=True)
    number, chunk = -1, memoryview(b"")
    for offset, size in spans:
        box = bytearray()
        while len(box) < size:
            wanted, start = divmod(offset + len(box), unit)
            while number < wanted:
                number, chunk = next(chunks)
            if number > wanted:
                raise Damaged(f"pieces of tensors overlap in {shard.name}")
            box += chunk[start : start + size - len(box)]
        yield box
