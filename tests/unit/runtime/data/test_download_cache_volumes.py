"""`spottrain.cached` on volumes of all kinds, with locks and without, and in a training."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import spottrain
from spottrain.contract import Env
from spottrain.core.preemption import Preemption
from spottrain.data import cache_locks, cache_volume, download_cache
from spottrain.errors import DataCacheFull
from spottrain.lifecycle import session as session_module
from spottrain.lifecycle.session import Session

from tests.support.sentences import Told

PATIENCE = 20.0


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(Env.DATA_CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(download_cache, "POLL_SECONDS", 0.01)
    return tmp_path / "cache"


def _fill(text: str = "x") -> Callable[[Path], object]:
    return lambda folder: (folder / "file").write_text(text)


def _leftover(root: Path) -> Path:
    half = root / ".spottrain" / "set.0123456789abcdef"
    half.mkdir(parents=True)
    return half


def _kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every path lies on such a file system."""
    monkeypatch.setattr(cache_volume, "mounts", lambda *_: [cache_volume.Mount(kind, frozenset())])


# --- locks that do not reach ---------------------------------------------------------------------------
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_without_locks_it_is_said_once_and_no_leftover_is_touched(
    root: Path, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    half = _leftover(root)
    monkeypatch.setattr(fcntl, "flock", refuse)
    spottrain.cached("set", _fill())
    spottrain.cached("other", _fill())
    assert capsys.readouterr().out.count("event=data-cache-without-locks") == 1 and half.exists()


ROW = "36 35 {device} / {at} rw,noatime shared:1 - {kind} server:/x {options}\n"


@pytest.mark.parametrize(
    ("kind", "options", "local"),
    [
        ("ext4", "rw", False),
        ("nfs4", "rw,vers=4.1,local_lock=none", False),
        ("nfs", "rw,vers=3,nolock,local_lock=all", True),
        ("cifs", "rw,nobrl", True),
        ("cifs", "rw,vers=3.1.1", True),
        ("smb3", "rw", True),
        ("virtiofs", "rw", True),
        ("9p", "rw,trans=virtio", True),
        ("fuse.gcsfuse", "rw", True),
    ],
)
def test_the_mount_says_whether_locks_reach_other_nodes(
    tmp_path: Path, kind: str, options: str, local: bool
) -> None:
    device = tmp_path.stat().st_dev
    row = ROW.format(device=f"{os.major(device)}:{os.minor(device)}", at=tmp_path, kind=kind, options=options)
    (tmp_path / "mounts").write_text("1 0 0:0 / /other rw - fuse x rw\n" + row)
    assert cache_locks.only_here(tmp_path, tmp_path / "mounts") is local
    assert not cache_locks.only_here(tmp_path, tmp_path / "absent")


def test_where_locks_are_of_one_node_no_leftover_is_touched(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = _leftover(root)
    monkeypatch.setattr(cache_locks, "only_here", lambda path: True)
    spottrain.cached("set", _fill())
    assert "locks on this volume may be of this node only" in capsys.readouterr().out and half.exists()


# --- SMB: locks are mandatory, and are refused in another way -------------------------------------------
def test_a_lock_that_is_refused_as_smb_does_it_is_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flock, refusals = fcntl.flock, [errno.EACCES, errno.EACCES]

    def busy(handle: int, how: int) -> None:
        if how != fcntl.LOCK_UN and refusals:
            raise OSError(refusals.pop(), "Permission denied")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", busy)
    assert (spottrain.cached("set", _fill()) / "file").exists()
    assert "event=data-cache-waiting" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["cifs", "ext4"])
def test_a_lock_file_that_cannot_be_opened_is_busy_on_smb_and_bad_rights_elsewhere(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    spottrain.cached("set", _fill())  # its lock stays
    (root / "set" / "file").unlink()
    (root / "set").rmdir()
    usual, refusals = os.open, [errno.EACCES]

    def busy(path: Path, flags: int, mode: int = 0o777, **more: int) -> int:
        if Path(path).suffix == ".lock" and refusals:
            raise PermissionError(refusals.pop(), "Permission denied")
        return usual(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", busy)
    _kind(kind, monkeypatch)
    if kind == "cifs":
        assert (spottrain.cached("set", _fill()) / "file").exists()
    else:
        told(lambda: spottrain.cached("set", _fill()))


def test_one_that_comes_does_not_truncate_the_file_of_the_lock(root: Path) -> None:
    lock = root / ".spottrain" / "set.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("kept")
    spottrain.cached("set", _fill())
    assert lock.read_text() == "kept"


# --- a server that does not take the lock of a dead node away -------------------------------------------
@pytest.fixture
def busy(root: Path) -> Path:
    """A lock that somebody has who will never say a word."""
    lock = root / ".spottrain" / "set.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def _of_the_dead(lock: Path) -> int:
    handle = os.open(lock, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def test_one_that_waits_for_a_silent_lock_goes_on_without_it_and_removes_nothing(
    root: Path, busy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = busy.parent / "set.0123456789abcdef"
    half.mkdir()
    monkeypatch.setattr(cache_locks, "SILENT_SECONDS", 0.1)
    handle = _of_the_dead(busy)
    assert (spottrain.cached("set", _fill()) / "file").exists() and half.exists()
    os.close(handle)
    out = capsys.readouterr().out
    assert "event=data-cache-lock-ignored" in out and "without-locks" not in out


def test_one_that_has_gone_on_without_the_lock_is_left_alone_by_who_gets_it_meanwhile(
    root: Path, busy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_locks, "SILENT_SECONDS", 0.1)
    handle = _of_the_dead(busy)

    def slow(folder: Path) -> None:
        os.close(handle)  # the node is back, and the server knows
        spottrain.cached("set", _fill("theirs"))
        (folder / "file").write_text("ours")

    assert (spottrain.cached("set", slow) / "file").read_text() == "theirs"


def test_a_lock_whose_file_changes_is_waited_for_however_long_it_takes(
    busy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, clock, waits = _of_the_dead(busy), [0.0], [0]
    monkeypatch.setattr(cache_locks, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def wait() -> None:
        clock[0] += cache_locks.SILENT_SECONDS - 1.0
        waits[0] += 1
        os.utime(busy, ns=(waits[0], waits[0]))  # the server's clock may stand anywhere
        if waits[0] == 10:
            os.close(handle)

    with cache_locks.held(busy, wait) as reach:
        assert reach is cache_locks.LockScope.ALL and waits == [10]


def test_one_that_fills_touches_the_file_of_its_lock(busy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_locks, "TOUCH_SECONDS", 0.01)
    with cache_locks.held(busy, lambda: None):
        for _ in range(2):
            os.utime(busy, ns=(1, 1))
            end = time.monotonic() + PATIENCE
            while busy.stat().st_mtime_ns == 1:
                assert time.monotonic() < end, "nobody has touched it"
                time.sleep(0.01)


# --- onto the volume ------------------------------------------------------------------------------------
@pytest.fixture
def fsyncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is synced one by one."""
    done: list[int] = []
    monkeypatch.setattr(os, "fsync", done.append)
    return done


def _many(folder: Path) -> None:
    for number in range(50):
        (folder / str(number)).write_text("x")


class _Library:
    """A C library whose syncfs fails so."""

    def __init__(self, code: int) -> None:
        self._code = code

    def syncfs(self, handle: int) -> int:
        ctypes.set_errno(self._code)
        return -1


def _broken(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_volume, "_reliable", lambda folder: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: _Library(code))


@pytest.mark.skipif(sys.platform != "linux", reason="syncfs is Linux's")
def test_all_files_are_brought_onto_the_volume_by_one_call(
    root: Path, fsyncs: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _kind("ext4", monkeypatch)
    spottrain.cached("set", _many)
    assert len(fsyncs) == 1, "the folder that it was renamed into"
    assert "files=50 sync_seconds=" in capsys.readouterr().out


def test_where_the_kernel_has_no_such_call_each_file_and_folder_is_synced(
    root: Path, fsyncs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _broken(errno.ENOSYS, monkeypatch)
    spottrain.cached("set", _many)
    assert len(fsyncs) == 50 + 2


def test_where_a_process_of_the_node_has_buffers_each_file_and_folder_is_synced(
    root: Path, fsyncs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _kind("fuse.juicefs", monkeypatch)
    spottrain.cached("set", _many)
    assert len(fsyncs) == 50 + 2


def test_what_could_not_be_brought_onto_the_volume_is_not_published(
    root: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    _broken(errno.EIO, monkeypatch)
    told(lambda: spottrain.cached("set", _many))
    _broken(errno.ENOSPC, monkeypatch)
    with pytest.raises(DataCacheFull):
        spottrain.cached("set", _many)
    assert not (root / "set").exists()


# --- half a file system ---------------------------------------------------------------------------------
def test_a_volume_that_renames_no_folders_is_told_before_anything_is_downloaded(
    root: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def never(folder: Path) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr(os, "rename", refuse)
    told(lambda: spottrain.cached("set", never))
    assert [path.name for path in (root / ".spottrain").iterdir()] == ["set.lock"]


# --- in the middle of a training --------------------------------------------------------------------------
@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Session:
    """This process' session; its first step is done, so that a limit holds."""
    session = Session({}, Preemption(grace=30.0))
    session.board.stepped(1)
    monkeypatch.setattr(session_module, "_current", session)
    return session


def test_a_download_in_the_middle_of_a_training_is_no_hang(root: Path, training: Session) -> None:
    board = training.board
    assert board.progress().hangSeconds is not None

    def download(folder: Path) -> None:
        assert board.facts.state == "Downloading" and board.progress().hangSeconds is None
        (folder / "file").touch()

    spottrain.cached("set", download)
    assert board.facts.state == "Training" and board.progress().hangSeconds is not None


def test_a_step_of_another_thread_brings_the_limit_back(root: Path, training: Session) -> None:
    def download(folder: Path) -> None:
        (folder / "file").touch()
        trains = threading.Thread(target=training.board.stepped, args=[2])
        trains.start()
        trains.join()
        assert training.board.progress().hangSeconds is not None
        training.board.update(state="Saving")

    spottrain.cached("set", download)
    assert training.board.facts.state == "Saving"
