"""The training loop, and what a user's script calls: `Trainer(...).fit()`.

    claim HEAD -> restore -> [ micro-batches -> step -> log -> evaluate? -> save? -> stop? ] -> finish

The loop is one function, `_train`. Position is optimizer steps: whatever a stop cuts short inside a step
is dropped and done again after the resume. What keeps the steps from being lost is `keeper`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain import device as devices
from spottrain import log, schedule
from spottrain.arguments import require_kinds, require_own_parameters, require_positive
from spottrain.best import Best
from spottrain.checkpoint import modelstate
from spottrain.data import Dataset, Stream
from spottrain.data.source import size_of, source
from spottrain.errors import CheckpointError, ConfigurationError, PeerLost
from spottrain.evaluation import Evaluation
from spottrain.keeper import Keeper, State
from spottrain.meter import Meter, require_finite
from spottrain.process.session import Session, current
from spottrain.ranks import parallel
from spottrain.settings import resolve

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Metrics = Callable[[torch.nn.Module, Any], Mapping[str, Any]]
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


class Trainer:
    """Trains `model` on `train_set`, and after an interruption goes on where it was saved.

    model, optimizer: any torch module and an optimizer over its parameters; moved to the device.
    With several ranks (`spottrain run --nproc`, torchrun) a plain model is trained by DDP, and one that
        `spottrain.shard` was called on by FSDP2.
    train_set, eval_set: map-style datasets (`len`, `[i]`); train_set may also be a loader of this rank's
        micro-batches that can go on where it was (torchdata's StatefulDataLoader; see `spottrain.data`).
    loss(model, batch): scalar tensor, the mean over the samples of the batch. Called on micro-batches.
    metrics(model, batch): further means by name, taken in evaluation only.
    max_steps, epochs: optimizer steps, or passes over train_set; whichever ends first.
    batch_size: samples of one optimizer step, of all ranks together; a multiple of ranks x micro_batch_size,
        which is the number of samples of one forward pass.
    precision: "fp32", "bf16", or "fp16" with a GradScaler, whose state is saved.
    steps_per_epoch: of a train_set that is a loader; needed with several ranks.
    schedule: "cosine" or "constant" (both after `warmup_steps` of linear warm-up), a function of the step
        that gives a factor on the learning rate, or a torch LRScheduler.
    eval_every: optimizer steps between evaluations; None: once per epoch. There is always one at the end.
    workers: loader processes. collate: as of torch's DataLoader.
    drop_last: leave out an epoch's last batch where it would be smaller.
    seed: of the order of samples; None: what `spottrain.seed()` was given.
    deterministic: repeatable kernels only, so that a resumed run equals an uninterrupted one bit by bit.

    `spec.training` of the manifest wins over these arguments. Raises ConfigurationError.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        train_set: Any,
        loss: Loss,
        eval_set: Dataset | None = None,
        metrics: Metrics | None = None,
        max_steps: int | None = None,
        epochs: int | None = None,
        batch_size: int = 32,
        micro_batch_size: int | None = None,
        schedule: str | schedule.Shape | LRScheduler = "cosine",
        warmup_steps: int = 0,
        clip_grad_norm: float | None = None,
        precision: str = "fp32",
        compile: bool = False,
        eval_every: int | None = None,
        log_every: int = 10,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        steps_per_epoch: int | None = None,
        seed: int | None = None,
        deterministic: bool = False,
        device: str | torch.device | None = None,
        session: Session | None = None,
    ) -> None:
        self.session = session or current()
        self.settings = resolve(
            self.session.run.training,
            max_steps=max_steps,
            epochs=epochs,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            warmup_steps=warmup_steps,
            clip_grad_norm=clip_grad_norm,
            precision=precision,
            compile=compile,
            seed=devices.seed_in_use() if seed is None else seed,
            deterministic=deterministic,
        )
        if self.settings.deterministic:
            devices.make_deterministic()
        require_positive(log_every=log_every, eval_every=eval_every)
        world = self.session.world
        self.device = devices.choose(device or parallel.default_device(world))
        require_kinds(model, optimizer)
        parallel.join(world, self.device)
        self.model = modelstate.plain(model).to(self.device)
        self.optimizer = optimizer
        require_own_parameters(self.model, optimizer)
        self.loss, self.metrics = loss, metrics
        self.batches = source(
            train_set,
            world,
            batch_size=self.settings.batch_size,
            micro_batch_size=self.settings.micro_batch_size,
            seed=self.settings.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            steps_per_epoch=steps_per_epoch,
            workers=workers,
            collate=collate,
            pin_memory=self.device.type == "cuda",
        )
        self.evaluation = None if eval_set is None else self._make_evaluation(eval_set, workers, collate)
        self.total_steps = self.settings.total_steps(self.batches.steps_per_epoch)
        self.schedule = self._make_schedule(schedule)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == "fp16")
        self.eval_every = eval_every or self.batches.steps_per_epoch or self.total_steps
        self.log_every = log_every
        self.step = 0
        self.best = Best()
        self.evaluated = 0
        """Step of the last evaluation: one that a stop cut short is done again."""
        self._last_loss = torch.tensor(0.0)
        self._cut = False
        """Whether a stop cut an evaluation short on all ranks."""

    # --- the run ------------------------------------------------------------------------------------
    def fit(self) -> Result:
        """Trains to the end and stores the weights; goes on from the last checkpoint if there is one.

        An interruption saves and leaves through SystemExit. Raises RunError.
        What the script does after `fit` runs at most once, and never again once the weights are stored: the
        job is done then, whatever becomes of the rest.
        """
        if self.session.completed:
            raise ConfigurationError("fit() was called a second time: a run trains once; make it two scripts")
        state = State(
            shared=self._shared,
            own=self._own,
            load=self._load,
            want=modelstate.wanted(self.model),
            of_first=modelstate.buffers(self.model),
        )
        self.keeper = Keeper(self.session, state, total_steps=self.total_steps)
        with closing(iter(self.batches)) as steps:  # last, for to end its workers takes time
            try:
                self._begin()
                if not self._train(steps):
                    self.keeper.ends.interrupted()
                return self._finish()
            except PeerLost as error:
                self.keeper.end_without(error)
            except BaseException as error:
                if (lost := parallel.peer_lost(error, self.session.world)) is not None:
                    self.keeper.end_without(lost)
                self.keeper.ends.give_up()
                raise

    def _begin(self) -> None:
        self.session.board.update(total_steps=self.total_steps, step=0)
        if not self.keeper.begin() and self.session.world.distributed:
            devices.seed_rank(self.session.world.rank)
        self.session.board.update(state="Compiling" if self.settings.compile else "Training")

    def _train(self, steps: Stream) -> bool:
        """Optimizer steps until `total_steps` (True) or until a stop is asked for (False)."""
        stopping, world = self.session.interruption, self.session.world
        replica = parallel.Replica(self.model, world, self.device, deterministic=self.settings.deterministic)
        model: Any = torch.compile(replica.outer) if self.settings.compile else replica.outer
        buffers = devices.saved_buffers(self.model)
        self._meter = self._make_meter()
        self._evaluate_if_due()
        while self.step < self.total_steps and not self._cut:
            step, micro_batches = self._awaited(lambda: next(steps))
            before = devices.Boundary(buffers) if len(step.shares) > 1 else None
            loss = torch.zeros((), device=self.device)
            for number, (batch, share) in enumerate(self._fetched(micro_batches), 1):
                if stopping.stopping and not world.distributed:  # several ranks stop between steps, together
                    self.optimizer.zero_grad(set_to_none=True)
                    if before is not None:
                        before.restore()
                    return False
                with replica.accumulating(last=number == len(step.shares)):
                    with devices.autocast(self.device, self.settings.precision):
                        part = self.loss(model, devices.to_device(batch, self.device)) * share
                    self._backward(part * world.size)  # of which DDP and FSDP take the mean over ranks
                loss += part.detach()
            stopping.let_end(None)  # from here on there is work to lose
            self._update(self.schedule.before_step)
            self.step += 1
            self.batches.done(step)
            self._last_loss = loss
            if not self._meter.began:
                devices.settle_memory()
            self._meter.tell(self.step, step, loss, self.schedule.rate)
            self.schedule.after_step()
            self._evaluate_if_due()
            if self._cut or self.keeper.boundary(self.step):
                return False
        return not self._evaluation_due  # a stop may have cut the last one short

    def _backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _update(self, before_step: Callable[[int], None]) -> None:
        """One optimizer step with the gradients that were gathered."""
        if self.settings.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_grad_norm)
        before_step(self.step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _fetched(self, micro_batches: Iterator[tuple[Any, float]]) -> Iterator[tuple[Any, float]]:
        yield self._awaited(lambda: next(micro_batches))
        yield from micro_batches

    def _awaited(self, get: Callable[[], Any]) -> Any:
        """What the loader gives; while it does not, and it may never, another thread may save and end."""
        if not self.batches.workers or not self._meter.began or self.session.world.distributed:
            return get()
        stopping = self.session.interruption
        stopping.let_end(self.keeper.ends.between_steps, after=POLL_SHARE)
        found = get()
        stopping.let_end(None)
        return found

    def _finish(self) -> Result:
        last = float(parallel.total(self._last_loss.clone(), self.session.world))
        uri, final = self.keeper.finish(lambda: modelstate.model_state(self.model))
        parallel.leave()
        return Result(step=self.step, loss=last, best=self.best.loss, digest=final, output_uri=uri)

    # --- between steps ------------------------------------------------------------------------------
    @property
    def _evaluation_due(self) -> bool:
        due = self.step % self.eval_every == 0 or self.step == self.total_steps
        return self.evaluation is not None and self.step > 0 and due and self.evaluated != self.step

    def _evaluate_if_due(self) -> None:
        if self.evaluation is None or not self._evaluation_due:
            return
        self.session.board.update(state="Evaluating")
        began = time.perf_counter()
        parallel.give_buffers(self.model, self.session.world)
        # The uncompiled model: its batches have other shapes, and a compilation here could outlast a notice.
        values = self.evaluation.run(self.model, lambda: self.session.interruption.stopping)
        self._cut = values is None and self.session.world.distributed
        if self._cut:  # all ranks know, and stop here; some may not have been told themselves
            self.session.interruption.stop_by(self.evaluation.deadline, "another rank")
        if values is not None:
            self.evaluated = self.step
            self._note_best(values["loss"])
            shown = {f"eval_{name}": f"{value:.9g}" for name, value in values.items()}
            if self.session.world.first:
                log.event("evaluated", step=self.step, **shown, seconds=time.perf_counter() - began)
        self.session.board.update(state="Training")
        self._meter.restart()

    def _measure(self, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(model, batch), **(self.metrics(model, batch) if self.metrics else {})}

    def _note_best(self, loss: float) -> None:
        """Saves the best so far, unless an upload is under way: best is then the best that was saved."""
        wanted = self.best.note(loss) and self.session.run.keep_best and self.step < self.total_steps
        if not wanted:
            return
        busy = torch.tensor(float(self.keeper.busy), device=self.device)
        if not float(parallel.total(busy, self.session.world)):
            self.best.keep(loss, lambda: self.keeper.save(best=True))

    # --- state --------------------------------------------------------------------------------------
    def _shared(self) -> dict[str, Any]:
        """Everything that the next step depends on and that is equal on all ranks."""
        require_finite(float(self._last_loss), self.step)
        return {
            modelstate.MODEL: modelstate.model_state(self.model),
            modelstate.OPTIMIZER: modelstate.optimizer_state(self.model, self.optimizer),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "data": None if self.batches.per_rank else self.batches.state_dict(),
            "progress": {
                "step": self.step,
                "best": self.best.loss,
                "best_kept": self.best.kept,
                "evaluated": self.evaluated,
                "trained": self.keeper.trained,
            },
        }

    def _own(self) -> dict[str, Any]:
        """The rest of it."""
        data = self.batches.state_dict() if self.batches.per_rank else None
        return {"random": devices.random_state(), "data": data}

    def _load(self, tree: dict[str, Any], own: dict[str, Any], new_rank: bool) -> None:
        """Raises CheckpointError where the checkpoint is of another model, optimizer or data."""
        mismatch = modelstate.load_model(self.model, tree[modelstate.MODEL])
        mismatch = mismatch or modelstate.load_optimizer(
            self.model, self.optimizer, tree[modelstate.OPTIMIZER]
        )
        if mismatch is not None:
            raise self._incompatible(mismatch)
        try:
            self.schedule.load_state_dict(tree["schedule"])
            if self.scaler.is_enabled() and tree["scaler"]:
                self.scaler.load_state_dict(tree["scaler"])
        except (ValueError, KeyError) as error:
            raise self._incompatible(f"its schedule does not fit ({error})") from error
        self.batches.load_state_dict(own["data"] if self.batches.per_rank else tree["data"])
        progress = tree["progress"]
        self.step, self.evaluated = progress["step"], progress["evaluated"]
        self.best = Best(loss=progress["best"], kept=progress["best_kept"])
        self.keeper.trained = progress["trained"]
        if new_rank:
            log.event("new-rank", why="the checkpoint has no random state of this rank; it gets a fresh one")
            devices.seed_rank(self.session.world.rank)
        else:
            devices.set_random_state(own["random"])

    def _incompatible(self, why: str) -> CheckpointError:
        return modelstate.incompatible(self.session.run.checkpoint_uri, why)

    # --- parts --------------------------------------------------------------------------------------
    def _make_evaluation(self, eval_set: Dataset, workers: int, collate: Any) -> Evaluation:
        if not size_of(eval_set, "eval_set"):
            raise ConfigurationError("Trainer(eval_set=...) is empty: give it samples, or leave it out")
        return Evaluation(
            dataset=eval_set,
            measure=self._measure,
            batch_size=self.settings.micro_batch_size or self.settings.batch_size,
            device=self.device,
            precision=self.settings.precision,
            workers=workers,
            collate=collate,
            world=self.session.world,
            until=lambda: self.session.interruption.deadline,  # infinite while nobody has asked for an end
            alive=self.session.board.pulse.beat,
        )

    def _make_meter(self) -> Meter:
        session = self.session
        return Meter(
            session.board,
            born=session.born,
            total_steps=self.total_steps,
            log_every=self.log_every,
            world=session.world,
        )

    def _make_schedule(self, kind: str | schedule.Shape | LRScheduler) -> schedule.Schedule:
        if isinstance(kind, str):
            kind = schedule.shape(kind, warmup_steps=self.settings.warmup_steps, total_steps=self.total_steps)
        return schedule.Schedule(self.optimizer, kind)
