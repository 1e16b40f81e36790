"""The uploader process: sends parts of the trainer's memory, outlives signals, and ends with the trainer."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from spottrain import errors
from spottrain.checkpoint import staging_buffer as arenas
from spottrain.checkpoint.layout import Layout, plan
from spottrain.checkpoint.saver import Saver
from spottrain.checkpoint.staging_buffer import StagingBuffer
from spottrain.checkpoint.tree import Flattened, Leaf
from spottrain.checkpoint.upload import InProcessTransfer, ProcessTransfer, UploaderDied, UploadItem
from spottrain.checkpoint.upload_process import Uploader
from spottrain.contract import CHUNK_BYTES
from spottrain.distributed.world import World
from spottrain.storage.base import AlreadyExists, Cancelled, never
from spottrain.storage.local import FolderStore

from tests.support.snapshots import Memory

SECONDS = 30.0


@contextmanager
def process(root: Path, **more: Any) -> Iterator[ProcessTransfer]:
    it = ProcessTransfer({"uri": str(root), **more})
    try:
        yield it
    finally:
        it.close()
        it._process.wait(SECONDS)  # by itself, because its socket is closed


def filled(numbers: int = 1000) -> tuple[StagingBuffer, Layout, bytes]:
    leaves = [Leaf(path="t", tensor=torch.arange(float(numbers)))]
    arena = StagingBuffer(plan(leaves, [0]))
    arena.fill(leaves)
    return arena, arena.layout, bytes(arena.map[: arena.layout.bytes])


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def until(what: Callable[[], bool], name: str) -> None:
    give_up = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < give_up, f"waited in vain: {name}"
        time.sleep(0.01)


# --- what it sends ------------------------------------------------------------------------------------
def test_it_sends_parts_of_the_memory_and_files_and_tells_what_it_sent(tmp_path: Path) -> None:
    arena, _, memory = filled()
    (tmp_path / "file").write_bytes(b"of a library")
    (tmp_path / "nothing").write_bytes(b"")
    with process(tmp_path / "store") as it:
        it.share(arena)
        sent = it.put(
            [
                UploadItem(key="checkpoints/a", bytes=100, offset=64),
                UploadItem(key="checkpoints/b", bytes=len(memory)),
                UploadItem(key="checkpoints/c", bytes=12, path=str(tmp_path / "file")),
                UploadItem(key="checkpoints/d", bytes=0, path=str(tmp_path / "nothing")),
            ],
            never,
        )
        bodies = {"a": memory[64:164], "b": memory, "c": b"of a library", "d": b""}
        for name, body in bodies.items():
            assert (tmp_path / "store" / "checkpoints" / name).read_bytes() == body
            assert sent[f"checkpoints/{name}"].bytes == len(body)
            assert sent[f"checkpoints/{name}"].chunks == ((sha(body),) if body else ())


def test_the_copy_that_is_sent_is_the_newest_and_of_the_newest_memory(tmp_path: Path) -> None:
    with process(tmp_path / "store") as it:
        for number in (1, 2):
            arena, layout, _ = filled(1000 * number)
            it.share(arena)
            for turn in (1, 2):
                arena.fill([Leaf(path="t", tensor=torch.full((1000 * number,), float(turn)))])
                key = f"checkpoints/{number}{turn}"
                it.put([UploadItem(key=key, bytes=layout.bytes)], never)
                assert (tmp_path / "store" / key).read_bytes() == bytes(arena.map[: layout.bytes])


def test_an_error_of_the_store_comes_back_as_what_it_was(tmp_path: Path) -> None:
    arena, _, _ = filled()
    (tmp_path / "store" / "checkpoints").mkdir(parents=True)
    (tmp_path / "store" / "checkpoints" / "there").write_bytes(b"x")
    (tmp_path / "store" / "checkpoints" / "file").write_bytes(b"x")
    with process(tmp_path / "store") as it:
        it.share(arena)
        with pytest.raises(AlreadyExists):
            it.put([UploadItem(key="checkpoints/there", bytes=10)], never)
        with pytest.raises(errors.ConfigurationError, match="remove the file of that name") as caught:
            it.put([UploadItem(key="checkpoints/file/below", bytes=10)], never)
        assert caught.value.reason == "BadConfiguration"
        with pytest.raises(errors.StoreUnavailable, match=r"failed with FileNotFoundError: .*nowhere"):
            it.put([UploadItem(key="checkpoints/n", bytes=1, path=str(tmp_path / "nowhere"))], never)
        assert it.put([UploadItem(key="checkpoints/next", bytes=10)], never), "it goes on"


def test_a_store_that_cannot_be_opened_is_told_by_the_first_upload(tmp_path: Path) -> None:
    arena, _, _ = filled()
    with process(tmp_path, endpoint=None) as _:
        pass
    it = ProcessTransfer({"uri": "ftp://nowhere"})
    it.share(arena)
    with pytest.raises(errors.ConfigurationError, match="'ftp://nowhere' is not valid"):
        it.put([UploadItem(key="a", bytes=1)], never)
    it.close()
    it._process.wait(SECONDS)


def test_an_upload_that_is_given_up_ends_as_such(tmp_path: Path) -> None:
    arena, layout, _ = filled((CHUNK_BYTES + 4096) // 4)
    with process(tmp_path / "store") as it:
        it.share(arena)
        with pytest.raises(Cancelled):
            it.put([UploadItem(key=f"checkpoints/{n}", bytes=layout.bytes) for n in range(20)], lambda: True)
        assert len(list((tmp_path / "store").glob("checkpoints/*"))) < 20


@pytest.mark.parametrize("name", ["json.py", "spottrain.py", "socket.py"])
def test_a_script_s_file_that_is_named_like_a_module_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    arena, _, _ = filled()
    with process(tmp_path / "store") as it:
        it.share(arena)
        assert it.put([UploadItem(key="checkpoints/a", bytes=10)], never)


def test_a_trainer_that_changes_its_folder_sends_the_files_that_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later" / "written").mkdir(parents=True)
    (tmp_path / "later" / "written" / "a").write_bytes(b"of a library")
    with process(tmp_path / "store") as it:
        monkeypatch.chdir(tmp_path / "later")
        saver = Saver(World(), None, lambda: it)
        save = saver.folder(Path("written"), {}, {}, 5)
        save.key = "checkpoints/x/"
        sent = saver._send(save)
    assert [(key.rpartition("/")[0], each.bytes) for key, each in sent.items()] == [("checkpoints/x", 12)]


def test_of_a_state_that_has_grown_the_old_memory_goes_before_the_new_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = weakref.WeakSet[StagingBuffer]()
    counts: list[int] = []

    def required(needed: int) -> None:
        counts.append(len(alive))

    monkeypatch.setattr(arenas, "require_memory", required)
    with process(tmp_path / "store") as it:
        saver = Saver(World(), None, lambda: it)
        for step, size in ((1, 10), (2, 20), (3, 20)):
            save = saver.snapshot({"t": torch.ones(size)}, {}, step)
            save.key = f"checkpoints/{step}/"
            saver._send(save)
            assert saver._buffer is not None
            alive.add(saver._buffer)
    assert counts == [0, 0]


# --- how it ends --------------------------------------------------------------------------------------
def test_one_that_dies_is_noticed_and_the_next_save_has_another(tmp_path: Path) -> None:
    started: list[ProcessTransfer] = []

    def start() -> ProcessTransfer:
        started.append(ProcessTransfer({"uri": str(tmp_path / "store")}))
        return started[-1]

    saver = Saver(World(), None, start)
    saver.prepare({"t": torch.ones(100)}, {})
    try:
        saver.send([UploadItem(key="checkpoints/a", bytes=100)], never)
        os.kill(started[0].pid, signal.SIGKILL)
        started[0]._process.wait(SECONDS)
        with pytest.raises(UploaderDied, match=f"uploader process {started[0].pid} ended with -9"):
            started[0].put([UploadItem(key="checkpoints/b", bytes=100)], never)
        sent = saver.send([UploadItem(key="checkpoints/b", bytes=100)], never)
        assert len(started) == 2 and sent["checkpoints/b"].bytes == 100
        assert len((tmp_path / "store" / "checkpoints" / "b").read_bytes()) == 100
    finally:
        for each in started:
            each.close()
            each._process.wait(SECONDS)


def test_what_one_that_died_had_sent_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    files = [UploadItem(key="checkpoints/a", bytes=100), UploadItem(key="checkpoints/b", bytes=100)]
    started: list[ProcessTransfer] = []

    def start() -> ProcessTransfer:
        started.append(ProcessTransfer({"uri": str(tmp_path / "store")}))
        return started[-1]

    saver = Saver(World(), None, start)
    saver.prepare({"t": torch.ones(100)}, {})
    try:
        first = saver.send(files[:1], never)
        os.kill(started[0].pid, signal.SIGKILL)
        started[0]._process.wait(SECONDS)
        second = saver.send(files, never)
        assert second["checkpoints/a"] == first["checkpoints/a"]
        assert (tmp_path / "store" / "checkpoints" / "b").exists()
    finally:
        for each in started:
            each.close()
            each._process.wait(SECONDS)


# --- in this process ----------------------------------------------------------------------------------
class Counting(Memory):
    """Tells what was tried; fails one key at once, and holds the others until they are given up."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails
        self.tried: list[str] = []

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        self.tried.append(key)
        if key == self.fails:
            raise errors.StoreUnavailable("no answer")
        if self.fails:
            until(cancelled, "to be given up")
            raise Cancelled(key)
        return super().upload(key, body)


