"""The checkpoints of one run of `spottrain sync`: claim, restore, commit, delete what is not needed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from spottrain.checkpoint.head.owner import Claim, ClaimPolicy, Entry, HeadClient, HeadOwner, Identity
from spottrain.checkpoint.head.state import Head, present
from spottrain.checkpoint.manifest import Damaged
from spottrain.contract import (
    BLOBS_PREFIX,
    CHUNK_BYTES,
    MANIFEST_NAME,
    LastExit,
    Outcome,
    Reason,
    SyncResult,
    SyncWhen,
    blobs_of,
)
from spottrain.core import log
from spottrain.core.log_format import counted
from spottrain.errors import CheckpointError, ConfigurationError, RunError
from spottrain.storage.base import Changed, Store, never
from spottrain.sync.folder import FolderError, NodeKind, Record, Tree, is_restored, look, notes_of
from spottrain.sync.manifest import SyncManifest, named_by, read_manifest, unnamed
from spottrain.sync.restore import REPLACED, adopt, explained, restore, set_aside, uncounted
from spottrain.sync.upload import Contents
from spottrain.sync.whole import Judgement, restores

COPIES: Final = "copies"
RESERVE: Final = 0.12
"""Share of the file system that copies leave free: a kubelet evicts pods when its disk is full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A checkpoint that HEAD names."""

    step: int
    key: str
    time: float
    """Unix seconds of its start."""
    seconds: float
    bytes: int
    sent: int
    """Bytes that the store did not hold yet."""
    sent_seconds: float


class CheckpointFound(RunError):
    """There is a checkpoint to restore, and the script was told that there is none."""

    outcome = Outcome.INTERRUPTED
    reason = Reason.CHECKPOINT_FOUND

    def __init__(self, step: int) -> None:
        super().__init__(
            f"Checkpoint {step} is in the store, which was not known when this attempt's pod was made. The "
            "next attempt restores it, and its script gets checkpoint.resumeArgs"
        )
        self.step = step


class SyncedCheckpoints:
    """The checkpoints of the folder `root`. Order of calls: `claim`, `restore`, any number of `commit`."""

    def __init__(
        self,
        root: Path,
        store: Store,
        who: Identity,
        policy: ClaimPolicy | None = None,
        *,
        keep: int,
        run: str,
        when: SyncWhen | None = None,
        last_exit: LastExit | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Makes no request.

        `run` tells this start from others (see `Record`). `when` says what a restore leaves alone; None:
        nothing. `last_exit`: see `SyncEnv.LAST_EXIT`.
        """
        self.committed: Tree = {}
        """What the newest checkpoint holds; empty without one."""
        self.step = 0
        """Number of the newest commit that was tried; a later one has a higher number."""
        self._root = root
        self._store = store
        self._attempt = who.attempt
        self._owner = HeadOwner(store, who, policy)
        self._keep = keep
        self._record = Record(uri=store.uri, run=run, ready=True)
        self._when = when or SyncWhen()
        self._last_exit = last_exit
        self._contents = Contents(root, store, chunk_bytes=chunk_bytes)
        self._chunk_bytes = chunk_bytes
        self._manifests: dict[str, SyncManifest | None] = {}
        """Of the checkpoints in HEAD, by key; None: of another kind."""
        self._uncounted: set[str] = set()
        """Keys of checkpoints that no restart uses, so they do not count towards `keep`."""
        self._claim: Claim | None = None
        self._sent_in_vain = False
        """Whether contents may be stored that HEAD does not name."""

    # --- start ------------------------------------------------------------------------------------------
    def claim(self, gate_until: float, stopping: Callable[[], bool], patience: float) -> bool:
        """Waits for the predecessor, and claims HEAD. Returns False if stopped first. Raises RunError."""
        if not self._owner.wait_at_gate(gate_until, stopping):
            return False
        claim = self._owner.claim(stopping, patience=patience)
        if claim is None:
            return False
        if claim.done:
            raise ConfigurationError(
                f"the job at {self._store.uri} is done: `spottrain run` finished it; use another "
                "checkpoint URI",
                reason=Reason.URI_IN_USE,
            )
        self._claim = claim
        self.step = max((entry.step for entry in claim.resume), default=0)
        log.event("claimed", term=claim.term, step=self.step or None)
        return True

    def restore(
        self, *, again: bool = False, told: bool | None = None, cancelled: Callable[[], bool] = never
    ) -> SyncResult:
        """Makes the folder equal to the newest checkpoint that counts, and deletes unused contents.

        A damaged checkpoint is skipped.

        Args:
            again: Whether this pod has restored the folder before, whatever the script has made of it since.
            told: Whether the script was told that there is a checkpoint; None: it was told nothing.

        Raises:
            CheckpointError: No checkpoint can be used, and not all can be read, or the script was told of
                one. Nothing was overwritten.
            CheckpointFound: The script was told of none. Nothing was restored.
            Cancelled: The next start restores once more.
        """
        found = self._record if again else Record.read(self._root)
        empty = not look(self._root)
        stored = bool(self._resumable)
        write = is_restored(found, self._record, empty=empty, stored=stored, folder=self._root)
        with explained(self._root):
            earlier = None if found == self._record or stored or not self._when.each_file else found
            if earlier is not None and earlier.uri == self._record.uri and not earlier.worth:
                self._told_of_moved(set_aside(self._root))  # of a first save that was killed
            found_one = self._restored(write=write, told=told, cancelled=cancelled)
            if told and found_one is None:
                raise CheckpointError(
                    f"{self._store.uri} has no checkpoint that counts, and the script was told of one",
                    reason=Reason.CHECKPOINT_MISSING,
                )
            result = found_one or SyncResult(resumed=False)
            self._record = replace(self._record, worth=bool(look(self._root)))
            self._record.write(self._root)
        self._sweep()
        return result

    def _told_of_moved(self, files: int) -> None:
        if files:
            place = notes_of(self._root) / REPLACED
            log.event("sync-replaced", files=files, folder=self._root, place=place)

    @property
    def _resumable(self) -> tuple[Entry, ...]:
        assert self._claim is not None, "restore comes after claim"
        return self._claim.resume

    def _restored(
        self, *, write: bool, told: bool | None, cancelled: Callable[[], bool]
    ) -> SyncResult | None:
        """Restores, or with `write` false only compares the folder with its newest checkpoint."""
        failures: list[str] = []
        for entry in self._resumable:
            try:
                key, manifest = entry.key, read_manifest(self._store, entry.key)
                if why := uncounted(manifest, self._last_exit, newest=entry is self._resumable[0]):
                    self._uncounted.add(key)
                    log.event("sync-skipped", step=entry.step, why=why)
                    continue
                if told is False:
                    raise CheckpointFound(manifest.step)
                self._fill(key, manifest, write=write, cancelled=cancelled)
            except Damaged as error:
                self._uncounted.add(entry.key)
                failures.append(f"step {entry.step}: {error}")
                log.event("damaged", step=entry.step, key=entry.key, error=str(error))
                continue
            if manifest.atEnd:
                key, manifest = self._count_for_good(key, manifest)
            return SyncResult(
                resumed=True, step=manifest.step, key=key, files=len(manifest.files), bytes=manifest.size
            )
        if failures:
            raise CheckpointError(
                f"none of the {counted(len(self._resumable), 'checkpoint')} at {self._store.uri} can be "
                f"used, and not all can be read ({'; '.join(failures)}). Nothing was overwritten: restore "
                "the objects from a backup or from older versions, or use another URI",
                reason=Reason.CHECKPOINT_DAMAGED,
            )
        return None

    def _count_for_good(self, key: str, manifest: SyncManifest) -> tuple[str, SyncManifest]:
        """Commits a checkpoint of an end that counts as one that always does.

        Later attempts do not know that attempt's exit code any more.
        """
        self.step += 1
        counting = replace(manifest, step=self.step, attempt=self._attempt, atEnd=False)
        self._uncounted.add(key)
        stored = self._owner.new_key(self.step)
        self._put_in_head(stored, counting, time.time(), None)
        return stored, counting

    def _fill(self, key: str, manifest: SyncManifest, *, write: bool, cancelled: Callable[[], bool]) -> None:
        began = time.time()
        if write:
            Record(uri=self._record.uri, run=self._record.run, ready=False).write(self._root)
            movable = partial(restores, self._when)
            moved = restore(self._store, manifest, self._root, movable=movable, cancelled=cancelled)
            self._told_of_moved(moved)
            log.event("restored", step=manifest.step, key=key, seconds=time.time() - began)
        self._contents.add(manifest.blobs)
        self._contents.known, self.committed = adopt(manifest, look(self._root))

    # --- commits ----------------------------------------------------------------------------------------
    def stored(self, path: str) -> bool:
        """Whether the content of a file is in the store as `committed` has it."""
        return path in self._contents.known

    def commit(
        self,
        verdict: Judgement,
        same: Callable[[], bool],
        *,
        copied: bool = False,
        at_end: bool = False,
        cancelled: Callable[[], bool] = never,
        patience: float | None = None,
    ) -> Commit:
        """Stores the verdict's tree, and makes it the newest checkpoint.

        Args:
            same: Whether the folder still holds it; called when all is sent, or copied.
            copied: Whether what is sent is copied on this machine first, which is faster than to send it.
            at_end: See `SyncManifest`.
            patience: Seconds to wait for HEAD.

        Raises:
            Changed: A file changed meanwhile. Cancelled, FolderError, RunError: nothing was committed; after
                StoreUnavailable it may yet be, and the next commit finds out.
        """
        if not self._record.worth:
            self._record = replace(self._record, worth=True)
            self._write_record()
        began, looked_ns = time.time(), time.time_ns()
        tree = verdict.tree or {}
        self.step += 1
        key = self._owner.new_key(self.step)
        self._sent_in_vain = True
        send = partial(self._contents.send, verdict, blobs_of(key), cancelled, looked_ns=looked_ns)
        if copied:
            with copies_of(self._root, tree, self._contents.unknown(verdict)) as copies:
                if not same():
                    raise Changed("the folder")
                sent = send(copies=copies)
        else:
            sent = send()
            if not same():
                raise Changed("the folder")
        manifest = SyncManifest(
            step=self.step,
            attempt=self._attempt,
            files={path: each.stored for path, each in sent.files.items()},
            links={path: node.target for path, node in tree.items() if node.kind is NodeKind.LINK},
            folders={path: node.mode for path, node in tree.items() if node.kind is NodeKind.FOLDER},
            owners={path: node.owner for path, node in tree.items()},
            atEnd=at_end,
            chunk_bytes=self._chunk_bytes,
        )
        dropped = self._put_in_head(key, manifest, began, patience)
        self._contents.known = sent.files
        self.committed = dict(tree)
        if Record.read(self._root) is None:  # the script has emptied the folder
            self._write_record()
        self._delete(dropped)
        return Commit(
            step=self.step,
            key=key,
            time=began,
            seconds=time.time() - began,
            bytes=manifest.size,
            sent=sent.bytes,
            sent_seconds=sent.seconds,
        )

    def _put_in_head(
        self, key: str, manifest: SyncManifest, began: float, patience: float | None
    ) -> tuple[str, ...]:
        """Makes it the newest checkpoint. Returns the keys dropped from HEAD."""
        try:
            manifest.require_sound()
        except Damaged as error:  # no restart could read it
            raise FolderError(f"{self._root} cannot be stored: {error}") from error
        self._store.put_if_absent(key + MANIFEST_NAME, manifest.to_bytes())
        entry = Entry(key=key, step=manifest.step, time=began, bytes=manifest.size)
        dropped = self._owner.commit(entry, self._keep, damaged=frozenset(self._uncounted), patience=patience)
        self._manifests[key] = manifest
        if manifest.atEnd:  # once there is a newer one, it does not count any more
            self._uncounted.add(key)
        return dropped

    def _write_record(self) -> None:
        try:
            self._record.write(self._root)
        except OSError as error:
            log.event("sync-record-not-written", folder=self._root, error=error.strerror)

    def check(self) -> None:
        """Raises Superseded if another process owns HEAD, StoreError if that is not known."""
        self._owner.check()

    def release(self, patience: float) -> None:
        """Releases HEAD, if it was claimed. Raises RunError."""
        self._owner.release(patience=patience)
        if self._claim is not None:
            log.event("released")

    # --- contents that no checkpoint needs --------------------------------------------------------------
    def collect(self) -> None:
        """At the end: deletes what was sent in vain since the last commit. Failure is harmless."""
        if self._sent_in_vain:
            self._delete(())

    def _delete(self, dropped: tuple[str, ...]) -> None:
        """While nothing is sent: deletes what a commit has dropped, and what was sent in vain.

        Failure is harmless.
        """
        try:
            head = self._head()
            self._owner.prune(dropped)
            named = named_by(self._store, head, self._manifests)
            gone = [self._manifests.pop(key, None) for key in dropped]
            candidates = set(self._contents.keys).union(*(each.blobs for each in gone if each))
            doomed = sorted(key for key in candidates if key not in named)
            self._contents.forget(doomed)
            self._store.delete(doomed)
            self._sent_in_vain = False
        except RunError as error:
            log.event("prune-failed", error=str(error))

    def _sweep(self) -> None:
        """At the start: deletes what earlier attempts have left. Failure is harmless."""
        try:
            assert self._claim is not None
            keys = self._store.list(BLOBS_PREFIX)  # before HEAD is read (see `manifest`)
            named = named_by(self._store, self._head(), self._manifests)
            self._store.delete(unnamed(keys, named, below=self._claim.term))
            self._owner.sweep_orphans()
        except RunError as error:
            log.event("prune-failed", error=str(error))

    def _head(self) -> Head:
        """Returns HEAD. Raises Superseded unless it is still ours."""
        self._owner.check()
        return present(HeadClient(self._store).read())


@contextlib.contextmanager
def copies_of(root: Path, tree: Tree, paths: Sequence[str]) -> Iterator[Mapping[str, Path]]:
    """Copies files that are written again before they can be sent, and deletes the copies at the end.

    They are outside of `root`, so that no script sees them. Raises FolderError or Changed.
    """
    try:
        with _folder(root) as folder:
            found, size = os.statvfs(folder), sum(tree[path].size for path in paths)
            free = found.f_bavail * found.f_frsize
            reserve = RESERVE * (free + (found.f_blocks - found.f_bfree) * found.f_frsize)
            if size > free - reserve:
                raise FolderError(
                    f"its files are written again before they are sent, and {folder.parent} has no room for "
                    f"a copy of {size / 1e9:.2f} GB: let the script save less often or under new names, or "
                    "give it room"
                )
            copies = {path: folder / str(number) for number, path in enumerate(paths)}
            for path, copy in copies.items():
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(root / path, copy, follow_symlinks=False)
                if not copy.is_file() or copy.is_symlink() or copy.stat().st_size < tree[path].size:
                    raise Changed(path)
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
