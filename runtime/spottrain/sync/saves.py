"""The default rule: which files are whole, each by itself, and which save is complete.

A file is whole if its format says so, or if it was closed after writing and its writer lived on: it renamed
the file, or the program still ran a moment later. Of another format where no close can be seen it is whole
after 30 s without a change.

What is written at about the same time is one save. It is complete once all of it is whole and nothing more
was written for a moment. If the files are those of the last save, it is complete at once; if some of those
are missing, the moment is longer.

A log is text that grows, or TensorBoard's: any beginning of it is as good as the whole, and no save waits for
it. A file that was open, or cut off, before the save began is left as the checkpoint before has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spottrain.contract import QUIET_SECONDS
from spottrain.sync.folder import Node, NodeKind, Tree, grown
from spottrain.sync.whole import TEMPORARY, Judgement, has_files, says_whole
from spottrain.sync.writes import Write

LULL: Final = 2.0
"""Seconds without a change after which a save is complete."""
SHORT_LULL: Final = 0.4
"""The same where a program has saved `BUSY_SAVES` times in `BUSY` without any longer one."""
BUSY: Final = 5.0
BUSY_SAVES: Final = 3
MISSED: Final = 10.0
"""The same where files are missing that the last save had."""
OPENED: Final = 10.0
"""A save does not wait for a file that was open, or cut off, so long before it began, such as a database."""
HELD: Final = 60.0
"""If its format says that it is cut off, not before it was left alone for so long."""
GROWTHS: Final = 3
"""After so many looks at which a text had grown at its end, it is a log."""
TENSORBOARD: Final = "tfevents"
TOGETHER: Final = 60.0
"""Seconds between the ends of files that a restored checkpoint has of one save."""
HEAD: Final = 512
TAIL: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    node: Node
    since: float
    """When a look saw this node first."""
    begun: float
    """When this version was begun."""
    write: Write | None = None
    """Its last write; None where only looks have seen it."""
    format: bool | None = None
    """What its format says."""

    @property
    def number(self) -> int:
        return self.write.number if self.write is not None else 0

    @property
    def changed(self) -> float:
        return self.since if self.write is None else max(self.write.changed, self.write.closed or 0.0)


class Saves:
    """What was seen of the files of `root`. Seconds are of one monotonic clock.

    Args:
        root: The folder.
        reaction: Seconds after which the death of the program is known for certain.
        restored: What the newest checkpoint has.
    """

    def __init__(self, root: Path, reaction: float, restored: Tree | None = None) -> None:
        self._root = root
        self._reaction = reaction
        self._tree: Tree = {}
        self._seen: dict[str, _Seen] = {}
        self._logs = _Logs(root)
        self._cycle: set[str] = set()
        """Names that were written since one of them was written twice."""
        self._last = _last_save(restored or {})
        """Those of the time before."""
        self._cycles = 0
        """How often that was."""
        self._waiting: tuple[float, int] | None = None
        """Since when whole files wait for a commit, and the cycles then."""
        self._busy = False
        """Whether it saves so often that no lull is to be waited for."""
        self._looked = False
        self._selected: dict[str, int] = {}
        """The numbers of the last writes when a commit was selected, by path."""

    def look(self, tree: Tree, writes: Mapping[str, Write], now: float) -> None:
        """Takes a look at the folder. `writes`: as they were known before the look."""
        self._seen = {
            path: self._take(path, node, writes.get(path), now)
            for path, node in tree.items()
            if node.kind is not NodeKind.FOLDER
        }
        self._tree = tree
        self._looked = True

    def _take(self, path: str, node: Node, write: Write | None, now: float) -> _Seen:
        before = self._seen.get(path)
        if before is not None and before.node != node and write is not None and write.number == before.number:
            write = None  # a change that the kernel did not tell of
        if before is not None and before.node == node and before.write == write:
            return before
        if write is not None:
            begun = write.began
        else:
            begun = before.begun if before is not None and now - before.changed < LULL else now
        if (before is None or begun != before.begun) and self._looked and not self._logs.is_one(path):
            self._written(path if before is not None else shape(path))
        since = now if before is None or before.node != node else before.since
        if node.kind is NodeKind.FILE:
            self._logs.look(path, before.node if before is not None else None, node)
        return _Seen(node=node, since=since, begun=begun, write=write, format=self._format(path, node))

    def _format(self, path: str, node: Node) -> bool | None:
        if node.kind is not NodeKind.FILE:
            return True
        try:
            return says_whole(self._root / path)
        except OSError:
            return None

    def _written(self, name: str) -> None:
        if name in self._cycle:
            self._last, self._cycle = self._cycle, set()
            self._cycles += 1
        self._cycle.add(name)

    # --- verdicts ---------------------------------------------------------------------------------------
    def judge(
        self,
        committed: Tree,
        stored: Callable[[str], bool],
        now: float,
        *,
        ended: bool = False,
        killed: bool = True,
    ) -> Judgement:
        """Returns what to commit.

        Args:
            committed: What the newest checkpoint has.
            stored: Whether the content of a path is in it as `committed` says.
            now: The last time at which the program was known to live.
            ended: Whether it has ended since.
            killed: Whether that may have been in the middle of a save.
        """
        changed = self.changed(committed)
        logs = {path for path in changed if self._logs.is_one(path)}
        torn = {path for path in changed - logs if not self._whole(path, now)}
        fresh = changed - logs - torn
        if not fresh:
            self._waiting = None
            if not (ended and logs and not torn):
                return Judgement(why=self._why(sorted(torn)[0]) if torn else "")
        elif self._waiting is None:
            self._waiting = (now, self._cycles)
        since, cycles = self._waiting or (now, self._cycles)
        if now - since >= BUSY and self._cycles - cycles >= BUSY_SAVES:
            self._busy = True
        there = {
            path
            for path in self._seen.keys()
            | {path for path, node in committed.items() if node.kind is NodeKind.FILE}
            if not _temporary(path) and not self._logs.is_one(path)
        }
        folders = all("/" in path for path in fresh | torn)
        done = self._finished(fresh, torn, there, committed) if folders or self._busy or ended else set()
        save = min((self._seen[path].begun for path in fresh), default=now)
        held = fresh | torn if done else {path for path in torn if self._held(path, save, now)}
        held = {path for path in held - done if path not in committed or stored(path)}
        if not done and torn - held:
            return Judgement(why=self._why(sorted(torn - held)[0]))
        if not done and (unit := _incomplete(fresh, there, committed)):
            return Judgement(why=f"{unit} lacks files that others of its kind have")
        first = not has_files(committed) and (killed or not ended)
        if not done and fresh and not self._complete(fresh, there, now, first=first):
            return Judgement(why="files are written so often that at no moment all of them are whole")
        tree = self._without(held, committed)
        if not has_files(tree):
            return Judgement()
        self._waiting = None
        self._selected = {path: seen.number for path, seen in self._seen.items()}
        return Judgement(
            tree=tree,
            kept=frozenset(held & tree.keys()),
            logs=frozenset(logs & tree.keys()),
            left_out=frozenset(() if done else held),
        )

    def changed(self, committed: Tree) -> set[str]:
        """Returns files and links that the newest checkpoint has not, or has otherwise."""
        return {
            path
            for path, seen in self._seen.items()
            if seen.node != committed.get(path) and not _temporary(path)
        }

    def unstored(self, committed: Tree) -> list[str]:
        """Returns the paths of those, without logs."""
        return sorted(path for path in self.changed(committed) if not self._logs.is_one(path))

    def reason(self, path: str, now: float) -> str:
        """Returns what is the matter with a file, such as "cut off"; "" if it is whole."""
        seen = self._seen[path]
        if self._whole(path, now):
            return ""
        if seen.write is not None and seen.write.closed is None:
            return "was still being written"
        return "is cut off" if seen.format is False else "was written just before the end"

    def same(self, verdict: Judgement) -> bool:
        """Whether what `judge` has selected is what it was before it was read. A file may be gone since."""
        assert verdict.tree is not None
        for path, node in verdict.tree.items():
            seen = self._seen.get(path)
            if seen is None or path in verdict.kept:
                continue
            if path in verdict.logs:
                if not grown(node, seen.node):
                    return False
            elif (seen.node, seen.number) != (node, self._selected.get(path)):
                return False
        return True

    # --- internal ---------------------------------------------------------------------------------------
    def _whole(self, path: str, now: float) -> bool:
        seen = self._seen[path]
        if seen.format is not None:
            return seen.format
        if seen.write is None:
            return now - seen.since >= QUIET_SECONDS
        closed = seen.write.closed
        return closed is not None and (seen.write.renamed or now - closed >= self._reaction)

    def _held(self, path: str, save: float, now: float) -> bool:
        """Whether a save that began at `save` does not wait for this file."""
        seen = self._seen[path]
        return seen.begun < save - OPENED and (seen.format is None or now - seen.changed > HELD)

    def _finished(self, fresh: set[str], torn: set[str], there: set[str], committed: Tree) -> set[str]:
        """Returns the files of new checkpoints that are finished, where all that has changed is new ones.

        A checkpoint is a file or a folder at the top whose name has a number. It is finished if it has the
        files of another one, or if another one was begun after it. Names of several shapes may belong to one
        checkpoint, so then nothing is known.
        """
        files = _by_unit(there)
        families = {shape(unit) for unit in files} - files.keys()
        new: dict[str, list[_Seen]] = {}
        for path in fresh | torn:
            new.setdefault(path.partition("/")[0], []).append(self._seen[path])
        old = {path.partition("/")[0] for path in committed}
        if len(families) != 1 or not {shape(unit) for unit in new} <= families or new.keys() & old:
            return set()
        if any(name.partition("/")[0] not in families for name in self._missing(there)):
            return set()
        begun = {unit: min(each.begun for each in seen) for unit, seen in new.items()}
        ended = {unit: max(each.changed for each in seen) for unit, seen in new.items()}
        finished = {
            unit
            for unit in new
            for each in files
            if each != unit and shape(each) in families
            if files[each] <= files[unit] or begun.get(each, 0.0) > ended[unit]
        }
        finished -= {path.partition("/")[0] for path in torn}
        return {path for path in fresh if path.partition("/")[0] in finished}

    def _missing(self, there: set[str]) -> set[str]:
        """Returns names that the last save had, and this one has not yet."""
        names = {name for path in there for name in (path, shape(path))}
        return (self._last - self._cycle) & names if self._cycle & self._last & names else set()

    def _complete(self, fresh: set[str], there: set[str], now: float, *, first: bool) -> bool:
        """Whether no more of this save is to come. `first`: nothing is stored yet, and more may come."""
        if len(there) == 1 and not first:
            return True
        quiet = now - max(self._seen[path].changed for path in fresh)
        if self._missing(there):
            return quiet >= MISSED
        names = self._cycle & there
        if names and names == self._last & there and names >= fresh:
            return True
        if quiet >= max(LULL, self._reaction):
            self._busy = False
            return True
        return self._busy and quiet >= SHORT_LULL

    def _without(self, held: set[str], committed: Tree) -> dict[str, Node]:
        """Returns the folder, with what is held as it was committed, and without new empty folders."""
        files = {
            path: committed.get(path) if path in held else seen.node
            for path, seen in self._seen.items()
            if not _temporary(path)
        }
        kept = {path: node for path, node in files.items() if node is not None}
        full = {path[:at] for path in kept for at, sign in enumerate(path) if sign == "/"}
        folders = {
            path: node
            for path, node in self._tree.items()
            if node.kind is NodeKind.FOLDER and (path in full or path in committed)
        }
        return dict(sorted((folders | kept).items()))

    def _why(self, path: str) -> str:
        seen = self._seen[path]
        if seen.format is False:
            return f"{path} was cut off"
        if seen.write is None:
            return f"{path} changed each {QUIET_SECONDS:g} s, and it is not known whether it was closed"
        how = "open for writing" if seen.write.closed is None else "closed just before each look"
        return f"{path} was {how}"


def _by_unit(paths: Iterable[str]) -> dict[str, set[str]]:
    """Returns the names in each folder at the top; "" is that of a file there."""
    files: dict[str, set[str]] = {}
    for path in paths:
        unit, _, name = path.partition("/")
        files.setdefault(unit, set()).add(name)
    return files


def _incomplete(fresh: set[str], there: set[str], committed: Tree) -> str:
    """Returns a new folder with a number that has the files of no other one of its shape; "" without one."""
    files = _by_unit(path for path in there if "/" in path)
    for unit in sorted({path.partition("/")[0] for path in fresh} & files.keys()):
        others = [each for each in files if each != unit and shape(each) == shape(unit) != unit]
        if unit not in committed and others and not any(files[each] <= files[unit] for each in others):
            return unit
    return ""


def _last_save(tree: Tree) -> set[str]:
    """Returns the names of the files that were written together last, by their times."""
    files = {path: node.mtime_ns for path, node in tree.items() if node.kind is NodeKind.FILE}
    newest = max(files.values(), default=0)
    together = [path for path, at in files.items() if newest - at < TOGETHER * 10**9]
    return {name if "#" in (name := shape(path)) else path for path in together}


def shape(path: str) -> str:
    """Returns the path with # for each number of its first part: what one step's file has in common with
    the next one's."""
    first, slash, rest = path.partition("/")
    return re.sub(r"\d+", "#", first) + slash + rest


