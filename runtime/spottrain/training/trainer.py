"""`Trainer`: the training loop, and the state that its checkpoints hold.

    begin: claim HEAD, restore -> find the micro-batch size
        -> [ micro-batches -> step -> log -> evaluate? -> save? -> stop? ] -> finish

HEAD is the object in the store that lists the durable checkpoints (`checkpoint.head`). The loop is one
function, `_train`. The position is a number of optimizer steps: a step that a stop cuts short is dropped, and
repeated after the resume. `engine.Engine` saves, stops and ends the run, and `techniques` makes steps fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.checkpoint.final_files import write_description
from spottrain.checkpoint.training_state import TrainingState
from spottrain.core import device as devices
from spottrain.core.time_split import STARTUP, WAITING
from spottrain.core.training_settings import (
    ARGUMENTS,
    AUTO,
    ActivationCheckpointing,
    LearningRateScaling,
    Profile,
    resolve,
)
from spottrain.data.plan import Dataset, Step, Stream
from spottrain.data.source import Batches, size_of, source
from spottrain.diagnostics.step_timer import StepTimer
from spottrain.distributed import process_group
from spottrain.distributed.dtensor import any_sharded
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.life import Phase
from spottrain.lifecycle.session import Session, current
from spottrain.techniques import accumulation, compilation, schedules
from spottrain.techniques import precision as precisions
from spottrain.techniques.dry_run import rehearsal
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.ema import EMA
from spottrain.techniques.memory_fit import MemoryFit
from spottrain.techniques.trackers import Tracker, Trackers, run_id
from spottrain.training import components
from spottrain.training.components import require_kinds, require_own_parameters, require_positive
from spottrain.training.data_parallel import Replica, clip
from spottrain.training.engine import Engine
from spottrain.training.evaluation import Evaluation, EvaluationSchedule
from spottrain.training.metrics_log import require_finite
from spottrain.training.phases import TrainerPhases
from spottrain.training.script_functions import checked_loss, checked_metrics, checked_weight
from spottrain.training.state_tree import AVERAGE, MAIN, SCALER, SCHEDULER, StateTree

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Metrics = Callable[[torch.nn.Module, Any], Mapping[str, Any]]
Weighing = Callable[[list[tuple[Any, float]]], list[tuple[Any, float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Result of `Trainer.fit`."""

    step: int
    """Optimizer steps done, in all attempts."""
    loss: float
    """Loss of the last optimizer step, over all ranks."""
    best: float | None
    """Lowest evaluation loss; None without an eval_dataset."""
    digest: str
    """SHA-256 of the final weights (`checkpoint.final_weights.digest`)."""
    output_uri: str
    """URI of the final weights; empty without a checkpoint URI."""
    ended_early: str = ""
    """The reason, if early stopping ended the training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHooks:
    """Functions that `Trainer` calls in each optimizer step, on all ranks, with the steps done before it.

    What they change must be a part of the model, of `extra` or of the optimizer: only that is saved. A step
    that a stop cuts short is made again by the next attempt, and so are its calls.

    Attributes:
        before: called once the first micro-batch is there, before its forward pass.
        gradients: called after the last backward pass, to change the gradients in place: they are averaged
            over ranks, have no loss scale, and are not clipped yet. In fp16 they may be NaN or infinite;
            then the step changes nothing.
        after: called after the optimizer step, before an evaluation, a save or a stop.
    """

    before: Callable[[int], None] | None = None
    gradients: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None


class Trainer:
    """Trains `model` on `train_dataset`, and resumes from the last checkpoint after an interruption.

    With several ranks (`spottrain run --nproc`, torchrun) a plain model is trained with DDP, and a model
    that `spottrain.shard` was called on with FSDP2. `spec.training` of the manifest wins over the arguments.

    Args:
        model: any torch module; moved to the device. DDP, FSDP2 and torch.compile stay as they are.
        optimizer: an optimizer over the model's parameters, or its name: "adamw", "sgd" or "adafactor".
        train_dataset: a map-style dataset (`len`, `[i]`), or a loader of this rank's micro-batches that can
            resume (torchdata's StatefulDataLoader; see `spottrain.data`).
        loss_fn: called as loss_fn(model, batch) on each micro-batch. Returns a scalar tensor, the mean over
            the samples of the batch.
        eval_dataset: a map-style dataset.
        loss_weight: called as loss_weight(batch). Returns the number of items, such as tokens, that the
            mean loss covers, if it differs from sample to sample.
        metrics: called as metrics(model, batch), in evaluation only. Returns further means by name.
        extra: further modules that are trained or have buffers, by name, such as a loss with weights. They
            are saved, averaged by EMA, and stored with the final weights as `extra.<name>...`; their
            gradients are averaged over ranks. A `loss_fn` or `metrics` that is a module is added by itself.
            Single parameters of the optimizer that are not the model's are saved as `loose.<number>`,
            without buffers of their module.
        max_steps: optimizer steps of the whole training. With `epochs`, whichever ends first.
        epochs: passes over `train_dataset`.
        global_batch_size: samples of one optimizer step over all ranks; a multiple of ranks x
            micro_batch_size.
        micro_batch_size: samples of one forward pass; None: no accumulation; "auto": the largest that fits.
        learning_rate: for an optimizer given by name.
        learning_rate_scaling: rule that scales the learning rate by the batch size.
        schedule: "cosine" (down to a tenth) or "constant", both after a warm-up; a function from the step to
            a factor on the learning rate; or a torch LRScheduler.
        warmup_steps: length of the warm-up in optimizer steps. Give one of the three units.
        warmup_epochs: the same in epochs.
        warmup_fraction: the same as a fraction of all steps.
        clip_grad_norm: greatest norm of all gradients together; None: no clipping.
        precision: "fp32", "tf32", "bf16", "fp16" (with a GradScaler, whose state is saved) or "auto".
        hooks: functions to call in each step, such as one that changes the gradients.
        ddp_options: keyword arguments of torch's DistributedDataParallel, such as `static_graph`.
        compile: whether to use torch.compile.
        compile_mode: "default", "reduce-overhead" or "max-autotune".
        activation_checkpointing: "none", "all", k for every k-th block, classes, or "auto": the least that
            fits into memory.
        ema_decay: decay of an average of the weights, which replaces them in evaluations and at the end.
        early_stopping: a `spottrain.EarlyStopping`, or its patience in evaluations.
        eval_every: optimizer steps between evaluations; None: once per epoch. The end is always evaluated.
        log_every: optimizer steps between two log lines.
        num_workers: loader processes per rank; "auto": this rank's CPU cores less one, from 1 to 8.
        prefetch_factor: as in torch's DataLoader.
        pin_memory: as in torch's DataLoader; None: on a GPU.
        collate_fn: as of torch's DataLoader.
        shuffle: whether to shuffle `train_dataset` in each epoch.
        drop_last: whether to leave out an epoch's last batch if it is smaller.
        steps_per_epoch: of a `train_dataset` that is a loader; required with several ranks.
        profile: window of steps to profile.
        trackers: experiment trackers of `spottrain.techniques.trackers`.
        seed: seed of the sample order; None: that of `spottrain.seed()` or `torch.manual_seed()`, of rank 0.
        deterministic: repeatable kernels only, so a resumed run equals an uninterrupted one bit for bit.
        device: None: this rank's GPU if there is one, else the CPU.
        session: the process's own session by default.

    Raises:
        ConfigurationError: an argument or a setting of the manifest is invalid.
    """

    _timer: StepTimer
    _replica: Replica
    _cold: bool
    """Whether this rank must compile before its first collective."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | str,
        train_dataset: Any,
        loss_fn: Loss,
        eval_dataset: Dataset | None = None,
        loss_weight: Callable[[Any], float] | None = None,
        metrics: Metrics | None = None,
        extra: Mapping[str, torch.nn.Module] | None = None,
        max_steps: int | None = None,
        epochs: int | None = None,
        global_batch_size: int = 32,
        micro_batch_size: int | str | None = None,
        learning_rate: float | None = None,
        learning_rate_scaling: LearningRateScaling | None = None,
        schedule: str | schedules.Shape | LRScheduler = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        warmup_fraction: float | None = None,
        clip_grad_norm: float | None = None,
        precision: str = "fp32",
        hooks: StepHooks | None = None,
        ddp_options: Mapping[str, Any] | None = None,
        compile: bool = False,
        compile_mode: str = "default",
        activation_checkpointing: str | int | type | Sequence[Any] | ActivationCheckpointing | None = "none",
        ema_decay: float | None = None,
        early_stopping: EarlyStopping | int | None = None,
        eval_every: int | None = None,
        log_every: int = 10,
        num_workers: int | str = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        steps_per_epoch: int | None = None,
        profile: Profile | None = None,
        trackers: Sequence[Tracker] | None = (),
        seed: int | None = None,
        deterministic: bool = False,
        device: str | torch.device | None = None,
        session: Session | None = None,
    ) -> None:
        script = {name: value for name, value in locals().items() if name in ARGUMENTS}
        script["seed"] = devices.seed_in_use() if seed is None else seed
        self.session = session or current()
        self.settings = resolve(self.session.run.training, **script)
        require_positive(log_every=log_every, eval_every=eval_every)
        require_kinds(model, optimizer)
        components.require_compiled_once(model, self.settings)
        self._given, self._ddp_options = model, ddp_options or {}
        self._hooks = hooks or StepHooks()
        self.loss_fn, self.log_every = checked_loss(loss_fn), log_every
        self.loss_weight = None if loss_weight is None else checked_weight(loss_weight)
        self.metrics = None if metrics is None else checked_metrics(metrics)
        whole = outside_parameters.of_trainer(model, optimizer, extra, {"loss": loss_fn, "metrics": metrics})
        self._set_up_model(whole, optimizer, learning_rate, device)
        self._make_batches(
            train_dataset, shuffle=shuffle, collate_fn=collate_fn, steps_per_epoch=steps_per_epoch
        )
        self.memory_fit = self._make_memory_fit()
        self.trackers = Trackers(
            components.trackers(trackers, self.settings, self.session), world=self.session.world
        )
        self._engine = Engine(self.session)
        self._engine.close_at_end(self.trackers)
        self._schedule_evaluations(eval_dataset, collate_fn, eval_every)
        self.step = 0
        self._data_wait = self.session.board.clock.data
        self.waiting: dict[str, Any] | None = None
        """The random state, while the loop waits for data."""
        self.last_loss = torch.tensor(0.0)
        objects = {SCHEDULER: self.schedule, SCALER: self.scaler, AVERAGE: self.ema}
        self._state = StateTree(
            "Trainer",
            self.model,
            {MAIN: self.optimizer},
            {},
            {name: each for name, each in objects.items() if each is not None},
            left_out=(SCALER, AVERAGE),
            dataset=getattr(self.batches, "dataset", None),
            replicas=self.session.world.distributed and not any_sharded(self.model),
            regroups=False,  # its schedule has a rate for each group
            over=lambda: self._engine.ended,
            incompatible=self._engine.incompatible,
        )

    def _set_up_model(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | str,
        learning_rate: float | None,
        device: str | torch.device | None,
    ) -> None:
        """Moves the model with its extras to this rank's device, then makes optimizer, scaler and EMA."""
        settings, world = self.settings, self.session.world
        if settings.deterministic:
            devices.make_deterministic()
        self.device = devices.choose(device or process_group.default_device(world))
        with self.session.board.clock.part(WAITING):  # for the other ranks
            process_group.join(world, self.device)
        self.precision = precisions.choose(settings.precision, self.device, world=world)
        self.precision.apply()
        self.model = model.to(self.device)
        self.optimizer = components.optimizer(optimizer, self.model, settings, learning_rate)
        require_own_parameters(self.model, self.optimizer)
        outside_parameters.require_unmixed(self.optimizer)
        self.scaler = self.precision.scaler(self.device)
        self.ema = None if settings.ema_decay is None else EMA(self.model, decay=settings.ema_decay)

    def _make_batches(self, train_dataset: Any, **loading: Any) -> None:
        """Makes the batches, and what depends on their number."""
        settings = self.settings
        self.batches = source(
            train_dataset,
            self.session.world,
            global_batch_size=settings.global_batch_size,
            micro_batch_size=None if settings.micro_batch_size == AUTO else settings.micro_batch_size,
            seed=process_group.from_rank0(settings.seed % 2**63, self.session.world),
            drop_last=settings.drop_last,
            num_workers=settings.num_workers,
            pin_memory=self.device.type == "cuda" if settings.pin_memory is None else settings.pin_memory,
            prefetch_factor=settings.prefetch_factor,
            **loading,
        )
        components.tell_what_cannot_act(settings, self.batches)
        per_epoch = self.batches.steps_per_epoch
        self.total_steps = settings.total_steps(per_epoch)
        self.schedule = components.schedule(self.optimizer, settings, self.total_steps, per_epoch)

    def _schedule_evaluations(
        self, eval_dataset: Dataset | None, collate: Any, eval_every: int | None
    ) -> None:
        """Makes the evaluation, its schedule and early stopping; without an eval_dataset it is never due."""
        evaluates, more = eval_dataset is not None, self.metrics is not None
        self.evaluations = EvaluationSchedule(
            None if eval_dataset is None else self._make_evaluation(eval_dataset, collate),
            model=self.model,
            every=eval_every or self.batches.steps_per_epoch or self.total_steps,
            total_steps=self.total_steps,
            stopping=components.early_stopping(self.settings, evaluates=evaluates, more=more),
            ema=self.ema,
            session=self.session,
            on_evaluation=self.trackers.log,
        )

    # --- the run ------------------------------------------------------------------------------------
    def fit(self) -> Result:
        """Trains to the end and stores the final weights; resumes from the last checkpoint if there is one.

        An interruption saves and leaves through SystemExit. The job is done once the weights are stored.
        Code after `fit` therefore runs at most once: it is not repeated if it fails or is interrupted.

        Returns:
            Step, losses, and where the final weights are.

        Raises:
            RunError: the run cannot go on, such as a checkpoint that does not match, or a NaN loss.
        """
        engine = self._engine
        restored = engine.begin(self.checkpoint_state(), total_steps=self.total_steps)
        with (
            closing(iter(self.batches)) as steps,  # loader workers last
            closing(engine),
            engine.failures(),
            self.memory_fit.explained(),
        ):
            self._begin(restored)
            if not self._train(steps):
                engine.stop()
            return self._finish()

    def _begin(self, restored: bool) -> None:
        """Prepares the first step of this attempt, once the engine has restored the checkpoint."""
        if not restored:
            self._engine.initialize(outside_parameters.inner(self.model))
            if self.session.world.distributed:
                devices.seed_rank(self.session.world.rank)
        self.trackers.begin(run_id(self.session.run.job_uid), self.step)
        self.session.board.update(state=self._first_state)
        self.memory_fit.fit()
        if self.evaluations.evaluation is not None and self.memory_fit.size is not None:
            self.evaluations.evaluation.batch_size = self.memory_fit.size
        self.evaluations.require()

    @property
    def _first_state(self) -> str:
        return "Compiling" if self.settings.compile else "Training"

    def _train(self, steps: Stream) -> bool:
        """Makes optimizer steps. Returns whether the training is complete; False: it must stop."""
        stopping, world = self.session.preemption, self.session.world
        stopped, self.waiting = False, None  # `fit` may have failed before
        self._assemble()
        modules = list(self.model.modules())
        # Whether a step is fetched at once, before its first pass; otherwise each micro-batch when it is due.
        whole = self._weighing is not None or not isinstance(self.batches, Batches)
        if self._weighing is not None:
            steps = ((step, iter(list(micro_batches))) for step, micro_batches in steps)
        self._evaluate()
        while self.step < self.total_steps and not self._over:
            self.waiting = random = self._random_before_wait()
            step, micro_batches = self._next(steps, awaited=whole)
            self._replica.give_buffers()
            before = devices.Boundary(modules, random) if len(step.shares) > 1 else None
            loss = torch.zeros((), device=self.device)
            try:
                if self._weighing is not None:
                    micro_batches = iter(self._weighing(micro_batches))
                for number in range(1, len(step.shares) + 1):
                    batch, share = self._next(micro_batches, awaited=number == 1 and not whole)
                    if stopping.stopping and not world.distributed:  # several ranks stop between steps
                        self._drop(before)
                        return False
                    loss += self._pass(batch, share, first=number == 1, last=number == len(step.shares))
            except Exception:
                self._drop(before)
                raise
            del micro_batches  # with `loss_weight` it holds all of the step's batches
            self.session.enter(Phase.STEP)  # from here on there is work to lose
            moved = self._update()
            self.step += 1
            self._state.live.note()
            self.batches.done(step)
            self.last_loss = loss
            self._count(step, loss)
            if moved:
                self.schedule.after_step()
            if self._hooks.after is not None:
                self._hooks.after(self.step - 1)
            self.session.enter(Phase.BOUNDARY)
            self._evaluate()
            if self._over or (stopped := self._boundary()):
                break
        return not (stopped or self.evaluations.interrupted or self.evaluations.due(self.step))

    def _settle(self) -> None:
        """Does after the first step what would make a later one stand out. It is a part of the start-up."""
        assert self._engine.monitor is not None
        clock = self.session.board.clock
        with clock.part(STARTUP):
            self._engine.monitor.count_work()
            devices.settle_memory()
        clock.mark()
        self._engine.metrics.restart()
        self._timer.restart()

    def _count(self, step: Step, loss: torch.Tensor) -> None:
        def of_all_ranks() -> float:
            # Reading it waits for the device.
            return float(process_group.all_reduce_sum(loss.clone(), self.session.world))

        first, rate = not self._engine.metrics.began, self.schedule.rate
        self._engine.count(self.step, loss=of_all_ranks, rate=rate, samples=step.samples, epoch=step.epoch)
        if first:
            self._settle()

    def _pass(self, batch: Any, share: float, *, first: bool, last: bool) -> torch.Tensor:
        """Runs forward and backward of one micro-batch. Returns its part of the step's loss."""
        timer, size = self._timer, self.session.world.size
        if first:
            self._enter(Phase.STEP)
            if self._hooks.before is not None:
                self._engine.before_step()  # it may change what a save still copies
                self._hooks.before(self.step)
        if self._cold:
            self._compile_first(batch)
            self._cold = False
        with accumulation.sync(self._replica.outer, last=last):
            with timer.h2d():
                batch = devices.to_device(batch, self.device)
            with timer.backward():  # forward too: it ends in no wait for other ranks
                with self.precision.autocast(self.device):
                    part = self.loss_fn(self._compiled, batch) * share
                whole = part if size == 1 else part * size  # DDP and FSDP take the mean over ranks
                self.scaler.scale(whole).backward()  # type: ignore[no-untyped-call]
            if self._own_gradients is not None and not last:
                self._own_gradients.keep()
        return part.detach()

    def _update(self) -> bool:
        """Makes one optimizer step with the accumulated gradients. Returns whether the weights changed."""
        with self._timer.checkpoint() if self._engine.copying else nullcontext():
            self._engine.before_step()
        with self._timer.compute():
            self._replica.average_gradients()
            if self._hooks.gradients is not None or self.settings.clip_grad_norm is not None:
                self.scaler.unscale_(self.optimizer)
            if self._hooks.gradients is not None:
                self._hooks.gradients(self.step)
            if self.settings.clip_grad_norm is not None:
                clip(self.model.parameters(), self.settings.clip_grad_norm)
            self.schedule.before_step(self.step)
            moved = precisions.step(self.scaler, self.optimizer)
            self._zero_grad()
            if moved and self.ema is not None:
                self.ema.update(self.step + 1)
            return moved

    def _drop(self, before: devices.Boundary | None) -> None:
        """Undoes a partial step."""
        self._zero_grad()
        if before is not None:
            before.restore()
            self._enter(Phase.BOUNDARY)

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self._own_gradients is not None:
            self._own_gradients.forget()

    def _next(self, source: Iterator[Any], *, awaited: bool) -> Any:
        """Returns the next item. While it is `awaited`, another thread may save and end the process."""
        outside = awaited and self._engine.metrics.began and not self.session.world.distributed
        if outside:
            self.session.enter(Phase.WAITING)
        with self._timer.data(), self._data_wait:
            found = next(source)
        if outside:
            self.session.enter(Phase.BOUNDARY)
        if awaited:
            self.waiting = None
        return found

    def _random_before_wait(self) -> dict[str, Any] | None:
        """Returns the training's random state: what is read in this process is read under one of its own.

        None where nothing else can set it, or nobody may save meanwhile.
        """
        elsewhere = isinstance(self.batches, Batches) and self.batches.num_workers
        return None if elsewhere or self.session.world.distributed else devices.random_copy()

    def _enter(self, phase: Phase) -> None:
        """Notes the phase, once there is work to lose. Until then a stop may end the process anywhere."""
        if self._engine.metrics.began:
            self.session.enter(phase)

    @property
    def _over(self) -> bool:
        return self.evaluations.interrupted or bool(self.evaluations.stop_reason)

    def _evaluate(self) -> None:
        if self.evaluations.evaluate(self.step, self._engine):
            self._engine.metrics.restart()
            self._timer.restart()

    def _boundary(self) -> bool:
        with self._timer.checkpoint():
            return self._engine.boundary(self.step)

    def _finish(self) -> Result:
        last = float(process_group.all_reduce_sum(self.last_loss.clone(), self.session.world))
        why = self.evaluations.stop_reason
        uri, final = self._engine.finish(
            self._weights, outside_parameters.beside(self.model), ended_early=why
        )
        process_group.leave()
        return Result(
            step=self.step,
            loss=last,
            best=self.evaluations.best.loss,
            digest=final,
            output_uri=uri,
            ended_early=why,
        )

    def _weights(self) -> dict[str, Any]:
        """The final weights: the average, if there is one."""
        weights = plain_state.model_state(self.model)
        averages = {} if self.ema is None else self.ema.by_weight()  # tied weights have several names
        return {name: averages.get(id(value), value) for name, value in weights.items()}

    # --- what a checkpoint holds ---------------------------------------------------------------------
    def checkpoint_state(self) -> TrainingState:
        """Returns the state to save and restore: all that the next step depends on."""
        return TrainingState(
            shared=self._shared_state,
            own=self._own_state,
            load=self._load_state,
            want=self._state.want(),
            stepped=self._stepped,
            by_rank0=self._state.by_rank0,
            describe=lambda folder: write_description(self.model, None, folder),
        )

    def _stepped(self) -> list[torch.Tensor]:
        """The tensors that `_update` alone changes. FSDP2 moves the memory of its own."""
        if any_sharded(self.model):
            return []
        averages = [] if self.ema is None else self.ema.by_weight().values()
        moments = (each for state in self.optimizer.state.values() for each in state.values())
        return [*self.model.parameters(), *averages, *(m for m in moments if isinstance(m, torch.Tensor))]

    def _shared_state(self) -> dict[str, Any]:
        """State that is equal on all ranks. Raises TrainingFailed if the loss is NaN or infinite."""
        require_finite(float(self.last_loss), self.step)
        if self.step < self.total_steps:
            self.schedule.before_step(self.step)  # as torch's schedulers do it after a step
        progress = {
            "step": self.step,
            **self._engine.record(),
            "data": None if self.batches.per_rank else self._position(),
            "trackers": self.trackers.state_dict(),
            "micro_batch_size": self.memory_fit.size,
            **self.evaluations.state_dict(),
        }
        return self._state.shared() | {"progress": progress}

    def _own_state(self) -> dict[str, Any]:
        """State of this rank alone."""
        return self._state.own() | {
            "random": devices.random_state(self.waiting),
            "loss": float(self.last_loss),
            "data": self._position() if self.batches.per_rank else None,
        }

    def _position(self) -> dict[str, Any]:
        return {"ranks": self.session.world.size, "state": self.batches.state_dict()}

    def _load_state(self, tree: dict[str, Any], own: dict[str, Any], new_rank: bool) -> None:
        """Restores it. Raises CheckpointError if it is from another model, optimizer or kind of data."""
        progress = self._state.load(tree, own, new_rank)["progress"]
        position = own["data"] if self.batches.per_rank else progress["data"]
        if position is not None and self.batches.per_rank:  # 0.3.0 has the state alone
            position = position if "state" in position else {"state": position}
        self.batches.load_state_dict(None if position is None else position["state"])
        self.step = progress["step"]
        self._engine.load_record(progress)
        if progress.get("trackers") is not None:
            self.trackers.load_state_dict(progress["trackers"])
        self.evaluations.load_state_dict(progress)
        self.last_loss = torch.tensor(0.0 if new_rank else own.get("loss", 0.0), device=self.device)
        self.memory_fit.saved_size = progress.get("micro_batch_size")
        self._engine.restore_random(None if new_rank else own["random"], self.step)

    # --- parts --------------------------------------------------------------------------------------
    def _assemble(self) -> None:
        """Makes what needs the restored model: replica and compiled model."""
        world, settings = self.session.world, self.settings
        self._weighing = self._make_weighing()
        self._timer = self._start()
        deterministic = settings.deterministic
        self._replica = Replica(
            self.model,
            self._given,
            world,
            self.device,
            deterministic=deterministic,
            options=self._ddp_options,
        )
        if self.ema is not None and not self.ema.updated:
            self.ema.begin()  # only now do all ranks have rank 0's weights
        ddp = plain_state.replica(self._replica.outer)
        if ddp is not None and not ddp._comm_hooks:  # the script's own hook stays
            ddp.register_comm_hook(None, self._timer.timed())
        self._compiled: Any = self._replica.outer
        if settings.compile:
            self._compiled = compilation.compiled(self._replica.outer, settings.compile_mode)
        graphs = settings.compile and settings.compile_mode != "default" and self.device.type == "cuda"
        self._own_gradients = compilation.OwnGradients(self.model) if graphs else None
        self._cold = world.distributed and (settings.compile or plain_state.is_compiled(self._given))

    def loss_of(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The script's loss, called with the model alone, without its extras."""
        return self.loss_fn(outside_parameters.inner(model), batch)

    def _make_memory_fit(self) -> MemoryFit:
        return MemoryFit(
            self.settings.micro_batch_size,
            self.settings.activation_checkpointing,
            model=self.model,
            optimizer=self.optimizer,
            loss_of=self.loss_of,
            source=self.batches,
            precision=self.precision,
            device=self.device,
            world=self.session.world,
        )

    def _make_evaluation(self, eval_dataset: Dataset, collate: Any) -> Evaluation:
        if not size_of(eval_dataset, "eval_dataset"):
            raise ConfigurationError("Trainer(eval_dataset=...) is empty: give it samples, or leave it out")
        settings, session, metrics = self.settings, self.session, self.metrics
        micro, workers = settings.micro_batch_size, settings.num_workers

        def measure(model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
            more = metrics(outside_parameters.inner(model), batch) if metrics else {}
            return {"loss": self.loss_of(model, batch), **more}

        return Evaluation(
            dataset=eval_dataset,
            measure=measure,
            batch_size=micro if isinstance(micro, int) else settings.global_batch_size // session.world.size,
            device=self.device,
            autocast=lambda: self.precision.autocast(self.device),
            workers=workers if isinstance(workers, int) else self.batches.num_workers,
            collate=collate,
            weight=self.loss_weight,
            world=session.world,
            alive=session.board.heartbeat.beat,
        )

    def _start(self) -> StepTimer:
        """Starts log and diagnostics. Returns the timer of a step's phases."""
        self._engine.start(
            step=self.step,
            total_steps=self.total_steps,
            device=self.device,
            log_every=self.log_every,
            state=self._first_state,
            profile=self.settings.profile,
            phases=TrainerPhases(
                model=self.model,
                loss_of=self.loss_of,
                batches=self.batches,
                settings=self.settings,
                precision=self.precision,
                device=self.device,
                interval_auto=self.session.run.interval.auto,
                local_ranks=self.session.world.local_size,
            ),
            on_line=self.trackers.log,
        )
        assert self._engine.monitor is not None
        return self._engine.monitor.timer

    def _make_weighing(self) -> Weighing | None:
        """Returns what weighs the micro-batches of a step by `loss_weight`; None: weighed by samples."""
        count, batches = self.loss_weight, self.batches
        if count is None:
            return None

        def spare() -> Any:
            """First micro-batch of the set with a weight above 0: the same in each attempt."""
            assert isinstance(batches, Batches)
            size = batches.plan.micro_batch_size
            for start in range(0, len(batches.dataset), size):
                batch = batches.sample(size, start=start)
                if count(batch):
                    return batch
                self.session.board.heartbeat.beat()  # the search may be long
            return None

        made = spare if isinstance(batches, Batches) else None
        return accumulation.Reweighed(count, self.session.world, spare=made)

    def _compile_first(self, batch: Any) -> None:
        """Compiles before the first collective, so that no rank waits in it while another compiles."""
        batch = devices.to_device(batch, self.device)

        def step() -> None:
            with self.precision.autocast(self.device):
                loss = self.loss_fn(self._compiled, batch)
            loss.backward()  # type: ignore[no-untyped-call]

        with rehearsal(self.model):  # self.model includes its extras
            compilation.warm_up(step, self._compiled)
