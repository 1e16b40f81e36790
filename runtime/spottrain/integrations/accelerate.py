"""`AccelerateRun`: `spottrain.Run` for a loop around Hugging Face's Accelerator:

    run = AccelerateRun(accelerator, data=loader, max_steps=1000)   # after accelerator.prepare(...)
    for batch in run.batches(loader):
        ...
        run.step_completed(loss=loss)
    run.finish()

`accelerator.save_state` writes the checkpoints, and `load_state` reads them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.checkpoint.kinds import TrainingState
from spottrain.errors import ConfigurationError
from spottrain.integrations.folder_checkpoints import FolderCheckpoints, packed, unpacked
from spottrain.lifecycle.session import Session, current
from spottrain.techniques import precision
from spottrain.training.loop import Loop


class AccelerateRun(Loop):
    """Saves and restores a training loop around an Accelerator.

    The constructor claims the checkpoint URI. It restores what `accelerator.prepare` was given, and what was
    registered for checkpointing.

    Args:
        accelerator: create the Run after `accelerator.prepare(...)`.
        data: an unprepared `spottrain.data.loader`, or another object that `spottrain.Run` accepts. A
            prepared loader has no position of its own: leave `data` out, and skip used batches with
            accelerator.skip_first_batches.
        max_steps: optimizer steps of the whole training; None: until `finish`. spec.training.maxSteps wins.
        log_every: steps between two log lines, at least 1.
        folder: on a disk with room for one checkpoint; None: the accelerator's project_dir, else the current
            folder.
        session: the process's own session by default.

    Raises:
        RunError: an argument cannot be saved, the checkpoint does not match, or the store fails.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        data: Any = None,
        max_steps: int | None = None,
        log_every: int = 10,
        folder: str | Path | None = None,
        session: Session | None = None,
    ) -> None:
        super().__init__(data=data, max_steps=max_steps, log_every=log_every, session=session or current())
        if accelerator.project_configuration.automatic_checkpoint_naming:
            raise ConfigurationError(
                "ProjectConfiguration(automatic_checkpoint_naming=True) lets Accelerate choose the folder of "
                "a checkpoint; leave it out: the Run names and keeps them"
            )
        if not accelerator._models:
            raise ConfigurationError(
                "AccelerateRun(accelerator) has no model yet: create it after "
                "accelerator.prepare(model, optimizer)"
            )
        if any(data is loader for loader in accelerator._dataloaders):
            raise ConfigurationError(
                "AccelerateRun(data=...) is a loader that Accelerate has prepared, which has no position of "
                "its own; give it spottrain.data.loader(...) unprepared, or leave data out"
            )
        self._accelerator = accelerator
        self._require_whole()
        state = TrainingState(
            shared=lambda: {"progress": self._progress()},
            own=lambda: dict(packed(self._own())),
            load=self._load,
            intact=self._intact,
        )
        place = Path(folder or accelerator.project_dir or ".")
        self._checkpoints = FolderCheckpoints(state, place=place, write=self._write)
        self._micro_batches = accelerator.step
        """Accelerate's counter of micro-batches, after the last optimizer step."""
        optimizers = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
        wanted = str(accelerator.mixed_precision)
        precision.advise_library(wanted, accelerator.device, f"leave mixed_precision={wanted!r} out")
        self._begin(self._checkpoints, torch.nn.ModuleList(self._plain()), optimizers)

    def _require_whole(self) -> None:
        """Raises ConfigurationError unless `save_state` stores all that is trained."""
        registered = [each for each in self._accelerator._custom_objects if isinstance(each, torch.nn.Module)]
        wrapped = [each.optimizer for each in self._accelerator._optimizers]
        optimizers = [each for each in wrapped if isinstance(each, torch.optim.Optimizer)]
        outside_parameters.require_owned(
            optimizers,
            [*self._accelerator._models, *registered],
            "Give its module to accelerator.prepare(...) or accelerator.register_for_checkpointing(...) too",
        )
        known = [*wrapped, *self._accelerator._optimizers]
        for each in self._accelerator._schedulers:
            outside_parameters.require_of(
                each.scheduler, known, "the scheduler that accelerator.prepare was given"
            )

    def _write(self, folder: Path) -> None:
        """Saves without the micro-batches of a partial step, which a resume repeats."""
        counted, self._accelerator.step = self._accelerator.step, self._micro_batches
        self._accelerator.save_state(str(folder))
        self._accelerator.step = counted

    def _count(self, loss: torch.Tensor | float | None, samples: int | None) -> None:
        self._micro_batches = self._accelerator.step
        super()._count(loss, samples)

    def _load(self, tree: Any, own: Any, new_rank: bool) -> None:
        restored, manager = self._checkpoints.restored, self._engine.coordinator.checkpoints
        assert restored is not None and manager is not None
        try:
            self._accelerator.load_state(str(restored))
        except (RuntimeError, ValueError, KeyError, IndexError, FileNotFoundError) as error:
            raise self._engine.incompatible(str(error)) from error
        self._micro_batches = self._accelerator.step
        self._load_progress(tree["progress"], unpacked(own), new_rank)
        manager.meet()  # load_state has no barrier: all ranks must have read before the folder is deleted
        if self.session.world.first_here:
            shutil.rmtree(restored, ignore_errors=True)

    def _plain(self) -> list[torch.nn.Module]:
        return [plain_state.plain(each) for each in self._accelerator._models]

    def _initialize(self) -> None:
        self._engine.initialize(self._whole())

    def _whole(self) -> torch.nn.Module:
        """Returns the model, or all models as one."""
        models = self._plain()
        return models[0] if len(models) == 1 else torch.nn.ModuleList(models)

    def _final(self) -> Mapping[str, Any]:
        return plain_state.model_state(self._whole())
