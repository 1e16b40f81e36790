"""Interface of the object store below a checkpoint URI. Keys are relative to the URI.

Every store has the same four kinds of result:
* a value, or None if the key is absent. None is returned only by a store that can be read;
* AlreadyExists, PreconditionFailed, KeyMissing: the condition of a conditional write did not hold;
* StoreUnavailable: no response, or 5xx. A write may have been applied, or may be applied later;
* StoreDenied, BucketNotFound, StoreUnsuitable, ConfigurationError, CheckpointArchived: the user must act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Body = bytes | bytearray | memoryview


class AlreadyExists(Exception):
    """put_if_absent: the key already has an object."""


class PreconditionFailed(Exception):
    """put_if_match: the object has another ETag, or another write to it is in progress."""


class KeyMissing(Exception):
    """put_if_match, read_into: the key has no object."""


class Truncated(Exception):
    """read_into: the object ends before the range does."""


class Cancelled(Exception):
    """upload: `cancelled` returned True."""


class Changed(Exception):
    """put_part: the file was written to since its SHA-256 was computed."""


def never() -> bool:
    """Default of `cancelled`: the upload is not cancelled."""
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Object:
    body: bytes
    etag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stat:
    """Metadata of an object."""

    bytes: int
    storage_class: str
    """The store's own name; empty if the store has no storage classes."""
    archived: bool
    """Whether it must be restored before it can be read."""
    restoring: bool
    """Whether such a restore is in progress."""
    modified: float = field(compare=False)
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """A part of an open file, which is sent without holding it in memory."""

    file: int
    """Descriptor, open for reading."""
    offset: int
    bytes: int
    sha256: str
    """Hexadecimal."""
    changed: Callable[[], bool] = never
    """Whether the file is known to have changed since."""


class Store(Protocol):
    @property
    def uri(self) -> str:
        """The URI as given, for messages."""

    @property
    def endpoint(self) -> str:
        """URL of its server; empty if it has none."""

    def get(self, key: str) -> Object | None: ...

    def put(self, key: str, body: Body) -> None: ...

    def put_if_absent(self, key: str, body: Body) -> str:
        """Returns the ETag of the new object. Raises AlreadyExists."""

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        """Returns the ETag of the new object. Raises PreconditionFailed or KeyMissing."""

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        """Writes an object that must not exist yet, from memory and in parallel.

        Returns the SHA-256 (hex) of each CHUNK_BYTES of `body`. Raises AlreadyExists, or Cancelled once
        `cancelled`, which is called in this thread, returns True. On any error the parts sent so far are
        removed; the object itself may still appear if the store gave no response.
        """

    def put_part(self, key: str, part: FilePart, *, cancelled: Callable[[], bool] = never) -> None:
        """Writes an object from a file, replacing what is there; thread-safe.

        Raises Changed unless exactly the bytes of `part.sha256` were stored, or Cancelled once `cancelled`,
        which is called in this thread, returns True.
        """

    def read_into(self, key: str, offset: int, *buffers: memoryview, hashed: bool = False) -> str:
        """Fills the buffers, one after the other, from `offset` on; thread-safe.

        Returns the SHA-256 (hex) of the bytes if `hashed`, else an empty text. Raises KeyMissing, Truncated.
        """

    def stat(self, key: str) -> Stat | None: ...

    def sweep_uploads(self, prefix: str, doomed: Callable[[str], bool]) -> list[str]:
        """Aborts unfinished uploads whose key begins with `prefix` and is `doomed`; returns their keys."""

    def folders(self, prefix: str) -> list[str]:
        """Returns the folders directly below `prefix`, sorted. Both are empty or end with /."""

    def list(self, prefix: str) -> list[str]:
        """Returns all keys that begin with `prefix`, sorted."""

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes the objects; absent keys are ignored."""

    def probe(self) -> None:
        """Raises StoreDenied, BucketNotFound or StoreUnsuitable if any operation above would fail."""
