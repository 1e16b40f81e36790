"""Store in a Google Cloud Storage bucket.

Conditions are generations: the ETag is the object's generation, and generation 0 means that there is no
object. A large body is sent in one resumable session, so in one stream. The session's last request creates
the object, under the condition. An unfinished session costs nothing and expires after a week. Google allows
about one write per second to the same key; more get 429 (StoreUnavailable).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import requests
from google.api_core import exceptions as api
from google.api_core.retry import Retry, retry_target
from google.auth import exceptions as auth
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption
from google.cloud.storage.retry import DEFAULT_RETRY

from spottrain.contract import CHUNK_BYTES, HEAD_KEY
from spottrain.errors import (
    BucketNotFound,
    ConfigurationError,
    StoreDenied,
    StoreUnavailable,
)
from spottrain.storage.base import (
    AlreadyExists,
    Body,
    Cancelled,
    Changed,
    FilePart,
    KeyMissing,
    Object,
    PreconditionFailed,
    Stat,
    Truncated,
    never,
)
from spottrain.storage.requests import (
    LONGEST_PAUSE,
    FileChanged,
    Filling,
    RequestBody,
    Stopped,
    VerifiedPartBody,
    digests,
    pause,
    probe_conditions,
    seconds,
)

WRITE_ID: Final = "spottrain-write"
"""Metadata key that identifies the writer of an object."""
PART_WINDOW: Final = 2 << 20
"""Bytes per request of a part of a file, which are held in memory."""
LARGEST_WHOLE: Final = 8 << 20
"""Up to so many bytes the library sends a body in one request, and holds it twice meanwhile."""
WHOLE_AT_ONCE: Final = 2
"""Number of such requests at once, where the body is larger than PART_WINDOW."""
READ_WINDOW: Final = 16 << 20
"""Bytes per read request. The library holds them once before they are copied into the caller's buffer."""
NO_PROJECT: Final = "none"
"""No request here needs a project; without a value the library would look for one on the network."""
NO_LOOKUPS: Final = "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"
"""Otherwise the library asks for the bucket's location in background threads, for traces that are not used
here, and with a permission that is not required here."""
GOOGLE: Final = "https://storage.googleapis.com"
METADATA_SERVER: Final = frozenset({"GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"})
"""Environment variables that name a metadata server."""
IDENTITY: Final = (
    "give the service account an identity (GKE Workload Identity), or set GOOGLE_APPLICATION_CREDENTIALS to "
    "a key file"
)
POLICY: Final = "give it roles/storage.objectUser on the bucket"
FAILURES: Final = (
    api.GoogleAPICallError,
    api.RetryError,
    auth.GoogleAuthError,
    requests.RequestException,
    DataCorruption,
)
"""All exceptions that a call of the library raises."""


class _Retry(Retry):
    """Uses its own pauses: Google's draw from Python's random state, which belongs to the training."""

    def __call__(self, func: Callable[..., Any], on_error: Callable[[Exception], Any] | None = None) -> Any:
        def again(*args: Any, **more: Any) -> Any:
            pauses = (self._initial * pause(failures) for failures in itertools.count(1))
            return retry_target(
                partial(func, *args, **more),
                self._predicate,
                pauses,
                timeout=self._timeout,
                on_error=self._on_error or on_error,
            )

        return again


