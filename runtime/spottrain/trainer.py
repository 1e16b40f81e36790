"""The training loop, and what a user's script calls: `Trainer(...).fit()`.

    claim HEAD -> restore -> [ micro-batches -> step -> log -> evaluate? -> save? -> stop? ] -> finish

The loop is one function, `_train`. Position is optimizer steps: whatever a stop cuts short inside a step
is dropped and done again after the resume.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain import device as devices
from spottrain import log, schedule
from spottrain.cadence import Cadence
from spottrain.checkpoint import Checkpointer
from spottrain.contract import Outcome, Reason
from spottrain.data import Batches, Dataset, Plan, Stream
from spottrain.ends import Ends
from spottrain.errors import CheckpointError, ConfigurationError
from spottrain.evaluation import Evaluation
from spottrain.meter import Meter
from spottrain.session import Session, current
from spottrain.settings import resolve
from spottrain.state import Snapshotter, digest, explain_mismatch, weights_file

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Metrics = Callable[[torch.nn.Module, Any], Mapping[str, Any]]
POLL_SHARE = 0.1
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
    """SHA-256 of the final weights (`state.digest`)."""
    output_uri: str
    """Where they are; empty without a checkpoint URI."""


class Trainer:
    """Trains `model` on `train_set`, and after an interruption goes on where it was saved.

    model, optimizer: any torch module and an optimizer over its parameters; moved to the device.
    train_set, eval_set: map-style datasets (`len`, `[i]`).
    loss(model, batch): scalar tensor, the mean over the samples of the batch. Called on micro-batches.
    metrics(model, batch): further means by name, taken in evaluation only.
    max_steps, epochs: optimizer steps, or passes over train_set; whichever ends first.
    batch_size: samples of one optimizer step, a multiple of micro_batch_size: samples of one forward pass.
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
        train_set: Dataset,
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
        _require_positive(log_every=log_every, eval_every=eval_every)
        self.device = devices.choose(device)
        self.model = model.to(self.device)
        self.optimizer = optimizer
        self.loss, self.metrics = loss, metrics
        self.batches = Batches(
            train_set,
            Plan(
                size=_size(train_set, "train_set"),
                batch_size=self.settings.batch_size,
                micro_batch_size=self.settings.micro_batch_size or self.settings.batch_size,
                seed=self.settings.seed,
                shuffle=shuffle,
                drop_last=drop_last,
            ),
            workers=workers,
            collate=collate,
            pin_memory=self.device.type == "cuda",
        )
        self.evaluation = None if eval_set is None else self._make_evaluation(eval_set)
        self.total_steps = self.settings.total_steps(self.batches.plan.steps_per_epoch)
        self.schedule = self._make_schedule(schedule)
        self.eval_every = eval_every or self.batches.plan.steps_per_epoch
        self.log_every = log_every
        self.step = 0
        self.best: float | None = None
        self.evaluated = 0
        """Step of the last evaluation: one that a stop cut short is done again."""
        self.checkpoints: Checkpointer | None = None
        self._snapshotter = Snapshotter()
        self._last_loss = torch.tensor(math.nan)
        self._cadence = Cadence(self.session.run.interval)
        self._skipped_for: int | None = None

    # --- the run ------------------------------------------------------------------------------------
    def fit(self) -> Result:
        """Trains to the end and stores the weights; goes on from the last checkpoint if there is one.

        An interruption saves and leaves through SystemExit. Raises RunError.
        What the script does after `fit` runs at most once, and never again once the weights are stored: the
        job is done then, whatever becomes of the rest.
        """
        if self.session.completed:
            raise ConfigurationError("fit() was called a second time: a run trains once; make it two scripts")
        if self.session.store is not None:
            self.checkpoints = Checkpointer(self.session, self.session.store)
        self._ends = Ends(self.session, self.checkpoints, self._snapshot)
        with closing(iter(self.batches)) as steps:  # last, for to end its workers takes time
            try:
                self._begin()
                if not self._train(steps):
                    self._ends.interrupted()
                return self._finish()
            except BaseException:
                self._ends.give_up()
                raise

    def _begin(self) -> None:
        """Claim and restore. Until the first step is done nothing can be lost: a stop may end it anywhere."""
        board = self.session.board
        board.update(total_steps=self.total_steps)
        if self.checkpoints is None:
            log.event("no-checkpoints", why="no checkpoint URI: an interruption loses the run")
        else:
            claim = self.checkpoints.claim()
            if claim.done:
                self._ends.done_already(self.checkpoints.final_uri, self.total_steps)
            self.session.interruption.let_end(self._ends.unchanged)
            board.update(state="Restoring")
            found = self.checkpoints.restore(claim)
            if found is not None:
                entry, tree = found
                self._load(tree)
                board.update(durable_step=entry.step, durable_time=entry.time, key=entry.key)
        self.session.interruption.let_end(self._ends.unchanged)
        state = "Compiling" if self.settings.compile else "Training"
        board.update(step=self.step, start_step=self.step, state=state)
        self._cadence.started(self.step)

    def _train(self, steps: Stream) -> bool:
        """Optimizer steps until `total_steps` (True) or until a stop is asked for (False)."""
        stopping = self.session.interruption
        model: Any = torch.compile(self.model) if self.settings.compile else self.model
        self._meter = Meter(
            self.session.board, born=self.session.born, total_steps=self.total_steps, log_every=self.log_every
        )
        self._evaluate_if_due()
        while self.step < self.total_steps:
            step, micro_batches = next(steps)
            before = devices.Boundary(self.model) if len(step.micro_batches) > 1 else None
            loss = torch.zeros((), device=self.device)
            for batch, share in self._fetched(micro_batches):
                if stopping.stopping:
                    self.optimizer.zero_grad(set_to_none=True)
                    if before is not None:
                        before.restore()
                    return False
                with devices.autocast(self.device, self.settings.precision):
                    part = self.loss(model, devices.to_device(batch, self.device)) * share
                part.backward()  # type: ignore[no-untyped-call]
                loss += part.detach()
            stopping.let_end(None)  # from here on there is work to lose
            if self.settings.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_grad_norm)
            self.schedule.before_step(self.step)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.batches.position = step.after
            self._last_loss = loss
            self._meter.tell(self.step, step, loss, self.schedule.rate)
            self.schedule.after_step()
            self._evaluate_if_due()
            self._save_if_due()
            if stopping.stopping and self.step < self.total_steps:
                return False
        return not self._evaluation_due  # a stop may have cut the last one short

    def _fetched(self, micro_batches: Iterator[tuple[Any, float]]) -> Iterator[tuple[Any, float]]:
        """The same. While it waits for the first, which may never come, another thread may save and end."""
        stopping = self.session.interruption
        if self.batches.workers and self._meter.began:
            stopping.let_end(self._ends.between_steps, after=POLL_SHARE)
            first = next(micro_batches)
            stopping.let_end(None)
            yield first
        yield from micro_batches

    def _finish(self) -> Result:
        """Last checkpoint, final weights, release. Each can be done again by a successor."""
        weights = {name: t for name, t in self.model.state_dict().items() if isinstance(t, torch.Tensor)}
        final, uri = digest(weights), ""
        self.session.interruption.let_end(None)
        if self.checkpoints is not None:
            self.session.board.update(state="Saving")
            self.checkpoints.settle()
            if self.session.board.facts.durable_step != self.step:
                self.checkpoints.save_now(self._snapshot(), self.step)
            uri = self.checkpoints.write_final(weights_file(weights), final, self.step)
            self.checkpoints.release(done=True)
        self.session.completed = True
        self.session.board.update(state="Done", output_uri=uri)
        log.event("done", step=self.step, digest=final, output=uri or None)
        session = self.session
        session.interruption.let_end(lambda: session.end_now(Outcome.DONE, session.summary()))
        last = float(self._last_loss)
        return Result(step=self.step, loss=last, best=self.best, digest=final, output_uri=uri)

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
        # The uncompiled model: its batches have other shapes, and a compilation here could outlast a notice.
        values = self.evaluation.run(self.model, lambda: self.session.interruption.stopping)
        if values is not None:
            self.evaluated = self.step
            self.best = values["loss"] if self.best is None else min(self.best, values["loss"])
            shown = {f"eval_{name}": f"{value:.9g}" for name, value in values.items()}
            log.event("evaluated", step=self.step, **shown, seconds=time.perf_counter() - began)
        self.session.board.update(state="Training")
        self._meter.restart()

    def _measure(self, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(model, batch), **(self.metrics(model, batch) if self.metrics else {})}

    def _save_if_due(self) -> None:
        """Starts an upload when the interval has passed. The last step's save is `_finish`'s."""
        if self.checkpoints is None or self.step == self.total_steps:
            return
        if not self._cadence.due(self.step, failed=self.checkpoints.last_save_failed):
            return
        if (uploading := self.checkpoints.busy_with) is not None:
            if uploading != self._skipped_for:  # once for each upload, not at every step until it is done
                log.event("save-skipped", step=self.step, uploading=uploading)
            self._skipped_for = uploading
            return
        self._cadence.started(self.step)
        began = time.perf_counter()
        self.checkpoints.save(self._snapshot(), self.step)
        log.event("saving", step=self.step, stall=time.perf_counter() - began)
        self._meter.restart()

    # --- state --------------------------------------------------------------------------------------
    def _snapshot(self) -> dict[str, Any]:
        """Everything that the next step depends on, copied."""
        busy = self.checkpoints is not None and self.checkpoints.busy_with is not None
        copier = Snapshotter() if busy else self._snapshotter  # an upload still reads the other's buffers
        return copier.take(  # type: ignore[no-any-return]
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "random": devices.random_state(),
                "data": self.batches.state_dict(),
                "progress": {"step": self.step, "best": self.best, "evaluated": self.evaluated},
            }
        )

    def _load(self, tree: dict[str, Any]) -> None:
        """Raises CheckpointError where the checkpoint is of another model, optimizer or data."""
        mismatch = explain_mismatch(tree["model"], self.model.state_dict())
        if mismatch is not None:
            raise self._incompatible(mismatch)
        self.model.load_state_dict(tree["model"])
        try:
            self.optimizer.load_state_dict(tree["optimizer"])
            self.schedule.load_state_dict(tree["schedule"])
        except (ValueError, KeyError) as error:
            raise self._incompatible(f"its optimizer state does not fit ({error})") from error
        self.batches.load_state_dict(tree["data"])
        progress = tree["progress"]
        self.step, self.best, self.evaluated = progress["step"], progress["best"], progress["evaluated"]
        devices.set_random_state(tree["random"])

    def _incompatible(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint at {self.session.run.checkpoint_uri} is not of this training: {why}. "
            "Use the script it was made with, or another checkpoint URI",
            reason=Reason.CHECKPOINT_INCOMPATIBLE,
        )

    def _make_evaluation(self, eval_set: Dataset) -> Evaluation:
        if not _size(eval_set, "eval_set"):
            raise ConfigurationError("Trainer(eval_set=...) is empty: give it samples, or leave it out")
        return Evaluation(
            dataset=eval_set,
            measure=self._measure,
            batch_size=self.batches.plan.micro_batch_size,
            device=self.device,
            precision=self.settings.precision,
            workers=self.batches.workers,
            collate=self.batches.collate,
        )

    def _make_schedule(self, kind: str | schedule.Shape | LRScheduler) -> schedule.Schedule:
        if isinstance(kind, str):
            kind = schedule.shape(kind, warmup_steps=self.settings.warmup_steps, total_steps=self.total_steps)
        return schedule.Schedule(self.optimizer, kind)


def _size(dataset: Dataset, name: str) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"Trainer({name}=...) is a {type(dataset).__name__} without len() or [i]; give it a map-style "
            "dataset, because a stream cannot be resumed at a position"
        )
    return len(dataset)


def _require_positive(**arguments: int | None) -> None:
    for name, value in arguments.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"Trainer({name}={value}): must be at least 1")
