"""What a checkpoint consists of: tensors and plain values, or also files that a library writes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint.reader import Want
from spottrain.distributed.world import World

OURS: Final = ".spottrain-"
"""Prefix of the names of folders that are made beside a library's own files."""


class LibraryFolders:
    """Folders of the checkpoints that a library writes, on a disk with room for one: `place`.

    `write(folder)` saves with the library, on all ranks. Other files of the library are not touched.
    """

    def __init__(self, place: Path, write: Callable[[Path], None]) -> None:
        self.place, self._write = place.resolve(), write
        self._saves = 0
        self._saved: list[Path] = []
        self._restored: list[Path] = []

    def begin(self, world: World) -> None:
        """Makes `place`, and deletes what a killed process has left there."""
        if world.first_here:
            self.place.mkdir(parents=True, exist_ok=True)
            _delete(self.place.glob(f"{OURS}*"), world)

    def restored_to(self, step: int) -> Path:
        """Returns where each pod gets the files of the checkpoint of `step`."""
        folder = self.place / f"{OURS}restored-{step}"
        self._restored.append(folder)
        return folder

    def save(self, step: int) -> Path:
        """Has the library save into a new folder, which must not change until it is uploaded."""
        self._saves += 1
        self._saved.append(self.place / f"{OURS}save-{step}-{self._saves}")
        self._write(self._saved[-1])
        return self._saved[-1]

    def forget_saves(self, world: World) -> None:
        """Deletes the folders of all saves: none is being uploaded."""
        _delete(self._saved, world)
        self._saved = []

    def close(self, world: World) -> None:
        """Deletes what was restored, too."""
        _delete([*self._saved, *self._restored], world)


def _delete(folders: Iterable[Path], world: World) -> None:
    """Deletes folders, which the ranks of a pod share, on its first rank."""
    if world.first_here:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


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
    folders: LibraryFolders | None = None
    """Where a library writes the rest of each checkpoint; `shared` and `own` then hold no tensors."""
    describe: Callable[[Path], None] = lambda folder: None
    """Writes the files that a library needs beside the final weights into a folder."""

    def described(self) -> Iterator[tuple[str, Path]]:
        """Yields name and place of each of these files, which exist only meanwhile."""
        place = None if self.folders is None else self.folders.place
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)  # the script may have deleted it
        with tempfile.TemporaryDirectory(prefix=OURS, dir=place) as folder:
            self.describe(Path(folder))
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    yield path.relative_to(folder).as_posix(), path
