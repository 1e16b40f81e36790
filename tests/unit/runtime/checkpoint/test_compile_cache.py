"""The compile cache beside the checkpoints: restored whole or not at all, and never the end of a run."""

from __future__ import annotations

import fcntl
import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spottrain.checkpoint.compile_cache import (
    CompileCache,
    cache_key,
    compile_target,
    folders_of,
    pack,
    parse_cpuinfo,
    use_folder,
)
from spottrain.contract import COMPILE_CACHE_PREFIX, Env
from spottrain.core.run_config import RunConfig
from spottrain.errors import StoreUnavailable
from spottrain.storage.base import Body
from spottrain.storage.local import FolderStore

from tests.support.sentences import Told

TARGET: dict[str, Any] = {
    "torch": "2.15.0+cpu",
    "triton": "",
    "python": "CPython 3.11.7",
    "machine": "x86_64",
    "libc": "glibc 2.36",
    "cpu": "AuthenticAMD 25 17 AMD EPYC",
    "flags": ("avx2", "avx512f"),
    "devices": (),
    "image": "sha256:1",
}
COMPILED = {
    "inductor/ab/cab.main.so": b"library",
    "inductor/fxgraph/x/y": b"graph",
    "triton/K/k.cubin": b"kernel",
    "headers/h.h.gch": b"header",
}


class Node:
    """A pod's folders and its compile cache, on a store that it shares with other nodes."""

    def __init__(self, root: Path, store: FolderStore, **options: Any) -> None:
        self.root = root
        self.store = store
        places = {label: root / label for label in ("inductor", "triton", "headers")}
        self.cache = CompileCache(store=store, places=places, **{"key": cache_key(TARGET), **options})

    def compile(self, files: dict[str, bytes]) -> Node:
        for name, body in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        return self

    def files(self) -> dict[str, bytes]:
        found = (path for path in self.root.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in found}

    def keys(self) -> list[str]:
        return self.store.list(COMPILE_CACHE_PREFIX)

    def archive(self) -> str:
        (found,) = (key for key in self.keys() if self.cache.key in key)
        return found


Nodes = Callable[..., Node]


def saved(node: Nodes) -> Node:
    first = node().compile(COMPILED)
    assert first.cache.save_if_changed()
    return first


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


