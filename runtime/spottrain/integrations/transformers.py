"""`TransformersCallback`: makes Hugging Face's Trainer survive interruptions:

    spot = TransformersCallback()
    trainer = Trainer(..., callbacks=[spot])
    trainer.train(resume_from_checkpoint=spot.resume(trainer))

The Trainer writes checkpoints into its output_dir as usual. The callback requests one when a save is due or
a stop is requested, at the same step on all ranks, and uploads it to the checkpoint URI. The files are
hard-linked, so save_total_limit may delete them during the upload. Checkpoints that only the callback
requested are deleted from output_dir.

At an epoch's last step a periodic save comes after the epoch's end, because an evaluation may follow. A stop
cannot wait for an evaluation or an epoch's end: it skips them, and the next attempt does them before its
first step (`_Owed`). For this, and for the loss of a partial logging window, the callback needs the Trainer.
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
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.save import Save
from spottrain.contract import Outcome
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.diagnostics.background import BackgroundMonitor
from spottrain.distributed import process_group
from spottrain.errors import ConfigurationError
from spottrain.integrations.folder_checkpoints import FolderCoordinator, link_tree
from spottrain.lifecycle.coordinator import TrainingState
from spottrain.lifecycle.session import current
from spottrain.training import job_settings
from spottrain.training.metrics_log import MetricsLog

if TYPE_CHECKING:
    from transformers import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owed:
    """Work that a stop skipped at its step."""

    evaluation: bool = False
    epoch_end: bool = False
    """Includes the evaluation, log and save that the Trainer does there."""


class TransformersCallback(TrainerCallback):
    """Saves, stops and resumes Hugging Face's Trainer. Create one per process and Trainer."""

    def __init__(self) -> None:
        self.session = current()
        self.coordinator: _Keeper | None = None
        self._args: TrainingArguments | None = None
        self._ours: int | None = None
        """Step of a checkpoint that only this callback requested."""
        self._monitor: BackgroundMonitor | None = None
        self._evaluated: int | None = None
        """Step of the last evaluation."""
        self._trainer: Trainer | None = None
        self._owed = _Owed()
        self._restored: Mapping[str, Any] = {}
        """This rank's part of the checkpoint."""
        self._over = False
        """Whether an evaluation skipped by the last attempt has ended training."""
        self._rate: float | None = None
        """The learning rate of the last step, as the Trainer logs it."""
        self._random: Any = None
        """Random state at the end of the last step, restored after an evaluation. So training is the same if
        the next attempt does the evaluation."""

    # --- public ---------------------------------------------------------------------------------------
    def resume(self, trainer: Trainer | None = None) -> str | None:
        """Claims the checkpoint URI and downloads the last checkpoint. Call it after the Trainer is made.

        Args:
            trainer: the Trainer with this callback. Without it, an evaluation or epoch end that a stop
                skipped is left out, and the first logged loss covers fewer steps. Both are logged.

        Returns:
            The folder for `trainer.train(resume_from_checkpoint=...)`; None at the first start.

        Raises:
            RunError: it is called twice or too early, or the checkpoint cannot be claimed or read.
        """
        if self._args is None:
            raise ConfigurationError(
                "spot.resume() was called before the Trainer was made: make Trainer(callbacks=[spot]) first"
            )
        if self.coordinator is not None:
            raise ConfigurationError("spot.resume() was called a second time: a run trains once")
        session, world = self.session, self.session.world
        self._trainer = trainer
        if world.distributed:
            process_group.join(world, devices.choose(process_group.default_device(world)))
        session.board.update(step=0)
        self.coordinator = _Keeper(
            session,
            TrainingState(shared=self._shared, own=self._own, load=self._load),
            place=Path(self._args.output_dir or "."),
            write=self._link,
            target=self._folder,
        )
        try:
            self.coordinator.begin()
        except BaseException:
            self.coordinator.ends.give_up()
            raise
        restored = self.coordinator.restored
        return None if restored is None else str(restored)

    # --- hooks of TrainerCallback ---------------------------------------------------------------------
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
        coordinator = self._begun()
        self._require_whole(model, optimizer)
        if coordinator.restored is None:  # it may resume from a checkpoint of the Trainer's own
            self.session.board.update(step=state.global_step, start_step=state.global_step)
        elif state.global_step != coordinator.step:
            raise ConfigurationError(
                f"the training begins at step {state.global_step}, and the newest checkpoint is of step "
                f"{coordinator.step}: call trainer.train(resume_from_checkpoint=spot.resume(trainer))"
            )
        session = self.session
        coordinator.total_steps = state.max_steps
        session.board.update(total_steps=state.max_steps, state="Training")
        self._metrics_log = MetricsLog(
            session.board,
            born=session.born,
            total_steps=state.max_steps,
            log_every=1,
            world=session.world,
        )
        job_settings.advise(session, ("max_steps",))
        self._monitor = self._make_monitor(args, state)
        if coordinator.restored is not None:
            self._make_up(args, state, control)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **_: Any,
    ) -> None:
        over = state.global_step >= state.max_steps  # the last attempt ended before it stored the weights
        if over or self._over:
            self._tell_early(state.global_step)
            self._finish(model)
            self.session.end(Outcome.DONE, self.session.summary(), reason=self.session.reason_done)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.session.preemption.let_end(None)  # from here on there is work to lose

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._trainer is not None:
            self._rate = self._trainer._get_learning_rate()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        coordinator, step = self._begun(), state.global_step
        self._metrics_log.count(
            step, args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        if self._monitor is not None:
            self._monitor.step()
        last_of_epoch = state.epoch is not None and float(state.epoch).is_integer()
        if coordinator.boundary(step):
            coordinator.stopping = True
            self._owed = _Owed(evaluation=control.should_evaluate, epoch_end=last_of_epoch)
            control.should_evaluate = False  # it may take longer than the notice
        wanted = coordinator.wanted and not last_of_epoch  # otherwise at the epoch's end
        if wanted or coordinator.stopping or step >= state.max_steps:
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
        self.session.board.heartbeat.beat()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Waits for an upload of this step: the Trainer may now save it again, into the same files."""
        coordinator = self._begun()
        if coordinator.checkpoints is not None and coordinator.checkpoints.busy_with == state.global_step:
            coordinator.checkpoints.settle()
        if coordinator.wanted:
            coordinator.due_since()
            self._save_too(state.global_step, control)
        self._random = devices.random_state() if control.should_evaluate else None

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Uploads the checkpoint, now that this rank's files are complete; after a stop request it ends."""
        coordinator = self._begun()
        if state.best_global_step == self._ours:
            self._ours = None
        if coordinator.stopping:
            try:
                coordinator.ends.interrupted()
            finally:
                self._close()
        if coordinator.wanted:
            coordinator.send()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs and "loss" in logs and self.coordinator is not None:
            epoch = None if state.epoch is None else int(state.epoch)
            self._metrics_log.line(
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

    # --- private --------------------------------------------------------------------------------------
    def _save_too(self, step: int, control: TrainerControl) -> None:
        self._ours = None if control.should_save else step
        control.should_save = True

    def _make_up(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Does what the last attempt skipped at its last step, before the first step."""
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
            trainer._total_loss_scalar -= window["loss"]  # counts only this call of train()
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
        if self.coordinator is None:
            raise ConfigurationError(
                "TransformersCallback was not asked where to go on: call "
                "trainer.train(resume_from_checkpoint=spot.resume(trainer))"
            )
        return self.coordinator

    def _require_whole(self, model: torch.nn.Module | None, optimizer: Any) -> None:
        """Raises ConfigurationError unless the Trainer's checkpoints hold all that is trained."""
        inner = getattr(optimizer, "optimizer", optimizer)  # unwraps Accelerate's optimizer
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
        if self._monitor is not None:
            self._monitor.close()

    def _take_max_steps(self, args: TrainingArguments, lr_scheduler: Any) -> None:
        """Applies the manifest's maxSteps before the Trainer makes its scheduler of that length."""
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

    def _make_monitor(self, args: TrainingArguments, state: TrainerState) -> BackgroundMonitor | None:
        """Returns None if no step is left. Raises ConfigurationError if a profile would end after the run."""
        if state.global_step >= state.max_steps:
            return None
        try:
            return BackgroundMonitor(
                self.session, start=state.global_step, total_steps=state.max_steps, device=args.device
            )
        except ConfigurationError:
            self._begun().ends.give_up()
            raise

    def _tell_early(self, step: int) -> None:
        """Reports an early end right after an evaluation. Other callbacks give no reason."""
        if self._evaluated == step:
            why = f"a callback of the Trainer stopped it after the evaluation at step {step}"
            self.session.board.update(ended_early=why)

    def _folder(self, step: int) -> Path:
        assert self._args is not None
        return Path(self._args.output_dir or ".").resolve() / f"checkpoint-{step}"

    def _link(self, folder: Path) -> None:
        coordinator = self._begun()
        coordinator.meet()  # other ranks may still be writing
        if self.session.world.first_here:
            written = self._folder(coordinator.step)
            link_tree(written, folder)
            if self._ours == coordinator.step:
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


class _Keeper(FolderCoordinator):
    """Coordinator whose saves wait until the Trainer has written its files."""

    wanted = False
    stopping = False
    _since: float | None = None

    def save(self, *, best: bool = False, since: float | None = None) -> Save | None:
        self.wanted = True
        self._since = time.perf_counter()
        return None

    def due_since(self) -> None:
        """Restarts the stall time of a save: the time before was spent on something else."""
        self._since = time.perf_counter()

    def send(self) -> None:
        self.wanted = False
        super().save(since=self._since)

    def _save_last(self, checkpoints: CheckpointManager) -> None:
        """Saves the last checkpoint if the Trainer wrote one: not after an early end by a callback."""
        self.meet()  # rank 0 may still delete it if another one is the best
        if self._target(self.step).is_dir():
            super()._save_last(checkpoints)
        else:
            log.event("no-last-checkpoint", step=self.step, why="the Trainer did not write one")
