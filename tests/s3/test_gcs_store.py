"""GCSStore against fake-gcs-server: the same promises as the S3 store, kept by generations.

What the fake cannot show is answered by the proxy instead: permissions, and the words of Google's 404.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials
from spottrain.errors import (
    BucketNotFound,
    ConfigurationError,
    StoreDenied,
    StoreUnavailable,
    StoreUnsuitable,
)
from spottrain.storage.base import (
    AlreadyExists,
    Cancelled,
    Changed,
    FilePart,
    KeyMissing,
    Object,
    Truncated,
)
from spottrain.storage.gcs import LARGEST_WHOLE, PART_WINDOW, WHOLE_AT_ONCE, GCSStore
from spottrain.storage.open import open_store
from spottrain.sync.upload import CONNECTIONS

from tests.support import gcsserver, storepromises
from tests.support.faultproxy import Fault, FaultProxy, Plan, Request, Treatment, error
from tests.support.gcsserver import GcsServer

CHUNK = 3 * 2**20
BODY = random.Random(5).randbytes(3 * CHUNK + 1000)
"""Above 8 MiB, where the library begins a resumable session."""
SMALL = BODY[:1000]
DIGESTS = [hashlib.sha256(BODY[at : at + CHUNK]).hexdigest() for at in range(0, len(BODY), CHUNK)]


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    """Before its server, whose URLs of upload sessions lead through it."""
    with FaultProxy(0).running() as it:
        yield it


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory, proxy: FaultProxy) -> Iterator[GcsServer]:
    with gcsserver.running(tmp_path_factory.mktemp("gcs"), public_port=proxy.ports[0]) as it:
        proxy.upstream_port = it.port
        yield it


@pytest.fixture
def pail(gcs: GcsServer, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    name = tmp_path.name.replace("_", "-").lower()[:50]
    gcs.make_bucket(name)
    proxy.reset(lambda request: Treatment())
    return name


def opened(bucket: str, endpoint: str) -> GCSStore:
    return GCSStore(
        bucket,
        "p",
        endpoint=endpoint,
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
        head_timeout=0.5,
        timeout=3.0,
        retry_seconds=6.0,
        first_pause=0.01,
        chunk_bytes=CHUNK,
    )


@pytest.fixture
def direct(gcs: GcsServer, pail: str) -> Iterator[GCSStore]:
    it = opened(pail, gcs.endpoint)
    yield it
    it._client.close()


@pytest.fixture
def proxied(proxy: FaultProxy, pail: str) -> Iterator[GCSStore]:
    it = opened(pail, proxy.endpoint())
    yield it
    it._client.close()


def first(count: int, method: str, treatment: Treatment, path: str = "") -> Plan:
    """`treatment` for the first so many requests of this method."""
    lock, seen = threading.Lock(), [0]

    def plan(request: Request) -> Treatment:
        hit = method in ("", request.method) and path in request.path
        with lock:
            seen[0] += hit
            return treatment if hit and seen[0] <= count else Treatment()

    return plan


ALWAYS = 10**6


def test_a_new_store_passes_the_probe_and_is_empty(direct: GCSStore) -> None:
    direct.probe()
    assert direct.list("") == []
    assert direct.get("HEAD") is None
    assert direct.uri.endswith("/p")


def test_what_was_put_is_read_listed_and_deleted_below_the_prefix(direct: GCSStore) -> None:
    direct.put("a/1", b"one")
    direct.put("a/2", memoryview(bytearray(b"two")))
    direct.put("b", bytearray(b"three"))
    found = direct.get("a/2")
    assert found is not None and found.body == b"two"
    assert direct.list("a/") == ["a/1", "a/2"]
    direct.delete(["a/1", "a/2", "never there"])
    assert direct.list("") == ["b"]


def test_put_if_absent_refuses_what_exists(direct: GCSStore) -> None:
    storepromises.put_if_absent_refuses_what_exists(direct)


def test_put_if_match_wants_the_very_generation_and_never_creates(direct: GCSStore) -> None:
    storepromises.put_if_match_wants_the_very_etag_and_never_creates(direct)


def test_folders_are_those_directly_below(direct: GCSStore) -> None:
    storepromises.folders_are_those_directly_below(direct)


@pytest.mark.parametrize("body", [b"", SMALL, BODY], ids=["empty", "small", "large"])
def test_an_upload_arrives_whole_with_the_digests_of_its_chunks_and_never_overwrites(
    direct: GCSStore, body: bytes
) -> None:
    expected = [hashlib.sha256(body[at : at + CHUNK]).hexdigest() for at in range(0, len(body), CHUNK)]
    assert direct.upload("k", memoryview(body)) == expected
    found = direct.get("k")
    assert found is not None and found.body == body
    with pytest.raises(AlreadyExists):
        direct.upload("k", memoryview(body))
    stat = direct.stat("k")
    assert stat is not None and (stat.bytes, stat.archived) == (len(body), False)
    assert direct.stat("other") is None
    assert direct.sweep_uploads("", lambda key: True) == []


def part_of(path: Path, *, sha256: str = "") -> FilePart:
    body = path.read_bytes()
    file = os.open(path, os.O_RDONLY)
    return FilePart(file=file, offset=0, bytes=len(body), sha256=sha256 or hashlib.sha256(body).hexdigest())


SIZES = [0, 1, PART_WINDOW, PART_WINDOW + 1, 4 * PART_WINDOW, 5 * PART_WINDOW, 5 * PART_WINDOW + 5]


@pytest.mark.parametrize("size", SIZES)
def test_a_part_of_a_file_arrives_as_it_is(direct: GCSStore, tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(size).randbytes(size))
    direct.put_part("blobs/x", part_of(path))
    found = direct.get("blobs/x")
    assert found is not None and found.body == path.read_bytes()


@pytest.mark.parametrize("size", [10, 2 * PART_WINDOW, 5 * PART_WINDOW])
def test_a_part_that_is_not_what_its_digest_says_is_not_stored(
    direct: GCSStore, tmp_path: Path, size: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    with pytest.raises(Changed):
        direct.put_part("blobs/x", part_of(path, sha256="0" * 64))
    whole = part_of(path)
    with pytest.raises(Cancelled):
        direct.put_part("blobs/x", whole, cancelled=lambda: True)
    os.truncate(path, size // 2)
    with pytest.raises(Changed):
        direct.put_part("blobs/x", whole)
    assert direct.get("blobs/x") is None


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("fault", [Fault.ERROR_503, Fault.REQUEST_LOST])
def test_a_request_of_a_part_that_fails_once_is_made_again(
    proxied: GCSStore, direct: GCSStore, proxy: FaultProxy, tmp_path: Path, method: str, fault: Fault
) -> None:
    path = tmp_path / "file"
    path.write_bytes(BODY + BODY[: 2 * PART_WINDOW])
    proxy.reset(first(1, method, Treatment(fault=fault)))
    proxied.put_part("blobs/x", part_of(path))
    found = direct.get("blobs/x")
    assert found is not None and found.body == path.read_bytes()


@pytest.mark.parametrize(("size", "most"), [(LARGEST_WHOLE, 26), (4 * LARGEST_WHOLE, 8)])
def test_a_part_of_a_file_holds_little_memory(direct: GCSStore, tmp_path: Path, size: int, most: int) -> None:
    """`most`: MiB. Alone: of several at once, how many are at their peak together is the machine's affair."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(2**20) * (size >> 20))
    part = part_of(path)
    direct.put_part("warm", part_of(path))
    gc.collect()
    tracemalloc.start()
    try:
        direct.put_part("k", part)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most * 2**20, f"{peak / 2**20:.0f} MiB"


