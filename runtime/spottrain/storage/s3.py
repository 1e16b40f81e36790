"""Store in an S3 bucket. boto3 is used only here, in `s3_client` and in `s3_errors`.

If the first try of a conditional PUT succeeded but its response was lost, the retry fails on its own
condition. So each conditional PUT carries a write ID, which distinguishes this from another writer.

A part's SHA-256 is computed once, in the thread that sends it: S3 checks it, and the manifest stores it. A
response of CompleteMultipartUpload may be lost, or be an error although the object was created. The write ID
in the object's metadata then shows whether the object is ours.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

from botocore.exceptions import ClientError

from spottrain.contract import CHUNK_BYTES, HEAD_KEY
from spottrain.core import log
from spottrain.errors import RunError, StoreUnavailable
from spottrain.storage import requests as ways
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
    SLICE,
    FileChanged,
    Filling,
    PartBody,
    RequestBody,
    Stopped,
    digests,
    probe_conditions,
    seconds,
    slices,
    tried,
)
from spottrain.storage.s3_client import clients
from spottrain.storage.s3_errors import FAILURES, RequestTarget, translate

DELETE_BATCH: Final = 1000
"""Keys per DeleteObjects request (S3 API limit)."""
DEFAULT_KEY: Final = "default"
"""`kms_key` value for the account's own key."""
S3_KEYS: Final = "AES256"
"""`kms_key` value for S3's own keys (SSE-S3), which a bucket policy may demand to be named."""
ARCHIVES: Final = frozenset({"GLACIER", "DEEP_ARCHIVE"})
WRITE_ID: Final = "spottrain-write"
"""User metadata key that identifies the writer of an object."""
MAX_PARTS: Final = 9000
"""S3's limit is 10,000."""
POLL_SECONDS: Final = 0.05
"""How often `cancelled` is polled."""
STOP_SECONDS: Final = 2.0
"""How long a failed or cancelled upload waits for its parts in progress before it aborts."""


