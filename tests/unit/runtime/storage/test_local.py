"""FolderStore keeps the promises of the S3 store: whole objects, conditions that hold between processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
from spottrain.errors import StoreUnavailable
from spottrain.storage.base import KeyMissing, PreconditionFailed
from spottrain.storage.local import FolderStore
from spottrain.storage.open import open_store

from tests.support import storepromises
from tests.support.sentences import Told


@pytest.fixture
def folder(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.mark.parametrize("uri", ["{}/with space", "file://{}/with space", "file://{}/with%20space"])
def test_a_path_and_a_file_uri_open_the_same_folder(tmp_path: Path, uri: str) -> None:
    open_store(uri.format(tmp_path)).put("k", b"1")
    assert (tmp_path / "with space" / "k").read_bytes() == b"1"


@pytest.mark.parametrize(
    "uri",
    [
        *("", "gs:///prefix", "file://relative/x", "s3:///prefix", "http://host/x", "https://b.s3.aws.com/x"),
        *("s3:/bucket/x", "s3:bucket/x", "gs:/bucket", "file:/x", "file:x", "S3://bucket/x", "File:///x"),
        *("s3a://bucket/x", "s3n://bucket/x", "az://container/x", "abfss://c@a/x", "hdfs://n/x", "C:x"),
        *("s3://bucket/x?versionId=1", "s3://bucket/x#1", "file:///x#1"),
    ],
)
def test_a_uri_that_names_no_store_is_a_bad_configuration(uri: str, told: Told) -> None:
    told(lambda: open_store(uri))


@pytest.mark.parametrize(
    ("uri", "endpoint"),
    [
        *[
            (uri, None)
            for uri in ("az://c/run", "AZ://c/run", "abfs://c/run", "abfss://c@acc.dfs.core.windows.net/r")
        ],
        *[
            (f"https://acc.{host}/c/run", None)
            for host in ("blob.core.windows.net", "z1.blob.storage.azure.net")
        ],
        ("s3://bucket/run", "https://acc.blob.core.windows.net"),
    ],
)
def test_azures_store_is_refused_with_what_to_use_on_aks(uri: str, endpoint: str | None, told: Told) -> None:
    told(lambda: open_store(uri, endpoint))


@pytest.mark.parametrize("path", ["./s3:/x", "runs/a:b", "plain", "~x", "1:2"])
def test_a_path_with_a_colon_further_on_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(path).put("k", b"1")
    assert (tmp_path / path / "k").exists()


def test_a_file_in_the_way_is_a_bad_configuration(tmp_path: Path, told: Told) -> None:
    (tmp_path / "file").touch()
    told(lambda: FolderStore(tmp_path / "file" / "store").probe())
    told(lambda: FolderStore(tmp_path / "file" / "store").get("HEAD"))


@pytest.mark.parametrize("path", ["/proc/nope", "/proc/nope/deeper", "x" * 300])
@pytest.mark.parametrize("act", ["probe", "put"])
def test_a_folder_that_cannot_be_made_is_a_bad_configuration(
    tmp_path: Path, path: str, act: str, told: Told
) -> None:
    it = FolderStore(tmp_path / path)
    told(lambda: it.probe() if act == "probe" else it.put("k", b""))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written_is_refused_with_what_to_do(
    folder: FolderStore, monkeypatch: pytest.MonkeyPatch, number: int, told: Told
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    told(folder.probe)


def test_who_only_looks_finds_nothing_and_makes_nothing(folder: FolderStore, tmp_path: Path) -> None:
    assert (folder.get("HEAD"), folder.stat("k"), folder.list("")) == (None, None, [])
    with pytest.raises(KeyMissing):
        folder.read_into("k", 0, memoryview(bytearray(1)))
    folder.delete(["k"])
    folder.sweep_uploads("", lambda key: True)
    assert list(tmp_path.iterdir()) == []
    folder.probe()
    assert folder.list("") == [] and folder.get("HEAD") is None
    folder.put("k", b"1")
    assert folder.list("") == ["k"]


def test_what_was_put_is_read_listed_and_deleted(folder: FolderStore) -> None:
    folder.put("a/b/1", b"one")
    folder.put("a/2", memoryview(b"two"))
    folder.put("ab", bytearray(b"three"))
    found = folder.get("a/2")
    assert found is not None and found.body == b"two"
    assert folder.list("a/") == ["a/2", "a/b/1"]
    assert folder.get("a/b") is None
    folder.delete(["a/b/1", "a/2", "never/there"])
    assert folder.list("") == ["ab"]


def test_put_if_absent_refuses_what_exists(folder: FolderStore) -> None:
    storepromises.put_if_absent_refuses_what_exists(folder)


def test_put_if_match_wants_the_very_etag_and_never_creates(folder: FolderStore) -> None:
    storepromises.put_if_match_wants_the_very_etag_and_never_creates(folder)


def test_folders_are_those_directly_below(folder: FolderStore) -> None:
    storepromises.folders_are_those_directly_below(folder)


def test_a_range_fills_several_buffers_and_gives_its_digest(folder: FolderStore) -> None:
    storepromises.a_range_fills_several_buffers_and_gives_its_digest(folder)


@pytest.mark.parametrize("key", ["../outside", "a//b", "/etc/passwd", "", ".spottrain/lock", "a/."])
def test_no_key_leads_out_of_the_folder(folder: FolderStore, key: str, told: Told) -> None:
    told(lambda: folder.put(key, b""))


@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_folder_that_went_away_is_not_an_empty_one(folder: FolderStore, tmp_path: Path, by: str) -> None:
    (folder if by == "itself" else FolderStore(tmp_path / "store")).put("HEAD", b"1")
    folder = folder if by == "itself" else FolderStore(tmp_path / "store")
    assert folder.get("HEAD") is not None
    (tmp_path / "store").rename(tmp_path / "unmounted")
    (tmp_path / "store").mkdir()  # the empty folder below a mount
    for act in (
        lambda: folder.get("HEAD"),
        lambda: folder.get("k"),
        lambda: folder.stat("HEAD"),
        lambda: folder.list(""),
        lambda: folder.put("HEAD", b"2"),
        lambda: folder.delete(["HEAD"]),
        lambda: folder.read_into("HEAD", 0, memoryview(bytearray(1))),
        folder.probe,
    ):
        with pytest.raises(StoreUnavailable):
            act()
    assert list((tmp_path / "store").iterdir()) == [], "it is not begun again"


def increments(root: Path, times: int) -> None:
    """Add to a number by read and conditional write."""
    it = FolderStore(root)
    for _ in range(times):
        while True:
            found = it.get("n")
            assert found is not None
            try:
                it.put_if_match("n", str(int(found.body) + 1).encode(), found.etag)
                break
            except PreconditionFailed:
                continue


def test_conditional_writes_lose_no_update_between_processes_and_threads(tmp_path: Path) -> None:
    FolderStore(tmp_path).put("n", b"0")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=increments, args=(tmp_path, 15))
    process.start()
    threads = [threading.Thread(target=increments, args=(tmp_path, 15)) for _ in range(2)]
    for thread in threads:
        thread.start()
    process.join(timeout=60)
    for thread in threads:
        thread.join(timeout=60)
    found = FolderStore(tmp_path).get("n")
    assert found is not None and int(found.body) == 45


@pytest.mark.parametrize("by", ["probe", "sweep"])
def test_temporary_files_that_killed_processes_left_are_swept_and_nothing_newer(
    tmp_path: Path, by: str
) -> None:
    it = FolderStore(tmp_path)
    it.probe()
    for name in ("stale", "fresh", "lock"):
        (tmp_path / ".spottrain" / name).touch()
    for name in ("stale", "lock"):
        os.utime(tmp_path / ".spottrain" / name, (1e9, 1e9))
    if by == "probe":
        it.probe()
    else:
        assert it.sweep_uploads("", lambda key: True) == []
    assert sorted(path.name for path in (tmp_path / ".spottrain").iterdir()) == ["fresh", "lock"]
