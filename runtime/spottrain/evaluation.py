"""Means of the loss and of further metrics over an evaluation set. Called by `trainer` at a step boundary.

Leaves no trace in the training: the random state is put back, and the model returns to its mode. So one that
a stop cuts short can simply be done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from spottrain import device as devices
from spottrain.data import Dataset, Plan, Position, load

Measure = Callable[[torch.nn.Module, Any], Mapping[str, Any]]


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """How to evaluate; the same every time."""

    dataset: Dataset
    measure: Measure
    batch_size: int
    device: torch.device
    precision: str
    workers: int
    collate: Callable[[list[Any]], Any] | None
    _stream: Iterator[Any] | None = field(default=None, init=False)
    """Of a run cut short: kept, because to end its workers takes time that the save needs."""

    def run(self, model: torch.nn.Module, stopping: Callable[[], bool]) -> dict[str, float] | None:
        """Means over the samples of the set; None when a stop cut it short."""
        if stopping():
            return None
        before = devices.random_state()
        was_training = model.training
        model.eval()
        try:
            return self._means(model, stopping)
        finally:
            model.train(was_training)
            devices.set_random_state(before)

    def _means(self, model: torch.nn.Module, stopping: Callable[[], bool]) -> dict[str, float] | None:
        count = len(self.dataset)
        size = min(self.batch_size, count)
        plan = Plan(size=count, batch_size=size, micro_batch_size=size, shuffle=False)
        steps = list(islice(plan.steps(Position()), plan.steps_per_epoch))
        sums: dict[str, Any] = {}
        self._stream = load(self.dataset, iter(steps), workers=self.workers, collate=self.collate)
        for step in steps:
            if stopping():
                return None
            batch = next(self._stream)
            if stopping():
                return None
            with torch.no_grad(), devices.autocast(self.device, self.precision):
                values = self.measure(model, devices.to_device(batch, self.device))
            for name, value in values.items():
                sums[name] = sums.get(name, 0) + torch.as_tensor(value) * step.samples
        self._stream = None
        return {name: float(total) / count for name, total in sums.items()}
