"""Bodies, plans of the fault proxy, and judgements that the tests of S3's large bodies share."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator

from spottrain.storage.s3 import S3Store

from tests.support.faultproxy import Fault, FaultProxy, Plan, Request, Treatment

CHUNK = 5 * 2**20
"""S3's least part."""
BODY = random.Random(4).randbytes(2 * CHUNK + 1000)
SMALL = BODY[:1000]
DIGESTS = [hashlib.sha256(BODY[at : at + CHUNK]).hexdigest() for at in range(0, len(BODY), CHUNK)]
BODY_SECONDS = 1.0
"""Time-out of the stores behind the proxy."""

Match = Callable[[Request], bool]


def is_create(request: Request) -> bool:
    return request.method == "POST" and request.path.endswith("?uploads")


def is_part(request: Request) -> bool:
    return request.method == "PUT" and "partNumber=" in request.path


def is_complete(request: Request) -> bool:
    return request.method == "POST" and "uploadId=" in request.path


def is_abort(request: Request) -> bool:
    return request.method == "DELETE" and "uploadId=" in request.path


def is_put(request: Request) -> bool:
    return request.method == "PUT" and "partNumber=" not in request.path


def is_get(request: Request) -> bool:
    return request.method == "GET" and "range" in request.headers


def first(count: int, which: Match, treatment: Treatment) -> Plan:
    """`treatment` for the first so many requests that match."""
    lock, seen = threading.Lock(), [0]

    def plan(request: Request) -> Treatment:
        with lock:
            seen[0] += which(request)
            hit = which(request) and seen[0] <= count
        return treatment if hit else Treatment()

    return plan


ALWAYS = 10**6
LOST = [Fault.REPLY_LOST, Fault.REPLY_CUT, Fault.REPLY_HANGS, Fault.REPLY_STALLS, Fault.ERROR_AFTER]
NOT_DONE = [Fault.ERROR_500, Fault.ERROR_503, Fault.REQUEST_LOST, Fault.REQUEST_CUT]


def requests(proxy: FaultProxy) -> Iterator[Request]:
    return (exchange.request for exchange in list(proxy.exchanges))


def unfinished(it: S3Store) -> list[str]:
    seen: list[str] = []

    def see(key: str) -> bool:
        seen.append(key)
        return False

    it.sweep_uploads("", see)
    return seen


def assert_whole(it: S3Store, body: bytes = BODY) -> None:
    found = it.get("k")
    assert found is not None and found.body == body
    assert unfinished(it) == []


def assert_absent(it: S3Store) -> None:
    assert it.stat("k") is None
    assert unfinished(it) == []
