"""What is whole: a file, by its format; a part of a folder, by a rule that a person names.

Zip files (torch.save, numpy.savez and Keras write them), safetensors and JSON say themselves whether they are
whole. The rules:

quietSeconds  everything, once nothing has changed for so long
marker        a name at the top: everything that is not newer than that file. A pattern with a slash: the
              folders in which such a file is
renamed       the files and folders of that name, with what is in them

A commit of a marker's folders or of renamed ones leaves all else out.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from spottrain.contract import SyncWhen
from spottrain.sync.folder import NodeKind, Tree, with_parents
from spottrain.sync.writes import Write

ZIP_START: Final = b"PK\x03\x04"
LARGEST_HEADER: Final = 100 * 2**20
"""Of safetensors, by its own rule."""
LARGEST_JSON: Final = 16 * 2**20
TEMPORARY: Final = (".orbax-checkpoint-tmp",)
"""Parts of names that a library gives to what it will rename; a pattern such as `[0-9]*` matches them too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    tree: Tree | None = None
    """What to commit; None: nothing, now."""
    why: str = ""
    """What stands against a commit although something has changed; "" if nothing has."""
    kept: frozenset[str] = frozenset()
    """Paths of `tree` whose content is that of the newest checkpoint, and not the folder's."""
    logs: frozenset[str] = frozenset()
    """Paths of `tree` that may grow meanwhile."""
    left_out: frozenset[str] = frozenset()
    """Paths of files that were not waited for any longer."""


class NamedRule:
    """The rule, and what was seen of the folder. It has the methods of `saves.Saves`, the default rule.

    Seconds are of one monotonic clock.
    """

    def __init__(self, when: SyncWhen) -> None:
        self._when = when
        self._tree: Tree | None = None
        self._changed_at = 0.0
        """When a change was seen last."""
        self._before_marker: frozenset[str] = frozenset()
        """Paths that were there before the marker, in its present form, was seen."""
        self._whole: Tree = {}
        """What was to be committed when it was judged last."""

    def look(self, tree: Tree, writes: Mapping[str, Write], now: float) -> None:
        """Takes a look at the folder. At the first one all may have been written just now."""
        if tree == self._tree:
            return
        before = tree if self._tree is None else self._tree
        if self._tree is None or tree.get(self._when.marker) != before.get(self._when.marker):
            self._before_marker = frozenset(before)
        self._tree, self._changed_at = tree, now

    def judge(
        self,
        committed: Tree,
        stored: Callable[[str], bool],
        now: float,
        *,
        ended: bool = False,
        killed: bool = True,
    ) -> Judgement:
        """Returns what is whole and not committed yet.

        A script may delete its old checkpoint before it writes the next, so a folder without files is never
        one.
        """
        when, tree = self._when, self._tree or {}
        if when.quietSeconds is not None:
            verdict = _quiet(when.quietSeconds, tree, committed, now - self._changed_at)
        elif when.marker and "/" not in when.marker:
            verdict = _marked(when.marker, tree, committed, self._before_marker)
        else:
            verdict = _units(when, tree, committed)
        if verdict.tree is not None and not has_files(verdict.tree):
            verdict = Judgement(why="the folder holds no checkpoint now" if has_files(committed) else "")
        self._whole = verdict.tree or {}
        return verdict

    def unstored(self, committed: Tree) -> list[str]:
        """Returns files and links that the newest checkpoint has not, or has otherwise."""
        changed = {path: node for path, node in (self._tree or {}).items() if node != committed.get(path)}
        return [path for path, node in changed.items() if node.kind is not NodeKind.FOLDER]

    def reason(self, path: str, now: float) -> str:
        """Returns what is the matter with a file; "" if it is whole."""
        return "" if path in self._whole else "(nothing said that it is whole)"

    def same(self, verdict: Judgement) -> bool:
        """Whether what was selected is what it was before it was read. A file may be gone since."""
        assert verdict.tree is not None and self._tree is not None
        return all(self._tree.get(path, node) == node for path, node in verdict.tree.items())


def has_files(tree: Tree) -> bool:
    return any(node.kind is not NodeKind.FOLDER for node in tree.values())


def _quiet(seconds: float, tree: Tree, committed: Tree, unchanged: float) -> Judgement:
    """`unchanged`: seconds since the last change."""
    if tree == committed:
        return Judgement()
    if unchanged >= seconds:
        return Judgement(tree=tree)
    return Judgement(why=f"files change more often than every {seconds:g} s")