class GCSStore:
    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        credentials: Any = None,
        head_timeout: float = 5.0,
        timeout: float = 60.0,
        retry_seconds: float = 120.0,
        first_pause: float = 1.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`credentials` None: the standard chain. Timeouts are seconds without a byte."""
        self.uri = f"gs://{bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._name = bucket
        self._times = {True: head_timeout, False: timeout}
        self._retry = _Retry(_passes, first_pause, LONGEST_PAUSE, timeout=retry_seconds)
        self._chunk_bytes = chunk_bytes
        self._whole = threading.BoundedSemaphore(WHOLE_AT_ONCE)
        self.endpoint = endpoint or GOOGLE
        self._options = {"api_endpoint": endpoint} if endpoint else None
        self._credentials = credentials
        os.environ.setdefault(NO_LOOKUPS, "true")

    @functools.cached_property
    def _client(self) -> Any:
        """Made by the first request. While it has no credentials, each request fails and may be retried."""
        with self._translating(""):
            return storage.Client(NO_PROJECT, self._credentials, client_options=self._options)

    @property
    def _bucket(self) -> Any:
        return self._client.bucket(self._name)

    def get(self, key: str) -> Object | None:
        blob = self._blob(key)
        try:
            with self._translating(key):
                body = blob.download_as_bytes(**self._patience(key))
        except KeyMissing:
            return None
        return Object(body=body, etag=str(blob.generation))

    def put(self, key: str, body: Body) -> None:
        self._put(key, body, None)

    def put_if_absent(self, key: str, body: Body) -> str:
        write_id = secrets.token_hex(8)
        try:
            return self._put(key, body, 0, write_id)
        except PreconditionFailed:
            return self._etag_of_own(key, write_id)

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        # HEAD is tried once; `checkpoint.head` handles a lost response itself.
        write_id = "" if key == HEAD_KEY else secrets.token_hex(8)
        try:
            return self._put(key, body, int(etag), write_id)
        except PreconditionFailed:
            found = self._look(key)
            if found is None:
                raise KeyMissing(self._place(key)) from None
            if write_id and (found.metadata or {}).get(WRITE_ID) == write_id:
                return str(found.generation)
            raise

    def upload(
        self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never
    ) -> builtins.list[str]:
        view, write_id = body.cast("B"), secrets.token_hex(8)
        blob = self._blob(key, write_id)
        blob.chunk_size = self._chunk_bytes
        sent = RequestBody(view, cancelled, exact=True)
        with ThreadPoolExecutor(1, thread_name_prefix="spottrain-digest") as pool:
            hashed = pool.submit(digests, view, self._chunk_bytes)
            try:
                with self._translating(key):
                    self._stream(blob, sent, cancelled, if_generation_match=0)
            except (PreconditionFailed, KeyMissing):  # KeyMissing: the session is gone
                self._etag_of_own(key, write_id)
            except Stopped:
                raise Cancelled(key) from None
            return hashed.result()

    def put_part(self, key: str, part: FilePart, *, cancelled: Callable[[], bool] = never) -> None:
        """Sends PART_WINDOW at a time. The library checks no SHA-256: `VerifiedPartBody` does."""
        blob = self._blob(key)
        blob.chunk_size = PART_WINDOW
        waits = self._whole if PART_WINDOW < part.bytes <= LARGEST_WHOLE else contextlib.nullcontext()
        try:
            with waits, self._translating(key):
                self._stream(blob, VerifiedPartBody(part, cancelled), cancelled)
        except FileChanged:
            raise Changed(key) from None
        except Stopped:
            raise Cancelled(key) from None
        except KeyMissing as error:  # the session has ended
            raise StoreUnavailable(f"{self._place(key)}: the upload's session has ended") from error

    def read_into(self, key: str, offset: int, *buffers: memoryview, hashed: bool = False) -> str:
        filling, blob = Filling(buffers, hashed=hashed), self._blob(key)
        end = offset + filling.left
        while filling.left:
            start = end - filling.left
            size = min(READ_WINDOW, filling.left)
            with self._translating(key):
                body = blob.download_as_bytes(
                    start=start,
                    end=start + size - 1,
                    checksum=None,
                    single_shot_download=True,
                    **self._patience(key),
                )
            if len(body) != size:
                raise Truncated(f"{self._place(key)} ends at byte {start + len(body)}")
            filling.read(io.BytesIO(body).readinto)
        return filling.sha256

    def stat(self, key: str) -> Stat | None:
        found = self._look(key)
        if found is None:
            return None
        # Objects of the class ARCHIVE, too, can be read at once.
        return Stat(
            bytes=int(found.size),
            storage_class=str(found.storage_class),
            archived=False,
            restoring=False,
            modified=seconds(found.updated),
        )

    def sweep_uploads(self, prefix: str, doomed: Callable[[str], bool]) -> builtins.list[str]:
        """Nothing to do: unfinished sessions expire by themselves."""
        return []

    def list(self, prefix: str) -> builtins.list[str]:
        with self._translating(""):
            found = self._client.list_blobs(self._bucket, prefix=self._prefix + prefix, **self._patience(""))
            return [blob.name.removeprefix(self._prefix) for blob in found]

    def folders(self, prefix: str) -> builtins.list[str]:
        with self._translating(""):
            found = self._client.list_blobs(
                self._bucket, prefix=self._prefix + prefix, delimiter="/", **self._patience("")
            )
            for _ in found.pages:  # each adds to `prefixes`
                pass
            return sorted(name.removeprefix(self._prefix) for name in found.prefixes)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(KeyMissing), self._translating(key):
                self._blob(key).delete(**self._patience(key))

    def probe(self) -> None:
        probe_conditions(
            self,
            self._place,
            absent="ifGenerationMatch=0",
            match="ifGenerationMatch",
            instead="Google Cloud Storage itself",
        )

    def _put(self, key: str, body: Body, generation: int | None, write_id: str = "") -> str:
        blob = self._blob(key, write_id)
        content = body if isinstance(body, bytes) else bytes(body)
        with self._translating(key):
            blob.upload_from_string(content, if_generation_match=generation, **self._patience(key))
        return str(blob.generation)

    def _stream(self, blob: Any, body: Any, cancelled: Callable[[], bool], **condition: int) -> None:
        retry = self._retry.with_predicate(lambda error: _passes(error) and not cancelled())
        blob.upload_from_file(
            body, size=len(body), timeout=(5.0, self._times[False]), retry=retry, **condition
        )

    def _etag_of_own(self, key: str, write_id: str) -> str:
        """Returns the ETag if an earlier try of the same write created the object.

        Called after a refused creation. Raises AlreadyExists if another writer created it."""
        found = self._look(key)
        if found is None:
            raise StoreUnavailable(
                f"{self._place(key)}: another write is in progress, or the upload's session has "
                "ended; try again"
            )
        if (found.metadata or {}).get(WRITE_ID) != write_id:
            raise AlreadyExists(self._place(key))
        return str(found.generation)

    def _look(self, key: str) -> Any:
        """Returns the blob with its metadata, or None."""
        blob = self._blob(key)
        try:
            with self._translating(key):
                blob.reload(**self._patience(key))
        except KeyMissing:
            return None
        return blob

    def _blob(self, key: str, write_id: str = "") -> Any:
        blob = self._bucket.blob(self._prefix + key)
        if write_id:
            blob.metadata = {WRITE_ID: write_id}
        return blob

    def _patience(self, key: str) -> dict[str, Any]:
        """Timeout and retry. HEAD is tried once: `checkpoint.head` handles a lost response itself."""
        head = key == HEAD_KEY
        return {"timeout": (5.0, self._times[head]), "retry": None if head else self._retry}

    def _place(self, key: str) -> str:
        return f"gs://{self._name}/{self._prefix}{key}"

    @contextlib.contextmanager
    def _translating(self, key: str) -> Iterator[None]:
        """Translates the library's exceptions to the store's."""
        place = self._place(key)
        try:
            yield
        except FAILURES as error:
            cause = error.cause if isinstance(error, api.RetryError) and error.cause else error
            if isinstance(cause, api.NotFound) and key:
                next(iter(self.list(key)), None)  # raises if it is the bucket that is missing
                raise KeyMissing(place) from error
            raise _translated(cause, place) from error


def _passes(error: Exception) -> bool:
    """Whether a retry may succeed, by the library's private predicate: its public one lacks upload errors."""
    response = getattr(error, "response", None)
    if response is not None:
        with contextlib.suppress(requests.RequestException):
            _ = response.content  # the library leaves the connection of a refused download open
    return bool(DEFAULT_RETRY._predicate(error))


