"""Large bodies: the folder store's upload and ranged reads, and what the network stores send."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import mmap
import os
import shlex
from pathlib import Path

import pytest
from spottrain.errors import StoreUnavailable
from spottrain.storage.base import AlreadyExists, Cancelled, KeyMissing, Stat, Truncated
from spottrain.storage.local import FolderStore
from spottrain.storage.requests import SLICE, RequestBody, Stopped, digests, pause, tried
from spottrain.storage.s3_errors import RequestTarget, restore_command

from tests.support.sentences import Told

CHUNK = 1000
BODY = bytes(range(256)) * 10
DIGESTS = [hashlib.sha256(BODY[at : at + CHUNK]).hexdigest() for at in range(0, len(BODY), CHUNK)]


@pytest.fixture
def folder(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store", chunk_bytes=CHUNK)


def temporaries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "store/.spottrain").iterdir())


def test_an_upload_is_read_back_whole_and_in_ranges(folder: FolderStore) -> None:
    assert folder.upload("a/k", memoryview(BODY)) == DIGESTS
    found = folder.get("a/k")
    assert found is not None and found.body == BODY
    into = bytearray(b"#" * 120)
    folder.read_into("a/k", 1000, memoryview(into)[10:-10])
    assert into == b"#" * 10 + BODY[1000:1100] + b"#" * 10
    assert folder.stat("a/k") == Stat(
        bytes=len(BODY), storage_class="", archived=False, restoring=False, modified=0.0
    )


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("refuses", [False, True])
def test_a_body_of_many_blocks_is_written_as_it_is_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: int, refuses: bool
) -> None:
    """By direct writes, which want aligned memory, and where a file system has none."""
    opened = os.open

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if refuses and flags & os.O_DIRECT:
            raise OSError(errno.ENOTSUP, "no direct writes")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", open_)
    memory = mmap.mmap(-1, 40000)
    memory[:] = os.urandom(len(memory))
    folder = FolderStore(tmp_path, chunk_bytes=3 * 4096)
    folder.upload("k", memoryview(memory)[skipped:])
    assert (tmp_path / "k").read_bytes() == memory[skipped:]


def test_an_empty_body_has_no_chunks(folder: FolderStore) -> None:
    assert folder.upload("k", memoryview(b"")) == []
    folder.read_into("k", 0, memoryview(bytearray()))
    stat = folder.stat("k")
    assert stat is not None and stat.bytes == 0


def test_a_view_of_numbers_is_taken_as_its_bytes(folder: FolderStore) -> None:
    numbers = memoryview(bytearray(BODY)).cast("Q")
    assert folder.upload("k", numbers) == DIGESTS
    into = memoryview(bytearray(len(BODY))).cast("Q")
    folder.read_into("k", 0, into)
    assert into == numbers


def test_an_upload_never_overwrites_and_leaves_no_temporary_file(folder: FolderStore, tmp_path: Path) -> None:
    folder.put("k", b"another's")
    with pytest.raises(AlreadyExists):
        folder.upload("k", memoryview(BODY))
    found = folder.get("k")
    assert found is not None and found.body == b"another's"
    assert temporaries(tmp_path) == ["lock"]


def test_a_cancelled_upload_stops_at_the_next_chunk_and_leaves_nothing(
    folder: FolderStore, tmp_path: Path
) -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 2

    with pytest.raises(Cancelled):
        folder.upload("k", memoryview(BODY), cancelled=cancelled)
    assert len(asked) == 2
    assert folder.stat("k") is None
    assert temporaries(tmp_path) == []


def test_what_is_missing_and_what_is_too_short_are_told_apart(folder: FolderStore, told: Told) -> None:
    assert folder.stat("a/b") is None
    with pytest.raises(KeyMissing):
        folder.read_into("a/b", 0, memoryview(bytearray(1)))
    folder.upload("k", memoryview(BODY))
    for offset in (len(BODY) - 5, len(BODY), len(BODY) + 5):
        with pytest.raises(Truncated) as refused:
            folder.read_into("k", offset, memoryview(bytearray(10)))
        told(refused)


def test_a_view_is_sent_in_large_slices_of_itself() -> None:
    data = bytearray(2 * SLICE + 5)
    body = RequestBody(memoryview(data))
    parts = list(iter(lambda: body.read(16384), b""))
    assert [len(part) for part in parts] == [SLICE, SLICE, 5]
    assert all(isinstance(part, memoryview) and part.obj is data for part in parts)
    assert body.seek(0) == 0 and len(body.read(3 * SLICE)) == len(data)
    assert body.seek(-5, io.SEEK_END) == body.tell() == 2 * SLICE
    assert len(body.read()) == 5 and len(body) == len(data)


def test_a_body_that_must_not_go_on_says_so_past_every_handler_of_exceptions() -> None:
    with pytest.raises(Stopped):
        RequestBody(memoryview(b"1"), lambda: True).read()
    assert not issubclass(Stopped, Exception)


def test_digests_are_of_each_chunk() -> None:
    assert digests(memoryview(BODY), CHUNK) == DIGESTS
    assert digests(memoryview(b""), CHUNK) == []


def test_only_what_may_pass_is_tried_again_and_with_pauses_between() -> None:
    failures: list[int] = []
    calls: list[int] = []

    def act() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise StoreUnavailable("not now")
        return "done"

    assert tried(act, 3, failures.append) == "done"
    assert failures == [1, 2]
    calls.clear()
    with pytest.raises(StoreUnavailable):
        tried(act, 2, failures.append)

    def refused() -> None:
        calls.append(1)
        raise AlreadyExists("k")

    calls.clear()
    with pytest.raises(AlreadyExists):
        tried(refused, 5, failures.append)
    assert len(calls) == 1


def test_pauses_grow_to_a_limit() -> None:
    for failures, most in [(1, 1.0), (3, 4.0), (5, 16.0), (60, 20.0)]:
        assert all(0 <= pause(failures) <= most for _ in range(100))


@pytest.mark.parametrize(("storage_class", "days"), [("GLACIER", True), ("ARCHIVE_ACCESS", False)])
def test_the_restore_command_can_be_pasted_into_a_shell(storage_class: str, days: bool) -> None:
    place = RequestTarget(bucket="b", key="p/it's a key", endpoint="https://s3.eu-west-1.amazonaws.com")
    words = shlex.split(restore_command(place, storage_class, aws=True))
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["aws", "s3api", "restore-object"]
    assert options["--key"] == place.key and "--endpoint-url" not in options
    assert ("Days" in json.loads(options["--restore-request"])) == days
