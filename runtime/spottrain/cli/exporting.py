"""`spottrain checkpoints export`: the model's weights alone, as one safetensors file under their plain names.

No pickle: every framework reads safetensors, and reading it executes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from spottrain.checkpoint.manifest import FOLDER, Damaged, Manifest, Stored
from spottrain.cli.answers import Answer, size
from spottrain.cli.reading import WIDTHS, Shards, choose, head_of, manifest_of
from spottrain.contract import Reason
from spottrain.errors import CheckpointError, ConfigurationError
from spottrain.head.document import Entry
from spottrain.store import Store

MODEL: Final = "model"
"""Where the model's state lies in the tree (`checkpoint/modelstate.py`)."""
WEIGHTS_FILE: Final = "model.safetensors"
"""Where libraries put it, in a checkpoint of kind folder."""
ALIGNMENT: Final = 64


def export(store: Store, which: str, target: Path) -> Answer:
    """Raises CheckpointError where it is damaged; then there is no file."""
    if target.exists():
        raise ConfigurationError(f"{target} exists already and is not overwritten; name another file")
    entry = choose(head_of(store), which)
    try:
        manifest, _ = manifest_of(store, entry.key)
        shards = Shards(store, entry.key, manifest)
        with _appearing(target) as file:
            count = (_folder if manifest.kind == FOLDER else _state)(manifest, shards, entry, file)
            written = file.tell()
    except Damaged as error:
        raise CheckpointError(
            f"step {entry.step} cannot be exported: {error}; choose another --step (spottrain checkpoints "
            "verify says which are whole)",
            reason=Reason.CHECKPOINT_DAMAGED,
        ) from error
    what = f"{count} tensors" if count else "the library's file"
    facts = {"step": entry.step, "file": str(target), "bytes": written, "tensors": count}
    return Answer(facts=facts, lines=[f"{target}: {what} of step {entry.step}, {size(written)}"])


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[BinaryIO]:
    """A file that is there whole or not at all."""
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.rename(target)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _folder(manifest: Manifest, shards: Shards, entry: Entry, file: BinaryIO) -> int:
    names = {each.path: each.shard for each in manifest.files}
    if WEIGHTS_FILE not in names:
        raise ConfigurationError(
            f"step {entry.step} is a folder that a library wrote, and {WEIGHTS_FILE} is not in it; it holds: "
            f"{', '.join(sorted(names)) or 'nothing'}"
        )
    shard = next(each for each in manifest.shards if each.name == names[WEIGHTS_FILE])
    for number in range(len(shard.chunks)):
        file.write(shards.chunk(shard, number))
    return 0


# --- our own state --------------------------------------------------------------------------------------
def _state(manifest: Manifest, shards: Shards, entry: Entry, file: BinaryIO) -> int:
    """Tied tensors are written once for each of their names: the format knows no aliases."""
    weights = weights_of(manifest)
    if not weights:
        raise ConfigurationError(f"step {entry.step} holds no model (no tensors under {MODEL!r})")
    file.write(_header(weights, entry))
    for tensor in weights.values():
        file.write(assemble(tensor, shards))
    return len(weights)


def weights_of(manifest: Manifest) -> dict[str, Stored]:
    """By name; wide types first, so that each tensor is aligned to its own width without holes."""
    tree = manifest.tree.get(MODEL) if isinstance(manifest.tree, dict) else None
    named = {name: manifest.tensors[number] for name, number in _named(tree, "")}
    return dict(sorted(named.items(), key=lambda item: (-WIDTHS[item[1].dtype][1], item[0])))


def _named(plain: Any, path: str) -> Iterator[tuple[str, int]]:
    """Name and number of each tensor (the marks are those of `checkpoint/tree.py`)."""
    if not isinstance(plain, dict):
        return
    if "$tensor" in plain:
        yield path, plain["$tensor"]
        return
    items = plain["$dict"] if "$dict" in plain else plain.items()
    for key, value in items:
        yield from _named(value, f"{path}.{key}" if path else str(key))


def _header(weights: dict[str, Stored], entry: Entry) -> bytes:
    entries: dict[str, Any] = {
        "__metadata__": {"format": "pt", "step": str(entry.step), "checkpoint": entry.key}
    }
    at = 0
    for name, tensor in weights.items():
        kind, width = WIDTHS[tensor.dtype]
        end = at + width * prod(tensor.shape)
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def assemble(tensor: Stored, shards: Shards) -> bytearray:
    """The bytes of the whole tensor, in row-major order, whoever stored its pieces."""
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
    """Copies a box to its place, by runs as long as both lie contiguous."""
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
