"""Reads the parts of a checkpoint that a rank needs, in parallel, and verifies each chunk.

Executes no code from the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch

from spottrain.checkpoint.manifest import Damaged, File, Manifest, Shard, StoredTensor
from spottrain.checkpoint.tensor_memory import byte_view
from spottrain.checkpoint.tree import numbers, unflatten
from spottrain.contract import MANIFEST_NAME
from spottrain.distributed.dtensor import Box
from spottrain.storage.base import KeyMissing, Store, Truncated

CONNECTIONS: Final = 8
"""Requests of this process that read chunks at once."""

Want = Callable[[StoredTensor], Box | None]
"""Returns the part of a stored tensor that a rank needs; None means the whole tensor."""


def read_manifest(store: Store, key: str) -> Manifest:
    """Reads a manifest. Raises Damaged if missing or invalid, CheckpointError if it has another format."""
    found = store.get(key + MANIFEST_NAME)
    if found is None:
        raise Damaged("the manifest is missing")
    return Manifest.from_bytes(found.body)


def read_trees(store: Store, key: str, manifest: Manifest, *, rank: int = 0, want: Want | None = None) -> Any:
    """Returns (the tree shared by all ranks, this rank's own tree); a new rank gets rank 0's own tree.

    Tensors are on the CPU; `want` selects the part of each. Raises Damaged.
    """
    with _consistent():
        own = manifest.ranks[rank if rank < len(manifest.ranks) else 0]
        tensors = _Reading(store, key, manifest).tensors(set(numbers([manifest.tree, own])), want)
        return unflatten(manifest.tree, tensors.__getitem__), unflatten(own, tensors.__getitem__)


def read_tensors(
    store: Store, key: str, manifest: Manifest, numbers: Collection[int]
) -> dict[int, torch.Tensor]:
    """Returns whole tensors of the manifest by number, on the CPU. Raises Damaged."""
    with _consistent():
        return _Reading(store, key, manifest).tensors(numbers)


@contextlib.contextmanager
def _consistent() -> Iterator[None]:
    """Raises Damaged for what a manifest causes that contradicts itself."""
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise Damaged(f"shards and manifest do not match ({type(error).__name__}: {error})") from error


def fetch_folder(store: Store, key: str, manifest: Manifest, folder: Path, rank: int = 0) -> None:
    """Writes the files of a checkpoint of kind "folder" into `folder`; reads in parallel. Raises Damaged.

    All or nothing: it replaces an older folder of that name.
    """
    fresh = folder.with_name(f".spottrain-{rank}-{folder.name}")
    try:
        fresh.mkdir(parents=True, exist_ok=True)
        _Reading(store, key, manifest).files(fresh)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # a pod on the same disk was faster
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _safe(file: File) -> PurePosixPath:
    path = PurePosixPath(file.path)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise Damaged(f"the manifest names the file {file.path!r}, which would lie outside its folder")
    return path


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sink:
    """Flat memory that receives the bytes of a piece."""

    begin: int
    """Offset of the bytes in the shard's file."""
    memory: torch.Tensor

    @property
    def end(self) -> int:
        return self.begin + self.memory.numel()


class _Reading:
    def __init__(self, store: Store, key: str, manifest: Manifest) -> None:
        self._store, self._key, self._manifest = store, key, manifest
        self._sinks: dict[str, list[_Sink]] = {}
        self._after: list[Callable[[], object]] = []
        self._buffers = threading.local()

    def files(self, folder: Path) -> None:
        shards = {shard.name: shard for shard in self._manifest.shards}
        reads: list[Callable[[], None]] = []
        for file in self._manifest.files:
            shard = shards.get(file.shard)
            if shard is None:
                raise Damaged(f"{file.path} names {file.shard}, which the manifest does not list")
            target = folder / _safe(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                out.truncate(shard.bytes)
            reads += [partial(self._copy, shard, number, target) for number in range(len(shard.chunks))]
        _in_parallel(reads)

    def _copy(self, shard: Shard, number: int, target: Path) -> None:
        """Writes one chunk to its place in `target`."""
        buffer = byte_view(self._buffer(shard, number))
        self._fetch(shard, number, buffer)
        with target.open("r+b") as out:
            out.seek(number * self._manifest.chunk_bytes)
            out.write(buffer)

    def tensors(self, numbers: Collection[int], want: Want | None = None) -> dict[int, torch.Tensor]:
        found = {number: self._prepare(self._manifest.tensors[number], want) for number in sorted(numbers)}
        reads = [
            partial(self._scatter, shard, number, sinks)
            for shard in self._manifest.shards
            for number, sinks in self._chunks(shard, self._sinks.pop(shard.name, []))
        ]
        if self._sinks:
            raise Damaged(f"the manifest has tensors in {', '.join(self._sinks)}, which it does not list")
        _in_parallel(reads)
        for act in self._after:
            act()
        return found

    def _prepare(self, stored: StoredTensor, want: Want | None) -> torch.Tensor:
        """Allocates memory for the wanted box, and a sink for each piece that overlaps it."""
        dtype = getattr(torch, stored.dtype)
        whole = Box(start=(0,) * len(stored.shape), shape=stored.shape)
        box = (want(stored) if want else None) or whole
        target = torch.empty(box.shape, dtype=dtype)
        covered = 0
        for piece in stored.pieces:
            overlap = _overlap(box, Box(start=piece.start, shape=piece.shape))
            if overlap is None:
                continue
            covered += math.prod(overlap.shape)
            inside = target[_slices(overlap, box.start)] if box.shape else target
            begin = piece.offset
            if overlap.shape[1:] == piece.shape[1:] and inside.is_contiguous():
                if piece.shape:  # skips the rows before the overlap
                    rows = overlap.start[0] - piece.start[0]
                    begin += rows * math.prod(piece.shape[1:]) * dtype.itemsize
                memory = inside.reshape(-1).view(torch.uint8)
            else:
                staged = torch.empty(piece.shape, dtype=dtype)
                part = staged[_slices(overlap, piece.start)]
                self._after.append(partial(inside.copy_, part))
                memory = staged.reshape(-1).view(torch.uint8)
            self._sinks.setdefault(piece.shard, []).append(_Sink(begin=begin, memory=memory))
        if covered != math.prod(box.shape):
            raise Damaged(
                f"{stored.name} is incomplete: {covered} of {math.prod(box.shape)} numbers are there"
            )
        return target

    def _chunks(self, shard: Shard, sinks: list[_Sink]) -> Iterator[tuple[int, list[_Sink]]]:
        """Yields each chunk that has wanted bytes, with its sinks in the order of their bytes."""
        size = self._manifest.chunk_bytes
        by_chunk: dict[int, list[_Sink]] = {}
        for sink in sorted(sinks, key=lambda sink: sink.begin):
            if sink.end > shard.bytes:
                raise Damaged(f"a tensor ends at byte {sink.end} of {shard.name}, which has {shard.bytes}")
            for number in range(sink.begin // size, -(-sink.end // size)):
                by_chunk.setdefault(number, []).append(sink)
        yield from sorted(by_chunk.items())

    def _scatter(self, shard: Shard, number: int, sinks: list[_Sink]) -> None:
        """Reads one chunk into its sinks."""
        begin = number * self._manifest.chunk_bytes
        end = begin + self._length(shard, number)
        parts = [(max(sink.begin, begin), min(sink.end, end)) for sink in sinks]
        targets = [
            sink.memory[first - sink.begin : last - sink.begin]
            for sink, (first, last) in zip(sinks, parts, strict=True)
        ]
        edges = [begin, *itertools.chain(*parts), end]
        if edges[::2] == edges[1::2]:  # no byte between them is unwanted, or wanted twice
            self._fetch(shard, number, *map(byte_view, targets))
            return
        buffer = self._buffer(shard, number)
        self._fetch(shard, number, byte_view(buffer))
        for target, (first, last) in zip(targets, parts, strict=True):
            target.copy_(buffer[first - begin : last - begin])

    def _fetch(self, shard: Shard, number: int, *buffers: memoryview) -> None:
        """Reads and verifies a chunk into buffers that have its length in all. Raises Damaged."""
        try:
            begin = number * self._manifest.chunk_bytes
            found = self._store.read_into(self._key + shard.name, begin, *buffers, hashed=True)
        except KeyMissing:
            raise Damaged(f"{shard.name} is missing") from None
        except Truncated as error:
            raise Damaged(f"{shard.name} is shorter than its {shard.bytes} bytes ({error})") from None
        if found != shard.chunks[number]:
            raise Damaged(f"{shard.name} has a wrong checksum in chunk {number}")

    def _buffer(self, shard: Shard, number: int) -> torch.Tensor:
        """Returns this thread's buffer for a chunk; reused memory is many times as fast as fresh memory."""
        if not hasattr(self._buffers, "tensor"):
            self._buffers.tensor = torch.empty(self._manifest.chunk_bytes, dtype=torch.uint8)
        found: torch.Tensor = self._buffers.tensor
        return found[: self._length(shard, number)]

    def _length(self, shard: Shard, number: int) -> int:
        return min(self._manifest.chunk_bytes, shard.bytes - number * self._manifest.chunk_bytes)


def _in_parallel(reads: Iterable[Callable[[], None]]) -> None:
    """Runs the reads in few threads, which bounds the memory. Raises the first one's error."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        futures = [pool.submit(read) for read in reads]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _overlap(a: Box, b: Box) -> Box | None:
    start = tuple(map(max, a.start, b.start))
    ends = tuple(min(p + s, q + t) for p, s, q, t in zip(a.start, a.shape, b.start, b.shape, strict=True))
    shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
    return Box(start=start, shape=shape) if all(size > 0 for size in shape) else None


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns `box` as an index into an array that begins at `origin`."""
    return tuple(slice(b - o, b - o + s) for b, o, s in zip(box.start, origin, box.shape, strict=True))
