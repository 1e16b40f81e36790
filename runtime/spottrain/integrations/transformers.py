"""Hugging Face's Trainer, in three lines:

    spot = TransformersCallback()
    trainer = Trainer(..., callbacks=[spot])
    trainer.train(resume_from_checkpoint=spot.resume(trainer))

The Trainer writes its checkpoint into its output_dir as ever; we have it do so when a save is due or a stop
was asked for, at the same step on all ranks, and send it to the checkpoint URI. The files are linked, not
copied, so that save_total_limit may delete them meanwhile. Those that the Trainer would not have written
without us are deleted from output_dir.

At an epoch's last step a periodic save comes after the epoch's end: its evaluation may follow. A stop cannot
wait for that, nor for an evaluation at any other step: it leaves them out, and the next attempt does them
before its first step (`_Owed`). For this, and for the loss of a logging window that was begun before, the
callback needs the Trainer.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.checkpoint.manager import Checkpointer
from spottrain.checkpoint.save import Save
from spottrain.contract import Outcome
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.diagnostics.background import Beside
from spottrain.distributed import process_group
from spottrain.errors import ConfigurationError
from spottrain.integrations.folder_checkpoints import FolderKeeper, link_tree
from spottrain.lifecycle.coordinator import TrainingState
from spottrain.lifecycle.session import current
from spottrain.training import job_settings
from spottrain.training.metrics_log import Meter

if TYPE_CHECKING:
    from transformers import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owed:
    """What a stop has left out at its step."""

    evaluation: bool = False
    epoch_end: bool = False
    """With the evaluation, the log and the save that the Trainer does there."""


class TransformersCallback(TrainerCallback):
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
        self._trainer: Trainer | None = None
        self._owed = _Owed()
        self._restored: Mapping[str, Any] = {}
        """This rank's own part of the checkpoint."""
        self._over = False
        """Whether an evaluation that the attempt before had left out has ended the training."""
        self._rate: float | None = None
        """The learning rate of the last step, as the Trainer logs it."""
        self._random: Any = None
        """At the end of the last step. What an evaluation draws leaves the training as it was: one that is
        done by the next attempt could not give it another one."""

    # --- of the person's script -----------------------------------------------------------------------
    def resume(self, trainer: Trainer | None = None) -> str | None:
        """Claims the checkpoint URI; the folder to go on from, None at the first start. Raises RunError.

        trainer: without it what a stop has left out at an evaluation's step or an epoch's last one stays
        undone, and the loss of the logging window in which it fell is another one. Both are told.
        """
        if self._args is None:
            raise ConfigurationError(
                "spot.resume() was called before the Trainer was made: make Trainer(callbacks=[spot]) first"
            )
        if self.keeper is not None:
            raise ConfigurationError("spot.resume() was called a second time: a run trains once")
        session, world = self.session, self.session.world
        self._trainer = trainer
        if world.distributed:
            process_group.join(world, devices.choose(process_group.default_device(world)))
        session.board.update(step=0)
        self.keeper = _Keeper(
            session,
            TrainingState(shared=self._shared, own=self._own, load=self._load),
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
                "TrainingArguments(deepspeed=...): TransformersCallback cannot gather DeepSpeed's weights; "
                "use FSDP"
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
                f"{keeper.step}: call trainer.train(resume_from_checkpoint=spot.resume(trainer))"
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
        job_settings.advise(session, ("max_steps",))
        self._beside = self._make_beside(args, state)
        if keeper.restored is not None:
            self._make_up(args, state, control)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **_: Any,
    ) -> None:
        over = state.global_step >= state.max_steps  # it was ended before it could leave the weights
        if over or self._over:
            self._tell_early(state.global_step)
            self._finish(model)
            self.session.end(Outcome.DONE, self.session.summary(), reason=self.session.reason_done)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.session.interruption.let_end(None)  # from here on there is work to lose

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._trainer is not None:
            self._rate = self._trainer._get_learning_rate()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        keeper, step = self._begun(), state.global_step
        self._meter.count(step, args.train_batch_size * args.gradient_accumulation_steps * args.world_size)
        if self._beside is not None:
            self._beside.step()
        last_of_epoch = state.epoch is not None and float(state.epoch).is_integer()
        if keeper.boundary(step):
            keeper.stopping = True
            self._owed = _Owed(evaluation=control.should_evaluate, epoch_end=last_of_epoch)
            control.should_evaluate = False  # it could outlast the notice
        wanted = keeper.wanted and not last_of_epoch  # else at the epoch's end
        if wanted or keeper.stopping or step >= state.max_steps:
            self._save_too(step, control)
        self._random = devices.random_state() if control.should_evaluate else None

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._evaluated = state.global_step
        self._begun().due_since()
        if self._random is not None:
            devices.set_random_state(self._random)

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
        if keeper.wanted:
            keeper.due_since()
            self._save_too(state.global_step, control)
        self._random = devices.random_state() if control.should_evaluate else None

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
    def _save_too(self, step: int, control: TrainerControl) -> None:
        self._ours = None if control.should_save else step
        control.should_save = True

    def _make_up(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Before the first step: what the attempt before has left out at its last one."""
        owed, window, trainer = self._owed, self._restored.get("window"), self._trainer
        self._owed = _Owed()
        if trainer is None or not hasattr(trainer, "_tr_loss"):
            if owed != _Owed() or window is None:
                text = (
                    "what was due after the step of the stop (an evaluation, the end of an epoch) stays "
                    "undone, and the loss that is logged next is of the steps since then: call "
                    "trainer.train(resume_from_checkpoint=spot.resume(trainer)), with transformers 5"
                )
                log.event("advice", about="resume", text=text)
            return
        if window is not None:
            trainer._tr_loss.fill_(window["loss"])
            trainer._globalstep_last_logged = window["since"]
            trainer._total_loss_scalar -= window["loss"]  # of this call of train() alone, as ever
        if owed == _Owed():
            return
        trainer._load_rng_state(str(self._begun().restored))
        self._rate = self._restored.get("rate")
        control.should_save = control.should_log = False
        if owed.evaluation:
            control.should_evaluate = True
            self._random = devices.random_state()
            self._log_save_evaluate(trainer, state)
        if owed.epoch_end:
            control.should_evaluate = control.should_save = control.should_log = False
            trainer.callback_handler.on_epoch_end(args, state, control)
            self._log_save_evaluate(trainer, state)
        control.should_evaluate = False
        self._over = control.should_training_stop

    def _log_save_evaluate(self, trainer: Trainer, state: TrainerState) -> None:
        epoch = int(state.epoch or 0)
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            None,
            trainer.model_wrapped,
            None,
            epoch,
            None,
            time.time(),
            learning_rate=self._rate,
        )

    def _begun(self) -> _Keeper:
        if self.keeper is None:
            raise ConfigurationError(
                "TransformersCallback was not asked where to go on: call "
                "trainer.train(resume_from_checkpoint=spot.resume(trainer))"
            )
        return self.keeper

    def _require_whole(self, model: torch.nn.Module | None, optimizer: Any) -> None:
        """That the Trainer's checkpoints hold all that is trained. Raises ConfigurationError."""
        inner = getattr(optimizer, "optimizer", optimizer)  # what Accelerate has wrapped
        if model is None or not isinstance(inner, torch.optim.Optimizer):
            return
        try:
            outside_parameters.require_owned(
                [inner], [model], "Make its module a part of the model, such as model.loss = module"
            )
        except ConfigurationError:
            self._begun().ends.give_up()
            raise

    def _finish(self, model: torch.nn.Module | None) -> None:
        assert model is not None, "the Trainer gives its callbacks the model"
        try:
            self._begun().finish(lambda: plain_state.model_state(model))
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
                f"{wanted}: make it with spottrain.job_settings(max_steps=...).max_steps"
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
        return {"trained": self._begun().trained, "owed": asdict(self._owed)}

    def _own(self) -> dict[str, Any]:
        trainer = self._trainer
        if trainer is None or not hasattr(trainer, "_tr_loss"):
            return {}
        window = {"loss": float(trainer._tr_loss), "since": trainer._globalstep_last_logged}
        return {"window": window, "rate": self._rate}

    def _load(self, shared: Any, own: Any, new_rank: bool) -> None:
        self._begun().trained = shared["trained"]
        self._owed = _Owed(**shared.get("owed", {}))
        self._restored = {} if new_rank else own


class _Keeper(FolderKeeper):
    """A save that is due waits for the Trainer to write its files."""

    wanted = False
    stopping = False
    _since: float | None = None

    def save(self, *, best: bool = False, since: float | None = None) -> Save | None:
        self.wanted = True
        self._since = time.perf_counter()
        return None

    def due_since(self) -> None:
        """What was before was no standing still for a save."""
        self._since = time.perf_counter()

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
