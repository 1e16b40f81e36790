"""Finds a checkpoint and reads it. No byte is used before its checksum is verified."""

from __future__ import annotations

from math import prod
from typing import Final

from spottrain.checkpoint.head.state import Entry, Head
from spottrain.checkpoint.manifest import TYPES, Damaged, Manifest, Shard
from spottrain.contract import MANIFEST_NAME, Reason
from spottrain.errors import ConfigurationError
from spottrain.storage.base import KeyMissing, Store, Truncated

NEWEST: Final = "newest"
BEST: Final = "best"


def choose(head: Head, which: str) -> Entry:
    """Selects by step, `newest` or `best`; of several with one step (fall-back), the newest commit."""
    if which == NEWEST:
        found = next(iter(head.resumable), None) or next(iter(head.checkpoints), None)
    elif which == BEST:
        found = head.best
    else:
        found = next((entry for entry in head.checkpoints if str(entry.step) == which), None)
    if found is None:
        there = ", ".join(str(entry.step) for entry in head.checkpoints) or "none"
        raise ConfigurationError(
            f"there is no {which if which in (NEWEST, BEST) else f'step {which}'} checkpoint in HEAD; "
            f"the steps are: {there}",
            reason=Reason.CHECKPOINT_MISSING,
        )
    return found


def manifest_of(store: Store, key: str) -> tuple[Manifest, bytes]:
    """Returns the checked manifest and its text. Raises Damaged, or CheckpointError for another format."""
    found = store.get(key + MANIFEST_NAME)
    if found is None:
        raise Damaged(f"{MANIFEST_NAME} is missing")
    manifest = Manifest.from_bytes(found.body)
    _require_sound(manifest)
    return manifest, found.body


def _require_sound(manifest: Manifest) -> None:
    """Raises Damaged unless the parts are consistent; a checksum only proves that they are as written."""
    sizes = {shard.name: shard.bytes for shard in manifest.shards}
    for shard in manifest.shards:
        if "/" in shard.name or len(shard.chunks) != chunks_of(shard, manifest):
            raise Damaged(f"the manifest does not describe all of {shard.name}")
    for tensor in manifest.tensors:
        if tensor.dtype not in TYPES:
            raise Damaged(f"tensor {tensor.name} has the unknown type {tensor.dtype}")
        width = TYPES[tensor.dtype][1]
        if any(p.offset + width * prod(p.shape) > sizes.get(p.shard, -1) for p in tensor.pieces):
            raise Damaged(f"tensor {tensor.name} is outside its shard")
        if sum(prod(p.shape) for p in tensor.pieces) != prod(tensor.shape):
            raise Damaged(f"the pieces of tensor {tensor.name} do not cover it")


def chunks_of(shard: Shard, manifest: Manifest) -> int:
    return -(-shard.bytes // manifest.chunk_bytes)


class Shards:
    """The shards of one checkpoint. Thread-safe."""

    def __init__(self, store: Store, key: str, manifest: Manifest) -> None:
        self._store = store
        self._key = key
        self._unit = manifest.chunk_bytes

    def chunk(self, shard: Shard, number: int) -> memoryview:
        """Reads one chunk. Raises Damaged if its checksum does not match."""
        view = memoryview(bytearray(min(self._unit, shard.bytes - number * self._unit)))
        self._fill(shard, number, view)
        return view

    def whole(self, shard: Shard) -> memoryview:
        view = memoryview(bytearray(shard.bytes))
        for number in range(len(shard.chunks)):
            self._fill(shard, number, view[number * self._unit : (number + 1) * self._unit])
        return view

    def _fill(self, shard: Shard, number: int, view: memoryview) -> None:
        offset = number * self._unit
        try:
            found = self._store.read_into(self._key + shard.name, offset, view, hashed=True)
        except KeyMissing:
            raise Damaged(f"{shard.name} is missing") from None
        except Truncated:
            raise Damaged(f"{shard.name} ends before byte {offset + len(view)}") from None
        if found != shard.chunks[number]:
            raise Damaged(
                f"{shard.name}: bytes {offset} to {offset + len(view) - 1} do not match their checksum"
            )
