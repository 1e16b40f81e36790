"""Hugging Face's Trainer, in three lines:

    spot = SpotCallback()
    trainer = Trainer(..., callbacks=[spot])
    trainer.train(resume_from_checkpoint=spot.resume())

The Trainer writes its checkpoint into its output_dir as ever; we have it do so when a save is due or a stop
was asked for, at the same step on all ranks, and send it to the checkpoint URI. The files are linked, not
copied, so that save_total_limit may delete them meanwhile. Those that the Trainer would not have written
without us are deleted from output_dir.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spottrain import device as devices
from spottrain import log, ownloop
from spottrain.beside import Beside
from spottrain.checkpoint import modelstate, trained
from spottrain.checkpoint.checkpointer import Checkpointer
from spottrain.checkpoint.saver import Save
from spottrain.contract import Outcome
from spottrain.errors import ConfigurationError
from spottrain.integrations.folder import FolderKeeper, link_tree
from spottrain.keeper import State
from spottrain.meter import Meter
from spottrain.process.session import current
from spottrain.ranks import parallel


class SpotCallback(TrainerCallback):
    """Saves, stops and resumes. One for each process and Trainer."""

    def __init__(self) -> None:
        self.session = current()
        self.keeper: _Keeper | None = None
        self._args: TrainingArguments | None = None
        self._ours: int | None = None
        """Step of a checkpoint that nobody but us has asked for."""
        self._beside: Beside | None = None
        self._evaluated: int | None = None
        """Step of the last evaluation."""

    # --- of the person's script -----------------------------------------------------------------------
    def resume(self) -> str | None:
        """Claims the checkpoint URI; the folder to go on from, None at the first start. Raises RunError."""
        if self._args is None:
            raise ConfigurationError(
                "spot.resume() was called before the Trainer was made: make Trainer(callbacks=[spot]) first"
            )
        if self.keeper is not None:
            raise ConfigurationError("spot.resume() was called a second time: a run trains once")
        session, world = self.session, self.session.world
        if world.distributed:
            parallel.join(world, devices.choose(parallel.default_device(world)))
        session.board.update(step=0)
        self.keeper = _Keeper(
            session,
            State(shared=self._shared, own=dict, load=self._load),
            place=Path(self._args.output_dir or "."),
            write=self._link,
            target=self._folder,
        )
        try:
            self.keeper.begin()
        except BaseException:
            self.keeper.ends.give_up()
            raise
        restored = self.keeper.restored
        return None if restored is None else str(restored)

    # --- called by the Trainer ------------------------------------------------------------------------
    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        if getattr(args, "deepspeed", None):
            raise ConfigurationError(
                "TrainingArguments(deepspeed=...): SpotCallback cannot gather DeepSpeed's weights; use FSDP"
            )
        if getattr(args, "save_only_model", False):
            raise ConfigurationError(
                "TrainingArguments(save_only_model=True) leaves the optimizer out of checkpoints, from which "
                "nobody can go on then; leave it out"
            )
        self._args = args
        self._take_max_steps(args, lr_scheduler)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        keeper = self._begun()
        self._require_whole(model, optimizer)
        if keeper.restored is None:  # then it may go on from a checkpoint that is not of ours
            self.session.board.update(step=state.global_step, start_step=state.global_step)
        elif state.global_step != keeper.step:
            raise ConfigurationError(
                f"the training begins at step {state.global_step}, and the newest checkpoint is of step "
                f"{keeper.step}: call trainer.train(resume_from_checkpoint=spot.resume())"
            )
        session = self.session
        keeper.total_steps = state.max_steps
        session.board.update(total_steps=state.max_steps, state="Training")
        self._meter = Meter(
            session.board,
            born=session.born,
            total_steps=state.max_steps,
            log_every=1,
            world=session.world,
        )
        ownloop.advise(session, ("max_steps",))
        self._beside = self._make_beside(args, state)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **_: Any,
    ) -> None:
        if state.global_step >= state.max_steps:  # it was ended before it could leave the weights
            self._finish(model)
            self.session.end(Outcome.DONE, self.session.summary())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.session.interruption.let_end(None)  # from here on there is work to lose

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        keeper, step = self._begun(), state.global_step
        self._meter.count(step, args.train_batch_size * args.gradient_accumulation_steps * args.world_size)
        if self._beside is not None:
            self._beside.step()
        if keeper.boundary(step):
            keeper.stopping = True
            control.should_evaluate = False  # it could outlast the notice
        if keeper.wanted or keeper.stopping or step >= state.max_steps:
            self._ours = None if control.should_save else step
            control.should_save = True

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._evaluated = state.global_step

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.session.board.pulse.beat()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer may now save this very step a second time, into the files that are being sent."""
        keeper = self._begun()
        if keeper.checkpoints is not None and keeper.checkpoints.busy_with == state.global_step:
            keeper.checkpoints.settle()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Its files of this rank are there."""
        keeper = self._begun()
        if state.best_global_step == self._ours:
            self._ours = None
        if keeper.stopping:
            try:
                keeper.ends.interrupted()
            finally:
                self._close()
        if keeper.wanted:
            keeper.send()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs and "loss" in logs and self.keeper is not None:
            epoch = None if state.epoch is None else int(state.epoch)
            self._meter.line(
                state.global_step, float(logs["loss"]), rate=logs.get("learning_rate"), epoch=epoch
            )

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **_: Any,
    ) -> None:
        if state.global_step < state.max_steps and control.should_training_stop:
            self._tell_early(state.global_step)
        self._finish(model)

    # --- inside ---------------------------------------------------------------------------------------
    def _begun(self) -> _Keeper:
        if self.keeper is None:
            raise ConfigurationError(
                "SpotCallback was not asked where to go on: call "
                "trainer.train(resume_from_checkpoint=spot.resume())"
            )
        return self.keeper

    def _require_whole(self, model: torch.nn.Module | None, optimizer: Any) -> None:
        """That the Trainer's checkpoints hold all that is trained. Raises ConfigurationError."""
        inner = getattr(optimizer, "optimizer", optimizer)  # what Accelerate has wrapped
        if model is None or not isinstance(inner, torch.optim.Optimizer):
            return
        try:
            trained.require_owned(
                [inner], [model], "Make its module a part of the model, such as model.loss = module"
            )
        except ConfigurationError:
            self._begun().ends.give_up()
            raise

    def _finish(self, model: torch.nn.Module | None) -> None:
        assert model is not None, "the Trainer gives its callbacks the model"
        try:
            self._begun().finish(lambda: modelstate.model_state(model))
        finally:
            self._close()

    def _close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def _take_max_steps(self, args: TrainingArguments, lr_scheduler: Any) -> None:
        """The manifest's, before the Trainer makes its scheduler, which is then of that length."""
        wanted = self.session.run.training.maxSteps
        if wanted is None or wanted == args.max_steps:
            return
        log.event("override", setting="max_steps", manifest=wanted, script=args.max_steps)
        args.max_steps = wanted
        if lr_scheduler is not None:
            text = (
                f"the Trainer was given a scheduler, whose length may be another than spec.training.maxSteps "
                f"{wanted}: make it with spottrain.training_arguments(max_steps=...).max_steps"
            )
            log.event("advice", about="learning-rate", text=text)

    def _make_beside(self, args: TrainingArguments, state: TrainerState) -> Beside | None:
        """None where all is done. Raises ConfigurationError where its window ends after the run."""
        if state.global_step >= state.max_steps:
            return None
        try:
            return Beside(
                self.session, start=state.global_step, total_steps=state.max_steps, device=args.device
            )
        except ConfigurationError:
            self._begun().ends.give_up()
            raise

    def _tell_early(self, step: int) -> None:
        """By an evaluation, which is all that a callback of another class has; for its reason nobody asks."""
        if self._evaluated == step:
            why = f"a callback of the Trainer stopped it after the evaluation at step {step}"
            self.session.board.update(ended_early=why)

    def _folder(self, step: int) -> Path:
        assert self._args is not None
        return Path(self._args.output_dir or ".").resolve() / f"checkpoint-{step}"

    def _link(self, folder: Path) -> None:
        keeper = self._begun()
        keeper.meet()  # until then another rank may still be writing
        if self.session.world.first_here:
            written = self._folder(keeper.step)
            link_tree(written, folder)
            if self._ours == keeper.step:
                shutil.rmtree(written, ignore_errors=True)

    def _shared(self) -> dict[str, Any]:
        return {"trained": self._begun().trained}

    def _load(self, shared: Any, own: Any, new_rank: bool) -> None:
        self._begun().trained = shared["trained"]


class _Keeper(FolderKeeper):
    """A save that is due waits for the Trainer to write its files."""

    wanted = False
    stopping = False
    _since: float | None = None

    def save(self, *, best: bool = False, since: float | None = None) -> Save | None:
        self.wanted = True
        self._since = time.perf_counter()
        return None

    def send(self) -> None:
        self.wanted = False
        super().save(since=self._since)

    def _save_last(self, checkpoints: Checkpointer) -> None:
        """Where the Trainer has written it: not where another callback has ended the training early."""
        self.meet()  # until then rank 0 may still delete it, for another one was the best
        if self._target(self.step).is_dir():
            super()._save_last(checkpoints)
        else:
            log.event("no-last-checkpoint", step=self.step, why="the Trainer did not write one")
