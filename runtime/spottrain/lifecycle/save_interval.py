"""When the next periodic save is due. Used by `keeper` between steps, on rank 0.

`auto` is Young's interval with what was measured: sqrt(2 x cost of a save x mean time between losses), where
the cost is the time that training stood still for it (Young 1974; Daly 2006). It is never below the time that
an upload takes, because uploads do not overlap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spottrain.core.run_config import Interval

AGAIN_SECONDS: Final = 30.0
"""After the start of a save that failed it is tried again so soon, or after the interval, if that is less."""
PRIOR_SECONDS: Final = 3600.0
"""Before anything was observed: one loss in so much training (a guess for spot; observations outweigh it)."""
FIRST_SECONDS: Final = 60.0
"""Until the first save has shown what one costs."""
FRESH_SHARE: Final = 0.1
"""Of the interval: a save that is no older makes one that is only advised needless."""
LEAST_SECONDS: Final = 5.0
MOST_SECONDS: Final = 1800.0
"""Against an error of the model (economics.md section 6)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """`trained`: seconds of training of all attempts; `losses`: attempts that ended early."""

    trained: float
    losses: int

    @property
    def mean_time(self) -> float:
        """Between losses: the posterior mean of a rate whose prior is one loss in PRIOR_SECONDS."""
        return (self.trained + PRIOR_SECONDS) / (self.losses + 1)


def young(cost: float, mean_time: float) -> float:
    """Seconds of work between saves, by Daly's higher order where it differs; inputs in seconds."""
    if cost >= 2 * mean_time:
        return mean_time
    root = math.sqrt(2 * cost * mean_time)
    ratio = cost / (2 * mean_time)
    return root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def auto_seconds(*, stall: float | None, upload: float | None, observed: Observed) -> float:
    """`stall`: seconds that training stood still for the last save; `upload`: until it was durable."""
    if stall is None:
        return FIRST_SECONDS
    best = young(max(stall, 1e-3), observed.mean_time)
    return min(max(best, upload or 0.0, LEAST_SECONDS), MOST_SECONDS)


class Cadence:
    """Counts from the start of the last save, or from where the run began.

    `seconds`: what `auto` means now; asked only where the interval is `auto`.
    """

    def __init__(
        self,
        interval: Interval,
        seconds: Callable[[], float] = lambda: FIRST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval = interval
        self._seconds = seconds
        self._clock = clock
        self.started(0)

    def started(self, step: int) -> None:
        """A save of `step` has begun."""
        self._step, self._time = step, self._clock()

    @property
    def next_step(self) -> int | None:
        """At which a save will be due, where the interval counts steps."""
        return None if self._interval.steps is None else self._step + self._interval.steps

    def due(self, step: int, *, failed: bool = False) -> bool:
        """`failed`: the last save did."""
        seconds = self._clock() - self._time
        if failed and seconds >= AGAIN_SECONDS:
            return True
        if self._interval.auto:
            return step > self._step and seconds >= self._seconds()
        return self._interval.due(steps=step - self._step, seconds=seconds)

    def fresh(self, *, steps: int, seconds: float) -> bool:
        """Whether so many steps and seconds after the state that is durable a save is needless."""
        if steps <= 0:
            return True
        if self._interval.steps is not None:
            return steps < FRESH_SHARE * self._interval.steps
        return seconds < FRESH_SHARE * (self._interval.seconds or self._seconds())
