"""Store in an S3 bucket. boto3 is used only here, in `s3_client` and in `s3_errors`.

If the first try of a conditional PUT succeeded but its response was lost, the retry fails on its own
condition. So each conditional PUT carries a write ID, which distinguishes this from another writer.
"""

from __future__ import annotations

import builtins
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from botocore.exceptions import ClientError

from spottrain.contract import CHUNK_BYTES, HEAD_KEY
from spottrain.errors import StoreUnavailable
from spottrain.storage import requests as ways
from spottrain.storage.base import (
    AlreadyExists,
    Body,
    KeyMissing,
    Object,
    PreconditionFailed,
    Stat,
    Truncated,
    never,
)
from spottrain.storage.requests import SLICE, RequestBody, probe_conditions, tried
from spottrain.storage.s3_client import clients
from spottrain.storage.s3_errors import FAILURES, RequestTarget, translate
from spottrain.storage.s3_upload import WRITE_ID, Upload, checksum

DELETE_BATCH: Final = 1000
"""Keys per DeleteObjects request (S3 API limit)."""
DEFAULT_KEY: Final = "default"
"""`kms_key` value for the account's own key."""
ARCHIVES: Final = frozenset({"GLACIER", "DEEP_ARCHIVE"})


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
        client = self._clients.quick if key == HEAD_KEY else self._clients.steady

        def read() -> Object:
            reply = self._ask(client, "get_object", key, {})
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
            with contextlib.suppress(AlreadyExists):
                return self.own(key, write_id)
            raise refused

    def upload(
        self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never
    ) -> builtins.list[str]:
        return Upload(self, key, body.cast("B"), cancelled).run()

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        left = buffer.cast("B")
        done = 0

        def read() -> None:  # resumes where the last body ended early
            nonlocal done
            for count in self._stream(key, offset + done, left[done:]):
                done += count

        if left:
            self._again(read)

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
        )

    def sweep_uploads(self, prefix: str, doomed: Callable[[str], bool]) -> builtins.list[str]:
        swept = [(key, upload) for key, upload in self._uploads(prefix) if doomed(key)]
        for key, upload in swept:
            with contextlib.suppress(KeyMissing):  # it has already ended
                self.call("abort_multipart_upload", key, UploadId=upload)
        return [key for key, _ in swept]

    def list(self, prefix: str) -> builtins.list[str]:
        return [key for page in self._pages(prefix) for key in page]

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

    def _put(self, key: str, body: Body, write_id: str, **condition: str) -> str:
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

    def _stream(self, key: str, start: int, view: memoryview) -> Iterator[int]:
        """Fills the view from byte `start` of the object; yields the number of bytes of each read."""
        wanted = f"bytes={start}-{start + len(view) - 1}"
        reply = self.ask_bulk("get_object", key, Range=wanted)
        with contextlib.closing(reply["Body"]) as body:
            if reply["ContentLength"] != len(view) or start != _first_byte(reply):
                raise Truncated(f"{self._place(key)}: asked for {wanted}, got {reply.get('ContentRange')}")
            at = 0
            while at < len(view):
                try:
                    count = body.readinto(view[at : at + SLICE])
                except FAILURES as error:
                    raise translate(error, self._place(key)) from error
                if not count:
                    raise StoreUnavailable(f"{self._place(key)}: the response ended early")
                at += count
                yield count

    def abort_all(self, key: str) -> None:
        self.sweep_uploads(key, lambda found: found == key)

    def _uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yields key and upload ID of each unfinished upload."""
        for reply in self._replies("list_multipart_uploads", prefix, "KeyMarker", "UploadIdMarker"):
            for item in reply.get("Uploads", ()):
                yield item["Key"].removeprefix(self._prefix), item["UploadId"]

    def _pages(self, prefix: str) -> Iterator[builtins.list[str]]:
        for reply in self._replies("list_objects_v2", prefix, "ContinuationToken"):
            yield [item["Key"].removeprefix(self._prefix) for item in reply.get("Contents", ())]

    def _replies(self, operation: str, prefix: str, *markers: str) -> Iterator[Any]:
        """Yields the replies of a listing; `markers` are the parameters with which it goes on."""
        following: dict[str, str] = {}
        while True:
            reply = self.call(operation, None, Prefix=self._prefix + prefix, **following)
            yield reply
            if not reply.get("IsTruncated"):
                return
            following = {name: reply[f"Next{name}"] for name in markers}

    def call(self, operation: str, key: str | None, **parameters: Any) -> Any:
        if key == HEAD_KEY:
            return self._ask(self._clients.quick, operation, key, parameters)
        return self._again(lambda: self._ask(self._clients.steady, operation, key, _rewound(parameters)))

    def _again(self, act: Callable[[], Any]) -> Any:
        """Retries without the SDK: its pauses draw from Python's random state, which is the training's."""
        return tried(act, self.tries, lambda failures: time.sleep(self.pause(failures)))

    def ask_bulk(self, operation: str, key: str, **parameters: Any) -> Any:
        return self._ask(self._clients.bulk, operation, key, parameters)

    def _ask(self, client: Any, operation: str, key: str | None, parameters: dict[str, Any]) -> Any:
        if key:
            parameters["Key"] = self._prefix + key
        try:
            return getattr(client, operation)(Bucket=self._bucket, **parameters)
        except FAILURES as error:
            raise translate(error, self._place(key or "")) from error

    def _place(self, key: str) -> RequestTarget:
        return RequestTarget(bucket=self._bucket, key=self._prefix + key, endpoint=self._clients.endpoint)


def _encryption(kms_key: str | None) -> dict[str, str]:
    if kms_key is None:
        return {}
    return {"ServerSideEncryption": "aws:kms"} | ({} if kms_key == DEFAULT_KEY else {"SSEKMSKeyId": kms_key})


def _rewound(parameters: dict[str, Any]) -> dict[str, Any]:
    body: Any = parameters.get("Body")
    if hasattr(body, "seek"):
        body.seek(0)
    return dict(parameters)


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
