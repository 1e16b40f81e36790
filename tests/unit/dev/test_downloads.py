"""Programs that are downloaded: from a real HTTP server on loopback, by their SHA-256 or not at all."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from localcluster import binaries, downloads, releases
from localcluster.downloads import Download, NotReached, fetch
from localcluster.layout import Paths
from localcluster.shell import ClusterError

PROGRAM = b"#!/bin/sh\necho here\n"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *words: object) -> None: ...


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """The address of a server and the folder that it serves."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def wheel() -> bytes:
    """A tar archive in a zip archive, as the wheel with kubectl and Helm is one."""
    inner, outer = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as tar:
        for name in ("lib/kubectl", "lib/helm"):
            entry = tarfile.TarInfo(name)
            entry.size = len(PROGRAM)
            tar.addfile(entry, io.BytesIO(PROGRAM))
    with zipfile.ZipFile(outer, "w") as packed:
        packed.writestr("layer.tgz", inner.getvalue())
    return outer.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_arrives_whole_and_can_be_started(served: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = served
    (folder / "etcd").write_bytes(PROGRAM)
    into = tmp_path / "bin" / "etcd"
    fetch({into: Download(url=f"{address}/etcd", sha256=sha256(PROGRAM))})
    assert into.read_bytes() == PROGRAM and into.stat().st_mode & 0o111
    assert [file.name for file in into.parent.iterdir()] == ["etcd"], "nothing half is left"


def test_one_archive_gives_several_programs_through_its_layers(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    address, folder = served
    (folder / "wheel").write_bytes(wheel())
    files = {
        tmp_path / name: Download(
            url=f"{address}/wheel", sha256=sha256(wheel()), members=("layer.tgz", f"lib/{name}")
        )
        for name in ("kubectl", "helm")
    }
    fetch(files)
    assert all(file.read_bytes() == PROGRAM for file in files)


def test_another_content_is_refused_and_nothing_of_it_stays(served: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = served
    (folder / "etcd").write_bytes(b"changed on the way")
    with pytest.raises(ClusterError, match="SHA-256") as refused:
        fetch({tmp_path / "bin" / "etcd": Download(url=f"{address}/etcd", sha256=sha256(PROGRAM))})
    assert not isinstance(refused.value, NotReached), "no other source is tried silently"
    assert not list((tmp_path / "bin").iterdir())


def test_a_server_that_lacks_the_file_is_not_reached(served: tuple[str, Path], tmp_path: Path) -> None:
    with pytest.raises(NotReached, match="404"):
        fetch({tmp_path / "etcd": Download(url=f"{served[0]}/etcd", sha256="")})


def test_a_silent_server_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def silent(files: dict[Path, Download]) -> None:
        asked.extend(download.host for download in files.values())
        raise NotReached("no answer")

    monkeypatch.setattr(downloads, "fetch", silent)
    monkeypatch.setattr(
        releases, "ready_made", lambda name: Download(url=f"http://127.0.0.1:9/{name}", sha256="")
    )
    paths = Paths(state=tmp_path)
    binaries._download(paths, binaries.missing(paths, {"etcd", "kubelet", "kubectl"}))
    assert asked == ["127.0.0.1:9"]


def test_each_program_of_the_demo_is_ready_made_or_has_a_module() -> None:
    for program in binaries.PROGRAMS:
        assert (binaries.module_folder(program) / "go.mod").exists(), program.name
    ready = {name for name in binaries.DEMO_PROGRAMS if releases.ready_made(name, "x86_64")}
    assert binaries.DEMO_PROGRAMS - ready == {"versitygw"}
    assert all(
        len(found.sha256) == 64
        for machine in ("x86_64", "aarch64")
        for name in binaries.DEMO_PROGRAMS
        if (found := releases.ready_made(name, machine))
    )


def test_programs_of_one_source_are_built_once() -> None:
    control = [p for p in binaries.PROGRAMS if p.name.startswith("kube-") and p.module == "control-plane"]
    assert len(control) == 3 and len({p.source for p in control}) == 1