# --- what comes back -----------------------------------------------------------------------------------
def test_a_new_pod_gets_the_files_of_the_one_before(node: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    assert node().compile(COMPILED).cache.save_if_changed()
    second = node()
    assert second.cache.restore() > 0
    assert second.files() == COMPILED
    said = capsys.readouterr().out
    assert (
        "event=compile-cache-saved" in said
        and "event=compile-cache-restored hit=True" in said
        and "files=4" in said
    )


def test_an_empty_store_is_a_miss_and_no_failure(node: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    assert node().cache.restore() == 0
    assert "event=compile-cache-restored hit=False" in capsys.readouterr().out


def test_a_file_that_is_there_is_not_replaced(node: Nodes) -> None:
    saved(node)
    second = node().compile({"inductor/ab/cab.main.so": b"own"})
    assert second.cache.restore()
    assert second.files() == {**COMPILED, "inductor/ab/cab.main.so": b"own"}


def test_what_was_restored_is_saved_again_only_with_something_new(node: Nodes) -> None:
    saved(node)
    second = node()
    second.cache.restore()
    assert not second.cache.save_if_changed()
    second.compile({"inductor/cd/new.so": b"new"})
    assert second.cache.save_if_changed()
    assert not second.cache.save_if_changed()
    third = node()
    third.cache.restore()
    assert third.files() == {**COMPILED, "inductor/cd/new.so": b"new"}


def test_a_file_that_changes_in_place_is_saved_again(node: Nodes) -> None:
    first = saved(node)
    assert first.compile({"inductor/fxgraph/x/y": b"longer graph"}).cache.save_if_changed()


def test_nodes_that_compiled_the_same_save_it_once(node: Nodes) -> None:
    first = node().compile(COMPILED)
    assert first.cache.save_if_changed()
    assert not node().compile(COMPILED).cache.save_if_changed()
    assert node().compile({"inductor/other": b"2"}).cache.save_if_changed()
    assert not first.cache.save_if_changed(), "nor again because another node compiled something else"


def test_empty_folders_are_not_saved(node: Nodes) -> None:
    empty = node()
    assert not empty.cache.save_if_changed()
    assert empty.keys() == []


# --- which machine -------------------------------------------------------------------------------------
def test_every_fact_makes_another_key(node: Nodes) -> None:
    saved(node)
    for name in TARGET:
        other = cache_key({**TARGET, name: ("sse2",) if name in ("flags", "devices") else "other"})
        assert other != cache_key(TARGET), name
        assert node(key=other).cache.restore() == 0, name
    assert TARGET.keys() == compile_target("sha256:1").keys()


def test_the_key_is_the_same_in_every_process() -> None:
    assert cache_key(TARGET) == "8a47e5e8ef184c6ffa02c0b4c9c2a08b668956997728a98e09e0087cbc41e41d"


@pytest.mark.parametrize(
    ("text", "model", "flags"),
    [
        (
            "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
            "flags\t\t: sse avx2\n\nprocessor\t: 1\nflags\t: other\n",
            "GenuineIntel 6 143",
            ("avx2", "sse"),
        ),
        (
            "processor\t: 0\nFeatures\t: sve asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n",
            "0x41 0xd40",
            ("asimd", "sve"),
        ),
        ("", "", ()),
    ],
)
def test_the_processor_is_told_by_model_and_flags(text: str, model: str, flags: tuple[str, ...]) -> None:
    assert parse_cpuinfo(text) == (model, flags)


def test_the_facts_of_this_machine_need_no_torch(tmp_path: Path) -> None:
    information = tmp_path / "driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H200\nIRQ: 4\n")
    target = compile_target("sha256:2", proc=tmp_path)
    assert target["torch"].startswith("2.") and target["devices"] == ("NVIDIA H200",)
    assert target["image"] == "sha256:2"


# --- while others write --------------------------------------------------------------------------------
def test_half_written_files_and_locks_are_left_out(node: Nodes) -> None:
    passing = {
        "inductor/ab/.77.140.tmp": b"torch, before its rename",
        "inductor/locks/cab.lock": b"",
        "inductor/ef/half.main.so": b"of a killed linker",
        "inductor/ef/half.main_CxxBuild/object.o": b"its folder",
        "triton/tmp.pid_5_x/k.cubin": b"Triton, before its rename",
    }
    first = node().compile({**COMPILED, **passing})
    (first.root / "inductor/ab/link").symlink_to("/etc/passwd")
    assert first.cache.save_if_changed()
    second = node()
    second.cache.restore()
    assert second.files() == COMPILED


def test_nothing_is_saved_while_a_compiler_holds_its_lock(node: Nodes) -> None:
    first = node().compile({**COMPILED, "inductor/locks/cab.lock": b""})
    with (first.root / "inductor/locks/cab.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not first.cache.save_if_changed()
    assert first.keys() == []
    assert first.cache.save_if_changed()


def test_what_changed_while_it_was_packed_is_not_saved(node: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    first = node().compile(COMPILED)

    def pack_beside_a_compiler(*arguments: Any) -> memoryview:
        body = pack(*arguments)
        first.compile({"inductor/cd/new.so": b"new"})
        return body

    monkeypatch.setattr("spottrain.checkpoint.compile_cache.pack", pack_beside_a_compiler)
    assert not first.cache.save_if_changed()
    assert first.keys() == []
    monkeypatch.undo()
    assert first.cache.save_if_changed()


class Interleaved(FolderStore):
    """Runs `between` once, after the first put of an archive: another writer's whole save."""

    between: Callable[[], object] | None = None

    def put(self, key: str, body: Body) -> None:
        super().put(key, body)
        if key.endswith(".tar.gz") and self.between:
            between, self.between = self.between, None
            between()


@pytest.mark.parametrize("older", [{}, {"inductor/old": b"1"}])
def test_two_writers_at_once_leave_an_archive_that_can_be_restored(
    node: Nodes, tmp_path: Path, older: dict[str, bytes]
) -> None:
    store = Interleaved(tmp_path / "both")
    if older:
        node(store=store).compile(older).cache.save_if_changed()
    one, other = node(store=store).compile(COMPILED), node(store=store).compile({"inductor/other": b"2"})
    store.between = other.cache.save_if_changed
    assert one.cache.save_if_changed()
    third = node(store=store)
    assert third.cache.restore() and third.files() in (COMPILED, {"inductor/other": b"2"})
    assert one.compile({"inductor/more": b"3"}).cache.save_if_changed()
    assert len(one.keys()) == 1


def test_replaced_archives_are_deleted(node: Nodes) -> None:
    first = node().compile(COMPILED)
    for number in range(3):
        assert first.compile({f"inductor/{number}": b"1"}).cache.save_if_changed()
    assert len(first.keys()) == 1


def test_eight_kinds_of_machine_are_kept_and_the_oldest_goes(node: Nodes) -> None:
    machines = [node(key=f"{number:064x}") for number in range(10)]
    for number, machine in enumerate(machines):
        assert machine.compile(COMPILED).cache.save_if_changed()
        os.utime(machine.root.parent / "store" / machine.archive(), (1e9 + number, 1e9 + number))
    keys = machines[0].keys()
    assert [machine for machine in machines if any(machine.cache.key in key for key in keys)] == machines[2:]
    assert len(keys) == 8


# --- how it is switched, and what it never does --------------------------------------------------------
def test_drop_forgets_what_every_machine_saved_and_saves_again(node: Nodes) -> None:
    saved(node)
    node(key="1" * 64).compile(COMPILED).cache.save_if_changed()
    dropping = node(drop=True)
    assert dropping.cache.restore() == 0
    assert dropping.keys() == [] and dropping.files() == {}
    assert dropping.compile({"inductor/ab/cab.main.so": b"for this CPU"}).cache.save_if_changed()
    after = node()
    after.cache.restore()
    assert after.files() == {"inductor/ab/cab.main.so": b"for this CPU"}


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    found = {str(Env.CACHE_DIR): str(tmp_path / "cache"), **more}
    use_folder(tmp_path / "cache", found)
    return found


def of(store: FolderStore | None, environ: dict[str, str]) -> CompileCache | None:
    return CompileCache.of(store, RunConfig.from_env(environ, script="train.py"), environ)


def test_it_keeps_the_folders_that_torch_was_pointed_at(tmp_path: Path, store: FolderStore) -> None:
    own = environ(tmp_path, TRITON_CACHE_DIR=str(tmp_path / "mine"))
    assert own["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache/inductor")
    places = folders_of(own)
    assert places["inductor"] == tmp_path / "cache/inductor" and places["triton"] == tmp_path / "mine"
    assert of(store, own) is not None


def test_it_is_off_where_told_so_without_a_store_and_without_a_folder(
    tmp_path: Path, store: FolderStore
) -> None:
    assert of(store, environ(tmp_path, **{Env.COMPILE_CACHE: "off"})) is None
    assert of(None, environ(tmp_path)) is None
    assert of(store, {}) is None


def test_an_unknown_mode_is_a_bad_configuration(told: Told) -> None:
    told(lambda: RunConfig.from_env({Env.COMPILE_CACHE: "on"}, script="train.py"))


class Down(FolderStore):
    """A store that has gone away."""

    def list(self, prefix: str) -> list[str]:
        raise StoreUnavailable("no answer")


def test_a_store_that_is_down_costs_a_compile(
    node: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = node(store=Down(tmp_path / "down")).compile(COMPILED)
    assert pod.cache.restore() == 0 and not pod.cache.save_if_changed()
    said = capsys.readouterr().out
    assert "compile-cache-unusable" in said and "compile-cache-not-saved" in said


# --- damaged or forged ---------------------------------------------------------------------------------
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


def plant(node: Node, body: bytes) -> None:
    """What somebody would store who can write the prefix."""
    node.store.put(node.archive(), body)


def is_a_cold_compile(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.cache.restore() == 0 and node.files() == {}
    assert "event=compile-cache-unusable" in capsys.readouterr().out


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
    plant(saved(node), archive(bad))
    is_a_cold_compile(node(), capsys)
    assert not (tmp_path / "outside").exists() and not list(tmp_path.glob("node-*/outside"))


def test_an_archive_that_unpacks_to_too_much_is_refused(
    node: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = saved(node)
    plant(first, archive(member("inductor/large", size=5000), b"\0" * 5000))
    monkeypatch.setattr("spottrain.checkpoint.compile_cache.UNPACKED_LIMIT", 4096)
    second = node()
    assert second.cache.restore() == 0 and second.files() == {}
    assert not second.compile({"inductor/large": b"\0" * 5000}).cache.save_if_changed()
    said = capsys.readouterr().out
    assert "compile-cache-unusable" in said and "compile-cache-not-saved" in said


def cut(body: bytes) -> bytes:
    return body[: len(body) // 2]


def flipped(body: bytes) -> bytes:
    return body[:40] + bytes([body[40] ^ 1]) + body[41:]


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "it is cut": cut,
    "a bit is flipped": flipped,
    "the checksum is another": lambda body: body[:-8] + bytes(8),
    "it is empty": lambda body: b"",
    "no tar in the gzip": lambda body: gzip.compress(b"no tar" * 1000),
    "half a gzip": lambda body: cut(archive(member("inductor/x"))),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_what_is_damaged_means_a_cold_compile_and_is_replaced(
    node: Nodes, harm: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    first = saved(node)
    found = first.store.get(first.archive())
    assert found is not None
    plant(first, harm(found.body))
    second = node()
    is_a_cold_compile(second, capsys)
    assert second.compile(COMPILED).cache.save_if_changed()
    assert node().cache.restore()
