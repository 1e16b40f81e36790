"""Looks at the folder again and again, and commits what is whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from spottrain.contract import SyncWhen
from spottrain.core import log
from spottrain.core.log_format import counted
from spottrain.core.progress import ProgressBoard
from spottrain.errors import RunError, StoreUnavailable, Superseded
from spottrain.lifecycle.notice_budget import NoticeBudget
from spottrain.storage.base import Cancelled, Changed
from spottrain.sync.checkpoints import Commit, SyncedCheckpoints
from spottrain.sync.folder import NodeKind, Tree, leads_out, look
from spottrain.sync.saves import Saves
from spottrain.sync.whole import Judgement, NamedRule, has_files
from spottrain.sync.writes import Writes

LOOK_SECONDS: Final = 1.0
"""Between two looks; more if a look at many files takes long."""
EARLY_SECONDS: Final = 0.2
"""The same where the kernel has told of a write."""
LOOK_SHARE: Final = 0.1
"""Largest share of the time that looks may take."""
CHECK_SECONDS: Final = 30.0
"""Between two readings of HEAD without a commit."""
MAX_NAMED: Final = 3
"""Files that a message names."""
TELL_SECONDS: Final = 300.0
"""After so long without a commit, although something has changed, the reason is logged."""
RETRY_SECONDS: Final = 5.0
PATIENCE: Final = 30.0
"""Seconds to wait for HEAD in a commit."""
MIN_BYTES: Final = 2**20
"""An upload of less says little about the bandwidth."""


class Watcher:
    """Watches one folder.

    Args:
        left: Returns the seconds in which a commit must be done; infinite while no end is near.
        reaction: Seconds after which the death of the program is known for certain.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        root: Path,
        when: SyncWhen,
        checkpoints: SyncedCheckpoints,
        board: ProgressBoard,
        left: Callable[[], float],
        *,
        grace: float,
        reaction: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: RunError | None = None
        """Why the last try of a commit failed; None once one has succeeded."""
        self.newest = board.facts.durable_step
        """Number of the newest checkpoint that is stored; None without one."""
        self._root = root
        self._when = when
        self._checkpoints = checkpoints
        self._board = board
        self._left = left
        self._grace = grace
        self._clock = clock
        self._rule = Saves(root, reaction, checkpoints.committed) if when.each_file else NamedRule(when)
        self._writes = Writes(root, clock)
        self._writes_known = 0
        if when.each_file:
            self._writes.start()
        self._tree: Tree = look(root)
        self._rule.look(self._tree, {}, clock())
        self._lived_at = clock()
        """When the program was known to live last."""
        self._look_at = self._look_early_at = self._try_at = float("-inf")
        self._check_at = float("-inf")
        self._tell_at = clock() + TELL_SECONDS
        self._told: set[str] = set()
        self._warnings: dict[str, str] = {}
        """What /progress warns of, by subject."""
        self._links_told: set[str] = set()
        self._left_out: frozenset[str] = frozenset()
        self._outpaced = False

    @property
    def covered(self) -> bool:
        """Whether the newest checkpoint holds all that counts of what was seen in the folder."""
        return not self._unstored()

    @property
    def empty(self) -> bool:
        return not has_files(self._tree)

    def step(self, *, alive: bool = True) -> None:
        """Looks if it is time to, and commits what is whole. Raises Superseded.

        `alive`: whether the program is known to live.
        """
        now = self._clock()
        if alive:
            self._lived_at = now
        if now < self._look_at and not (
            now >= self._look_early_at and self._writes.count() != self._writes_known
        ):
            return
        if not self._look():
            return self._tell(str(self.failure))
        verdict = self._judge(now)
        if verdict.why and self._when.each_file:  # it may be whole in a moment
            self._look_at = self._look_early_at
        if verdict.tree is not None and now >= self._try_at:
            self._try(verdict)
            self._tell_left_out(verdict.left_out)
        self._tell(verdict.why or (str(self.failure) if verdict.tree and self.failure else ""))
        self._check()

    def last(self, *, everything: bool, at_end: bool, until: Callable[[], bool], killed: bool = True) -> bool:
        """Commits what is left, once the script has ended. Returns whether all that counts is durable.

        Args:
            everything: Whether the folder counts as whole; otherwise only what a rule says is whole.
            at_end: See `SyncManifest`; of what only `everything` makes whole.
            until: Whether to give up trying.
            killed: Whether the script may have ended in the middle of a save.
        """
        ended = self._clock()
        while True:
            if self._look():
                verdict = self._judge(ended, ended=True, killed=killed)
                stored = self._tree == self._checkpoints.committed
                rest = verdict.tree is None and everything and not stored and not self.empty
                if rest:
                    verdict = Judgement(tree=self._tree)
                if verdict.tree is None:
                    return self.covered or self.empty
                if self._try(verdict, at_end=at_end and rest, all_of_it=rest):
                    continue
            if until():
                return False
            time.sleep(LOOK_SECONDS)

    def left_out(self) -> str:
        """Returns which files are not stored, and why not."""
        paths = self._unstored()
        if not paths:
            return str(self.failure or "")
        named = [f"{path} {self._reason(path)}".rstrip() for path in paths[:MAX_NAMED]]
        more = f" and {counted(len(paths) - MAX_NAMED, 'other')}" if len(paths) > MAX_NAMED else ""
        why = f": {self.failure}" if self.failure else ""
        return f"{', '.join(named)}{more}{why}"

    # --- internal ---------------------------------------------------------------------------------------
    def _unstored(self) -> list[str]:
        return self._rule.unstored(self._checkpoints.committed)

    def _reason(self, path: str) -> str:
        return self._rule.reason(path, self._lived_at)

    def _judge(self, now: float, *, ended: bool = False, killed: bool = True) -> Judgement:
        """By the default rule counts when the program was known to live last, by another the time `now`."""
        checkpoints, at = self._checkpoints, self._lived_at if self._when.each_file else now
        return self._rule.judge(checkpoints.committed, checkpoints.stored, at, ended=ended, killed=killed)

    def _look(self) -> bool:
        began = self._clock()
        self._writes_known, writes = self._writes.count(), self._writes.now()
        try:
            self._tree = look(self._root)
        except RunError as error:
            self._failed(error)
            self._look_at = self._clock() + RETRY_SECONDS
            return False
        now = self._clock()
        self._rule.look(self._tree, writes, now)
        self._look_at = now + max(LOOK_SECONDS, (now - began) / LOOK_SHARE)
        self._look_early_at = now + max(EARLY_SECONDS, (now - began) / LOOK_SHARE)
        return True

    def _try(self, verdict: Judgement, *, at_end: bool = False, all_of_it: bool = False) -> bool:
        """Commits what was selected. Returns whether it is committed. Raises Superseded.

        Whether it fits into the time that is left is not foretold: how much of it is new to the store shows
        only when it is read. `all_of_it`: nothing else may have come into the folder meanwhile.
        """
        tree = verdict.tree
        assert tree is not None
        self._warn_of_links(tree)
        self._board.update(state="Saving")

        def unchanged() -> bool:
            return self._look() and (self._tree == tree if all_of_it else self._rule.same(verdict))

        try:
            done = self._checkpoints.commit(
                verdict,
                unchanged,
                copied=self._outpaced and not all_of_it,
                at_end=at_end,
                cancelled=lambda: self._left() <= 0,
                patience=max(1.0, min(PATIENCE, self._left())),
            )
        except Superseded:
            raise
        except Changed as error:
            self._failed(RunError(f"{error} changed while it was read"), copy=self._when.each_file)
            return False
        except Cancelled:
            self._failed(StoreUnavailable("the time was up before all was sent"))
            return False
        except RunError as error:
            self._failed(error)
            return False
        finally:
            self._board.update(state="Training")
        self._committed(done, at_end=at_end)
        return True

    def _committed(self, done: Commit, *, at_end: bool) -> None:
        self.failure = None
        self.newest = done.step
        self._settled()
        self._check_at = self._clock() + CHECK_SECONDS
        log.event(
            "sync-committed",
            step=done.step,
            seconds=done.seconds,
            bytes=done.bytes,
            sent=done.sent,
            key=done.key,
        )
        # Whether a commit of the end counts depends on the exit code, which is not known here.
        durable = {} if at_end else {"durable_step": done.step, "durable_time": done.time, "key": done.key}
        self._board.update(
            step=done.step,
            saves=self._board.facts.saves + 1,
            save_seconds=done.seconds,
            **durable,
            **self._budget(done),
        )

    def _budget(self, done: Commit) -> dict[str, object]:
        """Returns what such a commit takes at a notice, for the board."""
        if done.sent < MIN_BYTES or not done.sent_seconds:
            return {}
        budget = NoticeBudget(
            bytes=done.sent,
            bandwidth=done.sent / done.sent_seconds,
            step_seconds=0,
            copy_seconds=0,
            grace=self._grace,
        )
        self._warn("budget", budget.warning)
        return {"emergency_seconds": budget.seconds, "grace_seconds": self._grace}

    def _failed(self, error: RunError, *, copy: bool = False) -> None:
        """`copy`: until a try fails otherwise, because files are written in place while they are sent."""
        self.failure, self._outpaced = error, copy
        if not copy:
            self._try_at = self._clock() + RETRY_SECONDS
        self._board.save_failed(str(error))
        log.event(
            "save-failed",
            step=self._checkpoints.step,
            error=str(error),
            seconds_left=self._left() if self._left() < float("inf") else None,
            next="files are copied first from now on"
            if copy
            else f"it is tried again from {RETRY_SECONDS:g} s on",
        )

    def _warn_of_links(self, tree: Tree) -> None:
        for path, node in tree.items():
            if node.kind is NodeKind.LINK and path not in self._links_told and leads_out(path, node.target):
                self._links_told.add(path)
                log.event("sync-link-out", path=path, target=node.target)

    def _tell_left_out(self, paths: frozenset[str]) -> None:
        if paths and paths != self._left_out:
            log.event(
                "sync-left-out", files=", ".join(f"{path} {self._reason(path)}" for path in sorted(paths))
            )
        self._left_out = paths
        words = "Checkpoints are stored without new versions of files that are open or cut off: "
        self._warn("left out", f"{words}{', '.join(sorted(paths)[:MAX_NAMED])}." if paths else "")

    def _tell(self, why: str) -> None:
        """Says why there is no checkpoint, once it has lasted long. "": there is nothing to store."""
        if not why:
            self._settled()
        elif self._clock() >= self._tell_at and why not in self._told:
            self._told.add(why)
            log.event("no-checkpoints", why=f"for {TELL_SECONDS:g} s {why}")
            self._warn("no checkpoint", f"No checkpoint for {TELL_SECONDS:g} s: {why}.")

    def _settled(self) -> None:
        """Notes that all of the folder that counts is stored: the time without a checkpoint begins again."""
        self._told.clear()
        self._tell_at = self._clock() + TELL_SECONDS
        if self._warnings.get("no checkpoint"):
            self._warn("no checkpoint", "")

    def _warn(self, about: str, words: str) -> None:
        """Shows a warning in /progress until another one about the same, or none, takes its place."""
        self._warnings[about] = words
        self._board.update(warning=" ".join(filter(None, self._warnings.values())))

    def _check(self) -> None:
        if self._clock() < self._check_at:
            return
        self._check_at = self._clock() + CHECK_SECONDS
        try:
            self._checkpoints.check()
        except Superseded:
            raise
        except RunError as error:
            log.event("head-check-failed", error=str(error))
