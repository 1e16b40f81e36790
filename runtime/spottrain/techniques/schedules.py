"""Learning rate schedules. `lr_schedule` makes one for a custom loop.

`constant` and `cosine` are pure functions of the step; their only state is the base rates. A torch
LRScheduler also works, with its own state.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from spottrain.core import log
from spottrain.errors import ConfigurationError

FLOOR: Final = 0.1
"""Final value of the cosine, as a share of the base rate."""

Shape = Callable[[int], float]
"""Step about to be done, counted from 0 -> factor on the base learning rate."""


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
            f"warmupSteps {warmup_steps} must be less than the number of steps, {total_steps}"
        )
    return Usual(name=name, warmup_steps=warmup_steps, total_steps=total_steps)


def lr_schedule(
    optimizer: torch.optim.Optimizer,
    kind: str | Shape = "cosine",
    *,
    warmup_steps: int = 0,
    total_steps: int,
    override_checkpoint: bool = False,
) -> LambdaLR:
    """Makes a schedule for a custom loop, with the same rates as `Trainer`.

    Call its `step()` after each optimizer step, and pass it to `spottrain.Run(scheduler=...)`.

    Args:
        optimizer: its current learning rates are the base rates.
        kind: "cosine", "constant", or a function: step, counted from 0 -> factor on the base rates.
        warmup_steps: optimizer steps of linear warm-up; ignored with a function. `lr_scaling.warmup_steps`
            converts epochs or a share of the run.
        total_steps: optimizer steps of the run.
        override_checkpoint: whether the optimizer's current rates override those of a checkpoint.

    Raises:
        ConfigurationError: the kind is not known, or the warm-up is not shorter than the run.
    """
    factor = kind if callable(kind) else shape(kind, warmup_steps=warmup_steps, total_steps=total_steps)
    # A plain function: of any other callable torch saves the __dict__.
    return _Rates(
        optimizer, lambda step: _finite(factor(step), step), override_checkpoint=override_checkpoint
    )


class _Rates(LambdaLR):
    """A LambdaLR with the `override_checkpoint` of `Schedule`. Restore the optimizer before it."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Shape, *, override_checkpoint: bool) -> None:
        self._override_checkpoint = override_checkpoint
        super().__init__(optimizer, factor)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "_override_checkpoint"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        now, saved = ([float(rate) for rate in of] for of in (self.base_lrs, state_dict["base_lrs"]))
        super().load_state_dict(state_dict)
        if saved == now:
            return
        _tell_rates(saved, now, override_checkpoint=self._override_checkpoint)
        if not self._override_checkpoint:
            return
        self.base_lrs = list(now)
        for group, base, factor in zip(self.optimizer.param_groups, now, self.lr_lambdas, strict=True):
            _set(group, "initial_lr", base)
            _set(group, "lr", base * factor(self.last_epoch))
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]


class Schedule:
    """Sets the rates before each step by a function, or steps a torch LRScheduler after it.

    The optimizer's current learning rates are the base rates; with `override_checkpoint` they override those
    of a checkpoint. Raises ConfigurationError if `kind` is a ReduceLROnPlateau, or is not callable.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: Shape | LRScheduler,
        *,
        override_checkpoint: bool = False,
    ) -> None:
        if isinstance(kind, ReduceLROnPlateau):
            raise ConfigurationError(
                "schedule: ReduceLROnPlateau needs a metric at every step; use a schedule that "
                "depends only on the step"
            )
        if not isinstance(kind, LRScheduler) and not callable(kind):
            raise _unknown(kind)
        self._optimizer = optimizer
        self._kind = kind
        self._override_checkpoint = override_checkpoint
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._step = 0

    def before_step(self, step: int) -> None:
        """Sets the rates for step `step`, counted from 0. Does nothing with a torch LRScheduler."""
        self._step = step
        if not isinstance(self._kind, LRScheduler):
            factor = _finite(self._kind(step), step)
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = base * factor

    def after_step(self) -> None:
        """Steps the torch LRScheduler, if there is one."""
        if isinstance(self._kind, LRScheduler):
            self._kind.step()

    @property
    def rate(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def kind(self) -> str:
        """Name that is compared with the checkpoint's. All functions have the same one."""
        if isinstance(self._kind, LRScheduler):
            return f"LRScheduler {type(self._kind).__name__}"
        return self._kind.name if isinstance(self._kind, Usual) else "function"

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, as torch's schedulers do: a custom loop goes on with `lr_schedule`."""
        if isinstance(self._kind, LRScheduler):
            of_torch = self._kind.state_dict()
        else:
            rates = [float(group["lr"]) for group in self._optimizer.param_groups]
            of_torch = {"base_lrs": list(self._base), "last_epoch": self._step, "_step_count": self._step + 1}
            of_torch |= {"_last_lr": rates, "lr_lambdas": [None] * len(rates)}
        return {**of_torch, "kind": self.kind, "base": list(self._base)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state. The checkpoint's rates hold, unless `override_checkpoint`.

        Raises ValueError if the state is of another kind of schedule.
        """
        saved = state.get("kind", self.kind)  # a custom loop's have no kind
        if saved != self.kind:
            raise ValueError(f"the checkpoint's schedule is {saved}, the script's {self.kind}")
        base = [float(rate) for rate in state.get("base", state.get("base_lrs", self._base))]
        if base != self._base:
            _tell_rates(base, self._base, override_checkpoint=self._override_checkpoint)
        if not self._override_checkpoint:
            self._base = base
        self._step = state.get("last_epoch", 0)
        if isinstance(self._kind, LRScheduler):
            of_torch = {name: each for name, each in state.items() if name not in ("kind", "base")}
            self._kind.load_state_dict(state.get("torch", of_torch))  # "torch": of 0.3.0


def _unknown(given: object) -> ConfigurationError:
    return ConfigurationError(
        f"schedule {given!r} is not known: use constant, cosine, a function or an LRScheduler"
    )


def _finite(factor: object, step: int) -> float:
    """Converts the result of the script's function to a finite float; else raises ConfigurationError."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan if isinstance(factor, str) else float(factor)  # type: ignore[arg-type]
        if math.isfinite(number):
            return number
    raise ConfigurationError(
        f"Trainer(schedule=...): the function returned {factor!r} for step {step} (the first is 0); it must "
        "return a finite factor on the learning rate"
    )


def _set(group: dict[str, Any], name: str, value: float) -> None:
    """Updates tensor values in place: a compiled step or a CUDA graph references the tensor."""
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _tell_rates(saved: list[float], now: list[float], *, override_checkpoint: bool) -> None:
    # With all digits: the log rounds numbers to three decimals.
    words = {name: ",".join(map(repr, rates)) for name, rates in (("checkpoint", saved), ("now", now))}
    log.event("override", setting="lr", holds="now" if override_checkpoint else "checkpoint", **words)
