"""The uploader process: sends parts of the trainer's memory, outlives signals, and ends with the trainer."""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from spottrain import errors
from spottrain.checkpoint import staging_buffer
from spottrain.checkpoint.layout import plan
from spottrain.checkpoint.saver import Saver
from spottrain.checkpoint.staging_buffer import StagingBuffer
from spottrain.checkpoint.tree import Leaf
from spottrain.checkpoint.upload import Sent, Transfer, Uploader, UploadItem
from spottrain.contract import CHUNK_BYTES
from spottrain.distributed.world import World
from spottrain.storage.base import AlreadyExists, Cancelled, never

from tests.support.sentences import Told
from tests.support.snapshots import Memory
from tests.unit.runtime.distributed.test_control_channel import wait_for

SECONDS = 30.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def process(root: Path) -> Iterator[Transfer]:
    it = Transfer({"uri": str(root)})
    yield it
    ended(it)


def ended(it: Transfer) -> None:
    it.close()
    it._process.wait(SECONDS)  # by itself, because its socket is closed


def filled(numbers: int = 1000) -> tuple[StagingBuffer, bytes]:
    leaves = [Leaf(path="t", tensor=torch.arange(float(numbers)))]
    buffer = StagingBuffer(plan(leaves, [0]))
    buffer.fill(leaves)
    return buffer, bytes(buffer.map[: buffer.layout.bytes])


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


# --- what it sends ------------------------------------------------------------------------------------
def test_it_sends_parts_of_the_memory_and_files_and_tells_what_it_sent(
    process: Transfer, root: Path, tmp_path: Path
) -> None:
    it = process
    buffer, memory = filled()
    (tmp_path / "file").write_bytes(b"of a library")
    (tmp_path / "nothing").write_bytes(b"")
    it.share(buffer)
    key = "checkpoints/all"
    sent = it.put(
        [
            UploadItem(key=f"{key}-a", bytes=100, offset=64),
            UploadItem(key=f"{key}-b", bytes=len(memory)),
            UploadItem(key=f"{key}-c", bytes=12, path=str(tmp_path / "file")),
            UploadItem(key=f"{key}-d", bytes=0, path=str(tmp_path / "nothing")),
        ],
        never,
    )
    for name, body in {"a": memory[64:164], "b": memory, "c": b"of a library", "d": b""}.items():
        assert (root / f"{key}-{name}").read_bytes() == body
        assert sent[f"{key}-{name}"].bytes == len(body)
        assert sent[f"{key}-{name}"].chunks == ([sha(body)] if body else [])


def test_the_copy_that_is_sent_is_the_newest_and_of_the_newest_memory(process: Transfer, root: Path) -> None:
    for number in (1, 2):
        buffer, _ = filled(1000 * number)
        process.share(buffer)
        for turn in (1, 2):
            buffer.fill([Leaf(path="t", tensor=torch.full((1000 * number,), float(turn)))])
            key, size = f"checkpoints/{number}{turn}", buffer.layout.bytes
            process.put([UploadItem(key=key, bytes=size)], never)
            assert (root / key).read_bytes() == bytes(buffer.map[:size])


def test_an_error_of_the_store_comes_back_as_what_it_was(process: Transfer, root: Path, told: Told) -> None:
    buffer, _ = filled()
    (root / "checkpoints").mkdir(exist_ok=True)
    (root / "checkpoints" / "there").write_bytes(b"x")
    process.share(buffer)
    with pytest.raises(AlreadyExists):
        process.put([UploadItem(key="checkpoints/there", bytes=10)], never)
    told(lambda: process.put([UploadItem(key="checkpoints/there/below", bytes=10)], never))
    told(lambda: process.put([UploadItem(key="checkpoints/n", bytes=1, path=str(root / "nowhere"))], never))
    assert process.put([UploadItem(key="checkpoints/next", bytes=10)], never), "it goes on"


def test_a_store_that_cannot_be_opened_is_told_by_the_first_upload(told: Told) -> None:
    it = Transfer({"uri": "ftp://nowhere"})
    told(lambda: it.put([UploadItem(key="a", bytes=1)], never))
    ended(it)


def test_an_upload_that_is_given_up_ends_as_such(process: Transfer, root: Path) -> None:
    buffer, memory = filled((CHUNK_BYTES + 4096) // 4)
    process.share(buffer)
    with pytest.raises(Cancelled):
        process.put([UploadItem(key=f"abandoned/{n}", bytes=len(memory)) for n in range(20)], lambda: True)
    assert len(list(root.glob("abandoned/*"))) < 20


def test_a_script_s_files_that_are_named_like_modules_are_not_taken_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "spottrain.py", "socket.py"):
        (tmp_path / name).write_text("raise SystemExit('not this one')")
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    it = Transfer({"uri": str(tmp_path / "store")})
    assert it.put([UploadItem(key="checkpoints/a", bytes=1, path=str(tmp_path / "file"))], never)
    ended(it)