class S3Store:
    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        path_style: bool | None = None,
        kms_key: str | None = None,
        head_timeout: float = 5.0,
        timeout: float = 60.0,
        tries: int = 5,
        connections: int = 8,
        chunk_bytes: int = CHUNK_BYTES,
        pause: Callable[[int], float] = ways.pause,
    ) -> None:
        """Timeouts are seconds without a byte; `connections` are those of one upload; `pause(failures)` gives
        the seconds before the next try."""
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._clients = clients(
            self.uri, endpoint=endpoint, path_style=path_style, head_timeout=head_timeout, timeout=timeout
        )
        self.encryption = _encryption(kms_key)
        self.tries = tries
        self.connections = connections
        self.chunk_bytes = chunk_bytes
        self.pause = pause

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def endpoint(self) -> str:
        return self._clients.endpoint

    def get(self, key: str) -> Object | None:
        def read() -> Object:
            reply = self.ask("get_object", key)
            try:
                return Object(body=reply["Body"].read(), etag=reply["ETag"])
            except FAILURES as error:
                raise translate(error, self._place(key)) from error

        with contextlib.suppress(KeyMissing):
            return read() if key == HEAD_KEY else self._again(read)
        return None

    def put(self, key: str, body: Body) -> None:
        self.call("put_object", key, **_sent(body), **self.encryption)

    def put_if_absent(self, key: str, body: Body) -> str:
        write_id = secrets.token_hex(8)
        try:
            return self._put(key, body, write_id, IfNoneMatch="*")
        except PreconditionFailed:
            return self.own(key, write_id)

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        write_id = secrets.token_hex(8)
        try:
            return self._put(key, body, write_id, IfMatch=etag)
        except PreconditionFailed as refused:
            if key == HEAD_KEY:  # tried once; `checkpoint.head` handles a lost response itself
                raise
            if self.stat(key) is None:  # servers refuse with 404 or 412
                raise KeyMissing(str(self._place(key))) from refused
            with contextlib.suppress(AlreadyExists):
                return self.own(key, write_id)
            raise refused

    def upload(
        self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never
    ) -> builtins.list[str]:
        return Upload(self, key, body.cast("B"), cancelled).run()

    def put_part(self, key: str, part: FilePart, *, cancelled: Callable[[], bool] = never) -> None:
        small = part.bytes <= SLICE  # as in `_sent`

        def put() -> None:
            body = bytearray(b"".join(slices(part))) if small else PartBody(part, cancelled)
            if cancelled():
                raise Stopped
            digest = _base64(part.sha256)
            self.ask("put_object", key, Body=body, ChecksumSHA256=digest, **self.encryption)

        try:
            self._again(put)
        except FileChanged:
            raise Changed(key) from None
        except Stopped:
            raise Cancelled(key) from None

    def read_into(self, key: str, offset: int, *buffers: memoryview, hashed: bool = False) -> str:
        filling = Filling(buffers, hashed=hashed)
        end = offset + filling.left
        if filling.left:
            self._again(lambda: self._stream(key, end, filling))
        return filling.sha256

    def stat(self, key: str) -> Stat | None:
        try:
            reply = self.call("head_object", key)
        except KeyMissing:
            next(self._pages(key), None)  # raises if the bucket is missing: HEAD gives 404 for both
            return None
        storage_class = str(reply.get("ArchiveStatus") or reply.get("StorageClass") or "STANDARD")
        restore = str(reply.get("Restore", ""))
        shut = storage_class in ARCHIVES and 'ongoing-request="false"' not in restore
        return Stat(
            bytes=int(reply["ContentLength"]),
            storage_class=storage_class,
            archived=shut or bool(reply.get("ArchiveStatus")),
            restoring='ongoing-request="true"' in restore,
            modified=seconds(reply.get("LastModified")),
        )

    def sweep_uploads(self, prefix: str, doomed: Callable[[str], bool]) -> builtins.list[str]:
        swept = [(key, upload) for key, upload in self._uploads(prefix) if doomed(key)]
        for key, upload in swept:
            with contextlib.suppress(KeyMissing):  # it has already ended
                self.call("abort_multipart_upload", key, UploadId=upload)
        return [key for key, _ in swept]

    def list(self, prefix: str) -> builtins.list[str]:
        return [key for page in self._pages(prefix) for key in page]

    def folders(self, prefix: str) -> builtins.list[str]:
        replies = self._replies("list_objects_v2", prefix, "ContinuationToken", Delimiter="/")
        found = [item["Prefix"] for reply in replies for item in reply.get("CommonPrefixes", ())]
        return sorted(name.removeprefix(self._prefix) for name in found)

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETE_BATCH):
            batch = [{"Key": self._prefix + key} for key in keys[start : start + DELETE_BATCH]]
            reply = self.call("delete_objects", "", Delete={"Objects": batch, "Quiet": True})
            for failed in reply.get("Errors", ()):
                error = {"Error": failed, "ResponseMetadata": {"HTTPStatusCode": 200}}
                raise translate(ClientError(error, "DeleteObjects"), self._place(failed["Key"]))

    def probe(self) -> None:
        next(self._pages(""), None)
        probe_conditions(
            self,
            self._place,
            absent="If-None-Match on PUT",
            match="If-Match on PUT",
            instead="a store with conditional writes (AWS S3 and most S3 servers since 2024)",
        )

    def _put(self, key: str, body: Body, write_id: str, **condition: Any) -> str:
        reply = self.call(
            "put_object",
            key,
            **_sent(body),
            Metadata={WRITE_ID: write_id},
            **self.encryption,
            **condition,
        )
        return str(reply["ETag"])

    def own(self, key: str, write_id: str) -> str:
        """Returns the object's ETag if this write created it.

        Raises AlreadyExists if another write did, StoreUnavailable if there is no object.
        """
        try:
            reply = self.call("head_object", key)
        except KeyMissing:
            raise StoreUnavailable(f"{self._place(key)}: another write is under way; try again") from None
        if reply["Metadata"].get(WRITE_ID) != write_id:
            raise AlreadyExists(str(self._place(key)))
        return str(reply["ETag"])

    def _stream(self, key: str, end: int, filling: Filling) -> None:
        """Reads what is missing, so that a retry goes on where the last body ended early."""
        start = end - filling.left
        wanted = f"bytes={start}-{end - 1}"
        reply = self.ask("get_object", key, Range=wanted)
        with contextlib.closing(reply["Body"]) as body:
            if reply["ContentLength"] != filling.left or start != _first_byte(reply):
                raise Truncated(f"{self._place(key)}: asked for {wanted}, got {reply.get('ContentRange')}")
            try:
                filling.read(body.readinto)
            except FAILURES as error:
                raise translate(error, self._place(key)) from error
        if filling.left:
            raise StoreUnavailable(f"{self._place(key)}: the response ended early")

    def _uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yields key and upload ID of each unfinished upload."""
        for reply in self._replies("list_multipart_uploads", prefix, "KeyMarker", "UploadIdMarker"):
            for item in reply.get("Uploads", ()):
                yield item["Key"].removeprefix(self._prefix), item["UploadId"]

    def _pages(self, prefix: str) -> Iterator[builtins.list[str]]:
        for reply in self._replies("list_objects_v2", prefix, "ContinuationToken"):
            yield [item["Key"].removeprefix(self._prefix) for item in reply.get("Contents", ())]

    def _replies(self, operation: str, prefix: str, *markers: str, **more: Any) -> Iterator[Any]:
        """Yields the replies of a listing; `markers` are the parameters with which it goes on."""
        following: dict[str, Any] = {}
        while True:
            reply = self.call(operation, "", Prefix=self._prefix + prefix, **more, **following)
            yield reply
            if not reply.get("IsTruncated"):
                return
            following = {name: reply[f"Next{name}"] for name in markers}

    def call(
        self, operation: str, key: str, *, rest: Callable[[float], None] = time.sleep, **parameters: Any
    ) -> Any:
        """Makes a request, and retries it unless it is HEAD's. `rest` waits some seconds before a retry."""
        if key == HEAD_KEY:
            return self.ask(operation, key, **parameters)
        return self._again(lambda: self.ask(operation, key, **parameters), rest)

    def _again(self, act: Callable[[], Any], rest: Callable[[float], None] = time.sleep) -> Any:
        """Retries without the SDK: its pauses draw from Python's random state, which is the training's."""
        return tried(act, self.tries, lambda failures: rest(self.pause(failures)))

    def ask(self, operation: str, key: str, **parameters: Any) -> Any:
        """Makes one request, without retries."""
        client = self._clients.quick if key == HEAD_KEY else self._clients.steady
        if key:
            parameters["Key"] = self._prefix + key
        if isinstance(body := parameters.get("Body"), RequestBody):
            body.seek(0)
        try:
            return getattr(client, operation)(Bucket=self._bucket, **parameters)
        except FAILURES as error:
            raise translate(error, self._place(key)) from error

    def _place(self, key: str) -> RequestTarget:
        return RequestTarget(bucket=self._bucket, key=self._prefix + key, endpoint=self._clients.endpoint)


