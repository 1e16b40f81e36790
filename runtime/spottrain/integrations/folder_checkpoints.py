"""Checkpoints of kind "folder": files that a library writes, and reads again. Used by the modules beside it.

Claim, commit, agreement and stop are the `Keeper`'s. The library writes into a folder that is ours alone
until it is uploaded, in the background, and then deleted; what it writes for itself is its own affair.
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
from spottrain.checkpoint.manager import Checkpointer
from spottrain.checkpoint.save import Save
from spottrain.checkpoint.selection import Restored
from spottrain.lifecycle.coordinator import Keeper, TrainingState
from spottrain.lifecycle.session import Session

OURS: Final = ".spottrain-"
"""Begin of the names of our folders."""


class FolderKeeper(Keeper):
    """`write(folder)`: the library's save, called on all ranks. `place`: a folder on a disk with enough room.

    `target(step)`: where a restored checkpoint is put; by default into a folder of ours, until `close`.
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
        """Of this machine, after `begin`; None where there was nothing to restore."""

    def begin(self) -> bool:
        if self.session.world.first_here:
            self._place.mkdir(parents=True, exist_ok=True)
            for left in self._place.glob(f"{OURS}*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        return super().begin()

    def _restore(self, checkpoints: Checkpointer, claim: Claim) -> Restored | None:
        found = checkpoints.restore_folder(claim, self._target)
        if found is not None:
            self.restored = self._target(found.entry.step)
        return found

    def _prepare(self, checkpoints: Checkpointer) -> None:
        """Nothing: the memory is the library's affair."""

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
        """Returns when all ranks are here: what each of them writes must be there before it is sent."""
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
    """The files of `source` at `target` too, without copying them where the file system can do that.

    Deleting them there leaves them here; whoever wants to write them anew must delete them first.
    """
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, link)
            except FileExistsError:
                continue  # another pod that shares this disk was quicker
            except OSError:
                shutil.copy2(path, link)


# --- a rank's own state without tensors ---------------------------------------------------------------------
def packed(value: Any) -> Any:
    """A rank's own state as plain values, which fit into the manifest: there are no shards of ours."""
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
