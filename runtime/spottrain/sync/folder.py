"""A folder: one look at what is in it, and a note of what it was filled from.

The note keeps a start from taking a person's files for its own. It is an attribute of the folder, or where
there are none a file: a script that lists its folder sees its own files alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Final

from spottrain.core import container, log
from spottrain.errors import ConfigurationError, RunError

PRIVATE: Final = ".spottrain-sync"
"""Name, or its end, of a folder with our own notes and half-done downloads (`notes_of`). It is never
uploaded."""
PERMISSIONS: Final = 0o777
"""Of a file's mode: a restore by root must not make a file of another user run as root (setuid)."""

Owner = tuple[int, int]
"""Numbers of user and group."""


class FolderError(RunError):
    """The folder cannot be read now. It is looked at again later."""


class NodeKind(StrEnum):
    FILE = "file"
    LINK = "link"
    FOLDER = "folder"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A file, a symbolic link or a folder. Two equal nodes have equal contents."""

    kind: NodeKind
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    target: str = ""
    """Of a link, as it is stored: it is never followed."""
    stamp: int = field(default=0, compare=False)
    """Nanoseconds of the last change of any kind, a rename included."""
    owner: Owner = field(default=(0, 0), compare=False)
    """It is no content. A change of a file's owner changes `ctime_ns`."""


Tree = Mapping[str, Node]
"""By path below the folder, with slashes. The folder itself is not in it."""


def node_of(found: os.stat_result, path: str = "") -> Node | None:
    """Returns the node; None if it is neither file, link nor folder. `path`: of a link."""
    mode = stat.S_IMODE(found.st_mode)
    stamp = max(found.st_mtime_ns, found.st_ctime_ns)
    owner = (found.st_uid, found.st_gid)
    if stat.S_ISDIR(found.st_mode):
        return Node(kind=NodeKind.FOLDER, mode=mode, stamp=stamp, owner=owner)
    if stat.S_ISLNK(found.st_mode):
        return Node(kind=NodeKind.LINK, target=os.readlink(path), stamp=stamp, owner=owner)
    if not stat.S_ISREG(found.st_mode):
        return None
    return Node(
        kind=NodeKind.FILE,
        mode=mode & PERMISSIONS,
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=found.st_ctime_ns,
        inode=found.st_ino,
        stamp=stamp,
        owner=owner,
    )


def grown(before: Node, now: Node) -> bool:
    """Whether it may be the same file with more at its end."""
    return now.kind is NodeKind.FILE and now.inode == before.inode and now.size >= before.size


def look(root: Path) -> dict[str, Node]:
    """Lists the folder. What disappears meanwhile is left out; sockets, pipes and devices always are.

    Raises FolderError if a folder in it cannot be listed, or if it is gone itself.
    """
    try:
        found = dict(_below(str(root), ""))
    except OSError as error:
        raise FolderError(
            f"{error.filename} cannot be listed: {error.strerror}; make it readable for user {os.getuid()}"
        ) from error
    return dict(sorted(found.items()))


def _below(folder: str, prefix: str) -> Iterator[tuple[str, Node]]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        if not prefix:
            raise
        return  # deleted since its parent was listed
    for entry in entries:
        path = prefix + entry.name
        if path == PRIVATE:
            continue
        try:
            node = node_of(entry.stat(follow_symlinks=False), entry.path)
        except FileNotFoundError:
            continue
        if node is None:
            continue
        yield path, node
        if node.kind is NodeKind.FOLDER:
            yield from _below(entry.path, f"{path}/")


def leads_out(path: str, target: str) -> bool:
    """Whether a link at `path` has a target outside the folder. Such a link is stored, its target is not."""
    place = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return place == ".." or place.startswith(("/", "../"))


def with_parents(tree: Tree, paths: set[str]) -> dict[str, Node]:
    """Returns the nodes of these paths and of the folders that they are in."""
    wanted = set(paths)
    for path in paths:
        wanted.update(str(parent) for parent in PurePosixPath(path).parents)
    return {path: node for path, node in tree.items() if path in wanted}


# --- what it was filled from ---------------------------------------------------------------------------
NAME: Final = "record.json"
ATTRIBUTE: Final = "user.spottrain.sync"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    uri: str
    run: str
    """The start that wrote it: a pod and its attempt. On a laptop each start has its own."""
    ready: bool
    """Whether the restore is over; false: it was cut off, and is done again."""
    worth: bool = field(default=False, compare=False)
    """Whether there was something in the folder, at the start or since, that was to be stored."""

    def write(self, root: Path) -> None:
        text = json.dumps(asdict(self))
        try:
            folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.setxattr(folder, ATTRIBUTE, text.encode())
                os.fsync(folder)
            finally:
                os.close(folder)
        except (OSError, AttributeError):  # there are none on this file system, or on macOS
            notes = notes_of(root)
            notes.mkdir(exist_ok=True)
            fresh = notes / f"{NAME}.new"
            with fresh.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, notes / NAME)
            if notes.parent == root:
                log.event("sync-notes-inside", folder=notes)

    @classmethod
    def read(cls, root: Path) -> Record | None:
        with contextlib.suppress(OSError, AttributeError, ValueError, TypeError):
            return cls(**json.loads(os.getxattr(root, ATTRIBUTE)))
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**json.loads((notes_of(root) / NAME).read_text()))
        return None


def notes_of(root: Path) -> Path:
    """Returns the place for half-done downloads and replaced files: a folder beside `root`.

    It is in `root` where a rename cannot come from outside: a mount, or a parent that is not ours to write.
    """
    real = root.resolve()
    mounts = container.mount_points()
    mounted = real in mounts if mounts else real.is_mount()
    if mounted or not os.access(real.parent, os.W_OK | os.X_OK):
        return root / PRIVATE
    return real.with_name(f".{real.name}{PRIVATE}")


def is_restored(found: Record | None, mine: Record, *, empty: bool, stored: bool, folder: Path) -> bool:
    """Returns whether a start restores into the folder; otherwise the folder stays as it is. Pure.

    `found`: the folder's record. `mine`: of this start. `empty`: whether nothing else is in the folder.
    `stored`: whether there is a checkpoint to restore. Raises ConfigurationError if there is one, and the
    folder holds files that may be of something else.
    """
    ours = found is not None and found.uri == mine.uri
    if not stored or (found == mine and mine.ready):
        return False
    if empty or ours:
        return True
    raise ConfigurationError(
        f"{folder} is not empty, and {mine.uri} has a checkpoint that belongs there: nothing was changed. "
        "Move the files away to restore the checkpoint, or name another folder or another checkpoint URI"
    )
