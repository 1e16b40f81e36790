"""The learning rate over the steps. Used by `trainer`.

The usual ones are pure functions of the step, so they have no state but the base rates; a torch LRScheduler
is taken as well, with its own state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spottrain import log
from spottrain.errors import ConfigurationError

FLOOR: Final = 0.1
"""Share of the base rate at which the cosine ends."""

Shape = Callable[[int], float]
"""Factor on the base learning rate for the step about to be done, counted from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usual:
    """`constant` or `cosine`, both after a linear warm-up."""

    name: str
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def shape(name: str, *, warmup_steps: int, total_steps: int) -> Usual:
    if name not in ("constant", "cosine"):
        raise _unknown(name)
    if warmup_steps >= total_steps:
        raise ConfigurationError(
            f"warmupSteps {warmup_steps} must be below the number of steps, {total_steps}"
        )
    return Usual(name=name, warmup_steps=warmup_steps, total_steps=total_steps)


class Schedule:
    """Sets the rates before each step (a shape), or lets a torch scheduler do so after it."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: Shape | LRScheduler) -> None:
        if isinstance(kind, ReduceLROnPlateau):
            raise ConfigurationError(
                "schedule is a ReduceLROnPlateau, which wants a measure at every step; use a schedule that "
                "depends on the step alone"
            )
        if not isinstance(kind, LRScheduler) and not callable(kind):
            raise _unknown(kind)
        self._optimizer = optimizer
        self._kind = kind
        self._base = [float(group["lr"]) for group in optimizer.param_groups]

    def before_step(self, step: int) -> None:
        if not isinstance(self._kind, LRScheduler):
            factor = _finite(self._kind(step), step)
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = base * factor

    def after_step(self) -> None:
        if isinstance(self._kind, LRScheduler):
            self._kind.step()

    @property
    def rate(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def kind(self) -> str:
        """By which a checkpoint's is compared: what a function does cannot be told."""
        if isinstance(self._kind, LRScheduler):
            return f"LRScheduler {type(self._kind).__name__}"
        return self._kind.name if isinstance(self._kind, Usual) else "function"

    def state_dict(self) -> dict[str, Any]:
        torch_state = self._kind.state_dict() if isinstance(self._kind, LRScheduler) else {}
        return {"kind": self.kind, "base": list(self._base), "torch": torch_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where it is of a schedule of another kind. The checkpoint's rates hold."""
        saved = state.get("kind", self.kind)  # what was saved before there was a kind is taken
        if saved != self.kind:
            raise ValueError(f"the checkpoint has {saved}, the script {self.kind}")
        if state["base"] != self._base:
            log.event("override", setting="lr", checkpoint=_rates(state["base"]), script=_rates(self._base))
        self._base = list(state["base"])
        if isinstance(self._kind, LRScheduler):
            self._kind.load_state_dict(state["torch"])


def _unknown(given: object) -> ConfigurationError:
    return ConfigurationError(
        f"schedule {given!r} is not known: use constant, cosine, a function or an LRScheduler"
    )


def _finite(factor: object, step: int) -> float:
    """The script's function may return anything; of NaN the weights would die without a word."""
    try:
        number = math.nan if isinstance(factor, str) else float(factor)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigurationError(
            f"Trainer(schedule=...): the function returned {factor!r} for step {step} (the first is 0); it "
            "must return a finite number, the factor on the learning rate"
        )
    return number


def _rates(base: list[float]) -> str:
    """In full: the log cuts numbers to three decimals."""
    return ",".join(map(repr, base))