def test_of_parts_that_are_held_whole_only_a_few_are_sent_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, sending, most = threading.Lock(), [0], [0]

    def stream(*_: object) -> None:
        with lock:
            sending[0] += 1
            most[0] = max(most[0], sending[0])
        time.sleep(0.05)
        with lock:
            sending[0] -= 1

    monkeypatch.setattr(GCSStore, "_stream", stream)
    path = tmp_path / "file"
    path.write_bytes(b"x" * LARGEST_WHOLE)
    part, store = part_of(path), opened("bucket", "http://127.0.0.1:9")
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for each in [pool.submit(store.put_part, f"k{n}", part) for n in range(CONNECTIONS)]:
            each.result()
    assert most[0] <= WHOLE_AT_ONCE
    store._client.close()


NOT_DONE = [Fault.ERROR_500, Fault.ERROR_503, Fault.REQUEST_LOST, Fault.REQUEST_CUT]
LOST = [Fault.REPLY_LOST, Fault.ERROR_AFTER]


@pytest.mark.parametrize(
    ("method", "fault"),
    [*(("POST", fault) for fault in (*NOT_DONE, *LOST)), *(("PUT", fault) for fault in NOT_DONE)],
)
def test_a_request_of_an_upload_that_fails_once_is_made_again(
    proxied: GCSStore, direct: GCSStore, proxy: FaultProxy, method: str, fault: Fault
) -> None:
    proxy.reset(first(1, method, Treatment(fault=fault)))
    assert proxied.upload("k", memoryview(BODY)) == DIGESTS
    found = direct.get("k")
    assert found is not None and found.body == BODY


