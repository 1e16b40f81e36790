"""`TransformersCallback`: makes Hugging Face's Trainer survive interruptions:

    spot = TransformersCallback()
    trainer = Trainer(..., callbacks=[spot])
    trainer.train(resume_from_checkpoint=spot.resume(trainer))

A save comes right after the Trainer has logged, evaluated and saved what was due at a step, by its own method
into a folder of ours in its output_dir. What it saves there for itself is not touched.

At an epoch's last step a periodic save comes after the epoch's end, because an evaluation may follow. A stop
cannot wait for an evaluation or an epoch's end: it skips them, and the next attempt does them before its
first step (`_Owed`).

`run_attached` does the same for a script that knows nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from inspect import BoundArguments
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spottrain.checkpoint import final_weights, outside_parameters, plain_state
from spottrain.checkpoint.final_files import has_adapter, write_description
from spottrain.checkpoint.training_state import LibraryFolders, TrainingState
from spottrain.core import device as devices
from spottrain.core import log, patches
from spottrain.core.time_split import CHECKPOINT_STALL, DATA_WAIT, OTHER, PRODUCTIVE
from spottrain.errors import ConfigurationError
from spottrain.integrations.folder_checkpoints import OFF, CallbackEngine, link_tree
from spottrain.integrations.generators import is_sized
from spottrain.integrations.pass_position import PassPosition
from spottrain.lifecycle.life import Phase

CALL: Final = "trainer.train(resume_from_checkpoint=spot.resume(trainer))"
STATE_FILE: Final = "trainer_state.json"
BEST: Final = "best-model"
"""Folder of a checkpoint with the files of the best model so far, if the Trainer loads that at the end."""
NO_MODEL: Final = ("optimizer", "scheduler", "scaler", "rng_state")
"""Prefixes of files that the best model does not need."""

METHOD: Final = "_init_training_state"
"""Of the Trainer of transformers 5: returns the epoch, and its used batches."""
NO_SKIP: Final = (
    "TrainingArguments(ignore_data_skip=True) begins an epoch's data again after each interruption, so that "
    "some samples are trained on twice and others are left out; remove it"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owed:
    """Work that a stop skipped at its step."""

    evaluation: bool = False
    epoch_end: bool = False
    """Includes the evaluation, log and save that the Trainer does there."""


class TrainerPosition(PassPosition):
    """The epoch, its finished steps, and the pass over the data. `follow` makes the Trainer resume there.

    The Trainer works its position out of the number of steps and the length of the loader. A stream has no
    length, and a callback may end an epoch early, so the epoch and its steps are kept in the checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Any = None
        self._epoch = self._steps = self._steps_per_epoch = 0
        self._begun = False
        """Whether this attempt has begun an epoch."""
        self._sized = False
        """Whether the loader has a length."""
        self._saved: Mapping[str, Any] | None = None

    def follow(self, trainer: Any) -> None:
        """Makes the training that begins next resume at the position of the checkpoint, if there is one."""
        if not hasattr(type(trainer), METHOD):
            raise ConfigurationError(
                f"transformers {transformers.__version__} is too old for TransformersCallback: install 5.10 "
                "or newer"
            )
        self._trainer = trainer
        usual = functools.partial(getattr(type(trainer), METHOD), trainer)

        def place(max_steps: int, steps_per_epoch: int, *more: Any) -> tuple[int, int]:
            epoch, batches = usual(max_steps, steps_per_epoch, *more)
            accumulation = trainer.args.gradient_accumulation_steps
            if self._saved is not None and self._saved.get("steps_per_epoch") not in (None, steps_per_epoch):
                self._saved = None  # other batches, or another number of ranks: as the Trainer counts them
            if self._saved is not None and not trainer.args.ignore_data_skip:
                epoch, batches = self._saved["epoch"], self._saved["steps"] * accumulation
            self._epoch, self._steps, self._steps_per_epoch = epoch, batches // accumulation, steps_per_epoch
            self._begun = False  # it may begin again, with smaller batches
            return epoch, batches

        patches.replace(trainer, METHOD, place)

    def load(self, saved: Mapping[str, Any] | None) -> None:
        self._saved = saved

    def require_known(self, loader: Any, *, skips: bool) -> None:
        """Raises ConfigurationError for data that cannot be resumed. `skips`: unless ignore_data_skip."""
        if not skips:
            log.event("advice", about="resume", text=NO_SKIP)
        elif loader is not None and not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"the Trainer's loader is a {type(loader).__name__}, in which it cannot skip used batches, "
                "so no attempt could go on in the middle of an epoch: let get_train_dataloader() return a "
                "torch DataLoader"
            )

    def begin_epoch(self, loader: Any) -> None:
        saved = None
        if self._begun:
            self._epoch, self._steps = self._epoch + 1, 0
        elif self._saved is not None and not self._trainer.args.ignore_data_skip:
            saved = {**self._saved, "batches": self._used}
        self._begun, self._sized = True, is_sized(loader)
        self.expect(loader, first=self._epoch == 0, saved=saved)

    def step_over(self) -> None:
        self._steps += 1
        self.step_done(self._used)

    def state_after(self, *, epoch_stops: bool) -> dict[str, Any]:
        """Returns the position after the last step. `epoch_stops`: whether a callback has ended the epoch."""
        over = epoch_stops or self._steps >= self._steps_per_epoch
        return {
            **self.state(),
            "epoch": self._epoch + over,
            "steps": 0 if over else self._steps,
            "steps_per_epoch": self._steps_per_epoch if self._sized else None,
        }

    @property
    def _used(self) -> int:
        return self._steps * int(self._trainer.args.gradient_accumulation_steps)


