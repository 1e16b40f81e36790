"""Means of the loss and of further metrics over an evaluation set. Called by `trainer` at a step boundary.

Leaves no trace in the training: the random state is put back, and the model returns to its mode. So one that
a stop cuts short can simply be done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch

from spottrain import device as devices
from spottrain.data import Dataset, Plan, Position, load

Measure = Callable[[torch.nn.Module, Any], Mapping[str, Any]]


def evaluate(
    model: torch.nn.Module,
    measure: Measure,
    dataset: Dataset,
    *,
    batch_size: int,
    device: torch.device,
    precision: str,
    workers: int,
    collate: Callable[[list[Any]], Any] | None,
    stopping: Callable[[], bool],
) -> dict[str, float] | None:
    """Means over the samples of `dataset`; None when a stop cut it short."""
    size = min(batch_size, len(dataset))
    plan = Plan(size=len(dataset), batch_size=size, micro_batch_size=size, shuffle=False)
    steps = list(islice(plan.steps(Position()), plan.steps_per_epoch))
    before = devices.random_state()
    was_training = model.training
    model.eval()
    sums: dict[str, Any] = {}
    try:
        stream = load(dataset, iter(steps), workers=workers, collate=collate)
        for step, batch in zip(steps, stream, strict=True):
            if stopping():
                return None
            with torch.no_grad(), devices.autocast(device, precision):
                values = measure(model, devices.to_device(batch, device))
            for name, value in values.items():
                sums[name] = sums.get(name, 0) + torch.as_tensor(value) * step.samples
    finally:
        model.train(was_training)
        devices.set_random_state(before)
    return {name: float(total) / len(dataset) for name, total in sums.items()}