@pytest.mark.parametrize("fault", LOST)
def test_an_upload_that_arrives_damaged_is_no_answer_and_leaves_nothing(
    proxied: GCSStore, direct: GCSStore, proxy: FaultProxy, fault: Fault
) -> None:
    """A chunk is sent again after its answer was lost. Google knows it by its range; the fake appends it."""
    proxy.reset(first(1, "PUT", Treatment(fault=fault)))
    with pytest.raises(StoreUnavailable, match="did not match"):
        proxied.upload("k", memoryview(BODY))
    assert direct.stat("k") is None


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.ERROR_AFTER, Fault.ERROR_503, Fault.REPLY_HANGS])
def test_a_small_write_whose_answer_is_lost_is_known_for_its_own(
    proxied: GCSStore, direct: GCSStore, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.reset(first(1, "POST", Treatment(fault=fault)))
    etag = proxied.put_if_absent("k", SMALL)
    assert direct.get("k") == Object(body=SMALL, etag=etag)


@pytest.mark.parametrize("fault", [Fault.ERROR_503, Fault.REQUEST_LOST])
def test_a_server_that_never_answers_ends_the_upload_and_leaves_nothing(
    proxied: GCSStore, direct: GCSStore, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.reset(first(ALWAYS, "PUT", Treatment(fault=fault)))
    with pytest.raises(StoreUnavailable, match=r"gs://.*/p/k"):
        proxied.upload("k", memoryview(BODY))
    assert direct.stat("k") is None


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.ERROR_503, Fault.REPLY_HANGS])
def test_head_is_tried_once(proxied: GCSStore, proxy: FaultProxy, fault: Fault) -> None:
    proxy.reset(first(ALWAYS, "", Treatment(fault=fault)))
    calls: list[Callable[[], object]] = [
        lambda: proxied.put_if_absent("HEAD", b"1"),
        lambda: proxied.get("HEAD"),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()
    assert len(proxy.exchanges) == 2


def test_a_cancelled_upload_sends_no_further_chunk_and_creates_nothing(
    proxied: GCSStore, direct: GCSStore, proxy: FaultProxy
) -> None:
    def sent() -> list[str]:
        return [exchange.request.method for exchange in proxy.exchanges if exchange.request.method == "PUT"]

    with pytest.raises(Cancelled):
        proxied.upload("k", memoryview(BODY), cancelled=lambda: len(sent()) >= 2)
    assert len(sent()) == 2
    assert direct.stat("k") is None


def test_a_range_is_read_into_the_callers_buffer(direct: GCSStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spottrain.storage.gcs.READ_WINDOW", CHUNK)
    direct.upload("k", memoryview(BODY))
    into = bytearray(b"#" * (2 * CHUNK + 20))
    direct.read_into("k", 1000, memoryview(into)[10:-10])
    assert into == b"#" * 10 + BODY[1000 : 1000 + 2 * CHUNK] + b"#" * 10
    with pytest.raises(KeyMissing):
        direct.read_into("other", 0, memoryview(bytearray(10)))
    for offset in (len(BODY) - 5, len(BODY), len(BODY) + 100):
        with pytest.raises(Truncated):
            direct.read_into("k", offset, memoryview(bytearray(10)))
    storepromises.a_range_fills_several_buffers_and_gives_its_digest(direct)


@pytest.mark.parametrize(
    "fault", [Fault.REPLY_LOST, Fault.REPLY_CUT, Fault.REPLY_STALLS, Fault.ERROR_500, Fault.ERROR_503]
)
def test_a_read_that_fails_once_is_made_again(
    proxied: GCSStore, direct: GCSStore, proxy: FaultProxy, fault: Fault
) -> None:
    direct.upload("k", memoryview(BODY))
    proxy.reset(first(1, "GET", Treatment(fault=fault)))
    into = bytearray(CHUNK)
    digest = proxied.read_into("k", 7, memoryview(into), hashed=True)
    assert into == BODY[7 : 7 + CHUNK] and digest == hashlib.sha256(into).hexdigest()


def test_a_missing_bucket_is_said_to_be_missing(gcs: GcsServer, pail: str) -> None:
    it = opened("no-such-bucket-here", gcs.endpoint)
    calls: list[Callable[[], object]] = [
        it.probe,
        lambda: it.get("HEAD"),
        lambda: it.stat("k"),
        lambda: it.upload("k", memoryview(SMALL)),
    ]
    for call in calls:
        with pytest.raises(BucketNotFound, match="no-such-bucket-here"):
            call()
    it._client.close()


def test_a_refusal_is_denied_with_a_sentence_and_never_none(proxied: GCSStore, proxy: FaultProxy) -> None:
    proxy.reset(first(ALWAYS, "", Treatment(fault=Fault.ANSWER, answer=error(403))))
    calls: list[Callable[[], object]] = [
        lambda: proxied.get("k"),
        lambda: proxied.stat("k"),
        lambda: proxied.put_if_absent("k", b""),
        lambda: proxied.upload("k", memoryview(BODY)),
        lambda: proxied.read_into("k", 0, memoryview(bytearray(9))),
    ]
    for call in calls:
        with pytest.raises(StoreDenied, match=r"roles/storage\.objectUser"):
            call()


def test_credentials_that_do_not_count_are_denied_with_a_sentence(
    proxied: GCSStore, proxy: FaultProxy
) -> None:
    answer = error(403, http_status=401)
    proxy.reset(first(ALWAYS, "", Treatment(fault=Fault.ANSWER, answer=answer)))
    with pytest.raises(StoreDenied, match="give the service account an identity"):
        proxied.stat("k")


@pytest.mark.parametrize("created", [False, True])
def test_an_upload_session_that_is_gone_is_judged_by_what_is_at_the_key(
    proxied: GCSStore, direct: GCSStore, proxy: FaultProxy, created: bool
) -> None:
    last = f"bytes {3 * CHUNK}-"

    def plan(request: Request) -> Treatment:
        hit = request.headers.get("content-range", "").startswith(last)
        fault = Fault.ANSWER_AFTER if created else Fault.ANSWER
        return Treatment(fault=fault, answer=error(404)) if hit else Treatment()

    proxy.reset(plan)
    if created:
        assert proxied.upload("k", memoryview(BODY)) == DIGESTS
        return
    with pytest.raises(StoreUnavailable, match="session has ended"):
        proxied.upload("k", memoryview(BODY))
    assert direct.stat("k") is None


def test_a_store_that_ignores_generations_is_unsuitable(proxied: GCSStore, proxy: FaultProxy) -> None:
    """The proxy tells the server of no condition."""

    def plan(request: Request) -> Treatment:
        return Treatment(fault=Fault.ANSWER, answer=CREATED) if request.method == "POST" else Treatment()

    proxy.reset(plan)
    with pytest.raises(StoreUnsuitable, match="ifGenerationMatch"):
        proxied.probe()


MADE = b'{"generation": "7", "name": "p/probe", "size": "1"}'
CREATED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(MADE),
    MADE,
)


def test_no_credentials_are_denied_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    with pytest.raises(StoreDenied, match="GOOGLE_APPLICATION_CREDENTIALS"):
        open_store("gs://bucket/p").probe()


def test_a_key_file_that_is_none_is_denied_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key.json").write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(StoreDenied, match="no credentials for gs://bucket/p"):
        open_store("gs://bucket/p").probe()


def test_a_uri_without_a_bucket_is_a_bad_configuration() -> None:
    with pytest.raises(ConfigurationError, match="names no bucket"):
        open_store("gs:///p")
