"""An archive or entry of the compile cache that is damaged or forged costs a compile, and nothing else."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spottrain.contract import COMPILE_CACHE_PREFIX
from spottrain.storage.local import FolderStore

from tests.unit.runtime.checkpoint.compilenode import COMPILED, Node, Nodes


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.fixture
def node(tmp_path: Path, store: FolderStore) -> Nodes:
    """Builds a new node with empty folders."""
    numbers = iter(range(100))

    def build(**options: Any) -> Node:
        return Node(tmp_path / f"node-{next(numbers)}", **{"store": store, **options})

    return build


def archive(member: tarfile.TarInfo, body: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        good = tarfile.TarInfo("inductor/good")
        good.size = 4
        tar.addfile(good, io.BytesIO(b"good"))
        tar.addfile(member, io.BytesIO(body))
    return buffer.getvalue()


def member(name: str, *, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


def plant(node: Node, body: bytes, **changes: Any) -> None:
    """What somebody would store who can write the prefix and knows the format."""
    sha256 = hashlib.sha256(body).hexdigest()
    entry = {**node.entry(), "archive": f"{node.cache.key}-{sha256}.tar.gz", "sha256": sha256, **changes}
    node.store.put(COMPILE_CACHE_PREFIX + f"{node.cache.key}-{sha256}.tar.gz", body)
    node.store.put(f"{COMPILE_CACHE_PREFIX}{node.cache.key}.json", json.dumps(entry).encode())


@pytest.mark.parametrize(
    "bad",
    [
        member("inductor//etc/absolute"),
        member("/etc/absolute"),
        member("inductor/../../outside"),
        member("../outside"),
        member("unknown/file"),
        member("inductor"),
        member("inductor/link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("inductor/link", kind=tarfile.LNKTYPE, link="inductor/good"),
        member("inductor/device", kind=tarfile.CHRTYPE),
        member("inductor/pipe", kind=tarfile.FIFOTYPE),
        member("inductor/folder", kind=tarfile.DIRTYPE),
    ],
    ids=lambda info: f"{info.type.decode()}:{info.name}",
)
def test_an_archive_with_anything_but_files_of_its_folders_is_refused_whole(
    node: Nodes, tmp_path: Path, bad: tarfile.TarInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    first = node().compile(COMPILED)
    first.cache.save_if_changed()
    plant(first, archive(bad))
    second = node()
    assert second.cache.restore() is None
    assert second.files() == {}
    assert not (tmp_path / "outside").exists() and not list(tmp_path.glob("node-*/outside"))
    assert "event=compile-cache-unusable" in capsys.readouterr().out


def test_an_archive_that_unpacks_to_too_much_is_refused(
    node: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = node().compile(COMPILED)
    first.cache.save_if_changed()
    plant(first, archive(member("inductor/large", size=5000), b"\0" * 5000))
    monkeypatch.setattr("spottrain.checkpoint.compile_cache.folders.UNPACKED_LIMIT", 4096)
    second = node()
    assert second.cache.restore() is None and second.files() == {}
    assert not second.compile({"inductor/large": b"\0" * 5000}).cache.save_if_changed()
    said = capsys.readouterr().out
    assert "compile-cache-unusable" in said and "compile-cache-not-saved" in said


def cut(body: bytes) -> bytes:
    return body[: len(body) // 2]


def flipped(body: bytes) -> bytes:
    return body[:40] + bytes([body[40] ^ 1]) + body[41:]


@pytest.mark.parametrize("damage", [cut, flipped, lambda body: b"", None])
def test_a_damaged_archive_means_a_cold_compile_and_is_replaced(
    node: Nodes, damage: Callable[[bytes], bytes] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = node().compile(COMPILED)
    first.cache.save_if_changed()
    key = COMPILE_CACHE_PREFIX + first.entry()["archive"]
    if damage is None:
        first.store.delete([key])
    else:
        found = first.store.get(key)
        assert found is not None
        first.store.put(key, damage(found.body))
    second = node()
    assert second.cache.restore() is None and second.files() == {}
    assert "compile-cache-unusable" in capsys.readouterr().out
    assert second.compile(COMPILED).cache.save_if_changed()
    assert node().cache.restore()


@pytest.mark.parametrize("whole", [True, False])
def test_what_gzip_or_tar_cannot_read_means_a_cold_compile(node: Nodes, whole: bool) -> None:
    first = node().compile(COMPILED)
    first.cache.save_if_changed()
    plant(first, gzip.compress(b"no tar" * 1000) if whole else cut(archive(member("inductor/x"))))
    second = node()
    assert second.cache.restore() is None and second.files() == {}


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"format": 1}',
        {"format": 2},
        {"facts": {}},
        {"facts": None},
        {"archive": "../HEAD"},
        {"archive": 7},
        {"sha256": "0" * 64},
        {"savedAt": None},
        {"extra": 1},
    ],
)
def test_a_damaged_entry_means_a_cold_compile_and_is_replaced(
    node: Nodes, entry: bytes | dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first = node().compile(COMPILED)
    first.cache.save_if_changed()
    body = entry if isinstance(entry, bytes) else json.dumps({**first.entry(), **entry}).encode()
    first.store.put(f"{COMPILE_CACHE_PREFIX}{first.cache.key}.json", body)
    second = node()
    assert second.cache.restore() is None and second.files() == {}
    assert "compile-cache-unusable" in capsys.readouterr().out
    second.compile(COMPILED).cache.save_if_changed()
    assert node().cache.restore()
