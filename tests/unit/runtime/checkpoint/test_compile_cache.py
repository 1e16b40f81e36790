"""The compile cache beside the checkpoints: restored whole or not at all, and never the end of a run."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spottrain.checkpoint.compile_cache.cache import CompileCache
from spottrain.checkpoint.compile_cache.folders import folders_of, pack, use_folder
from spottrain.checkpoint.compile_cache.key import CompileTarget, parse_cpuinfo
from spottrain.contract import COMPILE_CACHE_PREFIX, Env
from spottrain.core.run_config import RunConfig
from spottrain.errors import ConfigurationError, StoreUnavailable
from spottrain.storage.base import Body, Object
from spottrain.storage.local import FolderStore

from tests.unit.runtime.checkpoint.compilenode import COMPILED, FACTS, Node, Nodes


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
    restored = second.cache.restore()
    assert restored is not None and restored.files == 4 and restored.bytes > 0
    assert second.files() == COMPILED
    said = capsys.readouterr().out
    assert "event=compile-cache-saved" in said and "event=compile-cache-restored hit=True" in said


def test_an_empty_store_is_a_miss_and_no_failure(node: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    assert node().cache.restore() is None
    assert "event=compile-cache-restored hit=False" in capsys.readouterr().out


def test_a_file_that_is_there_is_not_replaced(node: Nodes) -> None:
    node().compile(COMPILED).cache.save_if_changed()
    second = node().compile({"inductor/ab/cab.main.so": b"own"})
    assert second.cache.restore()
    assert second.files() == {**COMPILED, "inductor/ab/cab.main.so": b"own"}


def test_what_was_restored_is_saved_again_only_with_something_new(node: Nodes) -> None:
    node().compile(COMPILED).cache.save_if_changed()
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
    first = node().compile(COMPILED)
    first.cache.save_if_changed()
    assert first.compile({"inductor/fxgraph/x/y": b"longer graph"}).cache.save_if_changed()


def test_nodes_that_compiled_the_same_save_it_once(node: Nodes) -> None:
    assert node().compile(COMPILED).cache.save_if_changed()
    assert not node().compile(COMPILED).cache.save_if_changed()


def test_empty_folders_are_not_saved(node: Nodes) -> None:
    empty = node()
    assert not empty.cache.save_if_changed()
    assert empty.keys() == []


# --- which machine -------------------------------------------------------------------------------------
@pytest.mark.parametrize("fact", [field.name for field in dataclasses.fields(CompileTarget)])
def test_every_fact_makes_another_key(fact: str, node: Nodes) -> None:
    changed: Any = ("sse2",) if fact in ("flags", "devices") else "other"
    other = dataclasses.replace(FACTS, **{fact: changed})
    assert other.key() != FACTS.key()
    node().compile(COMPILED).cache.save_if_changed()
    assert node(facts=other).cache.restore() is None


def test_the_key_is_the_same_in_every_process() -> None:
    assert FACTS.key() == "54497a2ed2119b3e676b69eb9d21576d700005605166de92facc0d3a0e800c9a"


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
    facts = CompileTarget.here("sha256:2", proc=tmp_path)
    assert facts.torch.startswith("2.") and facts.devices == ("NVIDIA H200",) and facts.image == "sha256:2"


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

    monkeypatch.setattr("spottrain.checkpoint.compile_cache.cache.pack", pack_beside_a_compiler)
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
    assert third.cache.restore() and third.files() == COMPILED


def test_replaced_archives_are_deleted(node: Nodes) -> None:
    first = node().compile(COMPILED)
    for number in range(3):
        assert first.compile({f"inductor/{number}": b"1"}).cache.save_if_changed()
    assert first.keys() == [
        COMPILE_CACHE_PREFIX + first.entry()["archive"],
        f"{COMPILE_CACHE_PREFIX}{first.cache.key}.json",
    ]


def test_eight_kinds_of_machine_are_kept_and_the_oldest_goes(node: Nodes) -> None:
    machines = [
        node(facts=dataclasses.replace(FACTS, cpu=str(number)), clock=lambda number=number: 1e9 + number)
        for number in range(10)
    ]
    for machine in machines:
        assert machine.compile(COMPILED).cache.save_if_changed()
    keys = machines[0].keys()
    kept = [machine for machine in machines if f"{COMPILE_CACHE_PREFIX}{machine.cache.key}.json" in keys]
    assert kept == machines[2:] and len(keys) == 16


# --- how it is switched, and what it never does --------------------------------------------------------
def test_drop_forgets_what_every_machine_saved_and_saves_anew(node: Nodes) -> None:
    node().compile(COMPILED).cache.save_if_changed()
    node(facts=dataclasses.replace(FACTS, cpu="other")).compile(COMPILED).cache.save_if_changed()
    dropping = node(drop=True)
    assert dropping.cache.restore() is None
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


def test_an_unknown_mode_is_a_bad_configuration() -> None:
    with pytest.raises(ConfigurationError, match="keep, drop, off"):
        RunConfig.from_env({Env.COMPILE_CACHE: "on"}, script="train.py")


class Down(FolderStore):
    """A store that has gone away."""

    def get(self, key: str) -> Object | None:
        raise StoreUnavailable("no answer")


def test_a_store_that_is_down_costs_a_compile(
    node: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = node(store=Down(tmp_path / "down")).compile(COMPILED)
    assert pod.cache.restore() is None and not pod.cache.save_if_changed()
    said = capsys.readouterr().out
    assert "compile-cache-unusable" in said and "compile-cache-not-saved" in said
