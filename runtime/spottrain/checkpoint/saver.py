"""This rank's part of a save: copies the state and uploads it. Builds the manifest of all ranks' parts.

`manager` has the ranks agree, and commits.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint.layout import describe, divide, plan, signature
from spottrain.checkpoint.manifest import FOLDER, MODEL, STATE, File, Manifest, StoredTensor, shard, stored
from spottrain.checkpoint.staging_buffer import PendingCopy, StagingBuffer
from spottrain.checkpoint.tree import Flattened, Leaf, renumber
from spottrain.checkpoint.upload import Sent, Transfer, UploaderDied, UploadItem
from spottrain.contract import Reason
from spottrain.core import log
from spottrain.distributed.world import World
from spottrain.errors import CheckpointError, TrainingFailed
from spottrain.storage.base import Cancelled

WEIGHTS: Final = f"{MODEL}."
"""Path prefix of the model's weights."""

Report = dict[str, Any]
"""What one rank has stored, or why it has not: a JSON object."""


@dataclass(slots=True, eq=False, kw_only=True)
class Save:
    """One save in progress. `tree` (shared) and `own` (this rank's) are JSON trees, see `tree.py`."""

    number: int
    step: int
    best: bool = False
    kind: str = STATE
    tree: Any = None
    own: Any = None
    shared: list[StoredTensor] = field(default_factory=list)
    """All tensors of `tree`, with the pieces that this rank stores."""
    private: list[StoredTensor] = field(default_factory=list)
    """The tensors of `own`."""
    files: list[File] = field(default_factory=list)
    items: list[UploadItem] = field(default_factory=list)
    """The objects that this rank uploads; `key` is the name below the save's key."""
    started: float = field(default_factory=time.time)
    productive: float = 0.0
    """Productive seconds that it saves (`core.time_split.TimeSplitClock.done`)."""
    finished: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False
    failed: bool = False
    committed: bool = False
    dropped: tuple[str, ...] = ()
    """Keys that this save's commit removed from HEAD."""
    again: bool = False
    """Whether an earlier try may have uploaded some of the objects."""
    key: str = ""
    """Key (folder) of its objects in the store; rank 0 chooses it."""

    @property
    def uploads(self) -> list[UploadItem]:
        """`items` by their whole keys."""
        return [replace(item, key=self.key + item.key, again=self.again) for item in self.items]


class Abandoned(Exception):
    """A newer save replaces this one, or no time is left for it."""


class TornCopy(Exception):
    """A save has copied tensors while they were changed."""


