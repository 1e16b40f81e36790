"""Copies of files that their program writes again before they can be sent."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from spottrain.storage.base import Changed
from spottrain.sync.record import notes_of
from spottrain.sync.tree import FolderError, Tree

COPIES: Final = "copies"
RESERVE: Final = 0.12
"""Share of the file system that copies leave free: a kubelet evicts pods when its disk is full."""


@contextlib.contextmanager
def copies_of(root: Path, tree: Tree, paths: Sequence[str]) -> Iterator[Mapping[str, Path]]:
    """Copies files to a folder of our own, and deletes it at the end. Raises FolderError or Changed.

    They are outside of `root`, so that no script sees them.
    """
    try:
        with _folder(root) as folder:
            _require_room(folder, sum(tree[path].size for path in paths))
            copies = {path: folder / str(number) for number, path in enumerate(paths)}
            for path, copy in copies.items():
                _copy(root / path, copy, tree[path].size)
            yield copies
    except OSError as error:
        raise FolderError(f"files of {root} cannot be copied: {error.strerror or error}") from error


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[Path]:
    notes = notes_of(root)
    if notes.parent == root:
        with tempfile.TemporaryDirectory(prefix="spottrain-sync-") as temporary:
            yield Path(temporary)
        return
    folder = notes / COPIES
    shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds replaced files
            notes.rmdir()


def _copy(source: Path, target: Path, size: int) -> None:
    try:
        shutil.copyfile(source, target, follow_symlinks=False)
    except FileNotFoundError as error:
        raise Changed(source.name) from error
    if target.is_symlink() or target.stat().st_size < size:
        raise Changed(source.name)


def _require_room(folder: Path, bytes: int) -> None:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    reserve = RESERVE * (free + (found.f_blocks - found.f_bfree) * found.f_frsize)
    if bytes > free - reserve:
        raise FolderError(
            f"its files are written again before they are sent, and {folder.parent} has no room for a copy "
            f"of {bytes / 1e9:.2f} GB: let the script save less often or under new names, or give it room"
        )
