"""Uploads one object to a bucket, in one request or in parts.

A part's SHA-256 is computed once, in the thread that sends it: S3 checks it, and the manifest stores it. A
response of CompleteMultipartUpload may be lost, or be an error although the object was created. The write ID
in the object's metadata then shows whether the object is ours.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from spottrain.core import log
from spottrain.errors import RunError, StoreUnavailable
from spottrain.storage.base import Cancelled, KeyMissing, PreconditionFailed
from spottrain.storage.requests import RequestBody, Stopped, digests, tried

if TYPE_CHECKING:
    from spottrain.storage.s3 import S3Store

WRITE_ID: Final = "spottrain-write"
"""User metadata key that identifies the writer of an object."""
MAX_PARTS: Final = 9000
"""S3's limit is 10,000."""
POLL_SECONDS: Final = 0.05
"""How often `cancelled` is polled."""
STOP_SECONDS: Final = 2.0
"""How long a failed or cancelled upload waits for its parts in progress before it aborts."""


T = TypeVar("T")


@dataclass(slots=True)
class Upload:
    store: S3Store
    key: str
    body: memoryview
    cancelled: Callable[[], bool]
    _write_id: str = field(default_factory=lambda: secrets.token_hex(8))
    _stop: threading.Event = field(default_factory=threading.Event)
    _parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    _digests: dict[int, list[str]] = field(default_factory=dict)
    _lost: bool = False
    """A creation request got no response, so an upload with an unknown ID may exist."""

    def run(self) -> list[str]:
        """Uploads and returns the digests. Call it once."""
        try:
            if len(self.body) <= self.store.chunk_bytes:
                return self._whole()
            return self._in_parts()
        except Stopped:
            raise Cancelled(self.key) from None

    @property
    def _options(self) -> dict[str, Any]:
        """Metadata and encryption of the new object."""
        return {"Metadata": {WRITE_ID: self._write_id}, **self.store.encryption}

    def _whole(self) -> list[str]:
        digest = checksum(self.body)

        def put() -> None:
            body: Any = RequestBody(self.body, self._unless_cancelled) if len(self.body) else b""
            self.store.ask_bulk(
                "put_object", self.key, Body=body, ChecksumSHA256=digest, IfNoneMatch="*", **self._options
            )

        try:
            self._tried(put, self._rest)
        except PreconditionFailed:
            self.store.own(self.key, self._write_id)
        except StoreUnavailable:
            if not self._arrived():
                raise
        return digests(self.body, self.store.chunk_bytes)

    def _in_parts(self) -> list[str]:
        left = ""
        try:
            left = upload_id = self._tried(self._create, self._rest)
            self._send(upload_id)
            self._unless_cancelled()
            if self._complete(upload_id):
                left = ""
        finally:
            self._clear(left)
        return [digest for number in sorted(self._digests) for digest in self._digests[number]]

    def _create(self) -> str:
        try:
            reply = self.store.ask_bulk(
                "create_multipart_upload", self.key, ChecksumAlgorithm="SHA256", **self._options
            )
        except StoreUnavailable:
            self._lost = True
            raise
        return str(reply["UploadId"])

    def _send(self, upload_id: str) -> None:
        size = part_bytes(len(self.body), self.store.chunk_bytes)
        starts = range(0, len(self.body), size)
        todo = deque((number, self.body[at : at + size]) for number, at in enumerate(starts, 1))
        workers = min(self.store.connections, len(todo))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="spottrain-upload")
        futures = [pool.submit(self._work, upload_id, todo) for _ in range(workers)]
        try:
            self._watch(futures)
        except BaseException:
            self._stop.set()
            wait(futures, timeout=STOP_SECONDS)
            raise
        finally:
            pool.shutdown(wait=False)

    def _watch(self, futures: list[Future[None]]) -> None:
        pending = set(futures)
        while pending:
            self._unless_cancelled()
            done, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()

    def _work(self, upload_id: str, todo: deque[tuple[int, memoryview]]) -> None:
        """Worker of one connection: sends the next part until none is left."""
        while True:
            self._unless_stopped()
            try:
                number, view = todo.popleft()
            except IndexError:
                return
            self._part(upload_id, number, view)

    def _part(self, upload_id: str, number: int, view: memoryview) -> None:
        chunk_bytes = self.store.chunk_bytes
        self._digests[number] = digests(view, chunk_bytes)
        one = len(view) <= chunk_bytes
        digest = _base64(self._digests[number][0]) if one else checksum(view)

        def put() -> Any:
            return self.store.ask_bulk(
                "upload_part",
                self.key,
                UploadId=upload_id,
                PartNumber=number,
                Body=RequestBody(view, self._unless_stopped),
                ChecksumSHA256=digest,
            )

        try:
            reply = self._tried(put, self._rest_of_worker)
        except KeyMissing as error:
            raise StoreUnavailable(f"another client aborted the upload: {error}; try again") from error
        self._parts[number] = {"PartNumber": number, "ETag": reply["ETag"], "ChecksumSHA256": digest}

    def _complete(self, upload_id: str) -> bool:
        """Returns whether S3 confirmed the completion; False if only the object shows it."""
        parts = {"Parts": [self._parts[number] for number in sorted(self._parts)]}

        def complete() -> None:
            self.store.ask_bulk(
                "complete_multipart_upload",
                self.key,
                UploadId=upload_id,
                IfNoneMatch="*",
                MultipartUpload=parts,
            )

        try:
            self._tried(complete, time.sleep)  # not cancellable once begun: it may already be done
            return True
        except (PreconditionFailed, KeyMissing):
            self.store.own(self.key, self._write_id)
        except StoreUnavailable:
            if not self._arrived():
                raise
        return False

    def _arrived(self) -> bool:
        """After a missing response: whether our object is at the key. Raises AlreadyExists for another's."""
        with contextlib.suppress(RunError):
            self.store.own(self.key, self._write_id)
            return True
        return False

    def _clear(self, left: str) -> None:
        """Aborts what is left of the upload, or of a creation whose response was lost."""
        try:
            if left:
                self._tried(lambda: self._abort(left), time.sleep)
            if self._lost:
                self.store.abort_all(self.key)
        except RunError as error:
            # Leftovers cost money but are harmless; the next start's sweep finds them.
            log.event("upload-not-aborted", key=self.key, upload=left or None, error=str(error))

    def _abort(self, upload_id: str) -> None:
        with contextlib.suppress(KeyMissing):
            self.store.ask_bulk("abort_multipart_upload", self.key, UploadId=upload_id)

    def _tried(self, act: Callable[[], T], rest: Callable[[float], None]) -> T:
        return tried(act, self.store.tries, lambda failures: rest(self.store.pause(failures)))

    def _rest(self, seconds: float) -> None:
        """Sleeps in the caller's thread, polling `cancelled`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._unless_cancelled()
            time.sleep(min(left, POLL_SECONDS))

    def _rest_of_worker(self, seconds: float) -> None:
        self._stop.wait(seconds)
        self._unless_stopped()

    def _unless_stopped(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _unless_cancelled(self) -> None:
        if self.cancelled():
            raise Stopped


def part_bytes(total: int, chunk_bytes: int) -> int:
    """Returns the smallest multiple of `chunk_bytes` that splits `total` into at most MAX_PARTS."""
    chunks = -(-total // chunk_bytes)
    return max(1, -(-chunks // MAX_PARTS)) * chunk_bytes


def checksum(view: memoryview) -> str:
    return base64.b64encode(hashlib.sha256(view).digest()).decode()


def _base64(digest: str) -> str:
    return base64.b64encode(bytes.fromhex(digest)).decode()
