"""Selects the checkpoint to resume from: the newest one that all ranks can read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spottrain.checkpoint.context import RunContext
from spottrain.checkpoint.head.owner import Claim, Entry
from spottrain.checkpoint.manifest import FOLDER, STATE, Damaged, Manifest
from spottrain.checkpoint.reader import Want, fetch_folder, read_manifest, read_trees
from spottrain.contract import Reason
from spottrain.core import log
from spottrain.core.text import counted
from spottrain.distributed.control_channel import ControlChannel, broadcast_facts, receive_facts
from spottrain.errors import CheckpointError, PeerLost
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
    """Restores the newest readable checkpoint. All ranks must call the same method.

    `damaged`: keys of the checkpoints that could not be read.
    """

    def __init__(self, context: RunContext, store: Store, control: ControlChannel | None) -> None:
        self.context = context
        self.store = store
        self._control = control
        self.damaged: set[str] = set()
        self.on_settled: Callable[[], None] = lambda: None
        """Called once a checkpoint that HEAD names was read, or if HEAD names none."""

    def restore(self, claim: Claim, want: Want | None = None) -> Restored | None:
        """Returns the newest intact checkpoint, the same one on all ranks; None if there is none yet.

        Damaged checkpoints are logged and skipped. Raises CheckpointError if all are damaged: then nothing
        is overwritten, because a person may be able to repair them.
        """
        return self._newest_intact(claim, STATE, lambda entry, manifest: self._trees(entry, manifest, want))

    def restore_folder(self, claim: Claim, place: Callable[[int], Path]) -> Restored | None:
        """Restores a library's checkpoint files into the folder `place(step)` of each pod, all or nothing."""

        def read(entry: Entry, manifest: Manifest) -> Restored:
            if self.context.world.first_here:
                fetch_folder(self.store, entry.key, manifest, place(entry.step), self.context.world.rank)
            return self._trees(entry, manifest, None)

        return self._newest_intact(claim, FOLDER, read)

    def _trees(self, entry: Entry, manifest: Manifest, want: Want | None) -> Restored:
        rank = self.context.world.rank
        shared, own = read_trees(self.store, entry.key, manifest, rank=rank, want=want)
        return Restored(entry=entry, shared=shared, own=own, new_rank=rank >= manifest.world)

    def _newest_intact(
        self, claim: Claim, kind: str, read: Callable[[Entry, Manifest], Restored]
    ) -> Restored | None:
        reasons: list[str] = []
        for entry in claim.resume:
            began = time.time()
            found, why = self._try(entry, kind, read)
            if not (why := self._first_failure(why)):
                log.event("restored", step=entry.step, key=entry.key, seconds=time.time() - began)
                self.on_settled()
                return found
            log.event("damaged", step=entry.step, key=entry.key, error=why)
            reasons.append(f"step {entry.step}: {why}")
            self.damaged.add(entry.key)
        if reasons:
            raise CheckpointError(
                f"none of the {counted(len(reasons), 'checkpoint')} at {self.store.uri} can be read "
                f"({'; '.join(reasons)}). Nothing was overwritten: restore the objects from a backup or "
                "from older versions, or use another URI",
                reason=Reason.CHECKPOINT_DAMAGED,
            )
        self.on_settled()
        return None

    def _try(
        self, entry: Entry, kind: str, read: Callable[[Entry, Manifest], Restored]
    ) -> tuple[Restored | None, str]:
        try:
            manifest = read_manifest(self.store, entry.key)
            if manifest.kind != kind:
                raise CheckpointError(
                    f"the checkpoint at {self.store.uri} is of kind {manifest.kind}, but this script "
                    f"resumes from kind {kind}: another interface of spottrain wrote it. Use the "
                    "script that wrote it, or another checkpoint URI",
                    reason=Reason.CHECKPOINT_INCOMPATIBLE,
                )
            return read(entry, manifest), ""
        except Damaged as error:
            return None, str(error)

    def _first_failure(self, why: str) -> str:
        """Returns why any of the ranks could not read the checkpoint; empty if all could."""
        if self._control is None:
            return why
        self._control.send_to_leader("restored", why.encode())
        if not self.context.world.first:
            return str(receive_facts(self._control, "restored")["why"])
        answers = self._control.collect("restored", math.inf)
        if self._control.lost is not None:
            raise self._control.lost
        why = next((answer.decode() for answer in answers if answer), "")
        if any(answer is None for answer in answers):
            raise PeerLost("another rank ended while the checkpoint was read; its log says why")
        broadcast_facts(self._control, "restored", {"why": why})
        return why
