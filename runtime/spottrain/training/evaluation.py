"""`Evaluation`: means of the loss and of further metrics over an evaluation set.

It does not affect training: the random state and the mode of the model are restored. So an evaluation that
a stop cuts short can be repeated.
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
from spottrain.data.worker_memory import WorkerMemoryLimit
from spottrain.distributed.process_group import Earliest, of_first, total
from spottrain.distributed.world import World

Measure = Callable[[torch.nn.Module, Any], Mapping[str, Any]]


@contextmanager
def _apart(model: torch.nn.Module) -> Iterator[None]:
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
    room: WorkerMemoryLimit | None = None
    """Checks whether the memory suffices for `workers`; None: no check."""
    world: World = field(default_factory=World)
    until: Callable[[], float] = lambda: math.inf
    """Returns the Unix time, in seconds, at which this rank must have ended."""
    alive: Callable[[], None] = lambda: None
    """Heartbeat, sent after each batch."""
    deadline: float = field(default=math.inf, init=False)
    """Earliest deadline of all ranks in Unix seconds, if a stop cut the evaluation short."""
    _stream: Iterator[Any] | None = field(default=None, init=False)
    """Kept after a run is cut short: worker shutdown takes time that the save needs."""

    def run(self, model: torch.nn.Module, stopping: Callable[[], bool]) -> dict[str, float] | None:
        """Returns means over the samples of the set; None if a stop cut it short."""
        if self._cut(stopping):
            return None
        with _apart(model):
            return self._means(model, stopping)

    def names(self, model: torch.nn.Module) -> list[str]:
        """Returns the names of the means that `run` returns, from one batch. All ranks must call it."""
        step = next(iter(self._plan().steps(Position())))
        with _apart(model), torch.no_grad(), self.autocast():
            batch = next(load(self.dataset, iter([step]), num_workers=0, collate_fn=self.collate))
            return sorted(self.measure(model, devices.to_device(batch, self.device)))

    def _means(self, model: torch.nn.Module, stopping: Callable[[], bool]) -> dict[str, float] | None:
        steps = list(islice(self._plan().steps(Position()), self._plan().steps_per_epoch))
        sums: dict[str, torch.Tensor] = {}
        counted = 0.0
        if self.room is not None:
            self.room.warn(self.workers)
        self._stream = load(self.dataset, iter(steps), num_workers=self.workers, collate_fn=self.collate)
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
                    self._heard(asked)  # completes the second request, maybe with an earlier deadline
                    return None
                samples = share * step.samples
                items = self._items(batch, samples)
                counted += items
                for name, value in values.items():
                    found = torch.as_tensor(value, dtype=torch.float64, device=self.device)
                    times = items if name == "loss" else samples
                    part = found * times if times else torch.zeros_like(found)  # a mean over nothing is NaN
                    sums[name] = sums.get(name, 0) + part
        self._stream = None
        if asked is not None:
            asked.result()  # ignored: the next step boundary handles a stop
        return self._over_ranks(sums, counted)

    def _over_ranks(self, sums: Mapping[str, torch.Tensor], counted: float) -> dict[str, float]:
        """Reduces all means at once: ranks and host synchronize here only."""
        names = sorted(sums)
        whole = torch.tensor(counted, dtype=torch.float64, device=self.device)
        every = total(torch.stack([whole, *(sums[name].reshape(()) for name in names)]), self._sharing)
        # Ranks that each evaluate the whole set may differ slightly, but must decide alike.
        of_loss, *found = of_first(every, self.world).tolist()
        count = len(self.dataset)
        return {
            name: value / (of_loss if name == "loss" else count)
            for name, value in zip(names, found, strict=True)
        }

    def _ask(self) -> Earliest | None:
        """Starts to ask all ranks for a stop. The result is read one batch later, so that no rank waits."""
        return Earliest(self.until(), self.device) if self.world.distributed else None

    def _heard(self, asked: Earliest | None) -> bool:
        """Whether a stop cuts it short, at the same batch on all ranks: a model may need them all."""
        if asked is None or (found := asked.result()) == math.inf:
            return False
        self.deadline = min(self.deadline, found)
        return True

    def _items(self, batch: Any, samples: float) -> float:
        """Returns the number of items that the mean loss of this batch covers; 0 for a filler."""
        return samples if self.weight is None or not samples else float(self.weight(batch))

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

    def _cut(self, stopping: Callable[[], bool]) -> bool:
        """Whether a stop request prevents the start, on all ranks alike."""
        self.deadline = math.inf
        return self._heard(self._ask()) if self.world.distributed else stopping()
