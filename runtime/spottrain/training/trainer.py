"""The training loop, and what a user's script calls: `Trainer(...).fit()`.

    claim HEAD -> restore -> fit -> [ micro-batches -> step -> log -> evaluate? -> save? -> stop? ] -> finish

The loop is one function, `_train`. Position is optimizer steps: whatever a stop cuts short inside a step
is dropped and done again after the resume. What keeps the steps from being lost is `keeper`; what makes
them fast is in `levers`, and what is slow about them is told by `watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.checkpoint.final_weights import BESIDE
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.training_settings import ARGUMENTS, resolve
from spottrain.core.training_spec import (
    AUTO,
    ActivationCheckpointing,
    LearningRateScaling,
    Profile,
)
from spottrain.data import Batches, Dataset, Stream
from spottrain.data.source import size_of, source
from spottrain.data.worker_memory import Room
from spottrain.diagnostics.trainer_watch import TrainerMonitor
from spottrain.distributed import process_group
from spottrain.errors import CheckpointError, ConfigurationError, PeerLost, RunError
from spottrain.lifecycle.coordinator import Keeper, TrainingState
from spottrain.lifecycle.session import Session, current
from spottrain.techniques import accumulation, compilation, gradient_compression, schedules
from spottrain.techniques import precision as precisions
from spottrain.techniques.dry_run import rehearsal
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.ema import EMA
from spottrain.techniques.gradient_compression import Compression
from spottrain.techniques.memory_fit import Fitting
from spottrain.techniques.oom_history import Shortages
from spottrain.techniques.trackers import Tracker, Trackers
from spottrain.training import components, optimizer_setup
from spottrain.training.components import require_kinds, require_own_parameters, require_positive
from spottrain.training.data_parallel import Replica, clip
from spottrain.training.evaluation import Evaluation
from spottrain.training.evaluation_schedule import Judge
from spottrain.training.metrics_log import Meter, require_finite

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Metrics = Callable[[torch.nn.Module, Any], Mapping[str, Any]]
Weighing = Callable[[list[tuple[Any, float]]], list[tuple[Any, float]]]
COMPRESSION: Final = "compression"
POLL_SHARE: Final = 0.1
"""Share of a notice that the training thread has to come back from the data, before another one saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What `fit` returns."""

    step: int
    loss: float
    """Of the last optimizer step."""
    best: float | None
    """Lowest evaluation loss; None without an eval_set."""
    digest: str
    """SHA-256 of the final weights (`weights.digest`)."""
    output_uri: str
    """Where they are; empty without a checkpoint URI."""
    ended_early: str = ""
    """Why, where early stopping ended it."""


class Trainer:
    """Trains `model` on `train_set`, and after an interruption goes on where it was saved.

    model, optimizer: any torch module and an optimizer over its parameters; moved to the device. Or the
        optimizer's name ("adamw", "sgd", "adafactor"), with `learning_rate`.
    With several ranks (`spottrain run --nproc`, torchrun) a plain model is trained by DDP, and one that
        `spottrain.shard` was called on by FSDP2.
    train_set, eval_set: map-style datasets (`len`, `[i]`); train_set may also be a loader of this rank's
        micro-batches that can go on where it was (torchdata's StatefulDataLoader; see `spottrain.data`).
    loss(model, batch): scalar tensor, the mean over the samples of the batch. Called on micro-batches.
    loss_weight(batch): over how many items that mean is, such as tokens, where samples have unequally many.
    metrics(model, batch): further means by name, taken in evaluation only.
    extra: further modules that are trained, or have buffers, by name, such as a loss with weights; saved,
        averaged and left with the final weights as `extra.<name>...`, their gradients averaged over ranks.
        A loss or metrics that is a module itself is one of them. Other parameters of the optimizer that are
        not the model's are saved too, as `loose.<number>`; but not where their module has buffers besides.
    max_steps, epochs: optimizer steps, or passes over train_set; whichever ends first.
    batch_size: samples of one optimizer step, of all ranks together; a multiple of ranks x micro_batch_size,
        which is the number of samples of one forward pass; "auto" finds the largest that fits.
    precision: "fp32", "tf32", "bf16", "fp16" with a GradScaler, whose state is saved, or "auto".
    compile, compile_mode: torch.compile; "default", "reduce-overhead", "max-autotune".
    activation_checkpointing: "none", "all", k for each k-th block, classes, or "auto": the least that fits.
    steps_per_epoch: of a train_set that is a loader; needed with several ranks.
    schedule: "cosine", down to a tenth, or "constant" (both after `warmup_steps`, `warmup_epochs` or
        `warmup_fraction`), a function of the step that gives a factor on the learning rate, or a torch
        LRScheduler. learning_rate_scaling: by the batch size.
    ema_decay: of an average of the weights, which evaluations and the final weights are then.
    gradient_compression: "none", "bf16", "powerSGD", between ranks of DDP.
    early_stopping: a `spottrain.EarlyStopping`, or its patience.
    eval_every: optimizer steps between evaluations; None: once per epoch. There is always one at the end.
    workers: loader processes; "auto" by what the first steps take. collate: as of torch's DataLoader.
    drop_last: leave out an epoch's last batch where it would be smaller.
    profile: a `spottrain.Profile`. trackers: of `spottrain.techniques.trackers`.
    seed: of the order of samples; None: what `spottrain.seed()` was given.
    deterministic: repeatable kernels only, so that a resumed run equals an uninterrupted one bit for bit.

    `spec.training` of the manifest wins over these arguments. Raises ConfigurationError.
    """

    watch: TrainerMonitor
    """From the first step of an attempt on."""
    _meter: Meter
    _replica: Replica
    _cold: bool
    """Whether this rank is to compile before it waits for another one."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | str,
        train_set: Any,
        loss: Loss,
        eval_set: Dataset | None = None,
        loss_weight: Callable[[Any], float] | None = None,
        metrics: Metrics | None = None,
        extra: Mapping[str, torch.nn.Module] | None = None,
        max_steps: int | None = None,
        epochs: int | None = None,
        batch_size: int = 32,
        micro_batch_size: int | str | None = None,
        learning_rate: float | None = None,
        learning_rate_scaling: LearningRateScaling | None = None,
        schedule: str | schedules.Shape | LRScheduler = "cosine",
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        warmup_fraction: float | None = None,
        clip_grad_norm: float | None = None,
        precision: str = "fp32",
        compile: bool = False,
        compile_mode: str = "default",
        activation_checkpointing: str | int | type | Sequence[Any] | ActivationCheckpointing | None = "none",
        ema_decay: float | None = None,
        gradient_compression: str = "none",
        early_stopping: EarlyStopping | int | None = None,
        eval_every: int | None = None,
        log_every: int = 10,
        workers: int | str = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
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
        self.loss, self.metrics, self.loss_weight, self.log_every = loss, metrics, loss_weight, log_every
        whole = outside_parameters.of_trainer(model, optimizer, extra, {"loss": loss, "metrics": metrics})
        self._place(whole, optimizer, learning_rate, device)
        self._feed(train_set, shuffle=shuffle, collate=collate, steps_per_epoch=steps_per_epoch)
        self.fitting = self._make_fitting()
        self.trackers = Trackers(
            components.trackers(trackers, self.settings, self.session), world=self.session.world
        )
        self.session.close_at_end(self.trackers)
        self._judge_by(eval_set, collate, eval_every)
        self.step = 0
        self.waiting: dict[str, Any] | None = None
        self.intact = False
        """Whether the state is still the one after the last step, in the midst of the next one."""
        """The random state, while data are awaited."""
        self.last_loss = torch.tensor(0.0)
        self.saved_compression: tuple[Any, Any] | None = None
        """Of the checkpoint: shared, and this rank's own."""

    def _place(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | str,
        learning_rate: float | None,
        device: str | torch.device | None,
    ) -> None:
        """The model, with what is trained beside it, and what is made of the parameters; on this rank's
        device."""
        settings, world = self.settings, self.session.world
        if settings.deterministic:
            devices.make_deterministic()
        self.device = devices.choose(device or process_group.default_device(world))
        process_group.join(world, self.device)
        self.precision = precisions.agreed(settings.precision, self.device, world)
        self.precision.apply()
        self.model = model.to(self.device)
        self.optimizer = optimizer_setup.optimizer(optimizer, self.model, settings, learning_rate)
        require_own_parameters(self.model, self.optimizer)
        outside_parameters.require_unmixed(self.optimizer)
        self.scaler = self.precision.scaler(self.device)
        self.ema = None if settings.ema_decay is None else EMA(self.model, decay=settings.ema_decay)

    def _feed(self, train_set: Any, **loading: Any) -> None:
        """The batches, and what depends on how many there are."""
        settings = self.settings
        self.batches = source(
            train_set,
            self.session.world,
            batch_size=settings.batch_size,
            micro_batch_size=None if settings.micro_batch_size == AUTO else settings.micro_batch_size,
            seed=settings.seed,
            drop_last=settings.drop_last,
            workers=settings.workers,
            pin_memory=components.pinned(settings, self.device),
            prefetch_factor=settings.prefetch_factor,
            **loading,
        )
        components.tell_what_cannot_act(settings, self.batches)
        per_epoch = self.batches.steps_per_epoch
        self.total_steps = settings.total_steps(per_epoch)
        self.schedule = optimizer_setup.schedule(self.optimizer, settings, self.total_steps, per_epoch)

    def _judge_by(self, eval_set: Dataset | None, collate: Any, eval_every: int | None) -> None:
        evaluates, more = eval_set is not None, self.metrics is not None
        self.judge = Judge(
            None if eval_set is None else self._make_evaluation(eval_set, collate),
            model=self.model,
            every=eval_every or self.batches.steps_per_epoch or self.total_steps,
            total_steps=self.total_steps,
            stopping=components.early_stopping(self.settings, evaluates=evaluates, more=more),
            ema=self.ema,
            session=self.session,
            told=self.trackers.log,
        )

    # --- the run ------------------------------------------------------------------------------------
    def fit(self) -> Result:
        """Trains to the end and stores the weights; goes on from the last checkpoint if there is one.

        An interruption saves and leaves through SystemExit. Raises RunError.
        What the script does after `fit` runs at most once, and never again once the weights are stored: the
        job is done then, whatever becomes of the rest.
        """
        if self.session.completed:
            raise ConfigurationError("fit() was called a second time: a run trains once; make it two scripts")
        self.keeper = Keeper(self.session, self.checkpoint_state(), total_steps=self.total_steps)
        with closing(iter(self.batches)) as steps:  # last, for to end its workers takes time
            try:
                self._begin()
                if not self._train(steps):
                    self.keeper.ends.interrupted()
                return self._finish()
            except PeerLost as error:
                self.keeper.end_without(error)
            except BaseException as error:
                if (lost := self._meaning_of(error)) is not None:
                    self.keeper.end_without(lost)
                self.session.broken_by_stop(error)
                self.keeper.ends.give_up()
                raise
            finally:  # a notice is short: what was trained is safe by now
                self._close()

    def _close(self) -> None:
        if hasattr(self, "watch"):  # it was made
            self.watch.close()
        self.trackers.close(self.session.outcome)

    def _begin(self) -> None:
        self.session.board.update(total_steps=self.total_steps, step=0)
        if not self.keeper.begin() and self.session.world.distributed:
            devices.seed_rank(self.session.world.rank)
        self.trackers.begin(components.run_id(self.session), self.step)
        self.session.board.update(state="Compiling" if self.settings.compile else "Training")
        self.fitting.fit()
        self._use_findings()
        self.judge.require()

    def _train(self, steps: Stream) -> bool:
        """Optimizer steps until the end (True) or until a stop is asked for (False)."""
        stopping, world = self.session.interruption, self.session.world
        self._assemble()
        buffers, watch = devices.saved_buffers(self.model), self.watch
        self._judge()
        while self.step < self.total_steps and not self._over:
            self.intact = True
            with watch.split.data():
                step, micro_batches = self._awaited(lambda: next(steps))
            self._replica.give_buffers()
            several = len(step.shares) > 1 or self.settings.micro_batch_size == AUTO
            before = devices.Boundary(buffers) if several else None
            loss, failed = torch.zeros((), device=self.device), None
            try:
                for number, (batch, share) in enumerate(self._fetched(micro_batches), 1):
                    if stopping.stopping and not world.distributed:  # several ranks stop between steps
                        self._drop(before)
                        return False
                    loss += self._pass(batch, share, last=number == len(step.shares))
            except Exception as error:
                failed = self.fitting.lacks_memory(error)
                if not failed:
                    self._drop(before)
                    self.intact |= before is not None
                    raise
            if failed:  # out here nothing holds the frames, and they the tensors, any more
                self._drop(before)
                self.fitting.shrink()
                self._weighing = self._make_weighing()  # its stand-in was larger
                continue
            stopping.let_end(None)  # from here on there is work to lose
            moved = self._update()
            self.step += 1
            self.batches.done(step)
            self.last_loss = loss
            if not self._meter.began:
                devices.settle_memory()
                watch.split.restart()
            self._meter.tell(self.step, step, loss, self.schedule.rate)
            if moved:
                self.schedule.after_step()
            watch.step_done()
            self.intact = True
            self._judge()
            if self._over or self._boundary():
                break
        return not self.judge.cut and not self._stopped and not self.judge.due(self.step)

    def _pass(self, batch: Any, share: float, *, last: bool) -> torch.Tensor:
        """Forward and backward of one micro-batch; its part of the step's loss."""
        split, size = self.watch.split, self.session.world.size
        self.intact = False
        if self._cold:
            self._compile_first(batch)
            self._cold = False
        with accumulation.sync(self._replica.outer, last=last):
            with split.h2d():
                batch = devices.to_device(batch, self.device)
            with split.compute(), self.precision.autocast(self.device):
                part = self.loss(self._compiled, batch) * share
            with split.backward():  # DDP and FSDP take the mean over ranks
                self.scaler.scale(part * size).backward()  # type: ignore[no-untyped-call]
        return part.detach()

    def _update(self) -> bool:
        """One optimizer step with the gradients that were gathered; whether the weights moved."""
        with self.watch.split.compute():
            self._replica.average_gradients()
            if self.settings.clip_grad_norm is not None:
                self.scaler.unscale_(self.optimizer)
                clip(self.model.parameters(), self.settings.clip_grad_norm)
            self.schedule.before_step(self.step)
            moved = precisions.step(self.scaler, self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
            if moved and self.ema is not None:
                self.ema.update(self.step + 1)
            return moved

    def _drop(self, before: devices.Boundary | None) -> None:
        """A partial step, as if it had not begun."""
        self.optimizer.zero_grad(set_to_none=True)
        if before is not None:
            before.restore()

    def _fetched(self, micro_batches: Iterator[tuple[Any, float]]) -> Iterator[tuple[Any, float]]:
        def fetch() -> tuple[Any, float] | None:
            with self.watch.split.data():
                return next(micro_batches, None)

        if self._weighing is not None:
            yield from self._weighing(self._awaited(lambda: list(iter(fetch, None))))
            return
        yield self._awaited(fetch)
        yield from iter(fetch, None)

    def _awaited(self, get: Callable[[], Any]) -> Any:
        """What the loader gives; while it does not, and it may never, another thread may save and end."""
        if not self.batches.workers or not self._meter.began or self.session.world.distributed:
            return get()
        stopping = self.session.interruption
        stopping.let_end(self.keeper.ends.between_steps, after=POLL_SHARE)
        # A stream is read under a random state of its own, which is not to be taken for the training's.
        self.waiting = None if isinstance(self.batches, Batches) else devices.random_state()
        found = get()
        stopping.let_end(None)
        self.waiting = None
        return found

    @property
    def _over(self) -> bool:
        return self.judge.cut or bool(self.judge.enough)

    def _judge(self) -> None:
        if self.judge.due(self.step):
            self._use_findings()
        if self.judge.judge(self.step, self.keeper):
            self._meter.restart()
            self.watch.split.restart()

    def _boundary(self) -> bool:
        with self.watch.split.checkpoint():
            self._stopped = self.keeper.boundary(self.step)
        return self._stopped

    def _finish(self) -> Result:
        last = float(process_group.total(self.last_loss.clone(), self.session.world))
        self.session.board.update(ended_early=self.judge.enough)
        uri, final = self.keeper.finish(self._weights, outside_parameters.beside(self.model))
        process_group.leave()
        return Result(
            step=self.step,
            loss=last,
            best=self.judge.best.loss,
            digest=final,
            output_uri=uri,
            ended_early=self.judge.enough,
        )

    def _weights(self) -> dict[str, Any]:
        """What is stored in the end: the average, where there is one."""
        weights = plain_state.model_state(self.model)
        averages = {} if self.ema is None else self.ema.by_weight()  # tied ones have several names
        return {name: averages.get(id(value), value) for name, value in weights.items()}

    # --- what a checkpoint holds ---------------------------------------------------------------------
    def checkpoint_state(self) -> TrainingState:
        """What the next step depends on."""
        return TrainingState(
            shared=self._shared_state,
            own=self._own_state,
            load=self._load_state,
            intact=lambda: self.intact,
            want=plain_state.wanted(self.model),
            of_first=plain_state.buffers(self.model),
        )

    def _shared_state(self) -> dict[str, Any]:
        """Everything that is equal on all ranks."""
        require_finite(float(self.last_loss), self.step)
        return {
            plain_state.MODEL: plain_state.model_state(self.model),
            BESIDE: outside_parameters.beside(self.model),
            plain_state.OPTIMIZER: plain_state.optimizer_state(self.model, self.optimizer),
            "kind": type(self.optimizer).__name__,
            plain_state.EMA: None if self.ema is None else self.ema.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            COMPRESSION: self.compression.state_dict(),
            "data": None if self.batches.per_rank else self.batches.state_dict(),
            "progress": {
                "step": self.step,
                "trained": self.keeper.trained,
                "trackers": self.trackers.state_dict(),
                "micro_batch_size": self.fitting.size,
                "micro_batch_room": self.fitting.room,
                **self.judge.state_dict(),
            },
        }

    def _own_state(self) -> dict[str, Any]:
        """The rest of it, which each rank has of its own."""
        return {
            "random": self.waiting or devices.random_state(),
            "loss": float(self.last_loss),
            "data": self.batches.state_dict() if self.batches.per_rank else None,
            COMPRESSION: self.compression.own_state_dict(),
        }

    def _load_state(self, tree: dict[str, Any], own: dict[str, Any], new_rank: bool) -> None:
        """Raises CheckpointError where the checkpoint is of another model, optimizer or data."""
        was, now = tree.get("kind"), type(self.optimizer).__name__
        mismatch = None if was in (None, now) else f"its optimizer is {was}, and here it is {now}"
        mismatch = mismatch or plain_state.load_model(self.model, tree[plain_state.MODEL])
        mismatch = mismatch or plain_state.load_optimizer(
            self.model, self.optimizer, tree[plain_state.OPTIMIZER]
        )
        if mismatch is not None:
            raise self._incompatible(mismatch)
        try:
            self.schedule.load_state_dict(tree["schedule"])
            if self.scaler.is_enabled() and tree["scaler"]:
                self.scaler.load_state_dict(tree["scaler"])
        except (ValueError, KeyError) as error:
            raise self._incompatible(f"its schedule does not fit ({error})") from error
        self._load_techniques(tree, own, new_rank)
        self.batches.load_state_dict(own["data"] if self.batches.per_rank else tree["data"])
        progress = tree["progress"]
        self.step, self.keeper.trained = progress["step"], progress["trained"]
        self.judge.load_state_dict(progress)
        self.last_loss = torch.tensor(0.0 if new_rank else own.get("loss", 0.0), device=self.device)
        self.fitting.before = progress.get("micro_batch_size")
        self.fitting.room_before = progress.get("micro_batch_room")
        if new_rank:
            log.event("new-rank", why="the checkpoint has no random state of this rank; it gets a fresh one")
            devices.seed_rank(self.session.world.rank)
        else:
            devices.set_random_state(own["random"])

    def _load_techniques(self, tree: dict[str, Any], own: dict[str, Any], new_rank: bool) -> None:
        """A checkpoint may be older than a technique, or of a run without it."""
        if self.ema is not None:
            try:
                components.restore_average(self.ema, tree.get(plain_state.EMA))
            except ValueError as error:
                raise self._incompatible(str(error)) from error
        if tree.get(COMPRESSION) is not None:  # laid out when DDP is there
            self.saved_compression = (tree[COMPRESSION], None if new_rank else own.get(COMPRESSION))
        if tree["progress"].get("trackers") is not None:
            self.trackers.load_state_dict(tree["progress"]["trackers"])

    def _incompatible(self, why: str) -> CheckpointError:
        return plain_state.incompatible(self.session.run.checkpoint_uri, why)

    # --- parts --------------------------------------------------------------------------------------
    def _assemble(self) -> None:
        """What needs the restored model: the replica, what ranks send each other, the compiled model."""
        world, settings = self.session.world, self.settings
        self._stopped, self._weighing = False, self._make_weighing()
        self.watch = self._make_watch()
        deterministic = settings.deterministic
        self._replica = Replica(self.model, world, self.device, deterministic=deterministic)
        if self.ema is not None and not self.ema.updated:
            self.ema.begin()  # all ranks have rank 0's weights only now
        self.compression = self._compress_gradients()
        if self.saved_compression is not None:
            self.compression.load_state_dict(*self.saved_compression)
        self._compiled: Any = self._replica.outer
        if settings.compile:
            self._compiled = compilation.compiled(self._replica.outer, settings.compile_mode)
        self._cold = settings.compile and world.distributed
        self._meter = self._make_meter()

    def _loss_of(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The loss of the model as the script has it, where more than that is trained."""
        return self.loss(outside_parameters.inner(model), batch)

    def _make_fitting(self) -> Fitting:
        return Fitting(
            self.settings,
            model=self.model,
            optimizer=self.optimizer,
            loss_of=self._loss_of,
            source=self.batches,
            precision=self.precision,
            device=self.device,
            world=self.session.world,
            shortages=Shortages(store=self.session.store, job_uid=self.session.run.job_uid),
        )

    def _make_evaluation(self, eval_set: Dataset, collate: Any) -> Evaluation:
        if not size_of(eval_set, "eval_set"):
            raise ConfigurationError("Trainer(eval_set=...) is empty: give it samples, or leave it out")
        settings, session, metrics = self.settings, self.session, self.metrics
        micro, workers = settings.micro_batch_size, settings.workers

        def measure(model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
            more = metrics(outside_parameters.inner(model), batch) if metrics else {}
            return {"loss": self._loss_of(model, batch), **more}

        return Evaluation(
            dataset=eval_set,
            measure=measure,
            batch_size=micro if isinstance(micro, int) else settings.batch_size // session.world.size,
            device=self.device,
            autocast=lambda: self.precision.autocast(self.device),
            workers=workers if isinstance(workers, int) else 0,
            collate=collate,
            weight=self.loss_weight,
            room=Room(eval_set, collate, name="eval_set", ranks=session.world.local_size),
            world=session.world,
            until=lambda: session.interruption.deadline,  # infinite while nobody has asked for an end
            alive=session.board.pulse.beat,
        )

    def _make_meter(self) -> Meter:
        return Meter(
            self.session.board,
            born=self.session.born,
            total_steps=self.total_steps,
            log_every=self.log_every,
            world=self.session.world,
            told=self.trackers.log,
        )

    def _make_watch(self) -> TrainerMonitor:
        return TrainerMonitor(
            self.settings,
            self.session,
            model=self.model,
            loss_of=self._loss_of,
            source=self.batches,
            fitting=self.fitting,
            precision=self.precision,
            device=self.device,
            start=self.step,
            total_steps=self.total_steps,
        )

    def _compress_gradients(self) -> Compression:
        """How ranks exchange gradients, timed."""
        outer, kind = self._replica.outer, self.settings.gradient_compression
        around: Callable[..., Any] = self.watch.split.timed
        if kind == "none" and isinstance(outer, DistributedDataParallel):
            outer.register_comm_hook(None, around())
        return gradient_compression.attach(
            outer,
            kind,
            start_step=gradient_compression.start(self.total_steps, self.schedule.warmup_steps),
            precision=self.precision.name,
            around=around,
        )

    def _make_weighing(self) -> Weighing | None:
        """Weighs the micro-batches of a step by `loss_weight`; None: by samples, as they come."""
        count, batches = self.loss_weight, self.batches
        if count is None:
            return None

        def spare() -> Any:
            """The first micro-batch of the set that counts: the same in each attempt."""
            assert isinstance(batches, Batches)
            size = batches.plan.micro_batch_size
            for start in range(0, len(batches.dataset), size):
                batch = self.fitting.sample(size, start=start)
                if count(batch):
                    return batch
                self.session.board.pulse.beat()  # it may be far
            return None

        made = spare if isinstance(batches, Batches) else None
        return accumulation.Reweighed(count, self.session.world, spare=made)

    def _compile_first(self, batch: Any) -> None:
        """Compiles before the first collective, so that no rank waits in one while another compiles."""
        batch = devices.to_device(batch, self.device)

        def step() -> None:
            with self.precision.autocast(self.device):
                loss = self.loss(self._compiled, batch)
            loss.backward()  # type: ignore[no-untyped-call]

        with rehearsal(self.model):  # it knows of what is trained beside the model, too
            compilation.warm_up(step, self._compiled)

    def _use_findings(self) -> None:
        """Has the evaluation use what was found by trial since it was made."""
        if self.judge.evaluation is not None:
            components.use_findings(
                self.judge.evaluation,
                micro_batch_size=self.fitting.size,
                workers=self.batches.workers if self.settings.workers == AUTO else None,
            )

    def _meaning_of(self, error: BaseException) -> RunError | None:
        """What an error means that ends this rank alone, and then the others; None: just itself."""
        if self.step < self.total_steps and (short := self.fitting.out_of_memory(error, self.step)):
            return short
        return process_group.peer_lost(error, self.session.world, self.session.peer_gone)
