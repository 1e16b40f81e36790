"""The object store below a checkpoint URI: what the runtime needs of it, and how to open one.

Called by `owner.py` (HEAD) and by the checkpoint code (shards, manifests). Keys are relative to the URI.

Every store gives the same four answers:
* the thing, or None where there is none: only for a key that is absent from a store that can be read;
* AlreadyExists, PreconditionFailed, KeyMissing: the condition of a conditional write did not hold;
* StoreUnavailable: no answer, or 5xx. A write may have been applied, or may be later;
* StoreDenied, BucketNotFound, StoreUnsuitable, ConfigurationError: a person must act.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from spottrain.errors import ConfigurationError

Body = bytes | bytearray | memoryview


class AlreadyExists(Exception):
    """put_if_absent: there is an object at that key already."""


class PreconditionFailed(Exception):
    """put_if_match: the object has another ETag, or another write to it is under way."""


class KeyMissing(Exception):
    """put_if_match: there is no object at that key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Object:
    body: bytes
    etag: str


class Store(Protocol):
    @property
    def uri(self) -> str:
        """As given, for sentences."""

    def get(self, key: str) -> Object | None: ...

    def put(self, key: str, body: Body) -> None: ...

    def put_if_absent(self, key: str, body: Body) -> str:
        """ETag of the new object. Raises AlreadyExists."""

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        """ETag of the new object. Raises PreconditionFailed or KeyMissing."""

    def list(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, in order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Idempotent."""

    def probe(self) -> None:
        """Raises StoreDenied, BucketNotFound or StoreUnsuitable unless everything above would work."""


def open(uri: str, endpoint: str | None = None) -> Store:
    """The store at `s3://bucket/prefix`, `file:///folder` or a plain path.

    `endpoint` is the URL of an S3-compatible server; None means AWS.
    """
    parts = urlsplit(uri)
    match parts.scheme:
        case "s3":
            return _open_s3(uri, parts.netloc, parts.path.strip("/"), endpoint)
        case "file" if not parts.netloc and parts.path.startswith("/"):
            return _open_folder(uri, Path(unquote(parts.path)))
        case "" if uri:
            return _open_folder(uri, Path(uri))
    raise ConfigurationError(
        f"checkpoint URI {uri!r} is not understood; use s3://bucket/prefix, file:///folder or a path"
    )


def _open_folder(uri: str, root: Path) -> Store:
    from spottrain.store.folder import FolderStore

    return FolderStore(root.absolute(), uri=uri)


def _open_s3(uri: str, bucket: str, prefix: str, endpoint: str | None) -> Store:
    if not bucket:
        raise ConfigurationError(f"checkpoint URI {uri!r} names no bucket; use s3://bucket/prefix")
    try:
        from spottrain.store.s3 import S3Store
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"checkpoint URI {uri} needs boto3 ({error}); install spottrain[s3]"
        ) from error
    return S3Store(bucket, prefix, endpoint=endpoint)