def test_after_the_first_file_that_fails_no_other_is_begun() -> None:
    store, said = Counting(fails="3"), list[dict[str, Any]]()
    uploader = Uploader(lambda: store, said.append)
    arena, _, _ = filled()
    uploader.share(os.dup(arena.fd), arena.size)
    uploader.work(1, [{"key": str(n), "bytes": 10, "offset": 0} for n in range(40)])()
    assert said == [
        {"put": 1, "error": "StoreUnavailable", "message": "no answer", "reason": "StoreUnavailable"}
    ], "the cause, and not what followed from it"
    assert len(store.tried) < 12


class Stuck(Memory):
    """One key fails when another is being sent; that one goes on, whatever it is told, until `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.sending, self.gate = threading.Event(), threading.Event()

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        if key == "fails":
            assert self.sending.wait(SECONDS), "the other was never begun"
            raise errors.StoreUnavailable("no answer")
        self.sending.set()
        assert self.gate.wait(SECONDS), "nobody opened the gate"
        return super().upload(key, body)


def test_that_one_file_failed_is_told_while_another_is_still_being_sent() -> None:
    store, said = Stuck(), list[dict[str, Any]]()
    uploader = Uploader(lambda: store, said.append)
    arena, _, _ = filled()
    uploader.share(os.dup(arena.fd), arena.size)
    files = [{"key": key, "bytes": 10, "offset": 0} for key in ("slow", "fails")]
    try:
        uploader.work(1, files)()
        assert [each["error"] for each in said] == ["StoreUnavailable"] and not store.gate.is_set()
    finally:
        store.gate.set()


def test_a_second_try_takes_what_is_there_although_its_answer_was_an_error() -> None:
    class Lost(Memory):
        def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
            if key in self.bodies:
                raise AlreadyExists(key)
            super().upload(key, body)
            raise errors.StoreUnavailable("the answer was lost")

    store, said = Lost(), list[dict[str, Any]]()
    uploader = Uploader(lambda: store, said.append)
    arena, _, memory = filled()
    uploader.share(os.dup(arena.fd), arena.size)
    file = {"key": "a", "bytes": 10, "offset": 0}
    uploader.work(1, [file])()
    uploader.work(2, [file | {"again": True}])()
    assert said[0]["message"] == "the answer was lost"
    assert said[1] == {"put": 2, "sent": {"a": (10, [sha(memory[:10])])}}


def test_a_second_try_sends_only_what_is_missing() -> None:
    store, said = Counting(fails=""), list[dict[str, Any]]()
    uploader = Uploader(lambda: store, said.append)
    arena, _, _ = filled()
    uploader.share(os.dup(arena.fd), arena.size)
    files = [{"key": str(n), "bytes": 10, "offset": 0} for n in range(4)]
    uploader.work(1, files[:2])()
    uploader.work(2, files)()
    assert sorted(store.tried) == ["0", "1", "2", "3"]
    assert sorted(said[1]["sent"]) == ["0", "1", "2", "3"]
    json.dumps(said)


def test_without_a_process_the_same_is_sent(tmp_path: Path) -> None:
    arena, layout, memory = filled()
    (tmp_path / "file").write_bytes(b"of a library")
    here = InProcessTransfer(FolderStore(tmp_path / "store"))
    here.share(arena)
    shard = layout.shards[0]
    files = [
        UploadItem(key="a", bytes=shard.bytes, offset=shard.offset),
        UploadItem(key="b", bytes=12, path=str(tmp_path / "file")),
    ]
    sent = here.put(files, never)
    assert sent["a"].chunks == (sha(memory[: shard.bytes]),) and sent["b"].chunks == (sha(b"of a library"),)
    assert (tmp_path / "store" / "a").read_bytes() == memory[: shard.bytes]
    here.close()


def test_the_uploader_starts_without_torch(tmp_path: Path) -> None:
    words = (
        "import sys, spottrain.checkpoint.upload_process; "
        "print('torch' in sys.modules, 'boto3' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_flattening_for_a_transfer_copies_nothing() -> None:
    weight = torch.ones(3)
    assert Flattened({"w": weight}).leaves[0].tensor.data_ptr() == weight.data_ptr()