def _temporary(path: str) -> bool:
    return any(mark in path for mark in TEMPORARY)


class _Logs:
    """Tells the files that only grow at their end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._growths: dict[str, int] = {}
        self._tails: dict[str, bytes] = {}

    def is_one(self, path: str) -> bool:
        return TENSORBOARD in path or self._growths.get(path, 0) >= GROWTHS

    def look(self, path: str, before: Node | None, node: Node) -> None:
        if before is not None and node.size == before.size and node.inode == before.inode:
            return
        tail = self._tails.pop(path, b"")
        try:
            with (self._root / path).open("rb") as file:
                head = file.read(HEAD)
                longer = before is not None and grown(before, node) and bool(tail)
                if longer and before is not None:
                    file.seek(max(before.size - TAIL, 0))
                    longer = file.read(len(tail)) == tail
                file.seek(max(node.size - TAIL, 0))
                self._tails[path] = file.read(min(TAIL, node.size))
        except OSError:
            head, longer = b"", False
        text = _is_text(head) and _is_text(self._tails.get(path, b""))
        self._growths[path] = self._growths.get(path, 0) + 1 if longer and text else 0


def _is_text(part: bytes) -> bool:
    """Whether it is UTF-8; a character may be cut at either end."""
    return b"\0" not in part and part.decode(errors="replace").count("\ufffd") <= 6