class TransformersCallback(TrainerCallback):
    """Saves, stops and resumes Hugging Face's Trainer. Create one per process and Trainer.

    Args:
        attached: set by `run_attached`: the job is done when the script ends, not with its training.
    """

    def __init__(self, *, attached: bool = False) -> None:
        self._engine = CallbackEngine(CALL, attached=attached)
        self.session = self._engine.session
        self._save_due = self._stopping = False
        """Whether to save, and whether to stop, once the Trainer has done what is due at this step."""
        self._args: TrainingArguments | None = None
        """The Trainer's output_dir, once the Trainer is made."""
        self._evaluated: int | None = None
        """Step of the last evaluation."""
        self._epoch_ended = False
        """Whether no step has begun since the end of an epoch."""
        self._trainer: Trainer
        """Set by `resume`."""
        self._detach: Callable[[], None] = lambda: None
        """Ends what `resume` has made the Trainer do."""
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
        self._random: Any = None
        """Random state at the end of the last step, restored after an evaluation. So training is the same if
        the next attempt does the evaluation."""

    # --- public ---------------------------------------------------------------------------------------
    def resume(self, trainer: Trainer) -> str | None:
        """Claims the checkpoint URI and downloads the last checkpoint. Call it after the Trainer is made.

        Args:
            trainer: the Trainer with this callback.

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
        self._position.follow(trainer)
        _save_shared_tensors(trainer)
        usual = trainer._maybe_log_save_evaluate

        def then_ours(*given: Any, **named: Any) -> None:
            usual(*given, **named)
            self._rate = named.get("learning_rate")
            self._save_or_stop(trainer.state, trainer.control)

        self._detach = patches.replace(trainer, "_maybe_log_save_evaluate", then_ours)
        state = TrainingState(
            shared=self._shared,
            own=self._own,
            load=self._load,
            folders=LibraryFolders(Path(self._args.output_dir or "."), self._write),
            describe=self._describe,
        )
        restored = self._engine.resume(state)
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
            inner = getattr(optimizer, "optimizer", optimizer)  # unwraps Accelerate's optimizer
            if model is not None and isinstance(inner, torch.optim.Optimizer):
                text = "Make its module a part of the model, such as model.loss = module"
                outside_parameters.require_owned([inner], [model], text)
            self._position.require_known(train_dataloader, skips=not args.ignore_data_skip)
            if model is not None and not has_adapter(model):
                _require_tensors(model)
        if model is not None:
            self._engine.initialize_first(model, own_checkpoint=state.global_step > 0)
        self._engine.start_at(
            state.global_step,
            last=state.max_steps,
            total_steps=state.max_steps,
            device=args.device,
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

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._epoch_ended = False
        self._position.go_on()
        self.session.board.clock.between_steps(PRODUCTIVE)
        if state.global_step >= state.max_steps or self._over is not None:  # see `_skip_steps`
            raise ConfigurationError(
                "all steps of the training were done before, and this Trainer begins another one, because it "
                f"replaces the loop of transformers' Trainer; {OFF}"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._engine.ended:
            self.session.enter(Phase.STEP)  # from here on there is work to lose

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        step = state.global_step
        self._position.step_over()
        self._epoch_stops = control.should_epoch_stop
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._engine.count(step, samples=samples)
        last_of_epoch = self._last_of_epoch(state)
        if self._engine.boundary(step, save=self._request_save):
            self._stopping = True
            self._owed = _Owed(evaluation=control.should_evaluate, epoch_end=last_of_epoch)
            control.should_evaluate = False  # it may take longer than the notice
        self._random = devices.random_state() if control.should_evaluate else None
        self._begin_due(control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        self._evaluated = state.global_step
        if self._random is not None:
            devices.set_random_state(self._random)
        self._note_best(state)
        self.session.board.clock.mark()
        self.session.board.clock.between_steps(CHECKPOINT_STALL)  # the Trainer may save now

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.session.board.heartbeat.beat()
        self.session.board.clock.between_steps(PRODUCTIVE)  # the evaluation of a further dataset
        alone = not self.session.world.distributed
        if alone and self.session.preemption.stopping and self._random is not None and not self._engine.ended:
            self._leave_evaluation(state)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._epoch_ended = True
        self._position.go_on()
        self._random = devices.random_state() if control.should_evaluate else None
        self._begin_due(control)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs and self._engine.begun:
            epoch = None if state.epoch is None else int(state.epoch)
            self._engine.metrics.line(
                state.global_step, float(logs["loss"]), rate=logs.get("learning_rate"), epoch=epoch
            )
            if not control.should_evaluate:
                self.session.board.clock.between_steps(CHECKPOINT_STALL)  # the Trainer may save now

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        processing_class: Any = None,
        **_: Any,
    ) -> None:
        assert model is not None, "the Trainer gives its callbacks the model"
        self._model, self._processing = model, processing_class
        vars(self._trainer).pop("_run_epoch", None)  # of `_skip_steps`
        self._detach()
        self._position.release()
        self._note_early_end(state, control)
        self._engine.finish_with(model, self._over or "")

    # --- private --------------------------------------------------------------------------------------
    def _begin_due(self, control: TrainerControl) -> None:
        """Notes what comes before `_save_or_stop`: the Trainer logs, evaluates, and saves what is due."""
        evaluates = control.should_log or control.should_evaluate
        self.session.board.clock.between_steps(PRODUCTIVE if evaluates else CHECKPOINT_STALL)

    def _save_or_stop(self, state: TrainerState, control: TrainerControl) -> None:
        """Saves, and ends after a stop request, once the Trainer has done what was due at a step."""
        self._note_early_end(state, control)
        if self._stopping:
            self._engine.stop()
        over = self._epoch_ended and control.should_training_stop  # it may load the best model next
        due = self._save_due and (self._epoch_ended or not self._last_of_epoch(state))
        if due or (over and self._engine.manager is not None):
            self._save_due = False
            self._engine.save()
        self.session.board.clock.between_steps(OTHER if over else DATA_WAIT)

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
        self._save_due = True

    def _leave_evaluation(self, state: TrainerState) -> None:
        """Saves the step before an evaluation that a stop comes in, and ends. The next attempt evaluates."""
        if self.session.board.facts.lost_steps:  # else it is one that the last attempt has left out
            self._owed = _Owed(evaluation=not self._epoch_ended, epoch_end=self._last_of_epoch(state))
            devices.set_random_state(self._random)
        self._engine.stop()

    def _last_of_epoch(self, state: TrainerState) -> bool:
        return self._epoch_stops or (state.epoch is not None and float(state.epoch).is_integer())

    def _make_up(self, state: TrainerState, control: TrainerControl) -> None:
        """Does what the last attempt skipped at its last step, before the first step."""
        owed, window, trainer = self._owed, self._restored.get("window"), self._trainer
        self._owed = _Owed()
        if window is not None:
            trainer._tr_loss.fill_(window["loss"])
            trainer._globalstep_last_logged = window["since"]
            trainer._total_loss_scalar -= window["loss"]  # counts only this call of train()
        if owed == _Owed():
            return
        trainer._load_rng_state(str(self._engine.restored))
        self._rate = self._restored.get("rate")
        control.should_save = control.should_log = False
        with self.session.board.clock.part(PRODUCTIVE):  # although it comes before the first step
            if owed.evaluation:
                control.should_evaluate = True
                self._random = devices.random_state()
                self._log_save_evaluate(trainer, state)
            if owed.epoch_end:
                control.should_evaluate = control.should_save = control.should_log = False
                trainer.callback_handler.on_epoch_end(trainer.args, state, control)
                self._log_save_evaluate(trainer, state)
        control.should_evaluate = False
        self._note_early_end(state, control)

    def _skip_steps(self, control: TrainerControl) -> None:
        """Makes the Trainer end this training as usual, without a step: all were done before."""
        patches.replace(self._trainer, "_run_epoch", lambda **_: None)
        control.should_training_stop = True

    def _note_early_end(self, state: TrainerState, control: TrainerControl) -> None:
        """Notes that a callback has ended the training. A checkpoint taken from now on contains it."""
        step = state.global_step
        if self._over is None and control.should_training_stop and step < state.max_steps:
            text = f"a callback of the Trainer stopped it after the evaluation at step {step}"
            self._over = text if self._evaluated == step else ""  # other callbacks give no reason

    def _restore_callbacks(self, state: TrainerState) -> None:
        """Restores what the checkpoint has of callbacks such as EarlyStoppingCallback."""
        states: Any = state.stateful_callbacks or {}
        for callback in self._trainer.callback_handler.callbacks:
            saved = states.get(type(callback).__name__)
            if isinstance(saved, dict):
                vars(callback).update(saved.get("attributes", {}))

    def _best(self) -> Path | None:
        """Returns the folder of the best model, if the Trainer loads it at the end of the training."""
        if not self._trainer.args.load_best_model_at_end:
            return None
        best = self._trainer.state.best_model_checkpoint
        return Path(best) if best and Path(best).is_dir() else None

    def _place_best(self, restored: Path) -> None:
        """Moves the best model of a restored checkpoint to where the Trainer looks for it."""
        found = restored / BEST
        state = TrainerState.load_from_json(str(restored / STATE_FILE))
        place = restored.parent / Path(state.best_model_checkpoint or BEST).name
        if self.session.world.first_here and not place.exists():
            if found.is_dir():
                found.rename(place)
            elif place.name == f"checkpoint-{state.global_step}":
                link_tree(restored, place)
        self._engine.barrier()  # all ranks look for it

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

    def _describe(self, folder: Path) -> None:
        """Writes what `from_pretrained` needs beside the final weights, as `Trainer.save_model` does."""
        assert self._model is not None
        collator = getattr(self._trainer, "data_collator", None)
        processing = self._processing or getattr(collator, "tokenizer", None)
        write_description(self._model, processing, folder)

    def _take_max_steps(self, args: TrainingArguments, lr_scheduler: Any) -> None:
        """Applies the manifest's maxSteps before the Trainer makes its scheduler of that length."""
        wanted = self.session.run.training.get("max_steps")
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

    def _write(self, folder: Path) -> None:
        """Saves as the Trainer does. Its own checkpoints may be deleted and replaced meanwhile."""
        trainer, best = self._trainer, self._best()
        state, before = trainer.state, trainer.state.best_model_checkpoint
        place = folder.with_name(f"{folder.name}-written")
        written = place / f"checkpoint-{state.global_step}"
        undo = patches.replace(trainer, "_get_output_dir", lambda trial: str(place))
        trainer._save_checkpoint(trainer.model_wrapped, None)
        undo()
        if state.best_model_checkpoint != before:  # it is no place of the Trainer's own
            state.best_model_checkpoint = before
            if trainer.args.should_save:
                state.save_to_json(str(written / STATE_FILE))
        self._engine.barrier()  # other ranks may still be writing
        if self.session.world.first_here:
            with contextlib.suppress(FileNotFoundError):  # another pod on this disk was faster
                written.rename(folder)
                place.rmdir()
            if best is not None and best.name != written.name:
                link_tree(best, folder / BEST, without=NO_MODEL)

    def _shared(self) -> dict[str, Any]:
        return {"owed": asdict(self._owed), "over": self._over}

    def _own(self) -> dict[str, Any]:
        trainer = self._trainer
        window = {"loss": float(trainer._tr_loss), "since": trainer._globalstep_last_logged}
        position = self._position.state_after(epoch_stops=self._epoch_stops)
        return {"window": window, "rate": self._rate, "data": position}

    def _load(self, shared: Any, own: Any, new_rank: bool) -> None:
        self._owed = _Owed(**shared.get("owed", {}))
        self._over = shared.get("over")
        self._restored = {} if new_rank else own
        self._position.load(own.get("data"))


