"""The volume of the data cache: how it is mounted, and how a filled folder is synced to it.

A folder is synced before it is renamed into place, because the node may fail right after. One syncfs does it
where that is reliable: for 20 000 files on a local disk it takes 0.05 s, an fsync of each 35 s. Otherwise
each file and folder gets an fsync.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spottrain.errors import ConfigurationError

MOUNTS: Final = Path("/proc/self/mountinfo")
UNKNOWN: Final = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Errors of a volume without fsync of folders, and of a kernel without syncfs."""
FORBIDDEN: Final = {*UNKNOWN, errno.EPERM}
"""The same, and the error of sandboxes."""
TELLS_ERRORS: Final = (5, 8)
"""First Linux version whose syncfs reports write errors."""
OWN_PROCESS: Final = ("fuse", "beegfs")
"""Prefixes of file system types with buffers in a process on the node, which syncfs may not flush."""


@dataclass(frozen=True, slots=True)
class Mount:
    kind: str
    options: frozenset[str]


def mounts(path: Path, table: Path = MOUNTS) -> list[Mount]:
    """Returns the mounts of the device that holds `path`. Empty without /proc, as on macOS."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
        device = path.stat().st_dev
    except OSError:
        return []
    number = f"{os.major(device)}:{os.minor(device)}"
    return [_mount(row) for row in rows if row[2] == number]


def _mount(row: list[str]) -> Mount:
    """Parses a row: ... mount options, optional fields, `-`, type, source, options of the file system."""
    dash = row.index("-", 6)
    return Mount(row[dash + 1], frozenset([*row[5].split(","), *row[dash + 3].split(",")]))


# --- sync ---------------------------------------------------------------------------------------------
@contextlib.contextmanager
def syncing(folder: Path) -> Iterator[Callable[[], tuple[int, int]]]:
    """Begins before the folder is filled: syncfs reports the write errors since then.

    Yields a function that syncs the folder and returns its number of files and their bytes. It raises
    ConfigurationError if the folder is empty, or has links that the rename breaks.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC) if _reliable(folder) else None

    def sync_all() -> tuple[int, int]:
        found = _content(folder)
        if handle is None or not _syncfs(handle, folder):
            _sync_each(folder)
        return found

    try:
        yield sync_all
    finally:
        if handle is not None:
            os.close(handle)


def _reliable(folder: Path) -> bool:
    if sys.platform != "linux":
        return False
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if found is None or (int(found[1]), int(found[2])) < TELLS_ERRORS:
        return False
    return not any(each.kind.startswith(OWN_PROCESS) for each in mounts(folder))


def _syncfs(handle: int, folder: Path) -> bool:
    """Calls syncfs. Returns False if it is not available."""
    try:
        call = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):  # the C library has no syncfs
        return False
    if call(handle) == 0:
        return True
    code = ctypes.get_errno()
    if code in FORBIDDEN:
        return False
    raise OSError(code, os.strerror(code), str(folder))


def _content(root: Path) -> tuple[int, int]:
    files, links, size = 0, 0, 0
    for folder, folders, names in os.walk(root):
        for each in (Path(folder, name) for name in (*names, *folders)):
            facts = each.lstat()
            if stat.S_ISLNK(facts.st_mode):
                _require_to_survive_rename(each, root)
                links += 1
            elif stat.S_ISREG(facts.st_mode):
                files, size = files + 1, size + facts.st_size
    if not files + links:
        raise ConfigurationError(
            "the function given to spottrain.cached wrote no file into its folder, so nothing was cached; it "
            "must write below the path that it is called with"
        )
    return files, size


def _require_to_survive_rename(link: Path, root: Path) -> None:
    """Raises ConfigurationError for an absolute link into `root`, by whatever path (`root` may be a link)."""
    target = Path(os.readlink(link))
    if not target.is_absolute():
        return
    if any(os.path.exists(each) and os.path.samefile(each, root) for each in (target, *target.parents)):
        raise ConfigurationError(
            f"{link.relative_to(root)} is a symbolic link to {target}, inside the folder that "
            "spottrain.cached fills; that folder is renamed afterwards, so make the link relative"
        )


def _sync_each(root: Path) -> None:
    for folder, _, names in os.walk(root, topdown=False):
        for each in (Path(folder, name) for name in names):
            if stat.S_ISREG(each.lstat().st_mode):
                sync(each)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Syncs one file or folder. On a volume without fsync of folders it does nothing."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # its owner may not read it
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)
