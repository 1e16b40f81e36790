"""Early stopping: ends training at a target, or without improvement. Uses neither a clock nor torch.

    stopping = EarlyStopping(metric="accuracy", mode="max", patience=5, target=0.99)
    stopping.require(evaluates=eval_dataset is not None)
    ...
    if reason := stopping.note(step, values): break      # on every rank, with the same `values`

Its state is part of the checkpoint, so that an interruption does not reset the count of bad evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from spottrain.core import log
from spottrain.errors import ConfigurationError

MODES: Final = ("min", "max")


@dataclass(kw_only=True, slots=True)
class EarlyStopping:
    """Decides after each evaluation whether to stop. Call `note` on every rank with the same values.

    Args:
        metric: "loss", or the name of a metric.
        mode: "min" or "max": whether lower or higher is better.
        patience: stop after so many evaluations in a row without a new best; None: never for this reason.
        min_delta: least improvement over the best, in units of the metric, that counts as a new best.
        target: stop when the metric is at least as good as this; None: never for this reason.
        min_steps: before this step it stops only for NaN or infinity; bad evaluations do not count yet.
        stop_on_nan: stop if the metric is NaN or infinite; False: that counts as a bad evaluation.

    Raises:
        ConfigurationError: an argument is not valid, or it would never stop.
    """

    metric: str = "loss"
    mode: str = "min"
    patience: int | None = None
    min_delta: float = 0.0
    target: float | None = None
    min_steps: int = 0
    stop_on_nan: bool = True
    best: float | None = field(default=None, init=False)
    best_step: int | None = field(default=None, init=False)
    bad: int = field(default=0, init=False)
    """Consecutive evaluations without a new best."""
    reason: str | None = field(default=None, init=False)
    """Why it stopped, as a sentence; None while it goes on."""
    agree: Callable[[float], float] | None = field(default=None, init=False, repr=False, compare=False)
    """Maps this rank's value to the one that all ranks use; None: the value itself. `Run` and `job_settings`
    set it with several ranks. Then every rank must call `note` at the same steps."""
    _noted: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise self._bad(f"mode={self.mode!r}", "must be min or max")
        if self.patience is not None and self.patience < 1:
            raise self._bad(f"patience={self.patience}", "must be at least 1 evaluation")
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            raise self._bad(f"min_delta={self.min_delta}", "must be a finite number, at least 0")
        if self.target is not None and not math.isfinite(self.target):
            raise self._bad(f"target={self.target}", "must be a finite number")
        if self.min_steps < 0:
            raise self._bad(f"min_steps={self.min_steps}", "must be at least 0")
        if self.patience is None and self.target is None and not self.stop_on_nan:
            nothing = "patience=None, target=None, stop_on_nan=False"
            raise self._bad(nothing, "would never stop: set one of them")

    def require(self, *, evaluates: bool, metrics: Iterable[str] | None = None) -> None:
        """Raises ConfigurationError, before the first step, if the metric will not be there.

        Args:
            evaluates: whether the run evaluates.
            metrics: names that an evaluation returns; None: not known yet.
        """
        if not evaluates:
            raise ConfigurationError(
                f"early stopping needs the {self.metric} of an evaluation, but there is no "
                "eval_dataset: set Trainer(eval_dataset=...), or leave early stopping out"
            )
        if metrics is not None:
            self._require_known(metrics)

    def note(self, step: int, values: Mapping[str, float]) -> str | None:
        """Takes the values of an evaluation. A step that was noted before changes nothing.

        Args:
            step: optimizer steps done.
            values: values by metric name, the same on all ranks.

        Returns:
            Why to stop, as a sentence; None to go on.

        Raises:
            ConfigurationError: `values` lacks the metric.
        """
        self._require_known(values)
        if step <= self._noted:
            return self.reason
        self._noted = step
        value = float(values[self.metric])
        if self.agree is not None:
            value = self.agree(value)
        self.reason = self._reason(step, value)
        if self.reason is not None:
            log.event("early-stopping", step=step, why=self.reason)
        return self.reason

    def _reason(self, step: int, value: float) -> str | None:
        if not math.isfinite(value) and self.stop_on_nan:
            best = self._best and f"; {self._best}"
            return f"{self.metric} is {value} at step {step}, so further training is useless{best}"
        if math.isfinite(value) and (self.best is None or self._gain(value, self.best) > self.min_delta):
            self.best, self.best_step, self.bad = value, step, 0
        elif step >= self.min_steps:
            self.bad += 1
        if step < self.min_steps:
            return None
        if math.isfinite(value) and self.target is not None and self._gain(value, self.target) >= 0:
            return f"{self.metric} is {value:.9g} at step {step}, which reaches the target {self.target:.9g}"
        if self.patience is not None and self.bad >= self.patience:
            by = f" by more than {self.min_delta:.9g}" if self.min_delta else ""
            best = self._best or "every value was NaN or infinite"
            return f"{self.metric} did not improve{by} in {self.bad} evaluation(s) up to step {step}; {best}"
        return None

    @property
    def _best(self) -> str:
        return "" if self.best is None else f"the best is {self.best:.9g} of step {self.best_step}"

    def _gain(self, value: float, other: float) -> float:
        """Returns by how much `value` is better than `other`."""
        return other - value if self.mode == "min" else value - other

    def _require_known(self, names: Iterable[str]) -> None:
        there = sorted(names)
        if self.metric not in there:
            raise ConfigurationError(
                f"early stopping needs the metric {self.metric!r}, but an evaluation returns "
                f"{', '.join(there) or 'none'}: use one of those, or return it from "
                "Trainer(metrics=...)"
            )

    # --- state --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, the same on all ranks."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "rules": self._rules,
            "best": self.best,
            "best_step": self.best_step,
            "bad": self.bad,
            "reason": self.reason,
            "noted": self._noted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state. A state for another metric or mode is ignored, and `event=override` logged."""
        was, now = f"{state['metric']}/{state['mode']}", f"{self.metric}/{self.mode}"
        if was != now:
            log.event("override", setting="early-stopping", checkpoint=was, script=now)
            return
        self.best, self.best_step, self.bad = state["best"], state["best_step"], state["bad"]
        same = state.get("rules", self._rules) == self._rules
        self.reason = state["reason"] if same else None  # by other rules it may go on
        self._noted = state["noted"]

    @property
    def _rules(self) -> list[Any]:
        return [self.patience, self.min_delta, self.target, self.min_steps, self.stop_on_nan]

    @staticmethod
    def _bad(what: str, must: str) -> ConfigurationError:
        return ConfigurationError(f"EarlyStopping({what}): {must}")
