"""The object store below a checkpoint URI, as the runtime needs it. Keys are relative to the URI.

Every store gives the same four answers:
* the thing, or None where there is none: only for a key that is absent from a store that can be read;
* AlreadyExists, PreconditionFailed, KeyMissing: the condition of a conditional write did not hold;
* StoreUnavailable: no answer, or 5xx. A write may have been applied, or may be later;
* StoreDenied, BucketNotFound, StoreUnsuitable, ConfigurationError, CheckpointArchived: a person must act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Body = bytes | bytearray | memoryview


class AlreadyExists(Exception):
    """put_if_absent: there is an object at that key already."""


class PreconditionFailed(Exception):
    """put_if_match: the object has another ETag, or another write to it is under way."""


class KeyMissing(Exception):
    """put_if_match, read_into: there is no object at that key."""


class Truncated(Exception):
    """read_into: the object ends before the range does."""


class Cancelled(Exception):
    """upload: the caller's `cancelled` said so."""


def never() -> bool:
    """`cancelled` of an upload that nobody will stop."""
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Object:
    body: bytes
    etag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stat:
    """What a store says of an object without its body."""

    bytes: int
    storage_class: str
    """As the store spells it; empty where there are none."""
    archived: bool
    """It must be restored before it can be read."""
    restoring: bool
    """Somebody has asked for that already."""


class Store(Protocol):
    @property
    def uri(self) -> str:
        """As given, for sentences."""

    @property
    def endpoint(self) -> str:
        """URL of its server; empty where there is none."""

    def get(self, key: str) -> Object | None: ...

    def put(self, key: str, body: Body) -> None: ...

    def put_if_absent(self, key: str, body: Body) -> str:
        """ETag of the new object. Raises AlreadyExists."""

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        """ETag of the new object. Raises PreconditionFailed or KeyMissing."""

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        """Writes an object that must not exist yet, from memory and in parallel.

        Returns the SHA-256 (hex) of each CHUNK_BYTES of `body`. Raises AlreadyExists, or Cancelled once
        `cancelled`, which is called in this thread, says so. Parts sent so far are taken back on any error;
        the object itself may still appear where the store gave no answer.
        """

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset` on; threads may do so in parallel. Raises KeyMissing or Truncated."""

    def stat(self, key: str) -> Stat | None: ...

    def sweep_uploads(self, prefix: str, doomed: Callable[[str], bool]) -> list[str]:
        """Ends the unfinished uploads whose key begins with `prefix` and is `doomed`; returns their keys."""

    def list(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, in order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Idempotent."""

    def probe(self) -> None:
        """Raises StoreDenied, BucketNotFound or StoreUnsuitable unless everything above would work."""
