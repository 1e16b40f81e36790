"""The learning rate over the steps. Used by `trainer`.

The usual ones are pure functions of the step, so they have no state but the base rates; a torch LRScheduler
is taken as well, with its own state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spottrain.errors import ConfigurationError

FLOOR: Final = 0.1
"""Share of the base rate at which the cosine ends."""

Shape = Callable[[int], float]
"""Factor on the base learning rate for the step about to be done, counted from 0."""


def shape(name: str, *, warmup_steps: int, total_steps: int) -> Shape:
    """`constant` or `cosine`, both after a linear warm-up."""
    if name not in ("constant", "cosine"):
        raise ConfigurationError(
            f"schedule {name!r} is not known: use constant, cosine, a function or an LRScheduler"
        )
    if warmup_steps >= total_steps:
        raise ConfigurationError(
            f"warmupSteps {warmup_steps} must be below the number of steps, {total_steps}"
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if name == "constant":
            return 1.0
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


class Schedule:
    """Sets the rates before each step (a shape), or lets a torch scheduler do so after it."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: Shape | LRScheduler) -> None:
        if isinstance(kind, ReduceLROnPlateau):
            raise ConfigurationError(
                "schedule is a ReduceLROnPlateau, which wants a measure at every step; use a schedule that "
                "depends on the step alone"
            )
        self._optimizer = optimizer
        self._kind = kind
        self._base = [float(group["lr"]) for group in optimizer.param_groups]

    def before_step(self, step: int) -> None:
        if not isinstance(self._kind, LRScheduler):
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = base * self._kind(step)

    def after_step(self) -> None:
        if isinstance(self._kind, LRScheduler):
            self._kind.step()

    @property
    def rate(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        torch_state = self._kind.state_dict() if isinstance(self._kind, LRScheduler) else {}
        return {"base": list(self._base), "torch": torch_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._base = list(state["base"])
        if isinstance(self._kind, LRScheduler):
            self._kind.load_state_dict(state["torch"])
