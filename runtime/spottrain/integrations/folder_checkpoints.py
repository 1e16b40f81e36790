"""Checkpoints of kind "folder": files that another library writes and reads, and the engine of its callbacks.

The library writes into a separate folder, which is uploaded in the background and then deleted. Other files
of the library are not touched.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import BoundArguments
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint import plain_state
from spottrain.checkpoint.head.owner import Claim
from spottrain.checkpoint.kinds import TrainingState
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.saver import Save
from spottrain.checkpoint.selection import Restored
from spottrain.checkpoint.tensor_memory import byte_view
from spottrain.contract import OnExisting
from spottrain.core import log
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import current
from spottrain.training import job_settings
from spottrain.training.drawn_batch import map_items
from spottrain.training.engine import Engine

OFF: Final = "use spottrain run --no-auto-attach"
"""How a script is run as without `integrations.attach`."""
OURS: Final = ".spottrain-"
"""Prefix of the names of these folders."""


class FolderCheckpoints:
    """Checkpoints that a library writes, as a `checkpoint.kinds.CheckpointKind`.

    `write(folder)` saves with the library, on all ranks. `place`: a folder on a disk with room for one
    checkpoint. `describe(folder)` writes the files that the library needs beside the final weights.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        place: Path,
        write: Callable[[Path], None],
        describe: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self.state = replace(
            state, load=lambda shared, own, new_rank: state.load(shared, unpacked(own), new_rank)
        )
        self._place = place.resolve()
        self._write, self._describe = write, describe
        self._described = self._place / f"{OURS}final"
        self._saved: list[tuple[Path, Save]] = []
        self._saves = 0
        self.restored: Path | None = None
        """Local folder of the restored checkpoint; None if there was none."""

    def start(self, world: World) -> None:
        if world.first_here:
            self._place.mkdir(parents=True, exist_ok=True)
            _delete(self._place.glob(f"{OURS}*"), world)  # left by a killed process

    def restore(self, manager: CheckpointManager, claim: Claim) -> Restored | None:
        def target(step: int) -> Path:
            return self._place / f"{OURS}restored-{step}"

        found = manager.restore(claim, folder=target)
        if found is not None:
            self.restored = target(found.entry.step)
        return found

    def prepare(self, manager: CheckpointManager) -> None:
        """Does nothing: no staging buffer is needed."""

    def take(
        self, manager: CheckpointManager, step: int, *, best: bool = False, beside: bool = False
    ) -> Save:
        uploaded = [each for each in self._saved if each[1].finished.is_set()]
        self._saved = [each for each in self._saved if each not in uploaded]
        _delete((folder for folder, _ in uploaded), manager.context.world)
        began = time.perf_counter()
        self._saves += 1
        folder = self._place / f"{OURS}save-{step}-{self._saves}"
        self._write(folder)
        manager.barrier()  # the files of all ranks must be complete before the upload
        manager.saver.copy_seconds = time.perf_counter() - began
        save = manager.saver.folder(folder, self.state.shared(), packed(self.state.own()), step, best=best)
        self._saved.append((folder, save))
        return save

    def final_files(self) -> Iterator[tuple[str, Path]]:
        self._described.mkdir(parents=True, exist_ok=True)
        self._describe(self._described)
        for path in sorted(self._described.rglob("*")):
            if path.is_file():
                yield path.relative_to(self._described).as_posix(), path

    def close(self, world: World) -> None:
        folders = [self._described, *(folder for folder, _ in self._saved)]
        if self.restored is not None:
            folders.append(self.restored)
        _delete(folders, world)


def _delete(folders: Iterable[Path], world: World) -> None:
    """Deletes folders, which the ranks of a pod share, on its first rank."""
    if world.first_here:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


