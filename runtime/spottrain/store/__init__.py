"""The object store below a checkpoint URI: what the runtime needs of it, and how to open one.

Called by `owner.py` (HEAD) and by the checkpoint code (shards, manifests). Keys are relative to the URI.

Every store gives the same four answers:
* the thing, or None where there is none: only for a key that is absent from a store that can be read;
* AlreadyExists, PreconditionFailed, KeyMissing: the condition of a conditional write did not hold;
* StoreUnavailable: no answer, or 5xx. A write may have been applied, or may be later;
* StoreDenied, BucketNotFound, StoreUnsuitable, ConfigurationError, CheckpointArchived: a person must act.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from spottrain.errors import ConfigurationError

Body = bytes | bytearray | memoryview
SCHEME: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
"""How a URI begins (RFC 3986)."""


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


def open(
    uri: str, endpoint: str | None = None, *, path_style: bool | None = None, kms_key: str | None = None
) -> Store:
    """The store at `s3://bucket/prefix`, `gs://bucket/prefix`, `file:///folder` or a plain path.

    `endpoint` is the URL of a server of that protocol; None means AWS, or Google. The rest is S3's:
    `path_style` puts the bucket into the path (None: where there is an endpoint); `kms_key` is the ID or
    ARN of the key for SSE-KMS (`default`: the account's own; None: the bucket's setting).
    """
    if uri and is_path(uri):
        return _open_folder(uri, Path(uri))
    parts = urlsplit(uri)
    if parts.query or parts.fragment:
        raise ConfigurationError(
            f"checkpoint URI {uri!r} holds ? or #, which would be lost; use a prefix without them"
        )
    if uri.startswith("s3://"):
        return _open_s3(uri, _bucket(uri, parts), endpoint, path_style, kms_key)
    if uri.startswith("gs://"):
        return _open_gcs(uri, _bucket(uri, parts), endpoint)
    if uri.startswith("file:///"):
        return _open_folder(uri, Path(unquote(parts.path)))
    hint = f"; for a folder of that name write ./{uri}" if uri else ""
    raise ConfigurationError(
        f"checkpoint URI {uri!r} is not understood: use s3://bucket/prefix, gs://bucket/prefix, "
        f"file:///folder (lower case, with these slashes) or a path{hint}"
    )


def is_path(uri: str) -> bool:
    """Whether it is a plain path. What begins with a scheme, known or mistyped, is never one."""
    return SCHEME.match(uri) is None


def _bucket(uri: str, parts: SplitResult) -> tuple[str, str]:
    """Bucket and prefix."""
    if not parts.netloc:
        raise ConfigurationError(
            f"checkpoint URI {uri!r} names no bucket; use {parts.scheme}://bucket/prefix"
        )
    return parts.netloc, parts.path.strip("/")


def _open_folder(uri: str, root: Path) -> Store:
    from spottrain.store.folder import FolderStore

    return FolderStore(root.absolute(), uri=uri)


def _open_s3(
    uri: str, where: tuple[str, str], endpoint: str | None, path_style: bool | None, kms_key: str | None
) -> Store:
    try:
        from spottrain.store.s3 import S3Store
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"checkpoint URI {uri} needs boto3 ({error}); install spottrain[s3]"
        ) from error
    return S3Store(*where, endpoint=endpoint, path_style=path_style, kms_key=kms_key)


def _open_gcs(uri: str, where: tuple[str, str], endpoint: str | None) -> Store:
    try:
        from spottrain.store.gcs import GCSStore
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"checkpoint URI {uri} needs google-cloud-storage ({error}); install spottrain[gcs]"
        ) from error
    return GCSStore(*where, endpoint=endpoint)
