"""File locks of the data cache: one process fills a folder, and leftovers of dead ones can be removed.

A process holds a lock (flock) on a file of the volume while it fills a folder. When the process dies, the
kernel or the file server releases the lock. Not every volume has locks that all nodes see:

    no locks           several processes may fill the same folder; the first rename into place wins
    node-local locks   the same between nodes; within a node one process fills and the others wait

On such volumes a half-filled folder may belong to a living process elsewhere, so none is removed.

Some servers keep the lock of a node that crashed (NFSv3 waits for its reboot). So the holder touches its file
regularly. A waiting process that sees no change for `SILENT_SECONDS` goes on without the lock. It compares
changes of the modification time only, never clocks: the time is the server's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from pathlib import Path
from typing import Final

from spottrain.core import log
from spottrain.data import cache_volume

NO_LOCKS: Final = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
BUSY: Final = {errno.EWOULDBLOCK, errno.EACCES}
"""Errors if another process holds the lock; SMB returns EACCES."""
LOCAL_OPTIONS: Final = {"nolock", "local_lock=all", "local_lock=flock", "nobrl", "localflock"}
"""Mount options (NFS, SMB, Lustre) that make locks node-local."""
SMB: Final = ("cifs", "smb")
LOCAL_KINDS: Final = ("fuse", "beegfs", "virtiofs", "9p", *SMB)
"""Prefixes of file system types whose locks may be node-local although no mount option says so."""
TOUCH_SECONDS: Final = 30.0
"""Interval at which the holder touches its lock file."""
SILENT_SECONDS: Final = 300.0
"""Time without a touch after which the holder counts as dead. NFS shows a change up to a minute late."""


class LockScope(Enum):
    """Which processes a lock excludes: those on all nodes, those on this node, or none."""

    ALL = auto()
    NODE = auto()
    NOBODY = auto()


@contextlib.contextmanager
def held(path: Path, wait: Callable[[], None]) -> Iterator[LockScope]:
    """Holds the lock of file `path`, which is created and kept; yields which processes it excludes.

    wait: called between two attempts to get the lock.
    """
    handle, reach = _take(path, wait)
    if handle is None:
        yield reach
        return
    try:
        if reach is LockScope.ALL and only_here(path):
            reach = LockScope.NODE
        if reach is not LockScope.ALL:
            _say(path.parent, reach)
        with _touched(path):
            yield reach
    finally:
        with contextlib.suppress(OSError):  # closing is not enough: a forked process may have it open
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _take(path: Path, wait: Callable[[], None]) -> tuple[int | None, LockScope]:
    """Waits for the lock. Returns the open file, or None if the holder seems to be dead."""
    silence = _silence_of(path)
    while True:
        handle = _open(path)  # reopened each time: only then NFS asks the server for the file's times
        if handle is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle, LockScope.ALL
            except OSError as error:
                if error.errno in NO_LOCKS:
                    return handle, LockScope.NOBODY
                os.close(handle)
                if error.errno not in BUSY:
                    raise
        if silence() >= SILENT_SECONDS:
            _say_silent(path)
            return None, LockScope.NOBODY
        wait()


def _open(path: Path) -> int | None:
    """Opens the file; None if another's lock forbids it (SMB). No truncation: it would look like a touch."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        if not path.exists() or not any(each.kind.startswith(SMB) for each in cache_volume.mounts(path)):
            raise
        return None


def _silence_of(path: Path) -> Callable[[], float]:
    """Returns a function: seconds for which the holder's file has not changed, by this process's clock."""
    seen, since = -1, time.monotonic()

    def seconds() -> float:
        nonlocal seen, since
        with contextlib.suppress(OSError):
            changed = path.stat().st_mtime_ns
            if changed != seen:
                seen, since = changed, time.monotonic()
        return time.monotonic() - since

    return seconds


@contextlib.contextmanager
def _touched(path: Path) -> Iterator[None]:
    """Touches the file regularly. The thread is never joined, because it may hang with the server."""
    over = threading.Event()

    def touch() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                os.utime(path)
            over.wait(TOUCH_SECONDS)

    threading.Thread(target=touch, name="spottrain-data-cache", daemon=True).start()
    try:
        yield
    finally:
        over.set()


_said: set[Path] = set()


def _say(folder: Path, reach: LockScope) -> None:
    """Logs the missing locks, once per volume."""
    if folder in _said:
        return
    _said.add(folder)
    whose = "may be of this node only" if reach is LockScope.NODE else "do not exist"
    why = (
        f"locks on this volume {whose}: other processes may download the same data at the same time, "
        f"of which one copy is kept, and what dead attempts left in {folder} is not removed"
    )
    log.event("data-cache-without-locks", folder=folder, why=why)


def _say_silent(path: Path) -> None:
    why = (
        f"another process holds the lock and has not renewed it for {SILENT_SECONDS:.0f} s; its node may "
        "have died without the file server noticing. This process continues; if both finish, one copy is kept"
    )
    log.event("data-cache-lock-ignored", path=path, why=why)


def only_here(path: Path, table: Path = cache_volume.MOUNTS) -> bool:
    """Whether locks on `path` may be invisible to other nodes, judging by the mount."""
    return any(
        each.kind.startswith(LOCAL_KINDS) or not LOCAL_OPTIONS.isdisjoint(each.options)
        for each in cache_volume.mounts(path, table)
    )
