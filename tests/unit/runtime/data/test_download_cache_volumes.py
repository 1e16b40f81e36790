"""`spottrain.cached` on volumes of all kinds, with locks and without, and in a training."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import spottrain
from spottrain.contract import Env
from spottrain.core.preemption import Preemption
from spottrain.data import download_cache
from spottrain.errors import DataCacheFull
from spottrain.lifecycle import session as session_module
from spottrain.lifecycle.session import Session

from tests.support.sentences import Told


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


# --- locks that do not reach ---------------------------------------------------------------------------
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_without_locks_it_is_said_and_no_leftover_is_touched(
    root: Path, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    half = _leftover(root)
    monkeypatch.setattr(fcntl, "flock", refuse)
    spottrain.cached("set", _fill())
    assert "locks on this volume do not exist" in capsys.readouterr().out and half.exists()


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
    (tmp_path / "mounts").write_bytes(b"1 0 0:0 / /not-utf8-\xff rw - fuse x rw\n" + row.encode())
    assert download_cache.node_local(tmp_path, tmp_path / "mounts") is local
    assert not download_cache.node_local(tmp_path, tmp_path / "absent")


def test_where_locks_are_of_one_node_no_leftover_is_touched(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = _leftover(root)
    monkeypatch.setattr(download_cache, "node_local", lambda path: True)
    spottrain.cached("set", _fill())
    assert "locks on this volume may be of this node only" in capsys.readouterr().out and half.exists()


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


def test_one_that_comes_does_not_truncate_the_file_of_the_lock(root: Path) -> None:
    lock = root / ".spottrain" / "set.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("kept")
    spottrain.cached("set", _fill())
    assert lock.read_text() == "kept"


def test_a_lock_that_the_server_keeps_for_a_dead_node_is_freed_by_deleting_its_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = root / ".spottrain" / "set.lock"
    lock.parent.mkdir(parents=True)
    dead = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(dead, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda _: lock.unlink())  # by a person
    assert (spottrain.cached("set", _fill()) / "file").exists()
    os.close(dead)


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


def test_each_file_and_folder_is_brought_onto_the_volume(
    root: Path, fsyncs: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    spottrain.cached("set", _many)
    assert len(fsyncs) == 50 + 2, "and the folder that it was renamed into"
    assert "files=50 sync_seconds=" in capsys.readouterr().out


def test_what_could_not_be_brought_onto_the_volume_is_not_published(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(code: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", lambda handle: fail(errno.EIO))
    with pytest.raises(OSError) as raised:
        spottrain.cached("set", _many)
    assert raised.value.errno == errno.EIO and raised.value.filename
    monkeypatch.setattr(os, "fsync", lambda handle: fail(errno.ENOSPC))
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
