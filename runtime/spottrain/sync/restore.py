"""Makes the folder equal to a checkpoint. Everything is downloaded and verified before anything is replaced.

A file of the folder that is not in the checkpoint, or differs from it, is never deleted: it is moved to
`replaced/N` in the folder of `folder.notes_of`, where each restore has a number of its own. Where a pattern
says what is a checkpoint, files of other names stay in their place, unless the checkpoint has another content
for them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from spottrain.checkpoint.manifest import Damaged
from spottrain.contract import LastExit
from spottrain.core import log
from spottrain.errors import ConfigurationError
from spottrain.storage.base import Cancelled, KeyMissing, Store, Truncated, never
from spottrain.sync.folder import FolderError, Node, NodeKind, Owner, Tree, look, notes_of
from spottrain.sync.manifest import StoredFile, SyncManifest, digest_of
from spottrain.sync.upload import Known, digest_of_part, in_parallel
from spottrain.sync.whole import says_whole

WINDOW: Final = 4 << 20
"""Bytes of one read request, and of one buffer."""
INCOMING: Final = "incoming"
REPLACED: Final = "replaced"


class NoRoom(ConfigurationError):
    """The file system of the folder has too little space."""


def restore(
    store: Store,
    manifest: SyncManifest,
    root: Path,
    *,
    movable: Callable[[str], bool],
    cancelled: Callable[[], bool] = never,
) -> int:
    """Fills the folder. Returns how many of its own files were moved away.

    Args:
        movable: Whether a path that the checkpoint does not have is moved away.
        cancelled: Whether to give up, while nothing of the folder was changed yet.

    Raises:
        Damaged, Cancelled: Before anything was changed.
        NoRoom: Before anything was written.
        StoreError: The store did not respond, or refused.
    """
    tree = look(root)
    files = manifest.files.items()
    same = {path for path, file in files if _equal(root / path, tree.get(path), file, manifest, cancelled)}
    missing = {path: file for path, file in manifest.files.items() if path not in same}
    _require_room(root, sum(file.size for file in missing.values()))
    notes = notes_of(root)
    incoming = notes / INCOMING
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    try:
        names = {path: incoming / str(number) for number, path in enumerate(missing)}
        _download(store, manifest, missing, names, cancelled)
        moved = _move_away(root, tree, lambda path: _stays(path, tree[path], manifest, same, movable))
        _put_in_place(root, manifest, names)
        return moved
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds replaced files
            notes.rmdir()


def _equal(
    path: Path, node: Node | None, file: StoredFile, manifest: SyncManifest, cancelled: Callable[[], bool]
) -> bool:
    """Whether the folder's file has this content already. Raises Cancelled."""
    if node is None or node.kind is not NodeKind.FILE or node.size != file.size:
        return False
    with path.open("rb", buffering=0) as opened:
        for key, offset, size in manifest.chunks_of(file):
            _go_on(cancelled)
            if digest_of_part(opened.fileno(), offset, size) != digest_of(key):
                return False
    return True


