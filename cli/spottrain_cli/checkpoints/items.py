"""Files that a download writes: their names, sizes, and verified contents."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, Final

from spottrain.checkpoint.manifest import Damaged, Shard
from spottrain.contract import CHUNK_BYTES
from spottrain.storage.base import KeyMissing, Store, Truncated

from spottrain_cli.checkpoints.reading import Shards

CONNECTIONS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A file to write. `name`: relative path with slashes."""

    name: str
    bytes: int
    write: Callable[[BinaryIO], Iterator[int]]
    """Writes the contents to an empty file, and yields the size of each part of them. Raises Damaged, at the
    latest after the last one, if they are not as they were stored."""


def stored_object(store: Store, key: str, name: str, size: int, sha256: str | None) -> Item:
    """Returns the file that a whole object is. `sha256`: None if it is unknown."""

    def part(number: int) -> memoryview:
        offset = number * CHUNK_BYTES
        view = memoryview(bytearray(min(CHUNK_BYTES, size - offset)))
        try:
            store.read_into(key, offset, view)
        except (KeyMissing, Truncated):
            raise Damaged(f"{key} is missing, or too short") from None
        return view

    def write(file: BinaryIO) -> Iterator[int]:
        total = hashlib.sha256()
        for view in ahead(part, -(-size // CHUNK_BYTES)):
            total.update(view)
            yield file.write(view)
        if sha256 is not None and total.hexdigest() != sha256:
            raise Damaged(f"{key} does not match its checksum")

    return Item(name=name, bytes=size, write=write)


def stored_shard(shards: Shards, shard: Shard, name: str) -> Item:
    """Returns the file of a library that a shard of a checkpoint is."""

    def write(file: BinaryIO) -> Iterator[int]:
        for view in ahead(lambda number: shards.chunk(shard, number), len(shard.chunks)):
            yield file.write(view)

    return Item(name=name, bytes=shard.bytes, write=write)


def ahead(part: Callable[[int], memoryview], count: int) -> Iterator[memoryview]:
    """Yields parts in order, and reads the next ones meanwhile."""
    waiting: deque[Future[memoryview]] = deque()
    pool = ThreadPoolExecutor(CONNECTIONS)
    try:
        for number in range(count):
            waiting.append(pool.submit(part, number))
            if len(waiting) == CONNECTIONS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
