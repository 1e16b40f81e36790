"""When the next periodic save is due. Used by `trainer` between steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from spottrain.config import Interval

AGAIN_SECONDS: Final = 30.0
"""After the start of a save that failed it is tried again so soon, or after the interval, if that is less."""


class Cadence:
    """Counts from the start of the last save, or from where the run began."""

    def __init__(self, interval: Interval, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self.started(0)

    def started(self, step: int) -> None:
        """A save of `step` has begun."""
        self._step, self._time = step, self._clock()

    def due(self, step: int, *, failed: bool = False) -> bool:
        """`failed`: the last save did."""
        seconds = self._clock() - self._time
        if failed and seconds >= AGAIN_SECONDS:
            return True
        return self._interval.due(steps=step - self._step, seconds=seconds)
