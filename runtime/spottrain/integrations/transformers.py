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

`run_attached` does the same for a script that knows nothing of it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from inspect import BoundArguments
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spottrain.checkpoint import outside_parameters
from spottrain.checkpoint.kinds import TrainingState
from spottrain.checkpoint.model_description import has_adapter, write_description
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.time_split import CHECKPOINT_STALL, DATA_WAIT, OTHER, PRODUCTIVE
from spottrain.errors import ConfigurationError
from spottrain.integrations import model_files
from spottrain.integrations.folder_checkpoints import (
    OFF,
    OURS,
    CallbackEngine,
    FolderCheckpoints,
    link_tree,
    packed,
    unpacked,
)
from spottrain.integrations.trainer_position import TrainerPosition
from spottrain.lifecycle.life import Phase

if TYPE_CHECKING:
    from transformers import Trainer


CALL: Final = "trainer.train(resume_from_checkpoint=spot.resume(trainer))"
STATE_FILE: Final = "trainer_state.json"
BEST: Final = "best-model"
"""Folder of a checkpoint with the files of the best model so far, if the Trainer loads that at the end."""
NO_MODEL: Final = ("optimizer", "scheduler", "scaler", "rng_state")
"""Prefixes of files that the best model does not need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owed:
    """Work that a stop skipped at its step."""

    evaluation: bool = False
    epoch_end: bool = False
    """Includes the evaluation, log and save that the Trainer does there."""


class TransformersCallback(TrainerCallback):
    """Saves, stops and resumes Hugging Face's Trainer. Create one per process and Trainer.

    Args:
        attached: set by `run_attached`: the job is done when the script ends, not with its training.
    """

    def __init__(self, *, attached: bool = False) -> None:
        self._engine = CallbackEngine(CALL, attached=attached)
        self.session = self._engine.session
        self._save_due = self._stopping = False
        """Whether to upload the Trainer's next checkpoint, and whether to stop after it."""
        self._paused_at: float | None = None
        """`perf_counter` when training paused for that checkpoint."""
        self._args: TrainingArguments | None = None
        """The Trainer's output_dir, once the Trainer is made."""
        self._ours: int | None = None
        """Step of a checkpoint that only this callback requested."""
        self._evaluated: int | None = None
        """Step of the last evaluation."""
        self._measured: dict[str, float] = {}
        """Metrics of the last evaluation; each dataset adds its own."""
        self._epoch_ended = False
        """Whether no step has begun since the end of an epoch."""
        self._trainer: Trainer | None = None
        self._position = TrainerPosition()
        self._epoch_stops = False
        """Whether a callback has ended the epoch after the last step."""
        self._owed = _Owed()
        self._restored: Mapping[str, Any] = {}
        """This rank's part of the checkpoint."""
        self._model: torch.nn.Module | None = None
        self._processing: Any = None
        """The trained model, and its tokenizer or the like, at the end of the training."""
        self._over: str | None = None
        """Why training is over before its last step, or "" if the reason is unknown."""
        self._rate: float | None = None
        """The learning rate of the last step, as the Trainer logs it."""
        self._last_saved: int | None = None
        """Step of a checkpoint that `_save_now` made."""
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
        self._trainer = trainer
        if trainer is not None:
            self._position.follow(trainer)
            model_files.save_shared_tensors(trainer)
        checkpoints = FolderCheckpoints(
            TrainingState(shared=self._shared, own=self._own, load=self._load),
            place=Path(self._args.output_dir or "."),
            write=self._link,
            target=self._folder,
            written=lambda step: self._source(step).is_dir(),  # a callback may have ended it between saves
            describe=self._describe,
        )
        restored = self._engine.resume(checkpoints)
        if restored is None:
            return None
        self._place_best(restored)
        return str(restored)

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
                "TrainingArguments(save_only_model=True) leaves the optimizer out of checkpoints, so no run "
                "could resume from them; remove it"
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
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        self._engine.require_resume(type(self).__name__)
        with self._engine.failures():
            self._require_whole(model, optimizer)
            self._position.require_known(train_dataloader, CALL, skips=not args.ignore_data_skip)
            self._require_storable(model)
        if model is not None:
            self._engine.initialize_first(model, own_checkpoint=state.global_step > 0)
        self._engine.start_at(
            state.global_step,
            last=state.max_steps,
            total_steps=state.max_steps,
            device=args.device,
            number_format="bf16" if args.bf16 else "fp16" if args.fp16 else "",
            log_every=1,
        )
        self._note_best(state)
        if self._engine.restored:
            self._restore_callbacks(state)
            self._make_up(state, control)
        if state.global_step >= state.max_steps or self._over is not None:
            self._skip_steps(control)

    def on_epoch_begin(
        self, args: Any, state: TrainerState, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        self._position.begin_epoch(train_dataloader)

    def on_step_begin(
        self, args: Any, state: TrainerState, control: Any, model: torch.nn.Module | None = None, **_: Any
    ) -> None:
        self._epoch_ended = False
        self._position.go_on()
        self.session.board.clock.between_steps(PRODUCTIVE)
        if state.global_step >= state.max_steps or self._over is not None:  # see `_skip_steps`
            if self._engine.attached:
                raise ConfigurationError(
                    "all steps of the training were done before, and this Trainer begins another one, "
                    f"because it replaces the loop of transformers' Trainer; {OFF}"
                )
            self._finish(model)
            self.session.end(self.session.done)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._engine.ended:
            self.session.enter(Phase.STEP)  # from here on there is work to lose

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is not None:
            self._rate = self._trainer._get_learning_rate()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        step = state.global_step
        self._position.step_done()
        self._epoch_stops = control.should_epoch_stop
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._engine.count(step, samples=samples)
        last_of_epoch = self._last_of_epoch(state)
        if self._engine.boundary(step, save=self._request_save):
            self._stopping = True
            self._owed = _Owed(evaluation=control.should_evaluate, epoch_end=last_of_epoch)
            control.should_evaluate = False  # it may take longer than the notice
        save_now = self._save_due and not last_of_epoch  # otherwise at the epoch's end
        if save_now or self._stopping or control.should_training_stop:
            self._save_too(step, control)
        self._random = devices.random_state() if control.should_evaluate else None
        self._time_next(control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        self._evaluated = state.global_step
        self._measured |= metrics or {}
        self._paused_at = time.perf_counter()  # the evaluation is no part of the save
        if self._random is not None:
            devices.set_random_state(self._random)
        self._note_best(state)
        self.session.board.clock.mark()
        best_only = args.save_strategy == "best"  # then the Trainer decides about a save after this
        saves = self._is_best(args, state) if best_only else None
        if control.should_training_stop and not self._engine.ended:
            self._save_too(state.global_step, control)  # early stopping: the last checkpoint of the training
            if saves is False and self._last_saved != state.global_step:  # each dataset is evaluated in turn
                self._save_now(state, control)
        self._time_next(control, saves=saves)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.session.board.heartbeat.beat()
        self.session.board.clock.between_steps(PRODUCTIVE)  # the evaluation of a further dataset
        alone = not self.session.world.distributed
        if alone and self.session.preemption.stopping and self._random is not None and not self._engine.ended:
            self._leave_evaluation(state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Waits for an upload of this step: the Trainer may now save it again, into the same files."""
        self._epoch_ended = True
        self._position.go_on()
        checkpoints = self._engine.manager
        if checkpoints is not None and checkpoints.busy_with == state.global_step:
            with self.session.board.clock.part(CHECKPOINT_STALL):
                checkpoints.wait_for_upload()
        if self._save_due:
            self._paused_at = time.perf_counter()
            self._save_too(state.global_step, control)
        self._random = devices.random_state() if control.should_evaluate else None
        self._time_next(control)

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Uploads the checkpoint, now that this rank's files are complete; after a stop request it ends."""
        if state.best_global_step == self._ours:
            self._ours = None
        self._note_early_end(state, control)
        if control.should_training_stop:
            self._keep_last(state.global_step)
        if self._stopping:
            self._engine.stop()
        if self._save_due:
            self._save_due = False
            self._engine.save(since=self._paused_at)
        self._time_next(control)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs and self._engine.checkpoints is not None:
            epoch = None if state.epoch is None else int(state.epoch)
            self._engine.metrics.line(
                state.global_step, float(logs["loss"]), rate=logs.get("learning_rate"), epoch=epoch
            )
        self._time_next(control)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        processing_class: Any = None,
        **_: Any,
    ) -> None:
        self._processing = processing_class
        if self._trainer is not None:
            vars(self._trainer).pop("_run_epoch", None)  # of `_skip_steps`
        self._position.release()
        self._note_early_end(state, control)
        self._finish(model)

    # --- private --------------------------------------------------------------------------------------
    def _time_next(self, control: TrainerControl, saves: bool | None = None) -> None:
        """Notes what the Trainer does until the next hook: it logs, evaluates, saves, fetches, and ends.

        `saves`: whether it saves, where `control` does not say so yet.
        """
        if control.should_log or control.should_evaluate:
            part = PRODUCTIVE
        elif control.should_save if saves is None else saves:
            part = CHECKPOINT_STALL
        else:
            last = self._epoch_ended and control.should_training_stop  # it loads the best model, maybe
            part = OTHER if last else DATA_WAIT
        self.session.board.clock.between_steps(part)

    def _is_best(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Whether the evaluation is the best so far, by the Trainer's rule for `save_strategy="best"`."""
        name = args.metric_for_best_model or ""
        value = self._measured.get(name if name.startswith("eval_") else f"eval_{name}", math.nan)
        sign = 1 if args.greater_is_better else -1
        best = -math.inf if state.best_metric is None else sign * state.best_metric
        return bool(sign * value > best)

    def _note_best(self, state: TrainerState) -> None:
        """Reports the step of the lowest `eval_loss`; the Trainer's checkpoints keep its log."""
        losses = [
            (each["eval_loss"], each["step"])
            for each in state.log_history
            if math.isfinite(each.get("eval_loss", math.nan))
        ]
        if losses:
            self.session.board.update(best_step=min(losses)[1])

    def _request_save(self) -> None:
        """Has the Trainer write a checkpoint, which `on_save` uploads."""
        self._save_due, self._paused_at = True, time.perf_counter()

    def _save_too(self, step: int, control: TrainerControl) -> None:
        self._ours = None if control.should_save else step
        control.should_save = True

    def _save_now(self, state: TrainerState, control: TrainerControl) -> None:
        """Saves the last checkpoint, which the Trainer will not, because another one is the best."""
        if self._trainer is None:
            return
        self._last_saved = state.global_step
        with self.session.board.clock.part(CHECKPOINT_STALL):
            self._trainer._save_checkpoint(self._trainer.model_wrapped, None)
            self._trainer.callback_handler.on_save(self._trainer.args, state, control)

    def _leave_evaluation(self, state: TrainerState, control: TrainerControl) -> None:
        """Saves the step before an evaluation that a stop comes in, and ends. The next attempt evaluates."""
        if self._trainer is None:
            return
        if self.session.board.facts.lost_steps:  # else it is one that the last attempt has left out
            self._stopping = True
            self._owed = _Owed(evaluation=not self._epoch_ended, epoch_end=self._last_of_epoch(state))
            self._ours = None if control.should_save else state.global_step
            devices.set_random_state(self._random)
            self._trainer._save_checkpoint(self._trainer.model_wrapped, None)
            self._trainer.callback_handler.on_save(self._trainer.args, state, control)
        self._engine.stop()

    def _last_of_epoch(self, state: TrainerState) -> bool:
        return self._epoch_stops or (state.epoch is not None and float(state.epoch).is_integer())

    def _make_up(self, state: TrainerState, control: TrainerControl) -> None:
        """Does what the last attempt skipped at its last step, before the first step."""
        owed, window, trainer = self._owed, self._restored.get("window"), self._trainer
        self._owed = _Owed()
        if trainer is None or not hasattr(trainer, "_tr_loss"):
            if owed != _Owed() or window is None:
                text = (
                    "what was due after the step of the stop (an evaluation, the end of an epoch) stays "
                    f"undone, and the loss that is logged next is of the steps since then: call {CALL}, with "
                    "transformers 5"
                )
                log.event("advice", about="resume", text=text)
            return
        if window is not None:
            trainer._tr_loss.fill_(window["loss"])
            trainer._globalstep_last_logged = window["since"]
            trainer._total_loss_scalar -= window["loss"]  # counts only this call of train()
        if owed == _Owed():
            return
        trainer._load_rng_state(str(self._folder(state.global_step)))
        self._rate = self._restored.get("rate")
        control.should_save = control.should_log = False
        with self.session.board.clock.part(PRODUCTIVE):  # although it comes before the first step
            self._do_owed(trainer, owed, state, control)
        self._note_early_end(state, control)

    def _skip_steps(self, control: TrainerControl) -> None:
        """Makes the Trainer end this training as usual, without a step: the last attempt has done them all.

        Without the Trainer, or with transformers 4, `on_step_begin` ends the script instead.
        """
        if self._trainer is not None and hasattr(self._trainer, "_run_epoch"):
            vars(self._trainer)["_run_epoch"] = lambda **_: None
            control.should_training_stop = True

    def _note_early_end(self, state: TrainerState, control: TrainerControl) -> None:
        """Notes that a callback has ended the training. A checkpoint taken from now on contains it."""
        early = control.should_training_stop and state.global_step < state.max_steps
        if early and self._over is None:
            self._over = self._early(state.global_step)

    def _restore_callbacks(self, state: TrainerState) -> None:
        """Restores what the checkpoint has of callbacks such as EarlyStoppingCallback."""
        states: Any = state.stateful_callbacks or {}
        handler = getattr(self._trainer, "callback_handler", None)
        for callback in handler.callbacks if handler is not None else ():
            saved = states.get(type(callback).__name__)
            if isinstance(saved, dict):
                vars(callback).update(saved.get("attributes", {}))

    def _best(self) -> Path | None:
        """Returns the folder of the best model, if the Trainer loads it at the end of the training."""
        trainer = self._trainer
        if trainer is None or not trainer.args.load_best_model_at_end:
            return None
        best = trainer.state.best_model_checkpoint
        return Path(best) if best and Path(best).is_dir() else None

    def _place_best(self, restored: Path) -> None:
        """Moves the best model of a restored checkpoint to where the Trainer looks for it."""
        found, manager = restored / BEST, self._engine.manager
        if self.session.world.first_here and found.is_dir():
            state = TrainerState.load_from_json(str(restored / STATE_FILE))
            place = restored.parent / Path(state.best_model_checkpoint or BEST).name
            if place.exists():
                shutil.rmtree(found)
            else:
                found.rename(place)
        assert manager is not None
        manager.barrier()  # all ranks look for it

    def _do_owed(self, trainer: Trainer, owed: _Owed, state: TrainerState, control: TrainerControl) -> None:
        if owed.evaluation:
            control.should_evaluate = True
            self._random = devices.random_state()
            self._log_save_evaluate(trainer, state)
        if owed.epoch_end:
            control.should_evaluate = control.should_save = control.should_log = False
            trainer.callback_handler.on_epoch_end(trainer.args, state, control)
            self._log_save_evaluate(trainer, state)
        control.should_evaluate = False

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

    def _require_whole(self, model: torch.nn.Module | None, optimizer: Any) -> None:
        """Raises ConfigurationError unless the Trainer's checkpoints hold all that is trained."""
        inner = getattr(optimizer, "optimizer", optimizer)  # unwraps Accelerate's optimizer
        if model is None or not isinstance(inner, torch.optim.Optimizer):
            return
        outside_parameters.require_owned(
            [inner], [model], "Make its module a part of the model, such as model.loss = module"
        )

    def _require_storable(self, model: torch.nn.Module | None) -> None:
        """Raises ConfigurationError unless the Trainer can save the model."""
        if model is None:
            return
        if not has_adapter(model):
            model_files.require_tensors(model)
        if self._trainer is None and model_files.shares_tensors(model):
            raise ConfigurationError(
                f"parameters of the model share memory, which the Trainer cannot save by itself: call {CALL}"
            )

    def _describe(self, folder: Path) -> None:
        """Writes what `from_pretrained` needs beside the final weights, as `Trainer.save_model` does."""
        assert self._model is not None
        collator = getattr(self._trainer, "data_collator", None)
        processing = self._processing or getattr(collator, "tokenizer", None)
        write_description(self._model, processing, folder)

    def _finish(self, model: torch.nn.Module | None) -> None:
        assert model is not None, "the Trainer gives its callbacks the model"
        self._model = model
        self._engine.finish_with(model, self._over or "")
        if self.session.world.first_here:
            shutil.rmtree(self._kept(self._engine.step), ignore_errors=True)

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

    def _early(self, step: int) -> str:
        """Returns why training ends at `step`, if an evaluation came just before; else ""."""
        if self._evaluated != step:
            return ""  # other callbacks give no reason
        return f"a callback of the Trainer stopped it after the evaluation at step {step}"

    def _folder(self, step: int) -> Path:
        assert self._args is not None
        return Path(self._args.output_dir or ".").resolve() / f"checkpoint-{step}"

    def _kept(self, step: int) -> Path:
        return self._folder(step).with_name(f"{OURS}last-{step}")

    def _source(self, step: int) -> Path:
        """Returns the folder with the Trainer's checkpoint of this step."""
        written, kept = self._folder(step), self._kept(step)
        return kept if kept.is_dir() and not written.is_dir() else written

    def _keep_last(self, step: int) -> None:
        """Links the last checkpoint, which the Trainer deletes with save_total_limit=1 if another is best."""
        if self.session.world.first_here:
            shutil.rmtree(self._kept(step), ignore_errors=True)  # of a save before the end of the epoch
            link_tree(self._folder(step), self._kept(step))

    def _link(self, folder: Path) -> None:
        engine = self._engine
        assert engine.manager is not None
        engine.manager.barrier()  # other ranks may still be writing
        if self.session.world.first_here:
            written, best = self._source(engine.step), self._best()
            link_tree(written, folder)
            if best is not None and best.resolve() != written:
                link_tree(best, folder / BEST, without=NO_MODEL)
            if self._ours == engine.step:
                shutil.rmtree(written, ignore_errors=True)

    def _shared(self) -> dict[str, Any]:
        return self._engine.record() | {"owed": asdict(self._owed), "over": self._over}

    def _own(self) -> dict[str, Any]:
        trainer = self._trainer
        if trainer is None or not hasattr(trainer, "_tr_loss"):
            return {}
        window = {"loss": float(trainer._tr_loss), "since": trainer._globalstep_last_logged}
        position = self._position.state(epoch_stops=self._epoch_stops)
        return {"window": window, "rate": self._rate, "data": packed(position)}

    def _load(self, shared: Any, own: Any, new_rank: bool) -> None:
        self._engine.load_record(shared)
        self._owed = _Owed(**shared.get("owed", {}))
        self._over = shared.get("over")
        self._restored = {} if new_rank else own
        self._position.load(unpacked(own.get("data")))


def run_attached(call: BoundArguments, train: Callable[..., Any]) -> Any:
    """Calls `Trainer.train`, saved and resumed by a callback that is made for this call.

    A checkpoint at the checkpoint URI replaces `resume_from_checkpoint`, which counts for the first start.
    """
    trainer: Trainer = call.arguments["self"]
    spot = TransformersCallback(attached=True)
    _require_attachable(spot, trainer)
    trainer.add_callback(spot)
    try:
        given, restored = call.arguments.get("resume_from_checkpoint"), spot.resume(trainer)
        if restored is not None:
            if isinstance(given, str):
                log.event("override", setting="resume_from_checkpoint", checkpoint=restored, script=given)
            call.arguments["resume_from_checkpoint"] = restored
        return train(*call.args, **call.kwargs)
    except BaseException as error:
        spot._engine.fail_in_script(error)
        raise
    finally:
        trainer.remove_callback(spot)


def _require_attachable(spot: TransformersCallback, trainer: Trainer) -> None:
    """Raises ConfigurationError for settings that no checkpoint of ours can serve."""
    try:
        if getattr(trainer.args, "enable_jit_checkpoint", False):
            raise ConfigurationError(
                "TrainingArguments(enable_jit_checkpoint=True) saves at SIGTERM too, and takes the signal; "
                "remove it"
            )
        spot.on_init_end(trainer.args, trainer.state, trainer.control, lr_scheduler=trainer.lr_scheduler)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; or, to train without saves at a notice, {OFF}") from None
