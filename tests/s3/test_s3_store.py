"""S3Store against the real server: conditions, errors by code, and a network that fails."""

from __future__ import annotations

import pytest
from spottrain.checkpoint.head.owner import HeadOwner, Identity
from spottrain.cli.reading import open_existing
from spottrain.contract import Env
from spottrain.errors import BucketNotFound, StoreDenied, StoreUnavailable, StoreUnsuitable
from spottrain.storage.base import AlreadyExists, Object
from spottrain.storage.open import open_store
from spottrain.storage.s3 import S3Store, checksum

from tests.support import s3server, storepromises
from tests.support.command import checkpoints as main
from tests.support.faultproxy import Fault, FaultProxy, Plan, Request, Treatment, error
from tests.support.headcheckpoints import save
from tests.support.s3server import S3Server


def only(fault: Fault, *numbers: int, method: str = "") -> Plan:
    """`fault` for the requests of these numbers (all when none is given) and this method."""

    def treat(request: Request) -> Treatment:
        hit = (not numbers or request.number in numbers) and method in ("", request.method)
        return Treatment(fault=fault if hit else Fault.NONE)

    return treat


def puts(request: Request, body: bytes) -> bool:
    return request.headers.get("x-amz-checksum-sha256") == checksum(memoryview(body))


@pytest.fixture
def s3(server: S3Server, bucket: str) -> S3Store:
    return S3Store(bucket, "some/prefix", endpoint=server.endpoint)


@pytest.fixture
def proxied(proxy: FaultProxy, bucket: str) -> S3Store:
    return S3Store(bucket, "p", endpoint=proxy.endpoint(), head_timeout=0.3, timeout=0.3, tries=3)


def test_a_store_opened_by_uri_passes_the_probe_and_leaves_nothing(server: S3Server, bucket: str) -> None:
    it = open_store(f"s3://{bucket}/some/prefix/", server.endpoint)
    it.probe()
    assert it.list("") == []
    assert it.uri == f"s3://{bucket}/some/prefix"


def test_what_was_put_is_read_listed_and_deleted_below_the_prefix(s3: S3Store) -> None:
    s3.put("a/1", b"one")
    s3.put("a/2", memoryview(bytearray(b"two")))
    s3.put("b", bytearray(b"three"))
    found = s3.get("a/2")
    assert found is not None and found.body == b"two"
    assert s3.list("a/") == ["a/1", "a/2"]
    s3.delete(["a/1", "a/2", "never there"])
    assert s3.list("") == ["b"]


def test_a_key_that_is_not_there_is_none(s3: S3Store) -> None:
    assert s3.get("nothing") is None


def test_a_slice_of_a_large_buffer_arrives_whole(s3: S3Store) -> None:
    data = bytes(range(256)) * 20_000
    s3.put_if_absent("large", memoryview(data)[100:-100])
    found = s3.get("large")
    assert found is not None and found.body == data[100:-100]


def test_put_if_absent_refuses_what_exists(s3: S3Store) -> None:
    storepromises.put_if_absent_refuses_what_exists(s3)


def test_put_if_match_wants_the_very_etag_and_never_creates(s3: S3Store) -> None:
    storepromises.put_if_match_wants_the_very_etag_and_never_creates(s3)


def test_folders_are_those_directly_below(s3: S3Store) -> None:
    storepromises.folders_are_those_directly_below(s3)


def test_lists_and_deletes_go_on_beyond_one_page(s3: S3Store, server: S3Server, bucket: str) -> None:
    keys = [f"k{number:04d}" for number in range(1005)]
    folder = server.folder / bucket / "some/prefix"
    folder.mkdir(parents=True)
    for key in keys:
        (folder / key).touch()
    assert s3.list("k") == keys
    s3.delete(keys)
    assert s3.list("k") == []


