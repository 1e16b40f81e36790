"""What the kernel tells of writes to a folder (inotify): which files are open, and which were closed.

It tells of all processes of this machine, also those of another container with the same volume. Where it
tells nothing (macOS, other machines on a network volume, no watch left), files are known by looks alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from spottrain.core import log
from spottrain.sync.folder import PRIVATE

MODIFY: Final = 0x2
ATTRIB: Final = 0x4
CLOSE_WRITE: Final = 0x8
MOVED_FROM: Final = 0x40
MOVED_TO: Final = 0x80
CREATE: Final = 0x100
DELETE: Final = 0x200
Q_OVERFLOW: Final = 0x4000
IGNORED: Final = 0x8000
IS_FOLDER: Final = 0x40000000
ONLY_FOLDERS: Final = 0x01000000
WATCHED: Final = MODIFY | ATTRIB | CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE | ONLY_FOLDERS
EVENT: Final = struct.Struct("iIII")
BUFFER: Final = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """The newest version of a file. Seconds are of the clock of `Writes`."""

    number: int
    """Another one after each event."""
    began: float
    changed: float
    closed: float | None = None
    """When it was closed after writing; None: it is open."""
    renamed: bool = False
    """Whether it got its name after that: its writer has outlived the close."""


class Writes:
    """The writes to files below `root`, by path."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._file = -1
        self._paths: dict[int, str] = {}
        """Of the watched folders, by watch; "" is the root."""
        self._found: dict[str, Write] = {}
        self._moved: tuple[int, dict[str, Write]] = (0, {})
        """What has left its name, with the cookie of the event that tells the new one."""
        self._number = 0
        self._limited = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begins to watch, where the system can."""
        if sys.platform != "linux":
            return
        self._file = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            log.event("sync-not-watched", folder=self._root, why=os.strerror(ctypes.get_errno()))
            return
        with self._lock:
            self._watch("")
        threading.Thread(target=self._follow, name="spottrain-writes", daemon=True).start()

    def now(self) -> dict[str, Write]:
        """Returns the newest version of each file of which a write was seen."""
        with self._lock:
            self._drain()
            if self._file >= 0 and "" not in self._paths.values():  # the folder was deleted and made again
                self._watch("")
            return dict(self._found)

    def count(self) -> int:
        """Returns the number of writes seen so far."""
        with self._lock:
            self._drain()
            return self._number

    # --- internal ---------------------------------------------------------------------------------------
    def _follow(self) -> None:
        """Reads events as they come: a folder in a new folder is watched only once the new one is."""
        while True:
            select.select([self._file], [], [])
            with self._lock:
                self._drain()

    def _drain(self) -> None:
        while self._file >= 0:
            try:
                text = os.read(self._file, BUFFER)
            except BlockingIOError:
                return
            for event in _events(text):
                self._take(*event)

    def _take(self, watch: int, mask: int, cookie: int, name: str) -> None:
        if mask & Q_OVERFLOW:
            log.event("sync-writes-lost", folder=self._root)
            self._found.clear()
            self._watch("")
        elif mask & IGNORED:
            self._paths.pop(watch, None)
        elif watch in self._paths:
            folder = self._paths[watch]
            path = f"{folder}/{name}" if folder else name
            if path != PRIVATE:
                self._change(path, mask, cookie)

    def _change(self, path: str, mask: int, cookie: int) -> None:
        if mask & (MOVED_FROM | DELETE):
            self._moved = (cookie, self._leave(path, folder=bool(mask & IS_FOLDER)))
        elif mask & MOVED_TO:
            self._leave(path, folder=False)
            known = self._arrive(path, cookie)
            if mask & IS_FOLDER:
                self._watch(path)
            elif not known:  # from elsewhere
                now = self._clock()
                self._found[path] = Write(
                    number=self._next(), began=now, changed=now, closed=now, renamed=True
                )
        elif mask & IS_FOLDER:
            if mask & CREATE:
                self._watch(path)
        elif mask & (MODIFY | CLOSE_WRITE):  # a hard link is created, and never closed
            self._note(path, closed=bool(mask & CLOSE_WRITE))
        elif path in self._found:
            self._found[path] = replace(self._found[path], number=self._next())

    def _note(self, path: str, *, closed: bool) -> None:
        now, before = self._clock(), self._found.get(path)
        if closed:
            write = before or Write(number=0, began=now, changed=now)
            self._found[path] = replace(write, number=self._next(), closed=now)
        else:
            began = before.began if before is not None and before.closed is None else now
            self._found[path] = Write(number=self._next(), began=began, changed=now)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _leave(self, path: str, *, folder: bool) -> dict[str, Write]:
        """Forgets a file, or a folder and all below it. Returns what was known, by the rest of the path."""
        if not folder:
            return {"": self._found.pop(path)} if path in self._found else {}
        for watch in [each for each, place in self._paths.items() if f"{place}/".startswith(f"{path}/")]:
            del self._paths[watch]
            _LIBC.inotify_rm_watch(self._file, watch)
        below = [each for each in self._found if each.startswith(f"{path}/")]
        return {each.removeprefix(path): self._found.pop(each) for each in below}

    def _arrive(self, path: str, cookie: int) -> bool:
        """Gives what has left its name the new one. Returns whether it was below the root before."""
        known, found = self._moved
        if known != cookie:
            return False
        for rest, write in found.items():
            renamed = write.closed is not None
            self._found[path + rest] = replace(
                write, number=self._next(), changed=self._clock(), renamed=renamed
            )
        return True

    def _watch(self, folder: str) -> None:
        """Watches a folder and those in it. A folder that was moved is known by its new path from then on."""
        place = self._root / folder
        found = _LIBC.inotify_add_watch(self._file, os.fsencode(place), WATCHED)
        if found < 0:
            if ctypes.get_errno() == errno.ENOSPC and not self._limited:
                self._limited = True
                why = "fs.inotify.max_user_watches of this node is used up"
                log.event("sync-not-watched", folder=place, why=why)
            return
        self._paths[found] = folder
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if path != PRIVATE and entry.is_dir(follow_symlinks=False):
                    self._watch(path)


def _events(text: bytes) -> Iterator[tuple[int, int, int, str]]:
    at = 0
    while at < len(text):
        watch, mask, cookie, length = EVENT.unpack_from(text, at)
        at += EVENT.size
        yield watch, mask, cookie, os.fsdecode(text[at : at + length].rstrip(b"\0"))
        at += length


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
