"""`spottrain.cached`: a folder that is downloaded once and reused by all later attempts.

    folder = spottrain.cached("imagenet-64", download)      # download(folder) fills it, the first time

Works without a Trainer; standard library only. The folder is on the job's data cache (`spec.dataCache`), or
on a laptop in the user's cache folder:

    <cache>/imagenet-64                           complete: put here by one rename
    <cache>/.spottrain/imagenet-64.lock           locked while a process fills it (cache_volume.py)
    <cache>/.spottrain/imagenet-64.6f1e/          being filled, or left by a killed process
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spottrain.contract import LIBRARY_HOMES
from spottrain.core import log
from spottrain.core.run_config import data_cache_folder
from spottrain.data import cache_volume
from spottrain.errors import ConfigurationError, DataCacheFull

if TYPE_CHECKING:
    from spottrain.lifecycle.session import Session

PRIVATE: Final = ".spottrain"
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
POLL_SECONDS: Final = 1.0
"""Interval between two attempts to get a lock that another process holds."""
FULL: Final = {errno.ENOSPC, errno.EDQUOT}
PASSING: Final = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Transient errors of a volume; they do not mean that it lacks a feature."""
TAKEN: Final = {errno.ENOTEMPTY, errno.EEXIST}
"""Errors of a rename onto a folder that another process has published meanwhile."""
DOWNLOADING: Final = "Downloading"
GIB: Final = 2**30
ALMOST_NOTHING: Final = GIB // 4
"""Free bytes below which a disk-full error without a path is taken to be of this volume."""


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
    if _whole(path):
        return _hit(path)
    private = root / PRIVATE
    with _room_for(path):
        with _writable(root):
            private.mkdir(parents=True, exist_ok=True)
        # Lazy: it imports much more than a cache hit needs.
        from spottrain.lifecycle.signal_scope import interruptible

        with interruptible() as session, _turn(private / f"{name}.lock", name, session) as alone:
            with os.scandir(root):  # else an NFS client may not see a new folder for a while
                pass
            if _whole(path):
                return _hit(path)
            if alone:
                _remove_leftovers(private, name)
            with _told(session):
                return _filled(path, private / _draft(name, alone), make)


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


def _whole(path: Path) -> bool:
    """Whether the folder exists. Raises ConfigurationError if `path` is not a folder."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise ConfigurationError(f"{path} is not a folder, so nothing can be cached there; delete it")
    return True


def _hit(path: Path) -> Path:
    log.event("data-cache-hit", name=path.name, path=path)
    return path


# --- lock ---------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _turn(lock: Path, name: str, session: Session | None) -> Iterator[bool]:
    """Holds the lock; yields whether it excludes all nodes.

    Waiting for it sends heartbeats, and can be interrupted like any data preparation.
    """
    waiting = False

    def wait() -> None:
        nonlocal waiting
        if not waiting:
            log.event("data-cache-waiting", name=name, why=f"another process downloads it, and holds {lock}")
            waiting = True
        if session is not None:
            session.board.heartbeat.beat()
        time.sleep(POLL_SECONDS)

    with contextlib.ExitStack() as stack:
        with _writable(lock.parent.parent):
            alone = stack.enter_context(cache_volume.locked(lock, wait))
        yield alone


@contextlib.contextmanager
def _told(session: Session | None) -> Iterator[None]:
    """Sets a state without a hang timeout (`core.heartbeat`), because a download may take any time.

    A step in another thread resets the state earlier.
    """
    if session is None:
        yield
        return
    before = session.board.facts.state
    session.board.update(state=DOWNLOADING)
    try:
        yield
    finally:
        if session.board.facts.state == DOWNLOADING:
            session.board.update(state=before)


# --- filling ------------------------------------------------------------------------------------------
def _filled(path: Path, draft: Path, make: Callable[[Path], object]) -> Path:
    began = time.monotonic()
    _begin(draft)
    try:
        with _room_for(path):
            make(draft)
            made = time.monotonic()
            files, size = cache_volume.sync_tree(draft)
            synced = time.monotonic() - made
            own = _published(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    if not own:
        shutil.rmtree(draft, ignore_errors=True)
        log.event(
            "data-cache-discarded", name=path.name, why="another process was faster; its folder is used"
        )
        return path
    log.event(
        "data-cache-filled",
        name=path.name,
        seconds=time.monotonic() - began,
        bytes=size,
        files=files,
        sync_seconds=synced,
        path=path,
    )
    return path


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


def _published(draft: Path, path: Path) -> bool:
    """Renames the folder into place. Returns False if another process was faster."""
    try:
        os.rename(draft, path)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        return False
    cache_volume.sync(path.parent)
    return True


def _draft(name: str, alone: bool) -> str:
    """Name of the draft folder. Without a lock on all nodes it is longer, so that it is never removed."""
    return f"{name}.{secrets.token_hex(8 if alone else 12)}"


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
            return _names(error, root) or _almost_full(root)
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _names(error: OSError, root: Path) -> bool:
    """Whether the error names a path below `root`."""
    above = os.path.realpath(root)
    told = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    return any(Path(os.path.realpath(name)).is_relative_to(above) for name in told)


def _almost_full(root: Path) -> bool:
    """Whether the volume has almost no space or inodes left. Needed as a write error names no file."""
    facts = os.statvfs(root)
    return facts.f_bavail * facts.f_frsize < ALMOST_NOTHING or (facts.f_files > 0 and facts.f_favail == 0)


@contextlib.contextmanager
def _writable(root: Path) -> Iterator[None]:
    """Turns errors of permission or file type into ConfigurationError: a retry would not help."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise
        raise ConfigurationError(
            f"the data cache {root} cannot be written: {error.strerror}; check the volume's access mode, and "
            f"owner and mode of the folder for user {os.getuid()}"
        ) from error
