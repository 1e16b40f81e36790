"""Checkpoints of kind "folder": files that another library writes and reads.

The coordinator does claim, commit, agreement and stop. The library writes into a separate folder,
which is uploaded in the background and then deleted. Other files of the library are not touched.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint.head.owner import Claim
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.save import Save
from spottrain.checkpoint.selection import Restored
from spottrain.lifecycle.coordinator import Coordinator, TrainingState
from spottrain.lifecycle.session import Session

OURS: Final = ".spottrain-"
"""Prefix of the names of these folders."""


class FolderCoordinator(Coordinator):
    """Coordinator for checkpoints that a library writes.

    `write(folder)` saves with the library, on all ranks. `place`: a folder on a disk with room for one
    checkpoint. `target(step)`: the folder for a restored checkpoint; by default one that `close` deletes.
    """

    def __init__(
        self,
        session: Session,
        state: TrainingState,
        *,
        place: Path,
        write: Callable[[Path], None],
        target: Callable[[int], Path] | None = None,
        total_steps: int | None = None,
    ) -> None:
        super().__init__(session, state, total_steps=total_steps)
        self._place = place.resolve()
        self._write = write
        self._target = target or (lambda step: self._place / f"{OURS}restored-{step}")
        self._saved: list[tuple[Path, Save]] = []
        self._meetings = 0
        self.restored: Path | None = None
        """Local folder of the restored checkpoint after `begin`; None if there was none."""

    def begin(self) -> bool:
        if self.session.world.first_here:
            self._place.mkdir(parents=True, exist_ok=True)
            for left in self._place.glob(f"{OURS}*"):  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)
        return super().begin()

    def _restore(self, checkpoints: CheckpointManager, claim: Claim) -> Restored | None:
        found = checkpoints.restore_folder(claim, self._target)
        if found is not None:
            self.restored = self._target(found.entry.step)
        return found

    def _prepare(self, checkpoints: CheckpointManager) -> None:
        """Does nothing: no staging buffer is needed."""

    def take(self, *, best: bool = False) -> Save:
        assert self.checkpoints is not None
        self._delete_sent()
        began = time.perf_counter()
        folder = self._place / f"{OURS}save-{self.step}-{self._meetings}"
        self._write(folder)
        self.meet()
        saver = self.checkpoints.saver
        saver.copy_seconds = time.perf_counter() - began
        save = saver.folder(folder, self.state.shared(), self.state.own(), self.step, best=best)
        self._saved.append((folder, save))
        return save

    def meet(self) -> None:
        """Waits for all ranks: their files must be complete before the upload."""
        self._meetings += 1
        if self.control is None:
            return
        name = f"folder/{self._meetings}"
        self.control.gather(name, b"")
        if not self.session.world.first:
            self.control.hear(name)
            return
        self.control.collect(name, float("inf"))
        if self.control.lost is not None:
            raise self.control.lost
        self.control.say(name, b"")

    def _delete_sent(self) -> None:
        self._saved = [
            each for each in self._saved if not (each[1].finished.is_set() and self._delete(each[0]))
        ]

    def _delete(self, folder: Path) -> bool:
        if self.session.world.first_here:
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def close(self) -> None:
        super().close()
        for folder, _ in self._saved:
            self._delete(folder)
        if self.restored is not None and self.restored.name.startswith(OURS):
            self._delete(self.restored)


def link_tree(source: Path, target: Path) -> None:
    """Hard-links the files of `source` into `target`; copies them if the file system has no hard links.

    Deleting a file in `source` keeps the link. Writing in place changes both: delete the file first.
    """
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, link)
            except FileExistsError:
                continue  # made by another pod that shares this disk
            except OSError:
                shutil.copy2(path, link)


# --- a rank's own state without tensors ---------------------------------------------------------------------
def packed(value: Any) -> Any:
    """Converts a rank's state to plain values for the manifest: these checkpoints have no tensor shards."""
    if isinstance(value, torch.Tensor):
        bytes_of = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"bytes of a tensor": bytes_of, "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        items = [packed(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return {key: packed(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def unpacked(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "bytes of a tensor" in value:
            body = bytearray(value["bytes of a tensor"])
            found = torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
            dtype = getattr(torch, value.get("dtype", "uint8"))
            return found.view(dtype).reshape(value.get("shape", [-1]))
        return {key: unpacked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [unpacked(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