def _translated(error: BaseException, place: str) -> Exception:
    if isinstance(error, api.GoogleAPICallError):
        return _from_reply(error, f"{place}: {error.code} {error.message}")
    if isinstance(error, auth.GoogleAuthError) and not isinstance(error, auth.TransportError):
        if _may_come(error):
            return StoreUnavailable(f"no credentials for {place} yet: {error}; if this lasts, {IDENTITY}")
        return StoreDenied(f"no credentials for {place} ({error}); {IDENTITY}")
    if isinstance(error, requests.exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return ConfigurationError(
            f"the certificate for {place} is not trusted ({error}); name the file with its CA in "
            "REQUESTS_CA_BUNDLE"
        )
    if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.MissingSchema):
        return ConfigurationError(f"{place} cannot be used: {error}; check the endpoint")
    return StoreUnavailable(f"{place} did not respond: {error}")


def _may_come(error: auth.GoogleAuthError) -> bool:
    """Whether what issues credentials, such as a node's metadata server, does not respond yet."""
    unreachable = isinstance(error.__cause__, auth.TransportError) or error.retryable
    named = not METADATA_SERVER.isdisjoint(os.environ)
    return unreachable or (named and isinstance(error, auth.DefaultCredentialsError))


def _from_reply(error: api.GoogleAPICallError, what: str) -> Exception:
    match int(error.code or 0):
        case 409 | 412:
            return PreconditionFailed(what)
        case 416:
            return Truncated(what)
        case 401 | 403:
            return StoreDenied(f"the store denied {what}; check the identity of this pod, and {POLICY}")
        case 404:
            return BucketNotFound(f"the bucket does not exist: {what}; create it, or check the URI")
        case status if status in (408, 429) or status >= 500 or not status:
            return StoreUnavailable(f"the store failed: {what}")
    return ConfigurationError(f"the store refused {what}; check the URI and the endpoint")