def _encryption(kms_key: str | None) -> dict[str, Any]:
    if kms_key is None:
        return {}
    if kms_key == S3_KEYS:
        return {"ServerSideEncryption": S3_KEYS}
    return {"ServerSideEncryption": "aws:kms"} | ({} if kms_key == DEFAULT_KEY else {"SSEKMSKeyId": kms_key})


def _first_byte(reply: Any) -> int:
    """First byte of the returned range; 0 if the server sent the whole object."""
    content_range = str(reply.get("ContentRange", "bytes 0-"))
    return int(content_range.removeprefix("bytes ").split("-", 1)[0])


def _sent(body: Body) -> dict[str, Any]:
    """Returns the body as botocore's parameters.

    A small body is passed as a bytearray, which botocore sends at once. For bytes or a file it asks for
    100-continue first: a round trip, and over TLS an early response may be lost (such as versitygw's 412).
    """
    view = memoryview(body).cast("B")
    sent = RequestBody(view) if len(view) > SLICE else bytearray(view)
    return {"Body": sent, "ChecksumSHA256": checksum(view)}


# --- uploads --------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Upload:
    """One object, in one request or in parts."""

    store: S3Store
    key: str
    body: memoryview
    cancelled: Callable[[], bool]
    _write_id: str = field(default_factory=lambda: secrets.token_hex(8))
    _stop: threading.Event = field(default_factory=threading.Event)

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
        chunks, digest = self._hashed(self.body)
        body: Any = RequestBody(self.body, self.cancelled) if len(self.body) else b""
        self._create("put_object", self._rest, Body=body, ChecksumSHA256=digest, **self._options)
        return chunks

    def _in_parts(self) -> list[str]:
        reply = self.store.call(
            "create_multipart_upload",
            self.key,
            rest=self._rest,
            ChecksumAlgorithm="SHA256",
            **self._options,
        )
        upload_id, confirmed = str(reply["UploadId"]), False
        try:
            sent = self._send(upload_id)
            self._unless_cancelled()
            confirmed = self._create(
                "complete_multipart_upload",
                time.sleep,  # not cancellable once begun: it may already be done
                UploadId=upload_id,
                MultipartUpload={"Parts": [part for part, _ in sent]},
            )
        finally:
            if not confirmed:
                self._abort(upload_id)
        return [digest for _, chunks in sent for digest in chunks]

    def _send(self, upload_id: str) -> list[tuple[dict[str, Any], list[str]]]:
        """Returns for each part what completes the upload, and the digests of its chunks."""
        size = part_bytes(len(self.body), self.store.chunk_bytes)
        starts = range(0, len(self.body), size)
        pool = ThreadPoolExecutor(self.store.connections, thread_name_prefix="spottrain-upload")
        futures = [
            pool.submit(self._part, upload_id, number, self.body[at : at + size])
            for number, at in enumerate(starts, 1)
        ]
        try:
            pending = set(futures)
            while pending:
                self._unless_cancelled()
                done, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
        except BaseException:
            self._stop.set()
            wait(futures, timeout=STOP_SECONDS)
            raise
        finally:
            pool.shutdown(wait=False)
        return [future.result() for future in futures]

    def _part(self, upload_id: str, number: int, view: memoryview) -> tuple[dict[str, Any], list[str]]:
        self._unless_stopped()
        chunks, digest = self._hashed(view)
        part = {"PartNumber": number, "ChecksumSHA256": digest}
        try:
            reply = self.store.call(
                "upload_part",
                self.key,
                rest=self._unless_stopped,
                UploadId=upload_id,
                Body=RequestBody(view, self._stop.is_set),
                **part,
            )
        except KeyMissing as error:
            raise StoreUnavailable(f"another client aborted the upload: {error}; try again") from error
        return {**part, "ETag": reply["ETag"]}, chunks

    def _hashed(self, view: memoryview) -> tuple[list[str], str]:
        """Returns the digests of the chunks, and that of all as S3 wants it."""
        chunks = digests(view, self.store.chunk_bytes)
        return chunks, _base64(chunks[0]) if len(chunks) == 1 else checksum(view)

    def _create(self, operation: str, rest: Callable[[float], None], **parameters: Any) -> bool:
        """Makes the request that creates the object. Returns False if only the object shows that it did.

        Raises AlreadyExists if another's object is there."""
        try:
            self.store.call(operation, self.key, rest=rest, IfNoneMatch="*", **parameters)
            return True
        except (PreconditionFailed, KeyMissing):
            self.store.own(self.key, self._write_id)
        except StoreUnavailable:
            with contextlib.suppress(RunError):
                self.store.own(self.key, self._write_id)
                return False
            raise
        return False

    def _abort(self, upload_id: str) -> None:
        try:
            with contextlib.suppress(KeyMissing):
                self.store.call("abort_multipart_upload", self.key, UploadId=upload_id)
        except RunError as error:
            # Leftovers cost money but are harmless; the next start's sweep finds them.
            log.event("upload-not-aborted", key=self.key, upload=upload_id, error=str(error))

    def _rest(self, seconds: float) -> None:
        """Sleeps in the caller's thread, polling `cancelled`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._unless_cancelled()
            time.sleep(min(left, POLL_SECONDS))

    def _unless_stopped(self, seconds: float = 0.0) -> None:
        """Waits in a worker's thread, until the upload ends at most."""
        if self._stop.wait(seconds):
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
