"""What a checkpoint consists of: tensors that this package writes, or a folder that a library writes.

The engine of a training claims, commits and agrees with the other ranks in the same way for both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from spottrain.checkpoint.final_files import write_description
from spottrain.checkpoint.head.owner import Claim
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.reader import Want
from spottrain.checkpoint.saver import Save
from spottrain.checkpoint.selection import Restored
from spottrain.distributed.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What is saved: `shared` is equal on all ranks and stored once, `own` is specific to this rank."""

    shared: Callable[[], dict[str, Any]]
    own: Callable[[], dict[str, Any]]
    load: Callable[[Any, Any, bool], None]
    """Loads both; true: this rank is new and gets rank 0's own state. Raises CheckpointError."""
    unmoved: Callable[[], bool] | None = None
    """Whether `shared` and `own` return the state after the last step, although a loop may have gone on.

    Set if the loop may do anything between two steps: whoever saves from outside asks before and after.
    """
    want: Want | None = None
    stepped: Callable[[], Sequence[torch.Tensor]] = tuple
    """Shared tensors that nothing changes before the next `Saver.before_step`: a save may copy them later."""
    by_rank0: frozenset[str] = frozenset()
    """Shared tensors of which only rank 0 has correct values: paths, or path prefixes that end in a dot."""


class CheckpointKind(Protocol):
    """How a checkpoint is taken and restored. All ranks call the same methods at the same steps."""

    state: TrainingState

    def start(self, world: World) -> None:
        """Runs before the claim."""

    def restore(self, manager: CheckpointManager, claim: Claim) -> Restored | None:
        """Restores the newest checkpoint, without `state.load`; None if there is none. Raises RunError."""

    def prepare(self, manager: CheckpointManager) -> None:
        """Runs after the first step: allocates what the first save needs."""

    def take(
        self, manager: CheckpointManager, step: int, *, best: bool = False, beside: bool = False
    ) -> Save:
        """Copies everything that the next step depends on. `beside`: `state.stepped` may be copied later."""

    def final_files(self) -> Iterable[tuple[str, Path]]:
        """Yields name and place of each file to store beside the final weights. Only rank 0 calls it."""

    def close(self, world: World) -> None:
        """Runs at the end, after the last upload."""


class StateCheckpoints:
    """Tensors and plain values of `state`, copied into the staging buffer.

    `model`: whose configuration is stored beside the final weights, if it is a model of Hugging Face's.
    """

    def __init__(self, state: TrainingState, model: torch.nn.Module) -> None:
        self.state = state
        self._model = model

    def start(self, world: World) -> None: ...

    def restore(self, manager: CheckpointManager, claim: Claim) -> Restored | None:
        return manager.restore(claim, self.state.want)

    def prepare(self, manager: CheckpointManager) -> None:
        manager.saver.prepare(self.state.shared(), self.state.own())

    def take(
        self, manager: CheckpointManager, step: int, *, best: bool = False, beside: bool = False
    ) -> Save:
        stepped = self.state.stepped() if beside else ()
        return manager.saver.snapshot(self.state.shared(), self.state.own(), step, best=best, stepped=stepped)

    def final_files(self) -> Iterator[tuple[str, Path]]:
        with tempfile.TemporaryDirectory(prefix=".spottrain-") as folder:
            write_description(self._model, None, Path(folder))
            for path in sorted(Path(folder).rglob("*")):
                yield path.relative_to(folder).as_posix(), path

    def close(self, world: World) -> None: ...