def _marked(name: str, tree: Tree, committed: Tree, before_marker: frozenset[str]) -> Judgement:
    marker = tree.get(name)
    if marker is None or marker.kind is NodeKind.FOLDER:
        changed = "" if tree == committed else f"there is no file {name} in the folder"
        return Judgement(why=changed)
    if marker == committed.get(name):
        return Judgement(why="" if tree == committed else f"{name} was not written again")
    if not marker.size and name in committed and committed[name].size:
        return Judgement(why=f"{name} is empty, which it was not before: it is being written, or was cut off")
    newer = {
        path
        for path, node in tree.items()
        if node.stamp > marker.stamp and node.kind is not NodeKind.FOLDER and node != committed.get(path)
    }
    rewritten = sorted(path for path in newer if path in committed or path in before_marker)
    if rewritten:
        return Judgement(
            why=f"{rewritten[0]} was written to after {name}, so what {name} stands for is gone; write "
            f"{name} last, and each checkpoint under a name of its own"
        )
    return Judgement(tree=_without(tree, newer, marker.stamp))


def _without(tree: Tree, newer: set[str], stamp: int) -> Tree:
    """Leaves out the paths `newer`, and folders that hold nothing older."""
    kept = {path for path, node in tree.items() if path not in newer and node.kind is not NodeKind.FOLDER}
    full = {str(parent) for path in tree for parent in PurePosixPath(path).parents}
    kept |= {
        path
        for path, node in tree.items()
        if node.kind is NodeKind.FOLDER and path not in full and node.stamp <= stamp
    }
    return with_parents(tree, kept)


def _units(when: SyncWhen, tree: Tree, committed: Tree) -> Judgement:
    whole = units(when, tree)
    if whole != units(when, committed):
        return Judgement(tree=whole)
    rest = [path for path in tree if path not in whole]
    if whole:  # beside a checkpoint that is stored, files of other names are the program's own
        rest = [path for path in rest if restores(when, path)]
    if not rest or tree == committed:
        return Judgement()
    return Judgement(why=f"{rest[0]} and {len(rest) - 1} others match no {when.marker or when.renamed}")


def units(when: SyncWhen, tree: Tree) -> Tree:
    """Returns the files and folders that a pattern says are whole, with all that is in them."""
    pattern = when.marker or when.renamed
    found = {path for path in tree if matches(path, pattern)}
    if when.marker:
        found = {path.rpartition("/")[0] for path in found if tree[path].kind is not NodeKind.FOLDER}
    below = {path for path in tree if any(str(each) in found for each in PurePosixPath(path).parents)}
    return with_parents(tree, found | below)


def matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("/"), pattern.split("/")
    if len(parts) != len(wanted) or any(mark in path for mark in TEMPORARY):
        return False
    return all(fnmatchcase(part, each) for part, each in zip(parts, wanted, strict=True))


def restores(when: SyncWhen, path: str) -> bool:
    """Whether a restore may move this path away although the checkpoint does not have it.

    With a pattern: what has that name, and all in it, whole or not. All else is the person's own.
    """
    pattern = when.renamed or when.marker.rpartition("/")[0]
    above = (str(each) for each in PurePosixPath(path).parents)
    return not pattern or any(matches(each, pattern) for each in (path, *above))


# --- formats that say it -------------------------------------------------------------------------------
def says_whole(path: Path) -> bool | None:
    """Returns whether the file is whole, by its format; None where the format does not say so for certain.

    Raises OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(9)
        if start.startswith(ZIP_START):
            return _zip(path)
        if start[8:] == b"{" and (length := int.from_bytes(start[:8], "little")) <= LARGEST_HEADER:
            return _safetensors(file, size, length)
        if path.suffix == ".json" and start.lstrip()[:1] in (b"{", b"[") and size <= LARGEST_JSON:
            return _json(start + file.read())
    return None


def _zip(path: Path) -> bool:
    """Whether it has its directory, which comes last."""
    try:
        with zipfile.ZipFile(path):
            return True
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):  # whatever cut-off bytes say
        return False


def _safetensors(file: BinaryIO, size: int, length: int) -> bool | None:
    """Whether the bytes of all tensors are there. Some versions reserve the size first: holes say nothing."""
    if 8 + length > size:
        return False
    try:
        file.seek(8)
        header = json.loads(file.read(length))
        end = max((each["data_offsets"][1] for name, each in header.items() if name[:2] != "__"), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
    if 8 + length + end != size:
        return False
    return None if _has_holes(file.fileno(), size) else True


def _has_holes(file: int, size: int) -> bool:
    try:
        hole = os.lseek(file, 0, os.SEEK_HOLE) if hasattr(os, "SEEK_HOLE") else size
    except OSError:
        hole = size
    return hole < size or os.fstat(file).st_blocks * 512 < size


def _json(text: bytes) -> bool | None:
    """Whether it is one value. What is not may be several, or have comments."""
    try:
        json.loads(text)
    except ValueError:
        return None
    return True
