"""Selects the checkpoint to resume from: the newest one that all ranks can read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spottrain.checkpoint.head.owner import Claim, Entry
from spottrain.checkpoint.manifest import FOLDER, STATE, Damaged
from spottrain.checkpoint.reader import Want, fetch_folder, read_manifest, read_trees
from spottrain.contract import Reason
from spottrain.core import log
from spottrain.core.log_format import counted
from spottrain.distributed.control_channel import ControlChannel
from spottrain.distributed.world import World
from spottrain.errors import CheckpointError
from spottrain.storage.base import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The contents of a checkpoint for this rank."""

    entry: Entry
    shared: Any
    own: Any
    new_rank: bool
    """Whether fewer ranks wrote the checkpoint, so that `own` is rank 0's."""


class CheckpointSelection:
    """Finds the newest readable checkpoint. `damaged`: keys of those that could not be read."""

    def __init__(self, world: World, store: Store, control: ControlChannel) -> None:
        self._world = world
        self._store = store
        self._control = control
        self.damaged: set[str] = set()

    def newest_intact(
        self, claim: Claim, want: Want | None, folder: Callable[[int], Path] | None
    ) -> Restored | None:
        """Reads the newest intact checkpoint, the same one on all ranks; None if there is none yet.

        For the arguments see `CheckpointManager.restore`. Damaged checkpoints are logged and skipped. Raises
        CheckpointError if all are damaged: then nothing is overwritten, because a person may be able to
        repair them.
        """
        reasons: list[str] = []
        for entry in claim.resume:
            began, found, why = time.time(), None, ""
            try:
                found = self._read(entry, want, folder)
            except Damaged as error:
                why = str(error)
            why = next(filter(None, self._control.all_gather("restored", why)), "")
            if not why:
                log.event("restored", step=entry.step, key=entry.key, seconds=time.time() - began)
                return found
            log.event("damaged", step=entry.step, key=entry.key, error=why)
            reasons.append(f"step {entry.step}: {why}")
            self.damaged.add(entry.key)
        if reasons:
            raise CheckpointError(
                f"none of the {counted(len(reasons), 'checkpoint')} at {self._store.uri} can be read "
                f"({'; '.join(reasons)}). Nothing was overwritten: restore the objects from a backup or "
                "from older versions, or use another URI",
                reason=Reason.CHECKPOINT_DAMAGED,
            )
        return None

    def _read(self, entry: Entry, want: Want | None, folder: Callable[[int], Path] | None) -> Restored:
        """Raises Damaged."""
        manifest, rank = read_manifest(self._store, entry.key), self._world.rank
        kind = STATE if folder is None else FOLDER
        if manifest.kind != kind:
            raise CheckpointError(
                f"the checkpoint at {self._store.uri} is of kind {manifest.kind}, but this script "
                f"resumes from kind {kind}: another interface of spottrain, or AccelerateRun of "
                "spottrain 0.3, wrote it. Use the script and image that wrote it, or another checkpoint URI",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
        if folder is not None and self._world.first_here:
            fetch_folder(self._store, entry.key, manifest, folder(entry.step), rank)
        shared, own = read_trees(self._store, entry.key, manifest, rank=rank, want=want)
        return Restored(entry=entry, shared=shared, own=own, new_rank=rank >= manifest.world)
