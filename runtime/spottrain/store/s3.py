"""A store in an S3 bucket. Opened by `store.open`; with `s3errors.py` the only modules that know boto3.

HEAD has a client of its own: one try, short time-outs, because `owner.py` resolves what a lost reply leaves
open, and a spot notice may leave 15 seconds. Everything else is retried by the SDK. A retried PUT whose
first try had arrived is refused by its own condition, so each conditional PUT carries an id, by which that
is told from another writer.
"""

from __future__ import annotations

import builtins
import io
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from spottrain.contract import HEAD_KEY
from spottrain.errors import ConfigurationError, StoreUnavailable, StoreUnsuitable
from spottrain.store import AlreadyExists, Body, KeyMissing, Object, PreconditionFailed
from spottrain.store.s3errors import FAILURES, Place, translate

WRITE_ID: Final = "spottrain-write"
"""User metadata that names the writer of an object."""
DELETE_BATCH: Final = 1000
"""Keys per DeleteObjects request (S3 API limit)."""
READ_TRIES: Final = 3
"""GETs of one object: the SDK retries the request, but not a body that breaks off."""


class S3Store:
    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        head_timeout: float = 5.0,
        timeout: float = 60.0,
        tries: int = 5,
    ) -> None:
        """Credentials and region come from the SDK's standard chain. Time-outs are seconds without a byte."""
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        try:
            session = Session()
            self._steady = _client(session, endpoint, timeout, tries)
            self._quick = _client(session, endpoint, head_timeout, 1)
        except (BotoCoreError, ValueError) as error:  # unknown profile or region, a URL that is none
            raise ConfigurationError(
                f"no client for s3://{bucket}/{prefix} at {endpoint or 'AWS'}: {error}; check the endpoint "
                "and the AWS_... variables"
            ) from error
        self._endpoint = str(self._steady.meta.endpoint_url)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def get(self, key: str) -> Object | None:
        for _ in range(READ_TRIES - 1 if key != HEAD_KEY else 0):
            try:
                return self._get(key)
            except StoreUnavailable:
                continue
        return self._get(key)

    def put(self, key: str, body: Body) -> None:
        self._call("put_object", key, Body=_sendable(body))

    def put_if_absent(self, key: str, body: Body) -> str:
        write_id = secrets.token_hex(8)
        try:
            return self._put(key, body, write_id, IfNoneMatch="*")
        except PreconditionFailed:
            return self._etag_of_own(key, write_id)

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        return self._put(key, body, secrets.token_hex(8), IfMatch=etag)

    def list(self, prefix: str) -> builtins.list[str]:
        return [key for page in self._pages(prefix) for key in page]

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETE_BATCH):
            batch = [{"Key": self._prefix + key} for key in keys[start : start + DELETE_BATCH]]
            reply = self._call("delete_objects", "", Delete={"Objects": batch, "Quiet": True})
            for failed in reply.get("Errors", ()):
                error = {"Error": failed, "ResponseMetadata": {"HTTPStatusCode": 200}}
                raise translate(ClientError(error, "DeleteObjects"), self._place(failed["Key"]))

    def probe(self) -> None:
        next(self._pages(""), None)
        key = f"probe-{secrets.token_hex(8)}"
        try:
            self._probe_conditions(key)
        finally:
            self.delete([key])

    def _probe_conditions(self, key: str) -> None:
        first = self.put_if_absent(key, b"1")
        self.put_if_match(key, b"2", first)
        writes: dict[str, Callable[[], str]] = {
            "If-None-Match": lambda: self.put_if_absent(key, b"3"),
            "If-Match": lambda: self.put_if_match(key, b"4", first),
        }
        for name, write in writes.items():
            try:
                write()
            except (AlreadyExists, PreconditionFailed):
                continue
            raise StoreUnsuitable(
                f"{self._place(key)} ignores {name} on PUT, so two attempts could overwrite each other's "
                "checkpoints; use a store with conditional writes (AWS S3 and most S3 servers since 2024)"
            )

    def _get(self, key: str) -> Object | None:
        try:
            reply = self._call("get_object", key)
            return Object(body=reply["Body"].read(), etag=reply["ETag"])
        except KeyMissing:
            return None
        except FAILURES as error:
            raise translate(error, self._place(key)) from error

    def _put(self, key: str, body: Body, write_id: str, **condition: str) -> str:
        reply = self._call(
            "put_object", key, Body=_sendable(body), Metadata={WRITE_ID: write_id}, **condition
        )
        return str(reply["ETag"])

    def _etag_of_own(self, key: str, write_id: str) -> str:
        """After a refused If-None-Match: whether it was an earlier try of the same write that got there."""
        try:
            reply = self._call("get_object", key)
        except KeyMissing:
            raise StoreUnavailable(f"{self._place(key)}: another write is under way; try again") from None
        reply["Body"].close()
        if reply["Metadata"].get(WRITE_ID) != write_id:
            raise AlreadyExists(str(self._place(key)))
        return str(reply["ETag"])

    def _pages(self, prefix: str) -> Iterator[builtins.list[str]]:
        token: dict[str, str] = {}
        while True:
            reply = self._call("list_objects_v2", None, Prefix=self._prefix + prefix, **token)
            yield [item["Key"].removeprefix(self._prefix) for item in reply.get("Contents", ())]
            if not reply.get("IsTruncated"):
                return
            token = {"ContinuationToken": reply["NextContinuationToken"]}

    def _call(self, operation: str, key: str | None, **parameters: Any) -> Any:
        client = self._quick if key == HEAD_KEY else self._steady
        if key:
            parameters["Key"] = self._prefix + key
        try:
            return getattr(client, operation)(Bucket=self._bucket, **parameters)
        except FAILURES as error:
            raise translate(error, self._place(key or "")) from error

    def _place(self, key: str) -> Place:
        return Place(bucket=self._bucket, key=self._prefix + key, endpoint=self._endpoint)


def _client(session: Session, endpoint: str | None, timeout: float, tries: int) -> Any:
    config = Config(
        connect_timeout=min(timeout, 5.0),
        read_timeout=timeout,
        retries={"mode": "standard", "total_max_attempts": tries},
        max_pool_connections=32,
        tcp_keepalive=True,
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    return session.client("s3", endpoint_url=endpoint, config=config)


def _sendable(body: Body) -> Any:
    """What botocore takes as a body; a memoryview (a slice of a pinned buffer) is not copied."""
    return io.BufferedReader(_View(body), buffer_size=1 << 20) if isinstance(body, memoryview) else body


class _View(io.RawIOBase):
    """A memoryview as a seekable file."""

    def __init__(self, view: memoryview) -> None:
        self._view = view.cast("B")
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