def _go_on(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled("the restore")


def _require_room(root: Path, bytes: int) -> None:
    found = os.statvfs(root)
    free = found.f_bavail * found.f_frsize
    if bytes > free:
        raise NoRoom(
            f"no room to restore the checkpoint into {root}: it needs {bytes / 1e9:.2f} GB and "
            f"{free / 1e9:.2f} GB are free, so {(bytes - free) / 1e9:.2f} GB are missing; nothing was "
            f"written. Use a larger volume, keep fewer checkpoints in the folder, or delete what earlier "
            f"restores have moved to {notes_of(root) / REPLACED}"
        )


@contextlib.contextmanager
def explained(root: Path) -> Iterator[None]:
    """Turns an OSError of the folder into a sentence."""
    try:
        yield
    except OSError as error:
        what = f"the checkpoint cannot be restored into {root}: {error.filename or root}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoom(f"{what}. Use a larger volume or quota") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ConfigurationError(f"{what}. Let user {os.geteuid()} write there") from error
        raise FolderError(what) from error


def _download(
    store: Store,
    manifest: SyncManifest,
    files: Mapping[str, StoredFile],
    names: Mapping[str, Path],
    cancelled: Callable[[], bool],
) -> None:
    failed = threading.Event()

    def fetch(name: Path, key: str, offset: int, size: int) -> None:
        if failed.is_set():
            return
        window = memoryview(bytearray(min(WINDOW, size)))
        with name.open("r+b", buffering=0) as out:
            for view in read_content(store, key, size, window):
                _go_on(cancelled)
                while view:
                    count = os.pwrite(out.fileno(), view, offset)
                    view, offset = view[count:], offset + count

    for path, file in files.items():
        with names[path].open("wb") as out:
            out.truncate(file.size)
    chunks = [(names[path], *chunk) for path, file in files.items() for chunk in manifest.chunks_of(file)]
    in_parallel([partial(fetch, *chunk) for chunk in chunks], failed)


def read_content(store: Store, key: str, size: int, window: memoryview) -> Iterator[memoryview]:
    """Yields a content piece by piece, each in `window`. Raises Damaged, also after the last."""
    digest = hashlib.sha256()
    for at in range(0, size, len(window)):
        view = window[: min(len(window), size - at)]
        try:
            store.read_into(key, at, view)
        except (KeyMissing, Truncated) as error:
            raise Damaged(f"{key} is missing or too short") from error
        digest.update(view)
        yield view
    if digest.hexdigest() != digest_of(key):
        raise Damaged(f"{key} does not match its checksum")


def damage(store: Store, manifest: SyncManifest) -> list[str]:
    """Reads all contents of a checkpoint, and returns what is wrong with them."""
    found = []
    window = memoryview(bytearray(WINDOW))
    sizes = {key: size for file in manifest.files.values() for key, _, size in manifest.chunks_of(file)}
    for key, size in sizes.items():
        try:
            for _ in read_content(store, key, size, window):
                pass
        except Damaged as error:
            found.append(str(error))
    return found


def _move_away(root: Path, tree: Tree, stays: Callable[[str], bool]) -> int:
    """Moves all that does not stay to a folder of its own; returns how many files and links."""
    place = notes_of(root) / REPLACED
    names = [each.name for each in place.iterdir()] if place.is_dir() else []
    replaced = place / str(1 + max((int(name) for name in names if name.isdecimal()), default=0))
    moved = 0
    gone: set[str] = set()
    for path, node in tree.items():
        inside = any(path.startswith(f"{each}/") for each in gone)
        if not inside and stays(path):
            continue
        moved += node.kind is not NodeKind.FOLDER
        if not inside:
            target = replaced / path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(root / path, target)
            gone |= {path} if node.kind is NodeKind.FOLDER else set()
    return moved


def set_aside(root: Path) -> int:
    """Moves away the files that are cut off or empty; returns how many."""
    tree = look(root)
    torn = {
        path
        for path, node in tree.items()
        if node.kind is NodeKind.FILE and (not node.size or says_whole(root / path) is False)
    }
    return _move_away(root, tree, lambda path: path not in torn)


def _stays(
    path: str, node: Node, manifest: SyncManifest, same: set[str], movable: Callable[[str], bool]
) -> bool:
    if path not in manifest.files and path not in manifest.links and path not in manifest.folders:
        return not movable(path)
    if node.kind is NodeKind.FOLDER:
        return path in manifest.folders
    if node.kind is NodeKind.LINK:
        return manifest.links.get(path) == node.target
    return path in same


def _put_in_place(root: Path, manifest: SyncManifest, names: Mapping[str, Path]) -> None:
    owners = _Owners(manifest.owners)
    for path in sorted(manifest.folders):
        (root / path).mkdir(exist_ok=True)
        (root / path).chmod(0o700)  # its own mode comes last: it may forbid to write
    for path, file in manifest.files.items():
        place = names.get(path, root / path)
        owners.set(path, place)
        place.chmod(file.mode)
        os.utime(place, ns=(file.mtime_ns, file.mtime_ns))
        if path in names:
            os.rename(place, root / path)
    for path, target in manifest.links.items():
        with contextlib.suppress(FileExistsError):  # the same link: `_move_away` has left no other
            os.symlink(target, root / path)
        owners.set(path, root / path)
    for path in sorted(manifest.folders, reverse=True):
        owners.set(path, root / path)
        (root / path).chmod(manifest.folders[path])


class _Owners:
    """Gives what root restores to the user who had written it, who need not be known here by name."""

    def __init__(self, owners: Mapping[str, Owner]) -> None:
        self._owners = owners if os.geteuid() == 0 else {}

    def set(self, path: str, place: Path) -> None:
        """Sets the owner of a file, a folder, or a link itself, if it is known and another one."""
        owner, found = self._owners.get(path), place.lstat()
        if owner is None or owner == (found.st_uid, found.st_gid):
            return
        try:
            os.chown(place, *owner, follow_symlinks=False)
        except PermissionError as error:  # such as a volume of NFS on which root is nobody
            self._owners = {}
            log.event("sync-owners-lost", path=path, user=owner[0], group=owner[1], why=error.strerror)


def adopt(manifest: SyncManifest, tree: Tree) -> tuple[dict[str, Known], dict[str, Node]]:
    """Compares the folder with its checkpoint by size and time.

    Returns the files that need not be read, and the tree as the checkpoint has it: a path whose node there
    is not the folder's has changed, or is gone.
    """
    known: dict[str, Known] = {}
    committed: dict[str, Node] = {}
    for path, file in manifest.files.items():
        node = tree.get(path)
        facts = (node.kind, node.size, node.mtime_ns, node.mode) if node else None
        if node and facts == (NodeKind.FILE, file.size, file.mtime_ns, file.mode):
            known[path] = Known(node=node, stored=file)
            committed[path] = node
        else:
            committed[path] = Node(kind=NodeKind.FILE, mode=file.mode, size=file.size, mtime_ns=file.mtime_ns)
    for path, target in manifest.links.items():
        committed[path] = Node(kind=NodeKind.LINK, target=target)
    for path, mode in manifest.folders.items():
        committed[path] = Node(kind=NodeKind.FOLDER, mode=mode)
    return known, dict(sorted(committed.items()))


def uncounted(manifest: SyncManifest, last_exit: LastExit | None, *, newest: bool) -> str:
    """Returns why no restart uses a checkpoint; "" if it counts. `newest`: whether HEAD names no newer one.

    One that was committed because all containers had ended counts if the script's exit code was 0 in that
    attempt, and if it is the newest.
    """
    if not manifest.atEnd:
        return ""
    exit_code = last_exit.code if last_exit and last_exit.attempt == manifest.attempt else None
    if exit_code == 0:
        return "" if newest else "it was stored at the end, and a later one is damaged"
    known = "is not known" if exit_code is None else f"was {exit_code}"
    return f"the script's exit code {known}, so its last write may have been cut off"
