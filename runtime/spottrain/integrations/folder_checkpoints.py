"""The engine of callbacks in other libraries' trainers, whose checkpoints are of kind "folder".

The library writes and reads their files (`checkpoint.training_state.LibraryFolders`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import BoundArguments
from pathlib import Path
from typing import Any, Final

import torch

from spottrain.checkpoint import plain_state
from spottrain.checkpoint.tensor_memory import byte_view
from spottrain.checkpoint.training_state import TrainingState
from spottrain.contract import OnExisting
from spottrain.core import log
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.session import current
from spottrain.training import job_settings
from spottrain.training.drawn_batch import map_items
from spottrain.training.engine import Engine

OFF: Final = "use spottrain run --no-auto-attach"
"""How a script is run as without `integrations.attach`."""


class CallbackEngine(Engine):
    """The engine of a callback in another library's trainer.

    `call`: how a script resumes with it. `attached`: whether `integrations.attach` made the callback, for a
    script that does not know of it. Then the job is done when the script ends, not with its training.
    """

    restored: Path | None = None
    """Folder of the checkpoint that was resumed from, set by `resume`; None if there was none."""

    def __init__(self, call: str, *, attached: bool = False) -> None:
        super().__init__(current())
        self.attached = attached
        self._remedy = f"do not resume elsewhere, or {OFF}" if attached else f"call {call}"

    def resume(self, state: TrainingState) -> Path | None:
        """Claims the checkpoint URI and downloads the last checkpoint. Returns its folder.

        `state` is saved with the engine's record, and with which training it is of, which alone loads it.
        """
        if self.begun:
            raise ConfigurationError("spot.resume() was called a second time: a run trains once")

        def shared() -> dict[str, Any]:
            return self.record() | {"training": self.session.training} | state.shared()

        def load(shared: Any, own: Any, new_rank: bool) -> None:
            if self.attached:
                self._require_same(shared.get("training", {}))
            self.load_record(shared)
            state.load(shared, unpacked(own), new_rank)

        self.join()
        whole = replace(state, shared=shared, own=lambda: packed(state.own()), load=load)
        if self.begin(whole, total_steps=None) and state.folders is not None:
            self.restored = state.folders.restored_to(self.step)
        return self.restored

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

    def initialize_first(self, model: torch.nn.Module, *, own_checkpoint: bool) -> None:
        """Loads the weights of `checkpoint.initFrom`, if any, at the first start. All ranks call it.

        `own_checkpoint`: whether the script resumes from a checkpoint of its own. Raises RunError.
        """
        if self.restored is not None or self.session.run.init_from is None:
            return
        with self.failures():
            if own_checkpoint:
                raise ConfigurationError(
                    "the script resumes from a checkpoint of its own, and checkpoint.initFrom begins at step "
                    "0 with other weights: leave one of the two out"
                )
        self.initialize(model)

    def require_resume(self, callback: str) -> None:
        if not self.begun:
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
            if self.restored is None:  # it may resume from a checkpoint of its own
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
