"""Who fills a folder of the data cache, and which half-filled folders nobody fills any more. Used by `cache`.

A filler holds a lock (flock) on a file of the volume for as long as it fills; the kernel, or the file server,
takes it away from the dead. Not every volume has locks that all nodes see:

    none at all        two may fill the same at once, and the first to rename it into place has won
    of one node only   the same between nodes; within a node one fills and the others wait

There a half-filled folder may be that of a living process elsewhere, so none is removed.

Nor does every server take a lock away from a node that has died hard (NFSv3 waits for its reboot). So a
filler touches its file again and again, and who waits and sees no change of it for long goes on without the
lock. Changes are compared, never clocks: the time is the server's.
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
from spottrain.data import mounts

NO_LOCKS: Final = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
BUSY: Final = {errno.EWOULDBLOCK, errno.EACCES}
"""Of a lock that another has; SMB says it in the second way."""
LOCAL_OPTIONS: Final = {"nolock", "local_lock=all", "local_lock=flock", "nobrl", "localflock"}
"""Mount options (NFS, SMB, Lustre) by which locks stay on their node."""
SMB: Final = ("cifs", "smb")
LOCAL_KINDS: Final = ("fuse", "beegfs", "virtiofs", "9p", *SMB)
"""File systems that may keep locks to their node, without a word of it: how their kind begins."""
TOUCH_SECONDS: Final = 30.0
"""Between two signs of life of a filler."""
SILENT_SECONDS: Final = 300.0
"""Without one, after which it counts as dead. NFS shows a change up to a minute late."""


class LockScope(Enum):
    """Whom a lock keeps out."""

    ALL = auto()
    NODE = auto()
    NOBODY = auto()


@contextlib.contextmanager
def held(path: Path, wait: Callable[[], None]) -> Iterator[LockScope]:
    """The lock of this file, which is made and stays; `wait` is called between two tries to get it."""
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
        with contextlib.suppress(OSError):  # closing is not enough: a process forked meanwhile has it open
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _take(path: Path, wait: Callable[[], None]) -> tuple[int | None, LockScope]:
    """The open file, None where who has its lock seems to be dead."""
    silence = _Silence(path)
    while True:
        handle = _open(path)  # anew each time: that is when NFS asks the server for the file's times
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
        if silence.seconds() >= SILENT_SECONDS:
            _say_silent(path)
            return None, LockScope.NOBODY
        wait()


def _open(path: Path) -> int | None:
    """None where another's lock is in the way, as on SMB. Not truncated, which would be a sign of life."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        if not path.exists() or not any(each.kind.startswith(SMB) for each in mounts.below(path)):
            raise
        return None


class _Silence:
    """Of the one that has the lock: how long its file has not changed, by this process' clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = -1
        self._since = time.monotonic()

    def seconds(self) -> float:
        with contextlib.suppress(OSError):
            changed = self._path.stat().st_mtime_ns
            if changed != self._seen:
                self._seen, self._since = changed, time.monotonic()
        return time.monotonic() - self._since


@contextlib.contextmanager
def _touched(path: Path) -> Iterator[None]:
    """A sign of life now and then. Nobody waits for its thread, which may hang with the server."""
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
    """Once for each volume."""
    if folder in _said:
        return
    _said.add(folder)
    whose = "may be of this node only" if reach is LockScope.NODE else "do not exist"
    why = (
        f"locks on this volume {whose}: others may download the same at once, of which one result is "
        f"kept, and what dead attempts have left in {folder} is not removed"
    )
    log.event("data-cache-without-locks", folder=folder, why=why)


def _say_silent(path: Path) -> None:
    why = (
        f"another process has the lock and has given no sign of life for {SILENT_SECONDS:.0f} s, as where "
        "its node has died and the file server does not know: this one goes on, and if both come to an end "
        "one result is kept"
    )
    log.event("data-cache-lock-ignored", path=path, why=why)


def only_here(path: Path, table: Path = mounts.MOUNTS) -> bool:
    """Whether other nodes may not see a lock that is held there, as far as the mount says."""
    return any(
        each.kind.startswith(LOCAL_KINDS) or not LOCAL_OPTIONS.isdisjoint(each.options)
        for each in mounts.below(path, table)
    )
