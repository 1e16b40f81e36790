"""read_into and stat against the real server, archived objects, and what a new object carries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from spottrain.errors import (
    BucketNotFound,
    CheckpointArchived,
    ConfigurationError,
    StoreDenied,
    StoreUnavailable,
)
from spottrain.storage.base import KeyMissing, Stat, Truncated
from spottrain.storage.s3 import S3Store

from tests.support import storepromises
from tests.support.faultproxy import Fault, FaultProxy, Treatment, error
from tests.support.heavy import sample
from tests.support.s3bodies import (
    ALWAYS,
    BODY,
    BODY_SECONDS,
    CHUNK,
    LOST,
    NOT_DONE,
    SMALL,
    first,
    is_create,
    is_get,
    is_put,
    requests,
)
from tests.support.s3server import S3Server


def test_a_range_is_read_into_the_callers_buffer(direct: S3Store) -> None:
    direct.upload("k", memoryview(BODY))
    into = bytearray(b"#" * (CHUNK + 20))
    direct.read_into("k", 1000, memoryview(into)[10:-10])
    assert into == b"#" * 10 + BODY[1000 : 1000 + CHUNK] + b"#" * 10
    direct.read_into("k", 5, memoryview(bytearray()))


def test_a_range_fills_several_buffers_and_gives_its_digest(direct: S3Store) -> None:
    storepromises.a_range_fills_several_buffers_and_gives_its_digest(direct)


def test_several_threads_read_at_once(direct: S3Store) -> None:
    direct.upload("k", memoryview(BODY))
    into = memoryview(bytearray(len(BODY)))
    step = len(BODY) // 8 + 1
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: direct.read_into("k", at, into[at : at + step]), range(0, len(BODY), step)))
    assert into == BODY


@pytest.mark.parametrize(
    "fault", sample([*LOST, *NOT_DONE], Fault.REPLY_CUT, Fault.REPLY_STALLS, Fault.ERROR_500)
)
def test_a_range_that_breaks_off_is_read_on(
    patient: S3Store, direct: S3Store, proxy: FaultProxy, fault: Fault
) -> None:
    direct.upload("k", memoryview(BODY))
    proxy.reset(first(1, is_get, Treatment(fault=fault)))
    into = bytearray(CHUNK)
    digest = patient.read_into("k", 7, memoryview(into)[:-9], memoryview(into)[-9:], hashed=True)
    assert into == BODY[7 : 7 + CHUNK] and digest == hashlib.sha256(into).hexdigest()
    ranges = [request.headers["range"] for request in requests(proxy)]
    assert len(ranges) == 2
    if fault in (Fault.REPLY_CUT, Fault.REPLY_STALLS):
        assert ranges[1] != ranges[0]  # not from the start


def test_a_slow_body_is_no_fault(patient: S3Store, direct: S3Store, proxy: FaultProxy) -> None:
    direct.upload("k", memoryview(BODY))
    proxy.reset(first(ALWAYS, is_get, Treatment(pace=1.5 * BODY_SECONDS / 80)))
    into = bytearray(CHUNK)
    patient.read_into("k", 0, memoryview(into))
    assert into == BODY[:CHUNK] and len(proxy.exchanges) == 1


@pytest.mark.parametrize(
    "fault", sample([Fault.REPLY_LOST, Fault.ERROR_500, Fault.ERROR_503, Fault.REPLY_STALLS], Fault.ERROR_503)
)
def test_reads_are_tried_a_bounded_number_of_times(
    patient: S3Store, direct: S3Store, proxy: FaultProxy, fault: Fault
) -> None:
    direct.upload("k", memoryview(SMALL))
    proxy.reset(first(ALWAYS, is_get, Treatment(fault=fault)))
    with pytest.raises(StoreUnavailable):
        patient.read_into("k", 0, memoryview(bytearray(len(SMALL))))
    assert len(proxy.exchanges) == 3


@pytest.mark.parametrize(("status", "kind"), [(403, StoreDenied), (404, BucketNotFound)])
def test_a_refused_read_ends_at_once(
    patient: S3Store, proxy: FaultProxy, status: int, kind: type[Exception]
) -> None:
    proxy.reset(first(ALWAYS, is_get, Treatment(fault=Fault.ANSWER, answer=error(status))))
    with pytest.raises(kind):
        patient.read_into("k", 0, memoryview(bytearray(10)))
    assert len(proxy.exchanges) == 1


def test_a_key_that_is_not_there_and_an_object_too_short_are_told_apart(direct: S3Store) -> None:
    with pytest.raises(KeyMissing):
        direct.read_into("k", 0, memoryview(bytearray(10)))
    direct.upload("k", memoryview(SMALL))
    for offset in (995, 1000, 5000):
        with pytest.raises(Truncated, match="/p/k"):
            direct.read_into("k", offset, memoryview(bytearray(10)))


def test_stat_says_the_size_or_none(direct: S3Store) -> None:
    direct.upload("k", memoryview(BODY))
    assert direct.stat("k") == Stat(
        bytes=len(BODY), storage_class="STANDARD", archived=False, restoring=False, modified=0.0
    )
    assert direct.stat("other") is None


def test_stat_in_a_bucket_that_is_not_there_is_no_none(server: S3Server, bucket: str) -> None:
    with pytest.raises(BucketNotFound):
        S3Store("no-such-bucket-here", endpoint=server.endpoint).stat("k")


def head_reply(**headers: str) -> Treatment:
    """versitygw knows no archive classes: what AWS documents, by the proxy."""
    lines = "".join(f"x-amz-{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return Treatment(
        fault=Fault.ANSWER,
        answer=f"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n{lines}Connection: close\r\n\r\n".encode(),
    )


DONE = 'ongoing-request="false", expiry-date="Fri, 21 Dec 2026 00:00:00 GMT"'


@pytest.mark.parametrize(
    ("headers", "archived", "restoring"),
    [
        ({"storage_class": "GLACIER"}, True, False),
        ({"storage_class": "DEEP_ARCHIVE", "restore": 'ongoing-request="true"'}, True, True),
        ({"storage_class": "GLACIER", "restore": DONE}, False, False),
        ({"storage_class": "GLACIER_IR"}, False, False),
        ({"storage_class": "INTELLIGENT_TIERING"}, False, False),
        ({"storage_class": "INTELLIGENT_TIERING", "archive_status": "ARCHIVE_ACCESS"}, True, False),
    ],
)
def test_stat_knows_the_archives(
    patient: S3Store, proxy: FaultProxy, headers: dict[str, str], archived: bool, restoring: bool
) -> None:
    proxy.reset(first(1, lambda request: request.method == "HEAD", head_reply(**headers)))
    found = patient.stat("k")
    assert found is not None and (found.archived, found.restoring) == (archived, restoring)


@pytest.mark.parametrize(
    ("inside", "request_json"),
    [
        (
            "<StorageClass>GLACIER</StorageClass>",
            '{"Days": 7, "GlacierJobParameters": {"Tier": "Standard"}}',
        ),
        (
            "<StorageClass>INTELLIGENT_TIERING</StorageClass><AccessTier>DEEP_ARCHIVE_ACCESS</AccessTier>",
            '{"GlacierJobParameters": {"Tier": "Standard"}}',
        ),
    ],
)
def test_an_archived_object_is_named_with_the_command_that_restores_it(
    patient: S3Store, proxy: FaultProxy, bucket: str, inside: str, request_json: str
) -> None:
    answer = error(403, "InvalidObjectState", inside=inside)
    proxy.reset(first(ALWAYS, lambda request: True, Treatment(fault=Fault.ANSWER, answer=answer)))
    reads: list[Callable[[], object]] = [
        lambda: patient.get("a key"),
        lambda: patient.read_into("a key", 0, memoryview(bytearray(10))),
    ]
    for read in reads:
        with pytest.raises(CheckpointArchived) as archived:
            read()
        command = f"aws s3api restore-object --bucket {bucket} --key 'p/a key' --restore-request"
        assert f"{command} '{request_json}' --endpoint-url {proxy.endpoint()}" in str(archived.value)
        assert "start the job again" in str(archived.value)
    assert len(proxy.exchanges) == 2


def test_a_kms_key_goes_with_every_new_object(proxy: FaultProxy, direct: S3Store, bucket: str) -> None:
    """Only the requests are judged: versitygw encrypts nothing, and no server here has KMS."""
    key = "arn:aws:kms:us-east-1:1:key/2"
    it = S3Store(bucket, "p", endpoint=proxy.endpoint(), kms_key=key, chunk_bytes=CHUNK)
    etag = it.put_if_absent("HEAD", b"1")
    it.put_if_match("HEAD", b"2", etag)
    it.put("other", b"3")
    it.upload("small", memoryview(SMALL))
    it.upload("k", memoryview(BODY))
    made = [x for x in requests(proxy) if is_put(x) or is_create(x)]
    assert len(made) == 5
    for request in made:
        assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == key
    proxy.reset(lambda request: Treatment())
    S3Store(bucket, "p", endpoint=proxy.endpoint(), kms_key="default").put("other", b"")
    (request,) = requests(proxy)
    assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
    assert "x-amz-server-side-encryption-aws-kms-key-id" not in request.headers


def test_a_kms_key_that_is_disabled_has_its_sentence(patient: S3Store, proxy: FaultProxy) -> None:
    answer = error(400, "KMS.DisabledException")
    proxy.reset(first(ALWAYS, is_create, Treatment(fault=Fault.ANSWER, answer=answer)))
    with pytest.raises(StoreDenied, match=r"checkpoint\.encryption\.kmsKey"):
        patient.upload("k", memoryview(BODY))


def test_a_bucket_in_the_host_name_is_asked_for_by_path_style_false(
    proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = proxy.ports[0]
    it = S3Store(bucket, "p", endpoint=f"http://localhost:{port}", path_style=False, tries=1)
    with pytest.raises((StoreUnavailable, ConfigurationError, StoreDenied, BucketNotFound)):
        it.get("k")
    hosts = [request.headers["host"] for request in requests(proxy)]
    assert all(host == f"{bucket}.localhost:{port}" for host in hosts)
