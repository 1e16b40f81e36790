"""The volume of the data cache: the lock of who fills a folder, and the sync before the folder is published.

The lock is flock on a file of the volume: when its holder dies, the kernel or the file server releases it.
Not every volume has locks that all nodes see. Without them several processes may fill the same folder, and
the first rename into place wins; a half-filled folder may then belong to a living process elsewhere, so none
is removed.

Each file is synced, because the node may fail right after the rename. Of 20,000 files on a local disk that
takes 2.3 s, and 35 s one after another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from spottrain.core import log
from spottrain.errors import ConfigurationError

NO_LOCKS: Final = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
BUSY: Final = {errno.EWOULDBLOCK, errno.EACCES}
"""Errors if another process holds the lock; SMB returns EACCES."""
MOUNTS: Final = Path("/proc/self/mountinfo")
LOCAL_OPTIONS: Final = {"nolock", "local_lock=all", "local_lock=flock", "nobrl", "localflock"}
"""Mount options (NFS, SMB, Lustre) that make locks node-local."""
LOCAL_KINDS: Final = ("fuse", "beegfs", "virtiofs", "9p", "cifs", "smb")
"""Prefixes of file system types whose locks may be node-local although no mount option says so."""
SYNCS_AT_ONCE: Final = 16
NO_SYNC: Final = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Errors of a volume without fsync of folders."""


# --- lock ---------------------------------------------------------------------------------------------
@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], None]) -> Iterator[bool]:
    """Holds the lock of the file `path`, which is created and kept; yields whether it excludes all nodes.

    wait: called between two attempts to get the lock.
    """
    handle, lack = _acquire(path, wait)
    try:
        if not lack and node_local(path):
            lack = "may be of this node only"
        if lack:
            why = (
                f"locks on this volume {lack}: other processes may download the same data at the same time, "
                f"of which one copy is kept, and what dead attempts left in {path.parent} is not removed"
            )
            log.event("data-cache-without-locks", folder=path.parent, why=why)
        yield not lack
    finally:
        with contextlib.suppress(OSError):  # closing is not enough: a forked process may have it open
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _acquire(path: Path, wait: Callable[[], None]) -> tuple[int, str]:
    """Waits for the lock. Returns the open file, and why nothing is locked, or ""."""
    while True:
        # Opened each time: a person may delete the file, where the server keeps the lock of a dead node.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle, ""
        except OSError as error:
            if error.errno in NO_LOCKS:
                return handle, "do not exist"
            os.close(handle)
            if error.errno not in BUSY:
                raise
        wait()


def node_local(path: Path, table: Path = MOUNTS) -> bool:
    """Whether locks on `path` may be invisible to other nodes, judging by the mounts of its device."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
        device = path.stat().st_dev
    except OSError:  # no /proc, as on macOS
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    for row in rows:
        # ... mount options, optional fields, `-`, type, source, options of the file system
        if row[2] == number:
            kind, options = row[(dash := row.index("-", 6)) + 1], f"{row[5]},{row[dash + 3]}"
            if kind.startswith(LOCAL_KINDS) or not LOCAL_OPTIONS.isdisjoint(options.split(",")):
                return True
    return False


# --- sync ---------------------------------------------------------------------------------------------
def sync_tree(root: Path) -> tuple[int, int]:
    """Syncs all that is below `root`. Returns the number of files and their bytes.

    Raises ConfigurationError if there is no file, or a link that the rename of `root` breaks.
    """
    folders, files, links, size = [root], list[Path](), 0, 0
    for folder, inner, names in os.walk(root):
        for each in (Path(folder, name) for name in (*names, *inner)):
            facts = each.lstat()
            if stat.S_ISLNK(facts.st_mode):
                _require_to_survive_rename(each, root)
                links += 1
            elif stat.S_ISREG(facts.st_mode):
                files.append(each)
                size += facts.st_size
            elif stat.S_ISDIR(facts.st_mode):
                folders.append(each)
    if not len(files) + links:
        raise ConfigurationError(
            "the function given to spottrain.cached wrote no file into its folder, so nothing was cached; it "
            "must write below the path that it is called with"
        )
    paths = [*files, *folders]
    with ThreadPoolExecutor(SYNCS_AT_ONCE) as pool:
        list(pool.map(_sync_all, (paths[first::SYNCS_AT_ONCE] for first in range(SYNCS_AT_ONCE))))
    return len(files), size


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


def _sync_all(paths: Sequence[Path]) -> None:
    for path in paths:
        sync(path)


def sync(path: Path) -> None:
    """Syncs one file or folder. On a volume without fsync of folders it does nothing."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # its owner may not read it
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)
