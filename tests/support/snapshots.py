"""Checkpoints in memory, so that a property can be tried on hundreds of them."""

from __future__ import annotations

import hashlib
import io
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from spottrain.checkpoint.layout import SHARD_BYTES, describe, plan
from spottrain.checkpoint.manifest import Manifest, Piece, Shard, StoredTensor
from spottrain.checkpoint.reader import Want, read_manifest, read_trees
from spottrain.checkpoint.staging_buffer import StagingBuffer
from spottrain.checkpoint.tree import Flattened
from spottrain.checkpoint.upload import Sent, Transfer, Uploader, UploadItem
from spottrain.contract import CHUNK_BYTES, MANIFEST_NAME
from spottrain.distributed.dtensor import Box
from spottrain.storage.base import Body, FilePart, KeyMissing, Object, Stat, Store, Truncated, never
from spottrain.storage.requests import Filling

KEY: Final = "checkpoints/t000001-s000000003-abc/"


class InProcessTransfer(Transfer):
    """Uploads in this process, so that a test may give it any store."""

    def __init__(self, store: Store) -> None:
        self._uploader = Uploader(lambda: store)
        self._memory: mmap.mmap | None = None

    def share(self, buffer: StagingBuffer) -> None:
        self._memory = buffer.map

    def forget(self) -> None:
        self._memory = None

    def put(self, items: Sequence[UploadItem], cancelled: Callable[[], bool]) -> dict[str, Sent]:
        return self._uploader.put(items, self._memory, cancelled)

    def close(self) -> None:
        self._memory = None


class Memory:
    """As much of a store as checkpoints need."""

    uri = "memory:"
    endpoint = ""

    def __init__(self, bodies: dict[str, bytes] | None = None, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.bodies = bodies or {}
        self._chunk_bytes = chunk_bytes

    def get(self, key: str) -> Object | None:
        return Object(body=self.bodies[key], etag="") if key in self.bodies else None

    def put(self, key: str, body: Body) -> None:
        self.bodies[key] = bytes(body)

    def put_if_absent(self, key: str, body: Body) -> str:
        self.put(key, body)
        return ""

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        raise NotImplementedError

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        self.put(key, body)
        return chunks_of(self.bodies[key], self._chunk_bytes)

    def put_part(self, key: str, part: FilePart, *, cancelled: Callable[[], bool] = never) -> None:
        raise NotImplementedError

    def read_into(self, key: str, offset: int, *buffers: memoryview, hashed: bool = False) -> str:
        if key not in self.bodies:
            raise KeyMissing(key)
        filling = Filling(buffers, hashed=hashed)
        filling.read(io.BytesIO(self.bodies[key][offset:]).readinto)
        if filling.left:
            raise Truncated(key)
        return filling.sha256

    def stat(self, key: str) -> Stat | None:
        raise NotImplementedError

    def sweep_uploads(self, prefix: str, doomed: Callable[[str], bool]) -> list[str]:
        return []

    def list(self, prefix: str) -> Any:
        return sorted(key for key in self.bodies if key.startswith(prefix))

    def folders(self, prefix: str) -> Any:
        raise NotImplementedError

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.bodies.pop(key, None)

    def probe(self) -> None:
        pass


def chunks_of(body: bytes, size: int) -> list[str]:
    return [hashlib.sha256(body[at : at + size]).hexdigest() for at in range(0, len(body), size)]


def pack(tree: Any, *, shard_bytes: int = SHARD_BYTES, chunk_bytes: int = CHUNK_BYTES) -> Memory:
    """The checkpoint of `tree` by one rank; nothing of the tree itself is in it."""
    flattened = Flattened(tree)
    numbers = range(len(flattened.leaves))
    layout = plan(flattened.leaves, numbers, shard_bytes=shard_bytes)
    arena = StagingBuffer(layout)
    arena.fill(flattened.leaves)
    store = Memory()
    shards = []
    for file in layout.shards:
        body = bytes(arena.map[file.offset : file.offset + file.bytes])
        store.put(KEY + file.name, body)
        shards.append(Shard(name=file.name, bytes=len(body), chunks=tuple(chunks_of(body, chunk_bytes))))
    pieces = {place.number: (place.piece,) for place in layout.places}
    manifest = Manifest(
        step=3,
        tree=flattened.plain,
        ranks=(None,),
        tensors=tuple(describe(leaf, pieces[n]) for n, leaf in enumerate(flattened.leaves)),
        shards=tuple(shards),
        chunk_bytes=chunk_bytes,
    )
    store.put(KEY + MANIFEST_NAME, manifest.to_bytes())
    return store


def unpack(store: Memory, want: Want | None = None) -> Any:
    return read_trees(store, KEY, read_manifest(store, KEY), want=want)[0]


def change(store: Memory, **fields: Any) -> Memory:
    """The same with another manifest, whose checksum fits."""
    manifest = replace(read_manifest(store, KEY), **fields)
    return Memory(store.bodies | {KEY + MANIFEST_NAME: manifest.to_bytes()})


def boxes(shape: Sequence[int], ranks: int, dimension: int = 0) -> list[Box]:
    """Each rank's part, as FSDP2 cuts a tensor: like torch.chunk, and the last ranks may have nothing."""
    size = -(-shape[dimension] // ranks)
    found = []
    for rank in range(ranks):
        begin = min(rank * size, shape[dimension])
        end = min(begin + size, shape[dimension])
        start, part = [0] * len(shape), list(shape)
        start[dimension], part[dimension] = begin, end - begin
        found.append(Box(start=tuple(start), shape=tuple(part)))
    return found


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))


def pack_parts(tensor: torch.Tensor, parts: Sequence[Box], *, chunk_bytes: int) -> Memory:
    """The checkpoint of {"t": tensor}, of which each rank has stored its part, after some other bytes."""
    store, pieces, shards = Memory(), [], []
    for rank, box in enumerate(parts):
        name = f"r{rank:05d}-00.safetensors"
        body = bytes(rank + 5) + tensor[inside(box)].contiguous().numpy().tobytes()
        store.put(KEY + name, body)
        shards.append(Shard(name=name, bytes=len(body), chunks=tuple(chunks_of(body, chunk_bytes))))
        pieces.append(Piece(shard=name, offset=rank + 5, start=box.start, shape=box.shape))
    dtype = str(tensor.dtype).removeprefix("torch.")
    stored = StoredTensor(name="t", dtype=dtype, shape=tuple(tensor.shape), pieces=tuple(pieces))
    manifest = Manifest(
        step=3,
        world=len(parts),
        tree={"t": {"$tensor": 0}},
        ranks=(None,) * len(parts),
        tensors=(stored,),
        shards=tuple(shards),
        chunk_bytes=chunk_bytes,
    )
    store.put(KEY + MANIFEST_NAME, manifest.to_bytes())
    return store


def same(a: Any, b: Any) -> bool:
    """Bit by bit, and keys in the same order."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def ordered(value: Any) -> Any:
    """In the order of keys: the manifest sorts them."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=lambda key: (str(type(key)), str(key)))}
    if isinstance(value, list | tuple):
        return type(value)(map(ordered, value))
    return value
