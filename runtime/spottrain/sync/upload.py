"""Sends the contents of files to the store: only what is not there yet, in parts, with bounded memory.

A part is read twice: first to compute its SHA-256, then, if the store lacks it, as the body of its request.
Neither reading holds more than a slice of it. A file that changes in between, or since the look at the
folder, stops the upload: what was sent so far stays, and is found again by the next try.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from spottrain.contract import CHUNK_BYTES
from spottrain.storage.base import Cancelled, Changed, FilePart, Store, never
from spottrain.storage.requests import SLICE
from spottrain.sync.folder import FolderError, Node, NodeKind, grown, node_of
from spottrain.sync.manifest import StoredFile, digest_of
from spottrain.sync.whole import Judgement

CONNECTIONS: Final = 6
SETTLED_NS: Final = 2 * 10**9
"""A file that was written to less than this before a look may change again without a new time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A file as it was when its content was stored."""

    node: Node
    stored: StoredFile
    looked_ns: int = 0
    """Unix nanoseconds of the look at the folder; 0: long after the file was written."""

    def covers(self, node: Node) -> bool:
        settled = not self.looked_ns or self.looked_ns - node.stamp > SETTLED_NS
        return settled and node == self.node


@dataclass(frozen=True, kw_only=True, slots=True)
class SentFiles:
    files: Mapping[str, Known]
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Where the content of a file is read."""

    path: str
    place: Path
    size: int
    node: Node | None
    """What the file is, as long as it does not change; None: a copy, which does not."""
    may_grow: bool

    def changed(self, file: int) -> bool:
        """Whether the open file is another one by now."""
        if self.node is None:
            return False
        now = node_of(os.fstat(file))
        return now != self.node and not (self.may_grow and now is not None and grown(self.node, now))


class Contents:
    """The contents that the store holds, and the way to add those of `root`. Not for two uploads at once."""

    def __init__(self, root: Path, store: Store, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.known: Mapping[str, Known] = {}
        """Files by path, as the newest checkpoint has them."""
        self._root = root
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._keys: dict[str, str] = {}
        """By SHA-256: where this content is stored for certain."""
        self._lock = threading.Lock()

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._keys.values())

    def add(self, keys: Collection[str]) -> None:
        """Notes contents that the store holds."""
        self._keys |= {digest_of(key): key for key in keys}

    def forget(self, keys: Collection[str]) -> None:
        """Notes contents that are about to be deleted."""
        gone = set(keys)
        self._keys = {digest: key for digest, key in self._keys.items() if key not in gone}

    def unknown(self, verdict: Judgement) -> list[str]:
        """Returns the paths of the files that `send` reads."""
        return [
            path
            for path, node in (verdict.tree or {}).items()
            if node.kind is NodeKind.FILE
            and path not in verdict.kept
            and not (path in self.known and self.known[path].covers(node))
        ]

    def send(
        self,
        verdict: Judgement,
        place: str,
        cancelled: Callable[[], bool] = never,
        *,
        looked_ns: int = 0,
        copies: Mapping[str, Path] = MappingProxyType({}),
    ) -> SentFiles:
        """Stores the files of the verdict's tree; new contents at keys below `place`.

        `looked_ns`: see `Known`. `copies`: where to read the content of a path instead. Raises Changed,
        Cancelled, FolderError or StoreError: not all is stored.
        """
        files = {path: node for path, node in (verdict.tree or {}).items() if node.kind is NodeKind.FILE}
        reading = self.unknown(verdict)
        chunks = {path: [""] * -(-files[path].size // self._chunk_bytes) for path in reading}
        sources = [
            _Source(
                path=path,
                place=copies.get(path, self._root / path),
                size=files[path].size,
                node=None if path in copies else files[path],
                may_grow=path in verdict.logs,
            )
            for path in reading
        ]
        self._sent = 0
        began = time.monotonic()
        failed = threading.Event()

        def over() -> bool:
            return failed.is_set() or cancelled()

        def store(source: _Source, number: int) -> None:
            if not over():
                chunks[source.path][number] = self._store_part(source, number, place, over)

        parts = [(each, number) for each in sources for number in range(len(chunks[each.path]))]
        in_parallel([partial(store, *part) for part in parts], failed)
        if cancelled() and any("" in keys for keys in chunks.values()):
            raise Cancelled(place)
        stored = {
            path: Known(
                node=node,
                stored=StoredFile(
                    size=node.size, mode=node.mode, mtime_ns=node.mtime_ns, chunks=tuple(chunks[path])
                ),
                looked_ns=looked_ns,
            )
            if path in chunks
            else replace(self.known[path], node=node)
            for path, node in files.items()
        }
        return SentFiles(files=stored, bytes=self._sent, seconds=time.monotonic() - began)

    def _store_part(self, source: _Source, number: int, place: str, over: Callable[[], bool]) -> str:
        """Returns the key of the part's content."""
        offset = number * self._chunk_bytes
        size = min(self._chunk_bytes, source.size - offset)
        with _opened(source) as file:
            changed = partial(source.changed, file)
            digest = digest_of_part(file, offset, size)
            if changed():
                raise Changed(source.path)
            with self._lock:
                if digest in self._keys:
                    return self._keys[digest]
            body = FilePart(file=file, offset=offset, bytes=size, sha256=digest, changed=changed)
            self._store.put_part(place + digest, body, cancelled=over)  # maybe by two threads, equal ones
            with self._lock:
                self._sent += size
                self._keys[digest] = place + digest
            return place + digest


def digest_of_part(file: int, offset: int, size: int) -> str:
    """Returns the SHA-256 (hex) of a part of a file, or of what the file has of it."""
    digest, end = hashlib.sha256(), offset + size
    view = memoryview(bytearray(min(SLICE, size)))
    while count := os.preadv(file, [view[: end - offset]], offset):
        digest.update(view[:count])
        offset += count
    return digest.hexdigest()


def in_parallel(calls: Iterable[Callable[[], None]], failed: threading.Event) -> None:
    """Runs the calls in a few threads. Sets `failed` after the first error, and raises the cause of all."""
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="spottrain-sync") as pool:
        futures = [pool.submit(each) for each in calls]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed.set()  # without an error all are done
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda each: isinstance(each, Cancelled)):
        raise error


@contextlib.contextmanager
def _opened(source: _Source) -> Iterator[int]:
    """Opens the file if it is still what was seen. Raises Changed or FolderError."""
    path = source.place
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as error:
        raise FolderError(
            f"{path} cannot be read: {error.strerror}; make it readable for user {os.getuid()}"
        ) from error
    except OSError as error:  # deleted, or replaced by a link
        raise Changed(source.path) from error
    try:
        yield file
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(file)