class CallbackEngine(Engine):
    """The engine of a callback in another library's trainer.

    `call`: how a script resumes with it. `attached`: whether `integrations.attach` made the callback, for a
    script that does not know of it. Then the job is done when the script ends, not with its training.
    """

    checkpoints: FolderCheckpoints | None = None
    """Set by `resume`."""

    def __init__(self, call: str, *, attached: bool = False) -> None:
        super().__init__(current())
        self.attached = attached
        self._remedy = f"do not resume elsewhere, or {OFF}" if attached else f"call {call}"

    def resume(self, checkpoints: FolderCheckpoints) -> Path | None:
        """Claims the checkpoint URI and downloads the last checkpoint. Returns its folder."""
        if self.checkpoints is not None:
            raise ConfigurationError("spot.resume() was called a second time: a run trains once")
        self.join()
        self.checkpoints = checkpoints
        checkpoints.state = self._recorded(checkpoints.state)
        self.begin(checkpoints, total_steps=None)
        return checkpoints.restored

    def _recorded(self, state: TrainingState) -> TrainingState:
        """Returns `state` with the engine's record, and which training it is of, which alone loads it."""

        def shared() -> dict[str, Any]:
            return self.record() | {"training": self.session.training} | state.shared()

        def load(shared: Any, own: Any, new_rank: bool) -> None:
            if self.attached:
                self._require_same(shared.get("training", {}))
            self.load_record(shared)
            state.load(shared, own, new_rank)

        return replace(state, shared=shared, load=load)

    def _require_same(self, saved: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the checkpoint is of another training of the script, such as its first
        stage. The length may change with the manifest, with the number of ranks, and in a job that goes on
        with another one's checkpoint.
        """
        run, now = self.session.run, self.session.training
        free = "max_steps" in run.training or run.on_existing is OnExisting.RESUME
        names = ["trainer", "folder"]
        if not free and saved.get("ranks") == now["ranks"]:
            names.append("length")
        if saved and any(saved[name] != now[name] for name in names):
            was, this = (", ".join(f"{name} {each[name]}" for name in names) for each in (saved, now))
            raise self.incompatible(
                f"it is of a training with {was}, and this one has {this}. A script with two trainings needs "
                "one checkpoint URI for each; to change the length of one, set maxSteps (--training "
                "'{\"maxSteps\": N}')"
            )

    @property
    def restored(self) -> bool:
        """Whether there was a checkpoint to resume from."""
        return self.checkpoints is not None and self.checkpoints.restored is not None

    def initialize_first(self, model: torch.nn.Module, *, own_checkpoint: bool) -> None:
        """Loads the weights of `checkpoint.initFrom`, if any, at the first start. All ranks call it.

        `own_checkpoint`: whether the script resumes from a checkpoint of its own. Raises RunError.
        """
        if self.restored or self.session.run.init_from is None:
            return
        with self.failures():
            if own_checkpoint:
                raise ConfigurationError(
                    "the script resumes from a checkpoint of its own, and checkpoint.initFrom begins at step "
                    "0 with other weights: leave one of the two out"
                )
        self.initialize(model)

    def require_resume(self, callback: str) -> None:
        if self.checkpoints is None:
            raise ConfigurationError(f"{callback}.resume() was not called: {self._remedy}")

    def start_at(
        self,
        step: int,
        *,
        last: int | None,
        total_steps: int | None,
        device: torch.device,
        log_every: int,
    ) -> None:
        """Starts this attempt at `step`, where the library begins. `last`: step at which the library ends.

        Raises ConfigurationError unless the library resumes from the restored checkpoint.
        """
        with self.failures():
            if not self.restored:  # it may resume from a checkpoint of its own
                self.session.board.update(step=step, start_step=step)
            elif step != self.step:
                raise ConfigurationError(
                    f"the training begins at step {step}, and the newest checkpoint is of step "
                    f"{self.step}: {self._remedy}"
                )
        self.total_steps = last
        job_settings.advise(self.session)
        self.start(step=step, total_steps=total_steps, device=device, log_every=log_every)

    def finish_with(self, model: torch.nn.Module, ended_early: str) -> None:
        self.finish(
            lambda: plain_state.model_state(model), ended_early=ended_early, with_script=self.attached
        )

    def attached_to(
        self, call: BoundArguments, method: Callable[..., Any], name: str, resume: Callable[[], str | None]
    ) -> Any:
        """Calls a library's method that trains.

        A checkpoint at the checkpoint URI replaces the argument `name`, which counts for the first start.
        """
        try:
            given, restored = call.arguments.get(name), resume()
            if restored is not None:
                if given is not None and not isinstance(given, bool):
                    log.event("override", setting=name, checkpoint=restored, script=given)
                call.arguments[name] = restored
            return method(*call.args, **call.kwargs)
        except BaseException as error:
            self.fail_in_script(error)
            raise

    def barrier(self) -> None:
        assert self.manager is not None
        self.manager.barrier()

    def fail_in_script(self, error: BaseException) -> None:
        """Releases HEAD at an exception in the training, unless the training was over."""
        if self.begun and not self.ended:
            self.failed(error)


def link_tree(source: Path, target: Path, *, without: tuple[str, ...] = ()) -> None:
    """Hard-links the files of `source` into `target`; copies them if the file system has no hard links.

    Deleting a file in `source` keeps the link. Writing in place changes both: delete the file first.
    `without`: prefixes of names in `source` that are left out.
    """
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.relative_to(source).parts[0].startswith(without):
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
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"bytes of a tensor": byte_view(flat).tobytes(), "dtype": dtype, "shape": list(value.shape)}
    return map_items(value, packed)


def unpacked(value: Any) -> Any:
    if isinstance(value, Mapping) and "bytes of a tensor" in value:
        body = bytearray(value["bytes of a tensor"])
        found = torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
        dtype = getattr(torch, value.get("dtype", "uint8"))
        return found.view(dtype).reshape(value.get("shape", [-1]))
    return map_items(value, unpacked)
