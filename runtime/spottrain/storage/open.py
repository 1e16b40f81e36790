"""Opens the store of a checkpoint URI: S3, Google Cloud Storage or a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from spottrain.contract import AZURE, NO_AZURE
from spottrain.core.uri import is_path
from spottrain.errors import ConfigurationError
from spottrain.storage.base import Store
from spottrain.storage.local import FolderStore

OLDEST_BOTOCORE: Final = (1, 36)
"""The first with conditional writes (If-Match) and the settings of checksums that `s3_client` makes."""


def open_store(
    uri: str, endpoint: str | None = None, *, path_style: bool | None = None, kms_key: str | None = None
) -> Store:
    """Opens the store at `s3://bucket/prefix`, `gs://bucket/prefix`, `file:///folder` or a plain path.

    Args:
        uri: The checkpoint URI.
        endpoint: URL of a server of that protocol; None means AWS, or Google.
        path_style: S3 only: puts the bucket into the path; None: if there is an endpoint.
        kms_key: S3 only: ID or ARN of the key for SSE-KMS (`default`: the account's own key; `AES256`: S3's
            own keys, SSE-S3; None: the bucket's setting).

    Raises:
        ConfigurationError: The URI is not understood, or its client library is not installed.
    """
    for what, given in (("URI", uri), ("endpoint", endpoint)):
        if AZURE.match(given or ""):
            raise ConfigurationError(f"checkpoint {what} {given!r}: {NO_AZURE}")
    if uri and is_path(uri):
        return FolderStore(Path(uri).absolute(), uri=uri)
    parts = urlsplit(uri)
    if parts.query or parts.fragment:
        raise ConfigurationError(
            f"checkpoint URI {uri!r} contains ? or #, which are not supported; use a prefix without them"
        )
    if uri.startswith("file:///"):
        return FolderStore(Path(unquote(parts.path)), uri=uri)
    if not uri.startswith(("s3://", "gs://")):
        hint = f"; for a folder of that name write ./{uri}" if uri else ""
        raise ConfigurationError(
            f"checkpoint URI {uri!r} is not valid: use s3://bucket/prefix, gs://bucket/prefix, "
            f"file:///folder (lower case, with these slashes) or a path{hint}"
        )
    if not parts.netloc:
        raise ConfigurationError(
            f"checkpoint URI {uri!r} names no bucket; use {parts.scheme}://bucket/prefix"
        )
    bucket, prefix = parts.netloc, parts.path.strip("/")
    library, extra = ("boto3", "s3") if parts.scheme == "s3" else ("google-cloud-storage", "gcs")
    try:
        if parts.scheme == "s3":
            _require_botocore()
            from spottrain.storage.s3 import S3Store

            return S3Store(bucket, prefix, endpoint=endpoint, path_style=path_style, kms_key=kms_key)
        from spottrain.storage.gcs import GCSStore

        return GCSStore(bucket, prefix, endpoint=endpoint)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"checkpoint URI {uri} needs {library} ({error}); install spottrain[{extra}]"
        ) from error


def _require_botocore() -> None:
    """Raises ConfigurationError if botocore is too old: an image may have its own (docs/own-image.md).

    Called before boto3 is imported, because an older botocore lacks names that boto3 imports.
    """
    import botocore

    numbers = re.match(r"(\d+)\.(\d+)", botocore.__version__)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_BOTOCORE:
        raise ConfigurationError(
            f"botocore {botocore.__version__} at {Path(botocore.__file__).parent} is too old for checkpoints "
            "on S3, which need conditional writes; install a newer one: pip install -U 'boto3>=1.40'"
        )