def test_a_trainer_that_changes_its_folder_sends_the_files_that_it_sees(
    process: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later" / "written").mkdir(parents=True)
    (tmp_path / "later" / "written" / "a").write_bytes(b"of a library")
    monkeypatch.chdir(tmp_path / "later")
    saver = Saver(World(), lambda: process)
    save = saver.folder(Path("written"), {}, {}, 5)
    save.key = "checkpoints/x/"
    sent = saver.send(save.uploads, never)
    assert [(key.rpartition("/")[0], each.bytes) for key, each in sent.items()] == [("checkpoints/x", 12)]


def test_of_a_state_that_has_grown_the_old_memory_goes_before_the_new_is_made(
    process: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = weakref.WeakSet[StagingBuffer]()
    counts: list[int] = []
    monkeypatch.setattr(staging_buffer, "require_memory", lambda needed: counts.append(len(alive)))
    saver = Saver(World(), lambda: process)
    for step, size in ((1, 10), (2, 20), (3, 20)):
        save = saver.snapshot({"t": torch.ones(size)}, {}, step)
        save.key = f"checkpoints/grown-{step}/"
        saver.send(save.uploads, never)
        assert saver._buffer is not None
        alive.add(saver._buffer)
    assert counts == [0, 0]


# --- how it ends --------------------------------------------------------------------------------------
def test_one_that_dies_is_replaced_and_what_it_had_sent_is_not_in_the_way(tmp_path: Path, told: Told) -> None:
    items = [UploadItem(key=f"checkpoints/{name}", bytes=100) for name in "ab"]
    started: list[Transfer] = []

    def start() -> Transfer:
        started.append(Transfer({"uri": str(tmp_path / "store")}))
        return started[-1]

    saver = Saver(World(), start)
    saver.prepare({"t": torch.ones(100)}, {})
    try:
        first = saver.send(items[:1], never)
        os.kill(started[0].pid, signal.SIGKILL)
        started[0]._process.wait(SECONDS)
        told(lambda: started[0].put(items, never))
        second = saver.send(items, never)
        assert len(started) == 2 and second["checkpoints/a"] == first["checkpoints/a"]
        assert len((tmp_path / "store" / "checkpoints" / "b").read_bytes()) == 100
    finally:
        for each in started:
            ended(each)


def test_the_uploader_starts_without_torch() -> None:
    words = "import sys, spottrain.checkpoint.upload; print('torch' in sys.modules, 'boto3' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# --- failures within one upload -----------------------------------------------------------------------
class Scene:
    """An uploader in this process, and what its puts of keys returned or raised."""

    def __init__(self, store: Memory) -> None:
        self.uploader = Uploader(lambda: store)
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)

    def put(self, *keys: str, again: bool = False) -> dict[str, Sent]:
        items = [UploadItem(key=key, bytes=10, again=again) for key in keys]
        return self.uploader.put(items, self.memory, never)

    def fail(self, *keys: str) -> str:
        with pytest.raises(errors.StoreUnavailable) as raised:
            self.put(*keys)
        return str(raised.value)


class Counting(Memory):
    """Notes what was tried; fails one key at once, and holds the others until they are given up."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails = fails
        self.tried: list[str] = []

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        self.tried.append(key)
        if key == self.fails:
            raise errors.StoreUnavailable("no answer")
        if self.fails:
            wait_for(cancelled)
            raise Cancelled(key)
        return super().upload(key, body)


def test_after_the_first_file_that_fails_no_other_is_begun() -> None:
    store = Counting(fails="3")
    assert Scene(store).fail(*map(str, range(40))) == "no answer", "the cause, and not what followed from it"
    assert len(store.tried) < 12


def test_a_second_try_sends_only_what_is_missing() -> None:
    store = Counting()
    scene = Scene(store)
    scene.put("0", "1")
    assert sorted(scene.put("0", "1", "2")) == ["0", "1", "2"]
    assert sorted(store.tried) == ["0", "1", "2"]


class Gated(Memory):
    """`fails` fails while `slow` is being sent; that one goes on, whatever it is told, until `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.sending, self.gate = threading.Event(), threading.Event()

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        if key == "fails":
            assert self.sending.wait(SECONDS), "the other was never begun"
            raise errors.StoreUnavailable("no answer")
        if key == "slow":
            self.sending.set()
            assert self.gate.wait(SECONDS), "nobody opened the gate"
        return super().upload(key, body)


def test_that_one_file_failed_is_told_while_another_is_still_being_sent() -> None:
    store = Gated()
    try:
        assert Scene(store).fail("slow", "fails") == "no answer"
        assert not store.gate.is_set()
    finally:
        store.gate.set()


def test_what_an_abandoned_upload_still_sends_is_no_part_of_the_next_answer() -> None:
    class Crossing(Gated):
        def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
            if key == "shard":  # the abandoned one ends meanwhile
                self.gate.set()
                abandoned.join(SECONDS)
            return super().upload(key, body)

    store = Crossing()
    scene = Scene(store)
    abandoned = threading.Thread(target=scene.put, args=["slow"])
    abandoned.start()
    assert store.sending.wait(SECONDS)
    assert list(scene.put("shard")) == ["shard"]
    assert not abandoned.is_alive()


def test_a_second_try_takes_what_is_there_although_its_answer_was_an_error() -> None:
    class Lost(Memory):
        def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
            if key in self.bodies:
                raise AlreadyExists(key)
            super().upload(key, body)
            raise errors.StoreUnavailable("the answer was lost")

    scene = Scene(Lost())
    assert scene.fail("a") == "the answer was lost"
    assert scene.put("a", again=True) == {"a": (10, [sha(bytes(10))])}
