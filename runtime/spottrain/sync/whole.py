"""Which part of a folder is a whole checkpoint. Pure: what was seen goes in, what to commit comes out.

quietSeconds  everything, once nothing has changed for so long
marker        a name at the top: everything that is not newer than that file. A pattern with a slash: the
              folders in which such a file is
renamed       the files and folders of that name, with what is in them

A commit of a marker's folders or of renamed ones leaves all else out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Final

from spottrain.contract import SyncWhen
from spottrain.sync.tree import Node, NodeKind, Tree, with_parents

TEMPORARY: Final = (".orbax-checkpoint-tmp",)
"""Parts of names that a library gives to what it will rename; a pattern such as `[0-9]*` matches them too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The folder as it was seen, up to now. Seconds are of one monotonic clock."""

    tree: Tree = field(default_factory=dict)
    changed_at: float = 0.0
    """When a change was seen last."""
    marker: Node | None = None
    before_marker: frozenset[str] = frozenset()
    """Paths that were there before `marker`, in its present form, was seen."""

    def then(self, tree: Tree, when: SyncWhen, now: float) -> View:
        """Returns the view after the next look."""
        if tree == self.tree:
            return self
        marker = tree.get(when.marker)
        before = self.before_marker if marker == self.marker else frozenset(self.tree)
        return View(tree=tree, changed_at=now, marker=marker, before_marker=before)


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


def judge(when: SyncWhen, view: View, committed: Tree, now: float) -> Judgement:
    """Returns what is whole and not committed yet.

    A script may delete its old checkpoint before it writes the next, so a folder without files is never one.
    """
    if when.quietSeconds is not None:
        verdict = _quiet(when.quietSeconds, view, committed, now)
    elif when.marker and "/" not in when.marker:
        verdict = _marked(when.marker, view, committed)
    else:
        verdict = _units(when, view, committed)
    if verdict.tree is not None and not has_files(verdict.tree):
        return Judgement(why="the folder holds no checkpoint now" if has_files(committed) else "")
    return verdict


def has_files(tree: Tree) -> bool:
    return any(node.kind is not NodeKind.FOLDER for node in tree.values())


def _quiet(seconds: float, view: View, committed: Tree, now: float) -> Judgement:
    if view.tree == committed:
        return Judgement()
    if now - view.changed_at >= seconds:
        return Judgement(tree=view.tree)
    return Judgement(why=f"files change more often than every {seconds:g} s")


def _marked(name: str, view: View, committed: Tree) -> Judgement:
    marker = view.tree.get(name)
    if marker is None or marker.kind is NodeKind.FOLDER:
        changed = "" if view.tree == committed else f"there is no file {name} in the folder"
        return Judgement(why=changed)
    if marker == committed.get(name):
        return Judgement(why="" if view.tree == committed else f"{name} was not written again")
    newer = {
        path
        for path, node in view.tree.items()
        if node.stamp > marker.stamp and node.kind is not NodeKind.FOLDER and node != committed.get(path)
    }
    rewritten = sorted(path for path in newer if path in committed or path in view.before_marker)
    if rewritten:
        return Judgement(
            why=f"{rewritten[0]} was written to after {name}, so what {name} stands for is gone; write "
            f"{name} last, and each checkpoint under a name of its own"
        )
    return Judgement(tree=_without(view.tree, newer, marker.stamp))


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


def _units(when: SyncWhen, view: View, committed: Tree) -> Judgement:
    whole = units(when, view.tree)
    if whole != units(when, committed):
        return Judgement(tree=whole)
    rest = [path for path in view.tree if path not in whole]
    if whole:  # beside a checkpoint that is stored, files of other names are the program's own
        rest = [path for path in rest if restores(when, path)]
    if not rest or view.tree == committed:
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


def same(selected: Tree, now: Tree, *, all_of_it: bool) -> bool:
    """Whether what was selected, and read since, is what it was. `all_of_it`: and nothing came or went.

    Otherwise a file may be gone by now: its content was whole, and was read before.
    """
    if all_of_it:
        return selected == now
    return all(now.get(path, node) == node for path, node in selected.items())


def first_view(tree: Tree, when: SyncWhen, now: float) -> View:
    """The view at the start. Nobody has seen what was written before, so all of it may be of just now."""
    return View(tree=tree, changed_at=now, marker=tree.get(when.marker), before_marker=frozenset(tree))