def run_attached(call: BoundArguments, train: Callable[..., Any]) -> Any:
    """Calls `Trainer.train`, saved and resumed by a callback that is made for this call."""
    trainer: Trainer = call.arguments["self"]
    spot = TransformersCallback(attached=True)
    _require_attachable(spot, trainer)
    trainer.add_callback(spot)
    try:
        return spot._engine.attached_to(call, train, "resume_from_checkpoint", lambda: spot.resume(trainer))
    finally:
        spot._detach()
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


# --- models that safetensors refuses -----------------------------------------------------------------------
def _save_shared_tensors(trainer: Any) -> None:
    """Makes a Trainer save a model in which parameters share memory, which safetensors refuses."""
    usual = functools.partial(type(trainer)._save, trainer)

    def save(output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        usual(output_dir, state_dict=_separate(trainer.model) if state_dict is None else state_dict)

    vars(trainer)["_save"] = save


def _separate(model: torch.nn.Module) -> dict[str, Any] | None:
    """Returns the model's state with a copy of each undeclared tensor that shares memory with one before it.

    None if there is none: then the library does it right by itself, as it does for adapters.
    """
    if has_adapter(model):
        return None
    declared = getattr(plain_state.plain(model), "all_tied_weights_keys", None) or {}
    seen: set[tuple[torch.device, int]] = set()
    separate, copied = {}, False
    for name, value in model.state_dict().items():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() and name not in declared:
            memory = (value.device, value.untyped_storage().data_ptr())
            if memory in seen or not value.is_contiguous():
                value, copied = value.clone(memory_format=torch.contiguous_format), True
            seen.add(memory)
        separate[name] = value
    return separate if copied else None


def _require_tensors(model: torch.nn.Module) -> None:
    """Raises ConfigurationError if safetensors cannot hold the model's state dict."""
    for name, value in plain_state.model_state(model).items():
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"the model cannot be saved: its state_dict() has {name}, a {type(value).__name__}, and a "
                "safetensors file holds tensors only; keep it out of get_extra_state(), or make it a buffer"
            )
    final_weights.require_storable(plain_state.model_state(model))
