"""`spottrain.cached`: a folder that is downloaded once and reused by all later attempts.

    folder = spottrain.cached("imagenet-64", download)      # download(folder) fills it, the first time

Works without a Trainer; standard library only. The folder is on the job's data cache (`spec.dataCache`), or
on a laptop in the user's cache folder:

    <cache>/imagenet-64                           complete: put here by one rename
    <cache>/.spottrain/imagenet-64.lock           locked while a process fills it
    <cache>/.spottrain/imagenet-64.6f1e/          being filled, or left by a killed process

The lock is flock: when its holder dies, the kernel or the file server releases it. Not every volume has locks
that all nodes see. Without them several processes may fill the same folder, and the first rename into place
wins; a half-filled folder may then belong to a living process elsewhere, so none is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spottrain.contract import LIBRARY_HOMES
from spottrain.core import container, log
from spottrain.core.run_config import data_cache_folder
from spottrain.errors import ConfigurationError, DataCacheFull

if TYPE_CHECKING:
    from spottrain.lifecycle.session import Session

PRIVATE: Final = ".spottrain"
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
POLL_SECONDS: Final = 1.0
"""Interval between two attempts to get a lock that another process holds."""
DOWNLOADING: Final = "Downloading"
GIB: Final = 2**30
ALMOST_NOTHING: Final = GIB // 4
"""Free bytes below which a disk-full error without a path is taken to be of this volume."""
SYNCS_AT_ONCE: Final = 16
LOCAL_OPTIONS: Final = {"nolock", "local_lock=all", "local_lock=flock", "nobrl", "localflock"}
"""Mount options (NFS, SMB, Lustre) that make locks node-local."""
LOCAL_KINDS: Final = ("fuse", "beegfs", "virtiofs", "9p", "cifs", "smb")
"""Prefixes of file system types whose locks may be node-local although no mount option says so."""

UNSUPPORTED: Final = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""Errors of a volume without locks, or without fsync of folders."""
BUSY: Final = {errno.EWOULDBLOCK, errno.EACCES}
"""Errors if another process holds the lock; SMB returns EACCES."""
FULL: Final = {errno.ENOSPC, errno.EDQUOT}
PASSING: Final = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Transient errors of a volume; they do not mean that it lacks a feature."""
NOT_WRITABLE: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder `<cache>/<name>`; calls `make(folder)` to fill it if it does not exist.

    If several ranks or pods call it, one fills the folder and the others wait.

    Args:
        name: name of the folder: letters, digits, `.`, `_` and `-`, at most 128 characters.
        make: fills the empty folder that it gets. The folder is renamed afterwards, so `make` must not store
            its path. Exceptions of `make` propagate, and then nothing is kept.

    Returns:
        The path of the complete folder.

    Raises:
        ConfigurationError: the name is not valid, the cache is not writable, or `make` left no file.
        DataCacheFull: the volume is full.
    """
    root = data_cache_folder(os.environ)
    path = root / _checked(name)
    if _found(path):
        return path
    private = root / PRIVATE
    with _room_for(path):
        with _writable(root):
            private.mkdir(parents=True, exist_ok=True)
        # Lazy: it imports much more than a cache hit needs.
        from spottrain.lifecycle.session import of_download

        session = of_download()
        with _locked(private / f"{name}.lock", name, session) as alone:
            with os.scandir(root):  # else an NFS client may not see a new folder for a while
                pass
            if _found(path):
                return path
            if alone:
                _remove_leftovers(private, name)
            # Longer without a lock on all nodes, so that it is never taken for a leftover.
            draft = private / f"{name}.{secrets.token_hex(8 if alone else 12)}"
            with _downloading(session):
                try:
                    with _room_for(path):
                        _fill(draft, path, make)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
    return path


def _checked(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"spottrain.cached({name!r}): the name becomes a folder's name; use at most 128 letters, digits, "
            "dots, underscores and hyphens, not beginning with a dot or hyphen, and without / and .."
        )
    if name in LIBRARY_HOMES.values():
        variable = next(key for key, folder in LIBRARY_HOMES.items() if folder == name)
        raise ConfigurationError(
            f"spottrain.cached({name!r}): {variable} uses the folder of that name; use another name"
        )
    return name


def _found(path: Path) -> bool:
    """Whether the folder exists. Raises ConfigurationError if `path` is not a folder."""
    if not path.exists():
        return False
    if not path.is_dir():
        raise ConfigurationError(f"{path} is not a folder, so nothing can be cached there; delete it")
    log.event("data-cache-hit", name=path.name, path=path)
    return True


