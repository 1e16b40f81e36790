"""`AccelerateRun`: `spottrain.Run` for a loop around Hugging Face's Accelerator:

    run = AccelerateRun(accelerator, data=loader, max_steps=1000)   # after accelerator.prepare(...)
    for batch in run.batches(loader):
        ...
        run.step_completed(loss=loss)
    run.finish()

`accelerator.save_state` writes the checkpoints, and `load_state` reads them.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.checkpoint.final_files import write_description
from spottrain.checkpoint.kinds import TrainingState
from spottrain.checkpoint.live_state import LiveState
from spottrain.checkpoint.manifest import MODEL
from spottrain.checkpoint.model_watch import ModelWatch
from spottrain.checkpoint.tree import Flattened, unflatten
from spottrain.errors import ConfigurationError
from spottrain.integrations import model_files
from spottrain.integrations.folder_checkpoints import FolderCheckpoints, packed, unpacked
from spottrain.integrations.pass_position import PassPosition
from spottrain.lifecycle.session import Session, current
from spottrain.training.loop import Loop


class AccelerateRun(Loop):
    """Saves and restores a training loop around an Accelerator.

    The constructor claims the checkpoint URI. It restores what `accelerator.prepare` was given, and what was
    registered for checkpointing.

    Args:
        accelerator: create the Run after `accelerator.prepare(...)`.
        data: an unprepared `spottrain.data.loader`, or another object that `spottrain.Run` accepts. Leave
            it out for a loader that Accelerate has prepared, and iterate over `run.batches(loader)`.
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
                "its own: leave data out, and iterate over run.batches(loader), which knows it; or give "
                "spottrain.data.loader(...) unprepared"
            )
        self._accelerator = accelerator
        self._require_whole()
        state = TrainingState(
            shared=lambda: {"progress": self._progress()},
            own=lambda: dict(packed(self._own())),
            load=self._load,
        )
        place = Path(folder or accelerator.project_dir or ".")
        self._position = PassPosition()
        self._loader: Any = None
        """The prepared loader that `batches` iterates over."""
        self._number, self._used = -1, 0
        """Number of the present pass over it, and the batches that it has given."""
        self._saved: Mapping[str, Any] | None = None
        """The position in it in the checkpoint."""
        self._checkpoints = FolderCheckpoints(state, place=place, write=self._write, describe=self._describe)
        self._micro_batches = accelerator.step
        """Accelerate's counter of micro-batches, after the last optimizer step."""
        optimizers = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
        named = {str(number): each for number, each in enumerate(optimizers)}
        parts = {MODEL: self._whole()}
        self._live = LiveState(parts, named)
        self._watch = ModelWatch(
            parts,
            named,
            replicas=any(map(plain_state.replica, accelerator._models)),
            regroups=False,
            over=lambda: self._engine.ended or self.ended_by_itself,
        )
        self._begin(self._checkpoints, torch.nn.ModuleList(self._plain()), optimizers)

    def _require_whole(self) -> None:
        """Raises ConfigurationError unless `save_state` stores all that is trained."""
        for each in self._accelerator._models:
            model_files.require_tensors(each)
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
        self._watch.require_unchanged()
        counted, self._accelerator.step = self._accelerator.step, self._micro_batches
        self._accelerator.save_state(str(folder))
        self._accelerator.step = counted

    def step_completed(self, loss: torch.Tensor | float | None = None, *, samples: int | None = None) -> bool:
        """See `Loop.step_completed`. The position in a prepared loader must be known."""
        self._require_known_pass()
        return super().step_completed(loss, samples=samples)

    def _count(self, loss: torch.Tensor | float | None, samples: int | None) -> None:
        self._micro_batches = self._accelerator.step
        self._live.note()
        self._position.step_done(self._used)
        super()._count(loss, samples)

    def _require_known_pass(self) -> None:
        """Raises ConfigurationError if the loop is in a pass over a prepared loader that is not ours."""
        if self._data.given or self._loader is not None or not self._accelerator.gradient_state.in_dataloader:
            return
        raise ConfigurationError(
            "the loop iterates over a loader that Accelerate has prepared, and AccelerateRun does not see "
            "its position, so after an interruption it would get other samples: write `for batch in "
            "run.batches(loader)`, without accelerator.skip_first_batches, which it calls itself"
        )

    def _pass(self, loader: Iterable[Any]) -> Iterator[Any]:
        if not any(loader is each for each in self._accelerator._dataloaders):
            return super()._pass(loader)
        if self._data.given:
            raise ConfigurationError(
                "AccelerateRun(data=...) was given, and run.batches(loader) is over another loader, which "
                "Accelerate has prepared: leave data out"
            )
        if self._loader is not None and self._loader is not loader:
            raise ConfigurationError(
                "run.batches(...) was called with a second prepared loader: it knows the position in one. "
                "Iterate over a loader for evaluation directly"
            )
        if getattr(loader, "use_stateful_dataloader", False):
            raise ConfigurationError(
                "DataLoaderConfiguration(use_stateful_dataloader=True) keeps a position of its own, beside "
                "that of run.batches(loader): leave it out"
            )
        self._loader, self._first_pass_after_resume = loader, False
        return self._prepared_pass(loader)

    def _prepared_pass(self, loader: Any) -> Iterator[Any]:
        """Yields the batches of a pass, or those that are left of it after a resume."""
        saved, self._saved = self._saved, None
        if (
            saved is not None and saved["epoch"] != self._epochs.number
        ):  # that pass was left at its epoch's end
            saved = {**saved, "batches": 0, "number": saved["number"] + 1}
        self._number = self._number + 1 if saved is None else saved["number"]
        self._used = 0 if saved is None else saved["batches"]
        loader.iteration = self._number  # which a seedable sampler makes its order of
        source = self._accelerator.skip_first_batches(loader, self._used) if self._used else loader
        self._position.expect(loader, first=not self._number, saved=saved)
        for batch in source:
            self._position.go_on()
            self._used += 1
            yield batch
        self._position.go_on()

    def _own(self) -> dict[str, Any]:
        live = Flattened(self._live.state())
        own = super()._own() | {
            "live": {"tree": live.plain, "tensors": [each.tensor for each in live.leaves]}
        }
        if self._loader is None:
            return own | {"pass": self._saved}
        position = {**self._position.state(), "number": self._number, "epoch": self._epochs.number}
        return own | {"pass": position}

    def _load_progress(self, saved: Mapping[str, Any], own: Mapping[str, Any], new_rank: bool) -> None:
        super()._load_progress(saved, own, new_rank)
        self._saved = own.get("pass")

    def _load(self, tree: Any, own: Any, new_rank: bool) -> None:
        restored, manager = self._checkpoints.restored, self._engine.manager
        assert restored is not None and manager is not None
        own = unpacked(own)
        if live := own.get("live"):
            self._live.load(unflatten(live["tree"], live["tensors"].__getitem__))
        try:
            with contextlib.ExitStack() as loading:
                for model in self._plain():
                    loading.enter_context(plain_state.contiguous_buffers(model))
                self._accelerator.load_state(str(restored))
        except (RuntimeError, ValueError, KeyError, IndexError, FileNotFoundError) as error:
            raise self._engine.incompatible(str(error)) from error
        self._micro_batches = self._accelerator.step
        self._load_progress(tree["progress"], own, new_rank)
        manager.barrier()  # load_state has no barrier: all ranks must have read before the folder is deleted
        if self.session.world.first_here:
            shutil.rmtree(restored, ignore_errors=True)

    def _plain(self) -> list[torch.nn.Module]:
        return [plain_state.plain(each) for each in self._accelerator._models]

    def _saved_besides(self) -> None:
        """The position in a loader that Accelerate has prepared is known here."""

    def _initialize(self) -> None:
        self._engine.initialize(self._whole())

    def _whole(self) -> torch.nn.Module:
        """Returns the model, or all models as one."""
        models = self._plain()
        return models[0] if len(models) == 1 else torch.nn.ModuleList(models)

    def _final(self) -> Mapping[str, Any]:
        return plain_state.model_state(self._whole())

    def _describe(self, folder: Path) -> None:
        write_description(self._whole(), None, folder)
