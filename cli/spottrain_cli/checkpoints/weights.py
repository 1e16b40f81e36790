"""The model's weights of a checkpoint of our own format, as one safetensors file, without torch.

Names are those of the plain model, however many ranks have stored it. No pickle: reading it executes no code.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from math import prod
from typing import Any, Final

from spottrain.checkpoint.head.state import Entry
from spottrain.checkpoint.manifest import BESIDE, Manifest, StoredTensor, model_tensors, names_beside
from spottrain.cli.reading import WIDTHS, Shards

from spottrain_cli.checkpoints.items import Item

FILE: Final = "model.safetensors"
ALIGNMENT: Final = 64


def weights_file(manifest: Manifest, shards: Shards, entry: Entry) -> Item | None:
    """Returns the file; None if the checkpoint has no model.

    A tied tensor is written under each of its names: the format has no aliases. What is no tensor is left
    out.
    """
    weights = weights_of(manifest)
    header = _header(weights, entry, names_beside(manifest))

    def read() -> Iterator[memoryview]:
        yield memoryview(header)
        for tensor in weights.values():
            yield memoryview(assemble(tensor, shards))

    size = len(header) + sum(map(_bytes, weights.values()))
    return Item(name=FILE, bytes=size, read=read) if weights else None


def weights_of(manifest: Manifest) -> dict[str, StoredTensor]:
    """Returns the weights by name: wide types first, so that each tensor is aligned without gaps, and in the
    order in which they are stored, so that nothing is read twice.
    """

    def place(item: tuple[str, StoredTensor]) -> tuple[Any, ...]:
        name, tensor = item
        first = min(((p.shard, p.offset) for p in tensor.pieces), default=("", 0))
        return -WIDTHS[tensor.dtype][1], first, name

    return dict(sorted(model_tensors(manifest).items(), key=place))


def _bytes(tensor: StoredTensor) -> int:
    return WIDTHS[tensor.dtype][1] * prod(tensor.shape)


def _header(weights: dict[str, StoredTensor], entry: Entry, beside: list[str]) -> bytes:
    metadata = {"format": "pt", "step": str(entry.step), "checkpoint": entry.key}
    entries: dict[str, Any] = {"__metadata__": metadata | ({BESIDE: json.dumps(beside)} if beside else {})}
    at = 0
    for name, tensor in weights.items():
        end = at + _bytes(tensor)
        kind = WIDTHS[tensor.dtype][0]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def assemble(tensor: StoredTensor, shards: Shards) -> bytearray:
    """Returns the bytes of the whole tensor in row-major order, assembled from the pieces of all ranks."""
    width = WIDTHS[tensor.dtype][1]
    if len(tensor.pieces) == 1:
        return shards.read(tensor.pieces[0].shard, tensor.pieces[0].offset, width * prod(tensor.shape))
    whole = bytearray(width * prod(tensor.shape))
    for piece in tensor.pieces:
        box = shards.read(piece.shard, piece.offset, width * prod(piece.shape))
        _place(memoryview(box), memoryview(whole), tensor.shape, piece.start, piece.shape, width)
    return whole


def _place(
    box: memoryview,
    whole: memoryview,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    part: tuple[int, ...],
    width: int,
) -> None:
    """Copies a piece into the whole tensor, in runs that are contiguous in both."""
    if not box:
        return
    last = len(shape) - 1
    while last > 0 and part[last] == shape[last]:
        last -= 1
    strides = [width * prod(shape[d + 1 :]) for d in range(last + 1)]
    run = part[last] * strides[last]
    outer = itertools.product(*(range(n) for n in part[:last]))
    for number, index in enumerate(outer):
        at = sum((start[d] + i) * strides[d] for d, i in enumerate(index)) + start[last] * strides[last]
        whole[at : at + run] = box[number * run : (number + 1) * run]