# --- lock ---------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _locked(lock: Path, name: str, session: Session | None) -> Iterator[bool]:
    """Holds the lock of a file, which is created and kept; yields whether it excludes all nodes.

    Waiting for it sends heartbeats, and can be interrupted like any data preparation.
    """
    waiting, lack = False, ""
    while True:
        # Opened each time: a person may delete the file, where the server keeps the lock of a dead node.
        with _writable(lock.parent.parent):
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lack = "may be of this node only" if node_local(lock) else ""
            break
        except OSError as error:
            if error.errno in UNSUPPORTED:
                lack = "do not exist"
                break
            os.close(handle)
            if error.errno not in BUSY:
                raise
        if not waiting:
            log.event("data-cache-waiting", name=name, why=f"another process downloads it, and holds {lock}")
            waiting = True
        if session is not None:
            session.board.heartbeat.beat()
        time.sleep(POLL_SECONDS)
    try:
        if lack:
            why = (
                f"locks on this volume {lack}: other processes may download the same data at the same time, "
                f"of which one copy is kept, and what dead attempts left in {lock.parent} is not removed"
            )
            log.event("data-cache-without-locks", folder=lock.parent, why=why)
        yield not lack
    finally:
        with contextlib.suppress(OSError):  # closing is not enough: a forked process may have it open
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def node_local(path: Path, mounts: Path = container.MOUNTS) -> bool:
    """Whether locks on `path` may be invisible to other nodes, judging by the mounts of its device."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for row in (row for row in container.mount_fields(mounts) if row[2] == number):
        # ... mount options, optional fields, `-`, type, source, options of the file system
        kind, options = row[(dash := row.index("-", 6)) + 1], f"{row[5]},{row[dash + 3]}"
        if kind.startswith(LOCAL_KINDS) or not LOCAL_OPTIONS.isdisjoint(options.split(",")):
            return True
    return False


# --- filling ------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _downloading(session: Session | None) -> Iterator[None]:
    """Sets a state without a hang timeout (`core.heartbeat`), because a download may take any time.

    A step in another thread resets the state earlier.
    """
    before = session and session.board.facts.state
    if session is not None:
        session.board.update(state=DOWNLOADING)
    try:
        yield
    finally:
        if session is not None and before is not None and session.board.facts.state == DOWNLOADING:
            session.board.update(state=before)


def _fill(draft: Path, path: Path, make: Callable[[Path], object]) -> None:
    began = time.monotonic()
    _begin(draft)
    make(draft)
    made = time.monotonic()
    files, size = _sync_tree(draft)
    words = {"seconds": time.monotonic() - began, "bytes": size, "files": files}
    words["sync_seconds"] = time.monotonic() - made
    try:
        os.rename(draft, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        why = "another process was faster; its folder is used"
        log.event("data-cache-discarded", name=path.name, why=why)
        return
    _sync(path.parent)
    log.event("data-cache-filled", name=path.name, **words, path=path)


def _begin(draft: Path) -> None:
    """Makes the folder by a rename, to test before the download that the volume can rename folders."""
    trial = draft.with_suffix(f".{secrets.token_hex(len(draft.suffix) // 2)}")
    with _writable(draft.parent.parent):
        trial.mkdir()
        (trial / "file").write_text("Whether a folder that is not empty can be renamed here.")
    try:
        os.rename(trial, draft)
    except OSError as error:
        shutil.rmtree(trial, ignore_errors=True)
        if error.errno in FULL | PASSING:
            raise
        raise ConfigurationError(
            f"folders in the data cache {draft.parent.parent} cannot be renamed: {error.strerror}. Without "
            "renaming, a complete download looks like an incomplete one. Object storage that is mounted as a "
            "folder (gcsfuse, Mountpoint for S3) behaves like this: use a file system, or stream the data"
        ) from error
    (draft / "file").unlink()


def _sync_tree(root: Path) -> tuple[int, int]:
    """Syncs all that is below `root`, as the node may fail after the rename. Returns files and bytes.

    Of 20,000 files on a local disk it takes 2.3 s, and 35 s one after another. Raises ConfigurationError if
    there is no file.
    """
    found = list(root.rglob("*"))
    if all(each.is_dir() for each in found):
        raise ConfigurationError(
            "the function given to spottrain.cached wrote no file into its folder, so nothing was cached; it "
            "must write below the path that it is called with"
        )
    own = [each for each in found if not each.is_symlink()]
    files = [each for each in own if each.is_file()]
    with ThreadPoolExecutor(SYNCS_AT_ONCE) as pool:
        list(pool.map(_sync, [root, *files, *(each for each in own if each.is_dir())]))
    return len(files), sum(each.stat().st_size for each in files)


def _sync(path: Path) -> None:
    """Syncs one file or folder. On a volume without fsync of folders it does nothing."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # its owner may not read it
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


def _remove_leftovers(private: Path, name: str) -> None:
    """Removes drafts of former holders of the lock. They are dead, or they would still hold it."""
    for path in private.glob(f"{name}.*"):
        if re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{16}}", path.name):
            shutil.rmtree(path, ignore_errors=True)
            log.event("data-cache-leftover", name=name, path=path, removed=str(not path.exists()).lower())


# --- errors -------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _room_for(path: Path) -> Iterator[None]:
    """Turns a disk-full error, of any library, into DataCacheFull with the size of the volume."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DataCacheFull) or not _is_full(error, path.parent):
            raise
        total, _, free = shutil.disk_usage(path.parent)
        raise DataCacheFull(
            f"no space left for {path.name} in the data cache: the volume at {path.parent} has "
            f"{total / GIB:.1f} GiB, of which {free / GIB:.1f} GiB were free when it failed; delete what is "
            "not needed there, or give spec.dataCache a larger volume"
        ) from error


def _is_full(error: BaseException | None, root: Path) -> bool:
    """Whether `error`, or one that it wraps, says that this volume is full, not another such as /tmp."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, OSError) and error.errno in FULL:
            told = [os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, (str, bytes))]
            if any(Path(os.path.realpath(name)).is_relative_to(os.path.realpath(root)) for name in told):
                return True
            facts = os.statvfs(root)  # a write error names no file
            few = facts.f_bavail * facts.f_frsize < ALMOST_NOTHING
            return few or (facts.f_files > 0 and facts.f_favail == 0)
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _writable(root: Path) -> Iterator[None]:
    """Turns errors of permission or file type into ConfigurationError: a retry would not help."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        raise ConfigurationError(
            f"the data cache {root} cannot be written: {error.strerror}; check the volume's access mode, and "
            f"owner and mode of the folder for user {os.getuid()}"
        ) from error