class Saver:
    """Copies and uploads saves. `new_transfer` starts an uploader, and another if one has died.

    `by_rank0`: paths, or prefixes that end in a dot, of the shared tensors that rank 0 must store.
    """

    def __init__(
        self,
        world: World,
        new_transfer: Callable[[], Transfer],
        *,
        by_rank0: Collection[str] = (),
        pin: bool = False,
    ) -> None:
        self._world, self._by_rank0, self._pin = world, by_rank0, pin
        self._new_transfer = new_transfer
        self._transfer = new_transfer()
        self._buffer: StagingBuffer | None = None
        self._number = 0
        self._files_bytes = 0
        self._copy = PendingCopy()
        """What was copied last of tensors that only an optimizer step changes."""
        self._beside: bool | None = None
        """Whether they are copied beside the training; None: they were not seen to stay as they are yet."""
        self._undecided = False
        """Whether `before_step` decides on it."""
        self.copy_seconds = 0.0
        """Seconds of the last copy that stopped the training."""
        self.bandwidth: float | None = None
        """Bytes per second of this rank's last upload that was not empty and not a retry; None if unknown."""

    @property
    def staged(self) -> int:
        """Bytes in the staging buffer; 0 without one, as where the checkpoint is made of files."""
        return 0 if self._buffer is None else self._buffer.layout.bytes

    @property
    def bytes(self) -> int:
        """Bytes of this rank's part of a save; 0 before one was prepared."""
        return self._files_bytes if self._buffer is None else self.staged

    # --- copy ---------------------------------------------------------------------------------------
    def prepare(self, tree: Any, own: Any) -> None:
        """Allocates the staging buffer for the first save, in the background.

        Raises CheckpointError for a state that cannot be stored, ConfigurationError if memory is short.
        """
        shared, private = Flattened(tree), Flattened(own)
        self._buffer_for(shared.leaves + private.leaves, len(shared.leaves))

    def snapshot(
        self, tree: Any, own: Any, step: int, *, best: bool = False, stepped: Sequence[torch.Tensor] = ()
    ) -> Save:
        """Copies the state, after which training may continue. No other save may be in progress.

        `stepped`: tensors that only an optimizer step changes, before which `before_step` is called. They are
        copied beside the training, from the second save on: the first shows whether this holds.
        """
        self._copy.finish()  # of a save that was abandoned
        shared, private = Flattened(tree), Flattened(own)
        leaves, count = shared.leaves + private.leaves, len(shared.leaves)
        buffer = self._buffer_for(leaves, count)
        began = time.perf_counter()
        later = () if self._beside is False else {each.data_ptr() for each in stepped if each.numel()}
        self._copy = buffer.fill(leaves, later)
        if not (self._beside and later):
            self._copy.finish()
            self.copy_seconds = time.perf_counter() - began
        self._undecided = self._beside is None and bool(later)
        pieces = {place.number: (place.piece,) for place in buffer.layout.places}
        tensors = [describe(leaf, pieces.get(number, ())) for number, leaf in enumerate(leaves)]
        return Save(
            number=self._next(),
            step=step,
            best=best,
            tree=shared.plain,
            own=private.plain,
            shared=tensors[:count],
            private=tensors[count:],
            items=[
                UploadItem(key=each.name, bytes=each.bytes, offset=each.offset)
                for each in buffer.layout.shards
            ],
        )

    @property
    def copying(self) -> bool:
        """Whether `before_step` has something to do."""
        return self._undecided or not self._copy.done

    def before_step(self) -> None:
        """Lets an optimizer step change the tensors that `snapshot` was given as `stepped`."""
        if self._undecided:
            self._undecided, self._beside = False, self._copy.equal
        self._copy.finish(wait=False)

    def require_whole(self, save: Save) -> None:
        """Finishes the copy. Raises TornCopy if a tensor was changed before it was copied."""
        self._copy.finish()
        if self._copy.torn:
            self._beside = False
            raise TornCopy(
                f"weights were changed between step {save.step} and the next optimizer step, while they were "
                "copied; from now on the training waits for the copy"
            )

    def folder(self, folder: Path, tree: Any, own: Any, step: int, *, best: bool = False) -> Save:
        """Prepares a save of a folder's files, which must not change until the save is done.

        Rank 0 uploads its files. The first rank of every other pod uploads the files that rank 0 lacks.
        The trees must hold no tensors.
        """
        shared, private = Flattened(tree), Flattened(own)
        assert not shared.leaves and not private.leaves, "a folder's trees hold no tensors"
        save = Save(
            number=self._next(), step=step, best=best, kind=FOLDER, tree=shared.plain, own=private.plain
        )
        folder = folder.absolute()
        paths = sorted(path for path in folder.rglob("*") if path.is_file()) if self._world.first_here else []
        for number, path in enumerate(paths):
            name = f"f{self._world.rank:05d}-{number:05d}"
            save.files.append(File(path=path.relative_to(folder).as_posix(), shard=name))
            save.items.append(UploadItem(key=name, bytes=path.stat().st_size, path=str(path)))
        self._files_bytes = sum(item.bytes for item in save.items)
        return save

    def again(self, save: Save) -> None:
        """Prepares a retry under the same key, so that objects already uploaded are not sent again."""
        save.number = self._next()
        save.again = True

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _buffer_for(self, leaves: Sequence[Leaf], shared: int) -> StagingBuffer:
        """Returns the buffer for this rank's part of the first `shared` leaves and for all other leaves."""
        mine = divide(leaves[:shared], self._world.size, self._by_rank0)[self._world.rank]
        mine += range(shared, len(leaves))
        if self._buffer is None or self._buffer.layout.signature != signature(leaves, mine):
            layout = plan(leaves, mine, rank=self._world.rank)
            before = 0 if self._buffer is None else self._buffer.size
            self.forget()  # freed before the next one is allocated: memory may not hold two
            self._buffer = StagingBuffer(
                layout, pin=self._pin, freed=before, ranks_here=self._world.local_size
            )
            self._transfer.share(self._buffer)
        return self._buffer

    def forget(self) -> None:
        """Frees the staging buffer."""
        self._copy, self._undecided = PendingCopy(), False
        self._buffer = None
        self._transfer.forget()

    # --- upload -------------------------------------------------------------------------------------
    def upload(self, save: Save, cancelled: Callable[[], bool]) -> Report:
        """Uploads this rank's part. Returns what rank 0 needs to know of it.

        Raises StoreError, Abandoned if `cancelled` returns True, TornCopy, and TrainingFailed if weights hold
        NaN: every restart would resume from them.
        """
        self.require_whole(save)
        for number, each in enumerate(save.shared):
            if each.name.startswith(WEIGHTS) and self._buffer is not None and self._buffer.has_nan(number):
                name = each.name.removeprefix(WEIGHTS)
                raise TrainingFailed(
                    f"{name} holds NaN after step {save.step}, which is not saved; "
                    "the checkpoints before it are whole. Lower the learning rate, clip the gradients "
                    "(clip_grad_norm), or look at the samples of the steps before"
                )
        try:
            return report_of(save, self.send(save.uploads, cancelled))
        except Cancelled:
            raise Abandoned from None

    def send(self, items: Sequence[UploadItem], cancelled: Callable[[], bool]) -> dict[str, Sent]:
        """Uploads the items, measures the bandwidth, and returns the results by key."""
        began = time.perf_counter()
        try:
            sent = self._transfer.put(items, cancelled)
        except UploaderDied as error:
            log.event("uploader-died", error=str(error), next="another one is started")
            self._transfer.close()
            self._transfer = self._new_transfer()
            if self._buffer is not None:
                self._transfer.share(self._buffer)
            items = [replace(item, again=True) for item in items]
            sent = self._transfer.put(items, cancelled)
        size = sum(each.bytes for each in sent.values())
        if size and not any(item.again for item in items):  # in a retry some objects exist already
            self.bandwidth = size / max(time.perf_counter() - began, 1e-6)
        return sent

    def close(self) -> None:
        self._transfer.close()


