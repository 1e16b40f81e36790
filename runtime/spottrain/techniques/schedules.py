"""The learning rate over the steps. Used by `trainer`; `scheduler` is for loops of one's own.

The usual ones are pure functions of the step, so they have no state but the base rates; a torch LRScheduler
is taken as well, with its own state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from spottrain.core import log
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


def lr_schedule(
    optimizer: torch.optim.Optimizer,
    kind: str | Shape = "cosine",
    *,
    warmup_steps: int = 0,
    total_steps: int,
    said_anew: bool = False,
) -> LambdaLR:
    """For a loop of one's own, the same rates as `Trainer`'s: cosine or constant, or a function of the step.

    Call its step() after each optimizer step, and give it to `spottrain.Run(scheduler=...)`.
    said_anew: whether the optimizer's rates hold against those of a checkpoint, which were said before.
    `techniques.lr_scaling.warmup_steps` makes steps of epochs or of a fraction. Raises ConfigurationError.
    """
    factor: Shape = (
        kind if callable(kind) else shape(kind, warmup_steps=warmup_steps, total_steps=total_steps)
    )
    # A function of Python's own, for of any other callable torch would want to save a __dict__.
    return _Rates(optimizer, lambda step: _finite(factor(step), step), said_anew=said_anew)


class _Rates(LambdaLR):
    """As `Schedule` it says whose rates hold after a resume. Restored after the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Shape, *, said_anew: bool) -> None:
        self._said_anew = said_anew
        super().__init__(optimizer, factor)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "_said_anew"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        now, saved = ([float(rate) for rate in of] for of in (self.base_lrs, state_dict["base_lrs"]))
        super().load_state_dict(state_dict)
        if saved == now:
            return
        _tell_rates(saved, now, said_anew=self._said_anew)
        if not self._said_anew:
            return
        self.base_lrs = list(now)
        groups = zip(self.optimizer.param_groups, now, self.lr_lambdas, strict=True)
        for group, base, factor in groups:
            _set(group, "initial_lr", base)
            _set(group, "lr", base * factor(self.last_epoch))
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]


class Schedule:
    """Sets the rates before each step (a shape), or lets a torch scheduler do so after it.

    said_anew: whether the optimizer's rates hold against those of a checkpoint, which were said before.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, kind: Shape | LRScheduler, *, said_anew: bool = False
    ) -> None:
        if isinstance(kind, ReduceLROnPlateau):
            raise ConfigurationError(
                "schedule is a ReduceLROnPlateau, which wants a measure at every step; use a schedule that "
                "depends on the step alone"
            )
        if not isinstance(kind, LRScheduler) and not callable(kind):
            raise _unknown(kind)
        self._optimizer = optimizer
        self._kind = kind
        self._said_anew = said_anew
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
    def warmup_steps(self) -> int:
        """0 where it cannot be told."""
        return self._kind.warmup_steps if isinstance(self._kind, Usual) else 0

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
        """The checkpoint's rates hold, unless this attempt's were said anew.

        Raises ValueError where it is of a schedule of another kind.
        """
        saved = state.get("kind", self.kind)  # what was saved before there was a kind is taken
        if saved != self.kind:
            raise ValueError(f"the checkpoint has {saved}, the script {self.kind}")
        if state["base"] != self._base:
            _tell_rates(state["base"], self._base, said_anew=self._said_anew)
        if not self._said_anew:
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


def _set(group: dict[str, Any], name: str, value: float) -> None:
    """A rate that is a tensor stays that one: a compiled step, or a CUDA graph, holds it."""
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _tell_rates(saved: list[float], now: list[float], *, said_anew: bool) -> None:
    words = {"checkpoint": _rates(saved), "now": _rates(now)}
    log.event("override", setting="lr", holds="now" if said_anew else "checkpoint", **words)


def _rates(base: list[float]) -> str:
    """In full: the log cuts numbers to three decimals."""
    return ",".join(map(repr, base))
