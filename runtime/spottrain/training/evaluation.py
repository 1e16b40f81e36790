"""Means of the loss and of further metrics over an evaluation set. Called by `trainer` at a step boundary.

Leaves no trace in the training: the random state is put back, and the model returns to its mode. So one that
a stop cuts short can simply be done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from spottrain.core import device as devices
from spottrain.data import Dataset, Plan, Position, load
from spottrain.data.worker_memory import Room
from spottrain.distributed.process_group import Earliest, of_first, total
from spottrain.distributed.world import World

Measure = Callable[[torch.nn.Module, Any], Mapping[str, Any]]


@contextmanager
def _apart(model: torch.nn.Module) -> Iterator[None]:
    """In evaluation mode, without a trace in the random state."""
    before = devices.random_state()
    modes = [(module, module.training) for module in model.modules()]  # some may be frozen on purpose
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        devices.set_random_state(before)


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """How to evaluate; the same every time."""

    dataset: Dataset
    measure: Measure
    batch_size: int
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    workers: int
    collate: Callable[[list[Any]], Any] | None
    weight: Callable[[Any], float] | None = None
    """Over how many items a batch's loss is the mean; None: over its samples."""
    room: Room | None = None
    """Against which `workers` are held; None: they are not."""
    world: World = field(default_factory=World)
    until: Callable[[], float] = lambda: math.inf
    """Unix seconds at which this rank must have ended."""
    alive: Callable[[], None] = lambda: None
    """Called after each batch."""
    deadline: float = field(default=math.inf, init=False)
    """The least of all ranks', where a stop cut it short."""
    _stream: Iterator[Any] | None = field(default=None, init=False)
    """Of a run cut short: kept, because to end its workers takes time that the save needs."""

    def run(self, model: torch.nn.Module, stopping: Callable[[], bool]) -> dict[str, float] | None:
        """Means over the samples of the set; None when a stop cut it short."""
        if self._cut(stopping):
            return None
        with _apart(model):
            return self._means(model, stopping)

    def names(self, model: torch.nn.Module) -> list[str]:
        """What `run` will give a mean of, by the first batch. All ranks must call it."""
        step = next(iter(self._plan().steps(Position())))
        with _apart(model), torch.no_grad(), self.autocast():
            batch = next(load(self.dataset, iter([step]), workers=0, collate=self.collate))
            return sorted(self.measure(model, devices.to_device(batch, self.device)))

    def _means(self, model: torch.nn.Module, stopping: Callable[[], bool]) -> dict[str, float] | None:
        steps = list(islice(self._plan().steps(Position()), self._plan().steps_per_epoch))
        sums: dict[str, torch.Tensor] = {}
        counted = 0.0
        if self.room is not None:
            self.room.warn(self.workers)
        self._stream = load(self.dataset, iter(steps), workers=self.workers, collate=self.collate)
        asked: Earliest | None = None
        for step in steps:
            for share in step.shares:
                if not self.world.distributed and stopping():
                    return None
                batch = next(self._stream)
                if not self.world.distributed and stopping():
                    return None
                asked, before = self._ask(), asked
                with torch.no_grad(), self.autocast():
                    values = self.measure(model, devices.to_device(batch, self.device))
                self.alive()
                if self._heard(before):
                    self._heard(asked)  # it may be an earlier one, and must not stay on its way
                    return None
                samples = share * step.samples
                items = self._items(batch, samples)
                counted += items
                for name, value in values.items():
                    found = torch.as_tensor(value, dtype=torch.float64, device=self.device)
                    times = items if name == "loss" else samples
                    part = (
                        found * times if times else torch.zeros_like(found)
                    )  # a mean over nothing is no number
                    sums[name] = sums.get(name, 0) + part
        self._stream = None
        if asked is not None:
            asked.result()  # all is done: a stop is the next step boundary's
        return self._over_ranks(sums, counted)

    def _over_ranks(self, sums: Mapping[str, torch.Tensor], counted: float) -> dict[str, float]:
        """All means at once: the only time that ranks, and the host, wait for what was computed."""
        names = sorted(sums)
        whole = torch.tensor(counted, dtype=torch.float64, device=self.device)
        every = total(torch.stack([whole, *(sums[name].reshape(()) for name in names)]), self._sharing)
        # What ranks that each did all of it found may differ, and what they do next must not.
        of_loss, *found = of_first(every, self.world).tolist()
        count = len(self.dataset)
        return {
            name: value / (of_loss if name == "loss" else count)
            for name, value in zip(names, found, strict=True)
        }

    def _ask(self) -> Earliest | None:
        """Of several ranks, whether one was told to stop: by a batch later, so that nobody waits for it."""
        return Earliest(self.until(), self.device) if self.world.distributed else None

    def _heard(self, asked: Earliest | None) -> bool:
        """Whether a stop cuts it short: for all ranks at the same batch, for a model may need them all."""
        if asked is None or (found := asked.result()) == math.inf:
            return False
        self.deadline = min(self.deadline, found)
        return True

    def _items(self, batch: Any, samples: float) -> float:
        """Over how many items the loss of this batch is the mean; 0 for a filler."""
        return samples if self.weight is None or not samples else float(self.weight(batch))

    @property
    def _sharing(self) -> World:
        """A set smaller than the number of ranks is evaluated by each of them, whole."""
        return self.world if len(self.dataset) >= self.world.size else World()

    def _plan(self) -> Plan:
        world, count = self._sharing, len(self.dataset)
        size = min(self.batch_size, count // world.size)
        return Plan(
            size=count,
            batch_size=size * world.size,
            micro_batch_size=size,
            shuffle=False,
            rank=world.rank,
            ranks=world.size,
        )

    def _cut(self, stopping: Callable[[], bool]) -> bool:
        """Whether it is not to begin: for all ranks."""
        self.deadline = math.inf
        return self._heard(self._ask()) if self.world.distributed else stopping()