# --- manifest ------------------------------------------------------------------------------------------
def report_of(save: Save, sent: Mapping[str, Sent]) -> Report:
    """Returns what rank 0 needs to know of a rank's uploads, which are given by their keys."""
    return {
        "shared": _fingerprint(save.shared),
        "pieces": [[asdict(piece) for piece in each.pieces] for each in save.shared],
        "private": [asdict(each) for each in save.private],
        "own": save.own,
        "files": [asdict(file) for file in save.files],
        "shards": [
            {"name": key.removeprefix(save.key), "bytes": each.bytes, "chunks": each.chunks}
            for key, each in sorted(sent.items())
        ],
    }


def _fingerprint(shared: Sequence[StoredTensor]) -> str:
    """Returns a hash that is equal on two ranks if they number the same tensors in the same order."""
    plain = [[each.name, each.dtype, list(each.shape)] for each in shared]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def manifest(save: Save, reports: Sequence[Report]) -> Manifest:
    """Builds the manifest from the reports of all ranks, given in rank order.

    Raises CheckpointError if the ranks' states do not match.
    """
    for rank, report in enumerate(reports):
        if report["shared"] != reports[0]["shared"]:
            raise CheckpointError(
                f"the state of rank {rank} has other tensors than that of rank 0 (names, types, "
                "shapes or their order), so they cannot form one checkpoint; use the same model, "
                "optimizer and extra objects on all ranks, and keep what differs out of state_dict()",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
    tensors: list[StoredTensor] = []
    for number, each in enumerate(save.shared):
        pieces = [piece for report in reports for piece in report["pieces"][number]]
        tensors.append(stored(asdict(each) | {"pieces": pieces}))
    trees = []
    for report in reports:
        trees.append(renumber(report["own"], len(tensors)))
        tensors += [stored(each) for each in report["private"]]
    for each in tensors:
        if sum(math.prod(piece.shape) for piece in each.pieces) != math.prod(each.shape):
            raise CheckpointError(
                f"{each.name} was not stored completely by the {len(reports)} rank(s); this is a bug in "
                "spottrain. Nothing was committed",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
    return Manifest(
        step=save.step,
        world=len(reports),
        kind=save.kind,
        tree=save.tree,
        ranks=tuple(trees),
        tensors=tuple(tensors),
        shards=tuple(shard(each) for report in reports for each in report["shards"]),
        files=tuple({file["path"]: File(**file) for report in reports for file in report["files"]}.values()),
        torch=str(torch.__version__),
    )
