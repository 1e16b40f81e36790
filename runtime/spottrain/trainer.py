"""The training loop, and what a user's script calls: `Trainer(...).fit()`.

    claim HEAD -> restore -> fit -> [ micro-batches -> step -> log -> evaluate? -> save? -> stop? ] -> finish

The loop is one function, `_train`. Position is optimizer steps: whatever a stop cuts short inside a step
is dropped and done again after the resume. What keeps the steps from being lost is `keeper`; what makes
them fast is in `levers`, and what is slow about them is told by `watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain import device as devices
from spottrain import optimizing, parts, schedule, trainerstate
from spottrain.arguments import require_kinds, require_own_parameters, require_positive
from spottrain.checkpoint import modelstate, trained
from spottrain.data import Batches, Dataset, Stream
from spottrain.data.source import source
from spottrain.errors import ConfigurationError, PeerLost
from spottrain.judge import Judge
from spottrain.keeper import Keeper
from spottrain.levers import accumulation, compiling
from spottrain.levers import precision as precisions
from spottrain.levers.ema import EMA
from spottrain.levers.stopping import EarlyStopping
from spottrain.levers.trackers import Tracker, Trackers
from spottrain.meter import Meter
from spottrain.parts import Result
from spottrain.process.session import Session, current
from spottrain.ranks import parallel
from spottrain.settings import ARGUMENTS, resolve
from spottrain.training import AUTO, ActivationCheckpointing, LearningRateScaling, Profile
from spottrain.watch import Watch

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Metrics = Callable[[torch.nn.Module, Any], Mapping[str, Any]]
POLL_SHARE: Final = 0.1
"""Share of a notice that the training thread has to come back from the data, before another one saves."""


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
    profile: a `spottrain.Profile`. trackers: of `spottrain.levers.trackers`.
    seed: of the order of samples; None: what `spottrain.seed()` was given.
    deterministic: repeatable kernels only, so that a resumed run equals an uninterrupted one bit for bit.

    `spec.training` of the manifest wins over these arguments. Raises ConfigurationError.
    """

    watch: Watch
    """From the first step of an attempt on."""
    _meter: Meter
    _replica: parallel.Replica
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
        schedule: str | schedule.Shape | LRScheduler = "cosine",
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
        whole = trained.of_trainer(model, optimizer, extra, {"loss": loss, "metrics": metrics})
        self._place(whole, optimizer, learning_rate, device)
        self._feed(train_set, shuffle=shuffle, collate=collate, steps_per_epoch=steps_per_epoch)
        self.fitting = parts.fitting(self)
        self.trackers = Trackers(
            parts.trackers(trackers, self.settings, self.session), world=self.session.world
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
        self.device = devices.choose(device or parallel.default_device(world))
        parallel.join(world, self.device)
        self.precision = precisions.agreed(settings.precision, self.device, world)
        self.precision.apply()
        self.model = model.to(self.device)
        self.optimizer = optimizing.optimizer(optimizer, self.model, settings, learning_rate)
        require_own_parameters(self.model, self.optimizer)
        trained.require_unmixed(self.optimizer)
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
            pin_memory=parts.pinned(settings, self.device),
            prefetch_factor=settings.prefetch_factor,
            **loading,
        )
        parts.tell_what_cannot_act(settings, self.batches)
        per_epoch = self.batches.steps_per_epoch
        self.total_steps = settings.total_steps(per_epoch)
        self.schedule = optimizing.schedule(self.optimizer, settings, self.total_steps, per_epoch)

    def _judge_by(self, eval_set: Dataset | None, collate: Any, eval_every: int | None) -> None:
        evaluates, more = eval_set is not None, self.metrics is not None
        self.judge = Judge(
            None if eval_set is None else parts.evaluation(self, eval_set, collate),
            model=self.model,
            every=eval_every or self.batches.steps_per_epoch or self.total_steps,
            total_steps=self.total_steps,
            stopping=parts.early_stopping(self.settings, evaluates=evaluates, more=more),
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
        self.keeper = Keeper(self.session, trainerstate.of(self), total_steps=self.total_steps)
        with closing(iter(self.batches)) as steps:  # last, for to end its workers takes time
            try:
                self._begin()
                if not self._train(steps):
                    self.keeper.ends.interrupted()
                return self._finish()
            except PeerLost as error:
                self.keeper.end_without(error)
            except BaseException as error:
                if (lost := parts.cannot_go_on(self, error)) is not None:
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
        self.trackers.begin(parts.run_id(self.session), self.step)
        self.session.board.update(state="Compiling" if self.settings.compile else "Training")
        self.fitting.fit()
        parts.keep_up(self)
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
                self._weighing = parts.weighing(self)  # its stand-in was larger
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
            parts.compile_first(self, self._compiled, batch)
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
                parallel.clip(self.model.parameters(), self.settings.clip_grad_norm)
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
            parts.keep_up(self)
        if self.judge.judge(self.step, self.keeper):
            self._meter.restart()
            self.watch.split.restart()

    def _boundary(self) -> bool:
        with self.watch.split.checkpoint():
            self._stopped = self.keeper.boundary(self.step)
        return self._stopped

    def _finish(self) -> Result:
        last = float(parallel.total(self.last_loss.clone(), self.session.world))
        self.session.board.update(ended_early=self.judge.enough)
        uri, final = self.keeper.finish(self._weights, trained.beside(self.model))
        parallel.leave()
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
        weights = modelstate.model_state(self.model)
        averages = {} if self.ema is None else self.ema.by_weight()  # tied ones have several names
        return {name: averages.get(id(value), value) for name, value in weights.items()}

    # --- parts --------------------------------------------------------------------------------------
    def _assemble(self) -> None:
        """What needs the restored model: the replica, what ranks send each other, the compiled model."""
        world, settings = self.session.world, self.settings
        self._stopped, self._weighing = False, parts.weighing(self)
        self.watch = parts.watch(self)
        deterministic = settings.deterministic
        self._replica = parallel.Replica(self.model, world, self.device, deterministic=deterministic)
        if self.ema is not None and not self.ema.updated:
            self.ema.begin()  # all ranks have rank 0's weights only now
        self.compression = parts.exchange(self, self._replica, self.watch.split)
        if self.saved_compression is not None:
            self.compression.load_state_dict(*self.saved_compression)
        self._compiled: Any = self._replica.outer
        if settings.compile:
            self._compiled = compiling.compiled(self._replica.outer, settings.compile_mode)
        self._cold = settings.compile and world.distributed
        self._meter = parts.meter(self)
