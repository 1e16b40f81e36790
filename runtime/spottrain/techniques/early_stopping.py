"""When a training is good enough, or will not get better: early stopping, a state machine without clock or
torch. Called after each evaluation.

    stopping = EarlyStopping(metric="accuracy", mode="max", patience=5, target=0.99)
    stopping.require(evaluates=eval_set is not None)
    ...
    if reason := stopping.note(step, values): break      # on every rank: `values` are the same on all of them

Its state is part of the checkpoint, so that an interruption neither forgives nor forgets a bad evaluation.
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
    """`note` answers why to stop, as a sentence, or None. All ranks come to the same answer, for the values
    of an evaluation are the same on all of them (`Evaluation` gives them rank 0's).

    metric: "loss", or a name that the metrics have; mode: whether lower or higher is better.
    patience: evaluations in a row without a new best after which it stops; None: it does not stop for that.
    min_delta: by how much, in units of the metric, a value must be better than the best to be a new best.
    target: stops when the metric is at least as good as this.
    min_steps: before this step it stops for a NaN only, and bad evaluations do not count.
    stop_on_nan: stops at a metric that is NaN or infinite; otherwise that is a bad evaluation.
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
    """Evaluations in a row without a new best."""
    reason: str | None = field(default=None, init=False)
    """Why it has stopped."""
    agree: Callable[[float], float] | None = field(default=None, init=False, repr=False, compare=False)
    """Of a rank's own figure, the one that all ranks judge by. Set by `Run` and `job_settings`
    where there are several; then every rank must call `note`, at the same steps."""
    _noted: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        """Raises ConfigurationError."""
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
            raise self._bad(
                "patience=None, target=None, stop_on_nan=False", "would never stop: give one of them"
            )

    def require(self, *, evaluates: bool, metrics: Iterable[str] | None = None) -> None:
        """Before the first step: whether the metric can come at all. Raises ConfigurationError.

        metrics: the names that an evaluation gives, where they are known beforehand.
        """
        if not evaluates:
            raise ConfigurationError(
                f"early stopping waits for the {self.metric} of an evaluation, and there is no eval_set: "
                "give Trainer(eval_set=...), or leave early stopping out"
            )
        if metrics is not None:
            self._require_known(metrics)

    def doubt(self, *, evaluations: int, total_steps: int) -> str | None:
        """Why it will not act in a run of so many, as a sentence; None where it may."""
        if self.min_steps >= total_steps:
            return f"early stopping begins at step {self.min_steps}, and the run has {total_steps}"
        if self.patience is not None and self.target is None and evaluations <= self.patience:
            return (
                f"early stopping has a patience of {self.patience} evaluation(s), and the run has "
                f"{evaluations}: it cannot end it for that; evaluate more often (eval_every)"
            )
        return None

    def note(self, step: int, values: Mapping[str, float]) -> str | None:
        """After the evaluation at `step`; a step that was noted before changes nothing.

        Raises ConfigurationError where `values` have no such metric.
        """
        self._require_known(values)
        if step <= self._noted:
            return self.reason
        self._noted = step
        value = float(values[self.metric])
        if self.agree is not None:
            value = self.agree(value)
        self.reason = self._judge(step, value)
        if self.reason is not None:
            log.event("early-stopping", step=step, why=self.reason)
        return self.reason

    def _judge(self, step: int, value: float) -> str | None:
        if not math.isfinite(value) and self.stop_on_nan:
            known = self.best is not None
            best = f"; the best is {self.best:.9g} of step {self.best_step}" if known else ""
            return f"{self.metric} is {value} at step {step}: what follows would be worth nothing{best}"
        if math.isfinite(value) and self._better(value):
            self.best, self.best_step, self.bad = value, step, 0
        elif step >= self.min_steps:
            self.bad += 1
        if step < self.min_steps:
            return None
        if math.isfinite(value) and self._reached(value):
            return f"{self.metric} is {value:.9g} at step {step}, which reaches the target {self.target:.9g}"
        if self.patience is not None and self.bad >= self.patience:
            return self._stale(step)
        return None

    def _better(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def _reached(self, value: float) -> bool:
        if self.target is None:
            return False
        return value <= self.target if self.mode == "min" else value >= self.target

    def _stale(self, step: int) -> str:
        best = (
            "no value was a number"
            if self.best is None
            else f"the best is {self.best:.9g} of step {self.best_step}"
        )
        by = f" by more than {self.min_delta:.9g}" if self.min_delta else ""
        return f"{self.metric} did not get better{by} in {self.bad} evaluation(s) up to step {step}; {best}"

    def _require_known(self, names: Iterable[str]) -> None:
        there = sorted(names)
        if self.metric not in there:
            raise ConfigurationError(
                f"early stopping waits for the metric {self.metric!r}, and an evaluation gives "
                f"{', '.join(there) or 'none'}: name one of those, or return it from Trainer(metrics=...)"
            )

    # --- state --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks."""
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
        """Of another metric nothing is taken: its best says nothing here. Told as `event=override`."""
        if (state["metric"], state["mode"]) != (self.metric, self.mode):
            was, now = (
                f"{metric}/{mode}"
                for metric, mode in ((state["metric"], state["mode"]), (self.metric, self.mode))
            )
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
