"""One save: its state, the ranks' reports, and the manifest built from the reports."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from spottrain.checkpoint.layout import Layout
from spottrain.checkpoint.manifest import (
    FOLDER,
    STATE,
    File,
    Manifest,
    Shard,
    StoredTensor,
    shard,
    stored,
)
from spottrain.checkpoint.tree import renumber
from spottrain.contract import Reason
from spottrain.distributed.world import World
from spottrain.errors import CheckpointError, StoreUnavailable, TrainingFailed


@dataclass(slots=True, eq=False, kw_only=True)
class Save:
    """One save in progress. `tree` (shared) and `own` (this rank's) are JSON trees, see `tree.py`."""

    number: int
    step: int
    best: bool = False
    tree: Any = None
    own: Any = None
    shared: list[StoredTensor] = field(default_factory=list)
    private: list[StoredTensor] = field(default_factory=list)
    layout: Layout | None = None
    files: list[File] = field(default_factory=list)
    folder: Path | None = None
    started: float = field(default_factory=time.time)
    finished: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False
    failed: bool = False
    committed: bool = False
    dropped: tuple[str, ...] = ()
    """Keys that this save's commit removed from HEAD."""
    tries: int = 0
    """Number of failed tries to write it."""
    key: str = ""
    """Key (folder) of its objects in the store; rank 0 chooses it."""


class Abandoned(Exception):
    """A newer save replaces this one, or no time is left for it."""


def raise_first_error(reports: Iterable[dict[str, Any]]) -> None:
    for report in reports:
        if report.get("error") == "Abandoned":
            raise Abandoned
        if report.get("error") == TrainingFailed.__name__:
            raise TrainingFailed(report["message"])
        if "error" in report:
            raise StoreUnavailable(
                f"rank {report['rank']} could not save: {report['error']}: {report['message']}"
            )


def manifest(save: Save, world: World, reports: Sequence[dict[str, Any]]) -> Manifest:
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
    tensors = [
        stored(
            asdict(each)
            | {"pieces": [p for report in reports for p in report["pieces"].get(str(number), [])]}
        )
        for number, each in enumerate(save.shared)
    ]
    trees = []
    for report in reports:
        trees.append(renumber(report["own"], len(tensors)))
        tensors += [stored(each) for each in report["private"]]
    for each in tensors:
        if sum(math.prod(piece.shape) for piece in each.pieces) != math.prod(each.shape):
            raise CheckpointError(
                f"{each.name} was not stored completely by the {world.size} rank(s); this is a bug in "
                "spottrain. Nothing was committed",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
    shards: list[Shard] = [shard(each) for report in reports for each in report["shards"]]
    return Manifest(
        step=save.step,
        world=world.size,
        kind=FOLDER if save.folder is not None else STATE,
        tree=save.tree,
        ranks=tuple(trees),
        tensors=tuple(tensors),
        shards=tuple(shards),
        files=tuple({file["path"]: File(**file) for report in reports for file in report["files"]}.values()),
        torch=str(torch.__version__),
    )


def fingerprint(shared: Sequence[StoredTensor]) -> str:
    """Returns a hash that is equal on two ranks if they number the same tensors in the same order."""
    plain = [[each.name, each.dtype, list(each.shape)] for each in shared]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()
