"""upload against the real server: parts, conditions, and a network that fails.

The last state is asserted each time: the object whole with the right bytes, or absent and no multipart left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from spottrain.errors import BucketNotFound, StoreDenied, StoreUnavailable
from spottrain.storage.base import AlreadyExists, Cancelled
from spottrain.storage.s3 import MAX_PARTS, S3Store, part_bytes

from tests.support.faultproxy import Fault, FaultProxy, Request, Treatment, error
from tests.support.heavy import sample
from tests.support.s3bodies import (
    ALWAYS,
    BODY,
    CHUNK,
    DIGESTS,
    LOST,
    NOT_DONE,
    SMALL,
    Match,
    assert_absent,
    assert_whole,
    first,
    is_abort,
    is_complete,
    is_create,
    is_part,
    is_put,
    requests,
    unfinished,
)


def test_a_large_body_goes_up_in_parts_with_the_digests_of_its_chunks(
    patient: S3Store, direct: S3Store, proxy: FaultProxy
) -> None:
    assert patient.upload("k", memoryview(BODY)) == DIGESTS
    assert_whole(direct)
    parts = [exchange.request for exchange in proxy.exchanges if is_part(exchange.request)]
    assert len(parts) == 3
    for part in parts:
        assert "x-amz-checksum-crc32" not in part.headers
        assert part.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert "x-amz-checksum-sha256" in part.headers["authorization"]


@pytest.mark.parametrize("size", [0, 1, 1000, CHUNK])
def test_a_small_body_is_one_request(patient: S3Store, direct: S3Store, proxy: FaultProxy, size: int) -> None:
    digests = patient.upload("k", memoryview(BODY)[:size])
    assert digests == ([hashlib.sha256(BODY[:size]).hexdigest()] if size else [])
    assert len(proxy.exchanges) == 1
    assert_whole(direct, BODY[:size])


def test_the_parts_of_a_huge_body_hold_several_chunks_each() -> None:
    assert part_bytes(CHUNK + 1, CHUNK) == CHUNK
    assert part_bytes(MAX_PARTS * CHUNK, CHUNK) == CHUNK
    assert part_bytes(MAX_PARTS * CHUNK + 1, CHUNK) == 2 * CHUNK


def test_digests_stay_by_chunk_where_parts_are_larger(
    direct: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spottrain.storage.s3.MAX_PARTS", 2)
    assert direct.upload("k", memoryview(BODY)) == DIGESTS
    assert_whole(direct)


@pytest.mark.parametrize("body", [BODY, SMALL], ids=["parts", "whole"])
def test_an_upload_never_overwrites(direct: S3Store, body: bytes) -> None:
    direct.put("k", b"another's")
    with pytest.raises(AlreadyExists):
        direct.upload("k", memoryview(body))
    assert_whole(direct, b"another's")


def sweep_empty(it: S3Store, step: str) -> None:
    """A creation without an answer may leave an upload of no parts, as the next claim finds it."""
    if step == "create":
        it.sweep_uploads("", lambda key: True)


STEPS = {"create": is_create, "part": is_part, "complete": is_complete}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "fault", sample([*LOST, *NOT_DONE], Fault.REPLY_LOST, Fault.REPLY_STALLS, Fault.ERROR_503)
)
def test_a_request_of_an_upload_that_fails_once_is_made_again(
    patient: S3Store, direct: S3Store, proxy: FaultProxy, step: str, fault: Fault
) -> None:
    proxy.reset(first(1, STEPS[step], Treatment(fault=fault)))
    assert patient.upload("k", memoryview(BODY)) == DIGESTS
    proxy.settle()
    sweep_empty(direct, step)
    assert_whole(direct)


@pytest.mark.parametrize("fault", sample([*LOST, *NOT_DONE], Fault.REPLY_HANGS, Fault.REQUEST_CUT))
def test_a_small_body_whose_request_fails_once_is_written_once(
    patient: S3Store, direct: S3Store, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.reset(first(1, is_put, Treatment(fault=fault)))
    assert patient.upload("k", memoryview(SMALL)) == [hashlib.sha256(SMALL).hexdigest()]
    assert_whole(direct, SMALL)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", sample(NOT_DONE, Fault.REQUEST_LOST))
def test_a_server_that_never_answers_ends_the_upload_and_leaves_nothing(
    patient: S3Store, direct: S3Store, proxy: FaultProxy, step: str, fault: Fault
) -> None:
    proxy.reset(first(ALWAYS, STEPS[step], Treatment(fault=fault)))
    with pytest.raises(StoreUnavailable, match=r"s3://.*/p/k"):
        patient.upload("k", memoryview(BODY))
    proxy.settle()
    sweep_empty(direct, step)
    assert_absent(direct)


def test_a_completion_without_any_answer_is_told_by_the_object(
    patient: S3Store, direct: S3Store, proxy: FaultProxy
) -> None:
    proxy.reset(first(ALWAYS, is_complete, Treatment(fault=Fault.REPLY_LOST)))
    assert patient.upload("k", memoryview(BODY)) == DIGESTS
    assert_whole(direct)


@pytest.mark.parametrize(
    ("fault", "count"), [(Fault.ANSWER, 1), (Fault.ANSWER_AFTER, 1), (Fault.ANSWER_AFTER, ALWAYS)]
)
def test_a_completion_answered_200_with_an_error_in_it_is_not_believed(
    patient: S3Store, direct: S3Store, proxy: FaultProxy, fault: Fault, count: int
) -> None:
    answer = error(500, http_status=200)
    proxy.reset(first(count, is_complete, Treatment(fault=fault, answer=answer)))
    assert patient.upload("k", memoryview(BODY)) == DIGESTS
    assert sum(is_complete(exchange.request) for exchange in proxy.exchanges) >= 2
    assert_whole(direct)


def test_a_completion_that_always_says_200_with_an_error_fails_and_leaves_nothing(
    patient: S3Store, direct: S3Store, proxy: FaultProxy
) -> None:
    answer = error(500, http_status=200)
    proxy.reset(first(ALWAYS, is_complete, Treatment(fault=Fault.ANSWER, answer=answer)))
    with pytest.raises(StoreUnavailable, match="InternalError"):
        patient.upload("k", memoryview(BODY))
    assert_absent(direct)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("status", "kind", "sentence"),
    [
        (403, StoreDenied, "check that its policy allows"),
        (404, BucketNotFound, "the bucket does not exist"),
    ],
)
def test_what_a_person_must_mend_ends_the_upload_at_once(
    patient: S3Store,
    direct: S3Store,
    proxy: FaultProxy,
    step: str,
    status: int,
    kind: type[Exception],
    sentence: str,
) -> None:
    proxy.reset(first(ALWAYS, STEPS[step], Treatment(fault=Fault.ANSWER, answer=error(status))))
    with pytest.raises(kind, match=sentence):
        patient.upload("k", memoryview(BODY))
    assert sum(STEPS[step](exchange.request) for exchange in proxy.exchanges) <= 3  # one of each connection
    assert_absent(direct)


@pytest.mark.parametrize("status", [409, 412])
@pytest.mark.parametrize(("body", "step"), [(BODY, is_complete), (SMALL, is_put)], ids=["parts", "whole"])
def test_a_conflict_is_judged_by_what_is_at_the_key(
    patient: S3Store, direct: S3Store, proxy: FaultProxy, status: int, body: bytes, step: Match
) -> None:
    proxy.reset(first(1, step, Treatment(fault=Fault.ANSWER, answer=error(status))))
    with pytest.raises(StoreUnavailable, match="another write is under way"):
        patient.upload("k", memoryview(body))
    assert_absent(direct)
    proxy.reset(first(1, step, Treatment(fault=Fault.ANSWER_AFTER, answer=error(status))))
    patient.upload("k", memoryview(body))
    assert_whole(direct, body)
    proxy.reset(first(1, step, Treatment(fault=Fault.ANSWER, answer=error(status))))
    with pytest.raises(AlreadyExists):
        patient.upload("k", memoryview(body))
    assert_whole(direct, body)


def test_an_upload_that_somebody_aborted_is_no_answer(
    patient: S3Store, direct: S3Store, proxy: FaultProxy
) -> None:
    gone = Treatment(fault=Fault.ANSWER, answer=error(404, "NoSuchUpload"))
    proxy.reset(first(1, is_part, gone))
    with pytest.raises(StoreUnavailable, match="another client aborted the upload"):
        patient.upload("k", memoryview(BODY))
    assert_absent(direct)


@pytest.mark.heavy
def test_a_slow_connection_is_no_fault(proxy: FaultProxy, direct: S3Store, bucket: str) -> None:
    chunk, timeout = 16 * 2**20, 3.0
    body = BODY[:CHUNK] * 4
    it = S3Store(bucket, "p", endpoint=proxy.endpoint(), chunk_bytes=chunk, timeout=timeout, tries=1)
    # 256 blocks of 64 KiB: a part takes longer than the time-out, and what lies in the kernel's buffers less.
    proxy.reset(first(ALWAYS, is_part, Treatment(pace=1.3 * timeout / 256)))
    it.upload("k", memoryview(body))
    assert sum(is_part(request) for request in requests(proxy)) == 2
    assert_whole(direct, body)


def test_a_cancelled_upload_starts_no_further_part_and_is_aborted(
    patient: S3Store, direct: S3Store, proxy: FaultProxy
) -> None:
    proxy.reset(first(ALWAYS, is_part, Treatment(pace=0.02)))
    with pytest.raises(Cancelled):
        patient.upload("k", memoryview(BODY * 3), cancelled=lambda: any(map(is_part, requests(proxy))))
    proxy.settle()
    assert sum(map(is_part, requests(proxy))) <= 3
    assert_absent(direct)


def test_an_upload_cancelled_between_two_tries_does_not_wait(
    proxy: FaultProxy, direct: S3Store, bucket: str
) -> None:
    it = S3Store(bucket, "p", endpoint=proxy.endpoint(), chunk_bytes=CHUNK, pause=lambda failures: 3600.0)
    for step in (is_create, is_part):
        proxy.reset(first(1, step, Treatment(fault=Fault.ERROR_503)))
        with pytest.raises(Cancelled):
            it.upload("k", memoryview(BODY), cancelled=answered_503(proxy))
    assert_absent(direct)


def test_a_cancelled_upload_does_not_wait_for_answers_that_never_come(
    proxy: FaultProxy, direct: S3Store, bucket: str
) -> None:
    it = S3Store(bucket, "p", endpoint=proxy.endpoint(), chunk_bytes=CHUNK, timeout=3600.0)
    proxy.reset(first(ALWAYS, is_part, Treatment(fault=Fault.REPLY_HANGS)))
    with pytest.raises(Cancelled):
        it.upload("k", memoryview(BODY), cancelled=lambda: len(proxy.landings) >= 3)
    assert_absent(direct)


def answered_503(proxy: FaultProxy) -> Callable[[], bool]:
    return lambda: any(x.ended for x in list(proxy.exchanges) if x.treatment.fault is Fault.ERROR_503)


def test_a_small_upload_is_cancelled_too(patient: S3Store, direct: S3Store) -> None:
    with pytest.raises(Cancelled):
        patient.upload("k", memoryview(SMALL), cancelled=lambda: True)
    assert_absent(direct)


def test_an_abort_that_fails_is_logged_and_found_by_the_sweep(
    patient: S3Store, direct: S3Store, proxy: FaultProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(request: Request) -> Treatment:
        return Treatment(fault=Fault.ERROR_503 if is_part(request) or is_abort(request) else Fault.NONE)

    proxy.reset(plan)
    with pytest.raises(StoreUnavailable):
        patient.upload("k", memoryview(BODY))
    assert "event=upload-not-aborted key=k upload=" in capsys.readouterr().out
    assert direct.sweep_uploads("", lambda key: key == "other") == []
    assert direct.sweep_uploads("", lambda key: key == "k") == ["k"]
    assert_absent(direct)


def test_the_sweep_takes_only_the_doomed_below_its_prefix(direct: S3Store, bucket: str) -> None:
    client = direct._clients.steady
    keys = [f"a/{number:04d}" for number in range(12)] + ["b/1"]
    for key in keys:
        client.create_multipart_upload(Bucket=bucket, Key=f"p/{key}")
    client.create_multipart_upload(Bucket=bucket, Key="elsewhere/a/1")
    assert direct.sweep_uploads("a/", lambda key: key != "a/0003") == [k for k in keys[:12] if k != "a/0003"]
    assert unfinished(direct) == ["a/0003", "b/1"]
