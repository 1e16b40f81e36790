"""Tracks signs of progress of a training, and the hang timeout that applies.

A sign of progress is an optimizer step, an evaluation batch, the end of a copy for a save, or a new state. An
import, data preparation, a restore or a compilation may take any time, and the store has its own timeouts. So
the hang timeout applies only while training, and only after the attempt's first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

FLOOR_SECONDS: Final = 600.0
"""Minimum of the measured limit: a kernel may be recompiled, a file system may be slow for a while."""
TIMES: Final = 30
"""The measured limit is this many times the slowest recent step."""
LAST_STEPS: Final = 100
"""The slowest step is taken from at least this many recent steps, and at most twice as many."""
TRAINING: Final = ("Training", "Evaluating")
"""States in which the limit applies."""


class Heartbeat:
    """Heartbeat of one run. The training thread writes it; any thread may read it.

    `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout: float | None = None
        """Seconds; from the manifest, in place of the measured limit."""
        self.steps = 0
        """Steps of this attempt."""
        self._clock = clock
        self.last = clock()
        """Time of the last sign of progress, by the clock."""
        self._slowest = self._slowest_before = 0.0
        """Slowest step since the last multiple of LAST_STEPS, and among the LAST_STEPS before that."""

    def beat(self) -> None:
        self.last = self._clock()

    def stepped(self) -> None:
        """Records a finished step. The first is not measured: it may include a compilation."""
        now = self._clock()
        if self.steps:
            self._slowest = max(self._slowest, now - self.last)
        self.steps += 1
        if self.steps % LAST_STEPS == 0:
            self._slowest_before, self._slowest = self._slowest, 0.0
        self.last = now

    @property
    def idle(self) -> float:
        """Seconds since the last sign of progress."""
        return self._clock() - self.last

    @property
    def allowed(self) -> float:
        """Maximum of `idle` in seconds, where the limit applies."""
        if self.timeout is not None:
            return self.timeout
        return max(FLOOR_SECONDS, TIMES * max(self._slowest, self._slowest_before))

    def limit(self, state: str) -> float | None:
        """Returns `allowed`; None in states where no limit applies."""
        return self.allowed if self.steps and state in TRAINING else None
