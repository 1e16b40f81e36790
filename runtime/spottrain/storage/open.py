"""Opens the store of a checkpoint URI: S3, Google Cloud Storage or a folder."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from spottrain.core.uri import is_path
from spottrain.errors import ConfigurationError
from spottrain.storage.base import Store


def open_store(
    uri: str, endpoint: str | None = None, *, path_style: bool | None = None, kms_key: str | None = None
) -> Store:
    """Opens the store at `s3://bucket/prefix`, `gs://bucket/prefix`, `file:///folder` or a plain path.

    Args:
        uri: The checkpoint URI.
        endpoint: URL of a server of that protocol; None means AWS, or Google.
        path_style: S3 only: puts the bucket into the path; None: if there is an endpoint.
        kms_key: S3 only: ID or ARN of the key for SSE-KMS (`default`: the account's own key; None: the
            bucket's setting).

    Raises:
        ConfigurationError: The URI is not understood, or its client library is not installed.
    """
    if uri and is_path(uri):
        return _open_folder(uri, Path(uri))
    parts = urlsplit(uri)
    if parts.query or parts.fragment:
        raise ConfigurationError(
            f"checkpoint URI {uri!r} contains ? or #, which are not supported; use a prefix without them"
        )
    if uri.startswith("s3://"):
        return _open_s3(uri, _bucket(uri, parts), endpoint, path_style, kms_key)
    if uri.startswith("gs://"):
        return _open_gcs(uri, _bucket(uri, parts), endpoint)
    if uri.startswith("file:///"):
        return _open_folder(uri, Path(unquote(parts.path)))
    hint = f"; for a folder of that name write ./{uri}" if uri else ""
    raise ConfigurationError(
        f"checkpoint URI {uri!r} is not valid: use s3://bucket/prefix, gs://bucket/prefix, "
        f"file:///folder (lower case, with these slashes) or a path{hint}"
    )


def _bucket(uri: str, parts: SplitResult) -> tuple[str, str]:
    """Returns bucket and prefix."""
    if not parts.netloc:
        raise ConfigurationError(
            f"checkpoint URI {uri!r} names no bucket; use {parts.scheme}://bucket/prefix"
        )
    return parts.netloc, parts.path.strip("/")


def _open_folder(uri: str, root: Path) -> Store:
    from spottrain.storage.local import FolderStore

    return FolderStore(root.absolute(), uri=uri)


def _open_s3(
    uri: str, where: tuple[str, str], endpoint: str | None, path_style: bool | None, kms_key: str | None
) -> Store:
    try:
        from spottrain.storage.s3 import S3Store
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"checkpoint URI {uri} needs boto3 ({error}); install spottrain[s3]"
        ) from error
    return S3Store(*where, endpoint=endpoint, path_style=path_style, kms_key=kms_key)


def _open_gcs(uri: str, where: tuple[str, str], endpoint: str | None) -> Store:
    try:
        from spottrain.storage.gcs import GCSStore
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"checkpoint URI {uri} needs google-cloud-storage ({error}); install spottrain[gcs]"
        ) from error
    return GCSStore(*where, endpoint=endpoint)
