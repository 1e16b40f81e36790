"""Means of the loss and of further metrics over an evaluation set, when to make them, and what follows.

An evaluation does not affect training: the random state and the mode of the model are restored. So one that a
stop cuts short can be repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from spottrain.checkpoint.saver import Save
from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.time_split import PRODUCTIVE
from spottrain.data.dataloader import load
from spottrain.data.plan import Dataset, Plan, Position
from spottrain.distributed.process_group import all_reduce_sum, broadcast_from_rank0, give_buffers
from spottrain.distributed.world import World
from spottrain.lifecycle.session import Session
from spottrain.techniques.early_stopping import EarlyStopping
from spottrain.techniques.ema import EMA
from spottrain.training.engine import Engine

Measure = Callable[[torch.nn.Module, Any], Mapping[str, Any]]


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Sets evaluation mode; restores modes and random state at the end."""
    before = devices.random_state()
    modes = [(module, module.training) for module in model.modules()]  # some may be in eval mode on purpose
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        devices.set_random_state(before)


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """Evaluates a model on `dataset`, in the same order every time."""

    dataset: Dataset
    measure: Measure
    batch_size: int
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    workers: int
    collate: Callable[[list[Any]], Any] | None
    weight: Callable[[Any], float] | None = None
    """Returns the number of items that a batch's mean loss covers; None: its samples."""
    world: World = field(default_factory=World)
    alive: Callable[[], None] = lambda: None
    """Heartbeat, sent after each batch."""
    _stream: Iterator[Any] | None = field(default=None, init=False)
    """Kept after a run is cut short: worker shutdown takes time that the save needs."""

    def run(self, model: torch.nn.Module, stops: Callable[[], bool]) -> dict[str, float] | None:
        """Returns means over the samples of the set; None if a stop cut it short.

        `stops`: whether all ranks stop now; a model may need them all.
        """
        if stops():
            return None
        with _eval_mode(model):
            return self._means(model, stops)

    def names(self, model: torch.nn.Module) -> list[str]:
        """Returns the names of the means that `run` returns, from one batch. All ranks must call it."""
        step = next(iter(self._plan().steps(Position())))
        with _eval_mode(model), torch.no_grad(), self.autocast():
            batch = next(load(self.dataset, iter([step]), num_workers=0, collate_fn=self.collate))
            return sorted(self.measure(model, devices.to_device(batch, self.device)))

    def _means(self, model: torch.nn.Module, stops: Callable[[], bool]) -> dict[str, float] | None:
        steps = list(islice(self._plan().steps(Position()), self._plan().steps_per_epoch))
        sums: dict[str, torch.Tensor] = {}
        counted = 0.0
        self._stream = load(self.dataset, iter(steps), num_workers=self.workers, collate_fn=self.collate)
        for step in steps:
            for share in step.shares:
                batch = next(self._stream)
                if stops():
                    return None
                with torch.no_grad(), self.autocast():
                    values = self.measure(model, devices.to_device(batch, self.device))
                self.alive()
                samples = share * step.samples  # 0 for a filler
                items = samples if self.weight is None or not samples else float(self.weight(batch))
                counted += items
                for name, value in values.items():
                    found = torch.as_tensor(value, dtype=torch.float64, device=self.device)
                    times = items if name == "loss" else samples
                    part = found * times if times else torch.zeros_like(found)  # a mean over nothing is NaN
                    sums[name] = sums.get(name, 0) + part
        self._stream = None
        return self._over_ranks(sums, counted)

    def _over_ranks(self, sums: Mapping[str, torch.Tensor], counted: float) -> dict[str, float]:
        """Reduces all means at once: ranks and host synchronize here only."""
        names = sorted(sums)
        whole = torch.tensor(counted, dtype=torch.float64, device=self.device)
        every = all_reduce_sum(
            torch.stack([whole, *(sums[name].reshape(()) for name in names)]), self._sharing
        )
        # Ranks that each evaluate the whole set may differ slightly, but must decide alike.
        of_loss, *found = broadcast_from_rank0(every, self.world).tolist()
        count = len(self.dataset)
        return {
            name: value / (of_loss if name == "loss" else count)
            for name, value in zip(names, found, strict=True)
        }

    @property
    def _sharing(self) -> World:
        """The ranks that share the set; one smaller than their number is evaluated whole by each."""
        return self.world if len(self.dataset) >= self.world.size else World()

    def _plan(self) -> Plan:
        world, count = self._sharing, len(self.dataset)
        size = min(self.batch_size, count // world.size)
        return Plan(
            size=count,
            global_batch_size=size * world.size,
            micro_batch_size=size,
            shuffle=False,
            rank=world.rank,
            ranks=world.size,
        )


class Best:
    """Equal on all ranks. `loss`: lowest of all evaluations; `kept`: of the checkpoint that HEAD keeps.

    `step`: of the evaluation with that `loss`; None if there is none, or an older version has noted it.
    """

    def __init__(self, loss: float | None = None, kept: float | None = None, step: int | None = None) -> None:
        self.loss, self.step = loss, step
        self._kept = kept
        self._before: float | None = None
        self._save: Save | None = None
        """Save of `_kept` until it is committed; `_before` is the value if it never is."""

    @property
    def kept(self) -> float | None:
        """Loss of the best checkpoint. If its save has ended without a commit, that of the one before."""
        save = self._save
        if save is not None and (save.finished.is_set() or save.abandoned):
            self._save = None
            self._kept = self._kept if save.committed else self._before
        return self._kept

    def note(self, loss: float, step: int) -> bool:
        """Records a loss. Returns whether it is better than `kept`; a NaN or infinite loss never is."""
        if not math.isfinite(loss):
            return False
        if self.loss is None or loss < self.loss:
            self.loss, self.step = loss, step
        return self.kept is None or loss < self.kept

    def keep(self, loss: float, save: Callable[[], Save | None]) -> None:
        """Calls `save`, which makes the best checkpoint; its state already has `loss` as `kept`."""
        self._before, self._kept = self.kept, loss
        self._save = save()


class EvaluationSchedule:
    """Evaluates every `every` optimizer steps, and at the end.

    `evaluation`: None without an evaluation set; then nothing is evaluated. `ema`: evaluated in place of the
    weights. `on_evaluation`: called with the step and the means of each evaluation.
    """

    def __init__(
        self,
        evaluation: Evaluation | None,
        *,
        model: torch.nn.Module,
        every: int,
        total_steps: int,
        stopping: EarlyStopping | None,
        ema: EMA | None,
        session: Session,
        on_evaluation: Callable[[int, dict[str, float]], None],
    ) -> None:
        self.evaluation, self.stopping, self.ema = evaluation, stopping, ema
        self.every, self.total_steps = every, total_steps
        self.best = Best()
        self.evaluated = 0
        """Step of the last complete evaluation; one that a stop cut short is repeated."""
        self.interrupted = False
        """Whether a stop cut the last evaluation short."""
        self._model, self._session, self._on_evaluation = model, session, on_evaluation

    @property
    def stop_reason(self) -> str:
        """Why training ends before its last step; "" if it does not."""
        return (self.stopping.reason or "") if self.stopping is not None else ""

    def require(self) -> None:
        """Raises ConfigurationError if the evaluation lacks the metric of early stopping, by one batch.

        Call it on all ranks before the first step of each attempt: both may differ from the last attempt.
        """
        stopping, evaluation = self.stopping, self.evaluation
        if stopping is not None and evaluation is not None:
            names = ["loss"] if stopping.metric == "loss" else evaluation.names(self._model)
            stopping.require(evaluates=True, metrics=names)

    def due(self, step: int) -> bool:
        due = step % self.every == 0 or step == self.total_steps
        return self.evaluation is not None and step > 0 and due and self.evaluated != step

    def evaluate(self, step: int, engine: Engine) -> bool:
        """Evaluates if due. Returns whether it did, even if a stop cut it short."""
        if self.evaluation is None or not self.due(step):
            return False
        self._session.board.update(state="Evaluating")
        began = time.perf_counter()
        with self._session.board.clock.part(PRODUCTIVE):  # also before the first step of an attempt
            values = self._means(self.evaluation, engine)
            if values is not None:
                self._note(step, values, engine, began)
        self._session.board.update(state="Training")
        return True

    def _means(self, evaluation: Evaluation, engine: Engine) -> dict[str, float] | None:
        give_buffers(self._model, self._session.world)
        # The uncompiled model: its batches have other shapes, and a compilation here could outlast a notice.
        with nullcontext() if self.ema is None else self.ema.applied():
            values = evaluation.run(self._model, engine.stops_evaluation)
        self.interrupted = values is None
        return values

    def _note(self, step: int, values: dict[str, float], engine: Engine, began: float) -> None:
        self.evaluated = step
        self._session.board.clock.mark()
        if self.stopping is not None:  # before the save of the best, which holds its state
            self.stopping.note(step, values)
        self._note_best(values["loss"], step, engine)
        named = {f"eval_{name}": value for name, value in values.items()}
        if self._session.world.first:
            shown = {name: f"{value:.9g}" for name, value in named.items()}
            log.event("evaluated", step=step, **shown, seconds=time.perf_counter() - began)
        self._on_evaluation(step, named)

    def _note_best(self, loss: float, step: int, engine: Engine) -> None:
        """Saves the best so far, unless an upload is under way: then the last best one stays."""
        better = self.best.note(loss, step)
        self._session.board.update(best_step=self.best.step)
        wanted = better and self._session.run.keep_best and step < self.total_steps
        if not wanted:
            return
        assert self.evaluation is not None
        busy = torch.tensor(float(engine.busy), device=self.evaluation.device)
        if not float(all_reduce_sum(busy, self._session.world)):
            self.best.keep(loss, lambda: engine.save(best=True))

    # --- state --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks."""
        return {
            "best": self.best.loss,
            "best_kept": self.best.kept,
            "best_step": self.best.step,
            "evaluated": self.evaluated,
            "stopping": None if self.stopping is None else self.stopping.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A custom loop's checkpoint has nothing of it."""
        self.best = Best(loss=state.get("best"), kept=state.get("best_kept"), step=state.get("best_step"))
        self._session.board.update(best_step=self.best.step)
        self.evaluated = state.get("evaluated", 0)
        saved = state.get("stopping")
        if self.stopping is not None and saved is not None:
            self.stopping.load_state_dict(saved)