@pytest.mark.parametrize(
    ("access_key", "secret_key", "advice"),
    [
        ("nobody", "x" * 20, "AWS_ACCESS_KEY_ID"),
        (s3server.ACCESS_KEY, "not the secret", "AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_wrong_credentials_are_denied_with_a_sentence(
    server: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    access_key: str,
    secret_key: str,
    advice: str,
) -> None:
    for name, value in s3server.credentials(access_key, secret_key).items():
        monkeypatch.setenv(name, value)
    it = S3Store(bucket, "p", endpoint=server.endpoint)
    with pytest.raises(StoreDenied, match=advice) as denied:
        it.get("HEAD")
    assert f"s3://{bucket}/p/HEAD at {server.endpoint}" in str(denied.value)
    with pytest.raises(StoreDenied):
        it.probe()


def test_no_credentials_at_all_are_denied_too(
    server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreDenied, match="no credentials"):
        S3Store(bucket, endpoint=server.endpoint).get("HEAD")


def test_a_missing_bucket_is_said_to_be_missing(server: S3Server, bucket: str) -> None:
    it = S3Store("no-such-bucket-here", "p", endpoint=server.endpoint)
    for call in (it.probe, lambda: it.get("HEAD"), lambda: it.put_if_absent("HEAD", b"")):
        with pytest.raises(BucketNotFound, match="no-such-bucket-here"):
            call()


FAILURES = [Fault.ERROR_500, Fault.ERROR_503, Fault.REPLY_LOST, Fault.REQUEST_LOST, Fault.REPLY_HANGS]


@pytest.mark.parametrize("fault", FAILURES)
def test_a_write_of_head_without_an_answer_is_tried_once_and_left_open(
    proxied: S3Store, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.reset(only(fault))
    with pytest.raises(StoreUnavailable):
        proxied.put_if_absent("HEAD", b"1")
    assert len(proxy.exchanges) == 1


@pytest.mark.parametrize("fault", [*FAILURES, Fault.REPLY_CUT, Fault.REPLY_STALLS])
def test_a_read_of_head_that_fails_is_no_answer_and_never_none(
    proxied: S3Store, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.reset(only(fault))
    with pytest.raises(StoreUnavailable):
        proxied.get("HEAD")
    assert len(proxy.exchanges) == 1


@pytest.mark.parametrize("fault", FAILURES)
def test_a_shard_is_written_once_though_its_first_reply_failed(
    proxied: S3Store, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.reset(only(fault, 0))
    etag = proxied.put_if_absent("shard", b"data")
    assert proxied.get("shard") == Object(body=b"data", etag=etag)


def test_another_writer_of_the_same_key_is_told_from_an_own_retry(
    proxied: S3Store, proxy: FaultProxy
) -> None:
    proxied.put("shard", b"other")
    proxy.reset(only(Fault.ERROR_500, 0))
    with pytest.raises(AlreadyExists):
        proxied.put_if_absent("shard", b"data")


def test_a_body_that_breaks_off_is_read_again(proxied: S3Store, proxy: FaultProxy) -> None:
    proxied.put("shard", b"data" * 1000)
    proxy.reset(only(Fault.REPLY_CUT, 0))
    found = proxied.get("shard")
    assert found is not None and found.body == b"data" * 1000


def test_retries_are_bounded(proxied: S3Store, proxy: FaultProxy) -> None:
    proxy.reset(only(Fault.ERROR_503))
    with pytest.raises(StoreUnavailable, match="503 SlowDown"):
        proxied.put("shard", b"data")
    assert len(proxy.exchanges) == 3


def test_nobody_listening_is_unavailable(server: S3Server, bucket: str) -> None:
    it = S3Store(bucket, endpoint="http://127.0.0.1:9", tries=1)
    with pytest.raises(StoreUnavailable, match="did not respond"):
        it.probe()


def test_a_store_that_ignores_conditions_is_unsuitable(proxied: S3Store, proxy: FaultProxy) -> None:
    proxy.reset(only(Fault.CONDITION_IGNORED))
    with pytest.raises(StoreUnsuitable, match="If-None-Match"):
        proxied.probe()


@pytest.mark.parametrize(
    ("body", "condition"),
    [(b"2", "If-None-Match"), (b"4", "If-Match"), (b"5", "If-Match on PUT where there is no object")],
)
def test_a_store_that_ignores_one_condition_alone_is_unsuitable(
    proxied: S3Store, proxy: FaultProxy, body: bytes, condition: str
) -> None:
    """The last is a bug that servers have had: HEAD could come back after its removal."""
    done = b'HTTP/1.1 200 OK\r\nETag: "any"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
    proxy.reset(
        lambda request: Treatment(fault=Fault.ANSWER if puts(request, body) else Fault.NONE, answer=done)
    )
    with pytest.raises(StoreUnsuitable, match=f"ignores {condition}"):
        proxied.probe()


def test_a_store_that_refuses_if_match_without_an_object_by_412_passes_the_probe(
    proxied: S3Store, proxy: FaultProxy
) -> None:
    def treat(request: Request) -> Treatment:
        return Treatment(fault=Fault.ANSWER if puts(request, b"5") else Fault.NONE, answer=error(412))

    proxy.reset(treat)
    proxied.probe()


def encrypted(request: Request) -> Treatment:
    """A bucket whose policy denies what does not name SSE-S3."""
    creates = request.method == "PUT" and "partNumber=" not in request.path
    denied = creates and request.headers.get("x-amz-server-side-encryption") != "AES256"
    return Treatment(fault=Fault.ANSWER if denied else Fault.NONE, answer=error(403))


def test_a_bucket_that_demands_encryption_is_told_and_can_be_used(proxy: FaultProxy, bucket: str) -> None:
    proxy.reset(encrypted)
    with pytest.raises(StoreDenied, match=r"checkpoint\.encryption\.kmsKey .* to AES256"):
        open_store(f"s3://{bucket}/p", proxy.endpoint()).probe()
    it = open_store(f"s3://{bucket}/p", proxy.endpoint(), kms_key="AES256")
    it.probe()
    it.upload("large", memoryview(bytes(40 * 2**20)))
    assert it.list("") == ["large"]


def test_commands_write_to_a_bucket_that_demands_encryption(
    proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variable that the cleanup pod has, too."""
    monkeypatch.setenv(Env.CHECKPOINT_KMS_KEY, "AES256")
    proxy.reset(encrypted)
    it = open_existing(f" s3://{bucket}/p ", proxy.endpoint())
    owner = HeadOwner(it, Identity(job_uid="A", job="digits", attempt=1))
    owner.claim()
    save(it, owner, 3)
    it.delete(["HEAD"])
    assert main(["repair", f"s3://{bucket}/p", "--endpoint", proxy.endpoint()]) == 0
    assert main(["delete", f"s3://{bucket}/p", "--endpoint", proxy.endpoint(), "--yes"]) == 0
    assert it.list("") == ["HEAD"]


@pytest.mark.parametrize("fault", [Fault.REPLY_CUT, Fault.REPLY_STALLS])
def test_a_head_of_which_only_a_part_arrives_is_no_answer(
    proxied: S3Store, proxy: FaultProxy, fault: Fault
) -> None:
    proxied.put_if_absent("HEAD", b"data" * 1000)
    proxy.reset(only(fault))
    with pytest.raises(StoreUnavailable):
        proxied.get("HEAD")
