"""`spottrain.cached`: a folder that is downloaded once, and found again by every later attempt.

    folder = spottrain.cached("imagenet-64", download)      # download(folder) fills it, the first time

Called by a person's script, before or without a Trainer; standard library only. The folder lies on the job's
data cache (`spec.dataCache`), or in the user's cache folder on a laptop:

    <cache>/imagenet-64                           whole: it came here by one rename
    <cache>/.spottrain/imagenet-64.lock           held by who fills it (locks.py)
    <cache>/.spottrain/imagenet-64.6f1e/          being filled, or left by somebody who was killed
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
from spottrain.data import cache_locks, durable_folder
from spottrain.errors import ConfigurationError, DataCacheFull

if TYPE_CHECKING:
    from spottrain.lifecycle.session import Session

PRIVATE: Final = ".spottrain"
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
POLL_SECONDS: Final = 1.0
"""Between two tries to get the lock that another process holds."""
FULL: Final = {errno.ENOSPC, errno.EDQUOT}
PASSING: Final = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Of a volume that has a bad time; they say nothing of what it can do."""
TAKEN: Final = {errno.ENOTEMPTY, errno.EEXIST}
"""Of a rename onto a folder that another has put there meanwhile."""
DOWNLOADING: Final = "Downloading"
GIB: Final = 2**30
ALMOST_NOTHING: Final = GIB // 4
"""Bytes that are free where a write of unknown place has met a full volume: then it was this one."""


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `<cache>/<name>`. Where it is not there, `make(folder)` is called to fill it, once.

    `make` is given an empty folder, which is renamed into place when it returns: it must not write down its
    path. Where several ranks or pods ask, one fills and the others wait. What `make` raises passes, and then
    nothing is kept. Raises ConfigurationError for a bad name, a folder that cannot be written, or a `make`
    that leaves no file, and DataCacheFull where the volume is full.
    """
    root = data_cache_folder(os.environ)
    path = root / _checked(name)
    if _whole(path):
        return _hit(path)
    private = root / PRIVATE
    with _room_for(path):
        with _writable(root):
            private.mkdir(parents=True, exist_ok=True)
        # Not above: it needs much more than a script that finds its folder.
        from spottrain.lifecycle.signal_scope import interruptible

        with interruptible() as session, _turn(private / f"{name}.lock", name, session) as reach:
            with os.scandir(root):  # else an NFS client may believe for a while that nothing has come
                pass
            if _whole(path):
                return _hit(path)
            if reach is cache_locks.LockScope.ALL:
                _remove_leftovers(private, name)
            with _told(session):
                return _filled(path, private / _draft(name, reach), make)


def _checked(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"spottrain.cached({name!r}): the name is that of one folder; give it letters, digits, . _ and - "
            "(at most 128, the first no . or -), without / and .."
        )
    if name in LIBRARY_HOMES.values():
        variable = next(key for key, folder in LIBRARY_HOMES.items() if folder == name)
        raise ConfigurationError(
            f"spottrain.cached({name!r}): this folder is {variable}'s; take another name"
        )
    return name


def _whole(path: Path) -> bool:
    """Raises ConfigurationError where something else is in the way."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise ConfigurationError(f"{path} is no folder, so nothing can be kept there; delete it")
    return True


def _hit(path: Path) -> Path:
    log.event("data-cache-hit", name=path.name, path=path)
    return path


# --- whose turn it is ---------------------------------------------------------------------------------
@contextlib.contextmanager
def _turn(lock: Path, name: str, session: Session | None) -> Iterator[cache_locks.LockScope]:
    """While another fills, the wait is a sign of life. A stop ends the process as in any data preparation."""
    waiting = False

    def wait() -> None:
        nonlocal waiting
        if not waiting:
            log.event("data-cache-waiting", name=name, why="another process downloads it")
            waiting = True
        if session is not None:
            session.board.pulse.beat()
        time.sleep(POLL_SECONDS)

    with contextlib.ExitStack() as stack:
        with _writable(lock.parent.parent):
            reach = stack.enter_context(cache_locks.held(lock, wait))
        yield reach


@contextlib.contextmanager
def _told(session: Session | None) -> Iterator[None]:
    """As a state in which no limit holds: how long a download takes is known to nobody (`pulse`).

    A step that another thread does meanwhile takes it back.
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
        with _room_for(path), durable_folder.Volume(draft) as volume:
            make(draft)
            made = time.monotonic()
            content = volume.sync()
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
        bytes=content.size,
        files=content.files,
        sync_seconds=synced,
        path=path,
    )
    return path


def _begin(draft: Path) -> None:
    """Makes the folder, by the rename that is to publish it later: not each volume has one, and that should
    not be known after the download only."""
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
            f"folders of the data cache {draft.parent.parent} cannot be renamed: {error.strerror}. So a "
            "download could not be told from half of one. Object storage that is mounted as a folder is like "
            "that (gcsfuse, Mountpoint for S3): take a file system, or stream the data"
        ) from error
    (draft / "file").unlink()


def _published(draft: Path, path: Path) -> bool:
    """False where another has put it there first."""
    try:
        os.rename(draft, path)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        return False
    durable_folder.sync(path.parent)
    return True


def _draft(name: str, reach: cache_locks.LockScope) -> str:
    """Longer where it is filled without a lock that all see: who gets that lock meanwhile leaves it alone."""
    return f"{name}.{secrets.token_hex(8 if reach is cache_locks.LockScope.ALL else 12)}"


def _remove_leftovers(private: Path, name: str) -> None:
    """Of those who had the lock before, and are dead: else they had it still."""
    for path in private.glob(f"{name}.*"):
        if re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{16}}", path.name):
            shutil.rmtree(path, ignore_errors=True)
            log.event("data-cache-leftover", name=name, path=path, removed=str(not path.exists()).lower())


# --- what goes wrong ----------------------------------------------------------------------------------
@contextlib.contextmanager
def _room_for(path: Path) -> Iterator[None]:
    """A full volume is named, with its size, whatever library has met it."""
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
    """Also where a library has wrapped it. Another volume may be full too, such as /tmp."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, OSError) and error.errno in FULL:
            return _names(error, root) or _almost_full(root)
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _names(error: OSError, root: Path) -> bool:
    """Whether the error is about a path below the root."""
    above = os.path.realpath(root)
    told = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    return any(Path(os.path.realpath(name)).is_relative_to(above) for name in told)


def _almost_full(root: Path) -> bool:
    """An error of a write names no file."""
    facts = os.statvfs(root)
    return facts.f_bavail * facts.f_frsize < ALMOST_NOTHING or (facts.f_files > 0 and facts.f_favail == 0)


@contextlib.contextmanager
def _writable(root: Path) -> Iterator[None]:
    """Raises ConfigurationError where only another volume, or other rights on this one, would do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise
        raise ConfigurationError(
            f"the data cache {root} cannot be written: {error.strerror}; check the volume's access mode, and "
            f"owner and mode of the folder for user {os.getuid()}"
        ) from error
