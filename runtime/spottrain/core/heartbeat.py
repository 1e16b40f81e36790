"""Whether the training gets on, and for how long it may not. Pure but for its clock; of `progress.Board`.

A sign of life is an optimizer step, a batch of an evaluation, the end of a copy for a save, or a new state.
Nobody knows how long an import, data preparation, a restore or a compilation may take, and the store has
time-outs of its own: so a limit holds from the end of the attempt's first step on, and only while it trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

FLOOR_SECONDS: Final = 600.0
"""Least limit that is measured: a kernel may be compiled anew, a file system may be slow for a while."""
TIMES: Final = 30
"""The limit that is measured is so many times the slowest of the last steps."""
LAST_STEPS: Final = 100
"""Steps that the slowest is sought among, at least; twice as many at most."""
TRAINING: Final = ("Training", "Evaluating")
"""States in which a limit holds."""


class Pulse:
    """`clock` gives seconds and never goes back. Written by the training thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout: float | None = None
        """Seconds; what the manifest sets in place of the measured limit."""
        self.steps = 0
        """Of this attempt."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when the first step is done, from where on a limit holds."""
        self._clock = clock
        self._last = clock()
        self._slowest = self._slowest_before = 0.0
        """Among the steps since the last multiple of LAST_STEPS, and among the LAST_STEPS before."""

    def beat(self) -> None:
        self._last = self._clock()

    def stepped(self) -> None:
        """Another step is done. The first is not measured: it may have been a compilation."""
        now = self._clock()
        if self.steps:
            self._slowest = max(self._slowest, now - self._last)
        self.steps += 1
        if self.steps % LAST_STEPS == 0:
            self._slowest_before, self._slowest = self._slowest, 0.0
        self._last = now
        if self.steps == 1:
            self.on_begin()

    @property
    def last(self) -> float:
        """When the last sign of life came, by the clock."""
        return self._last

    @property
    def idle(self) -> float:
        """Seconds since then."""
        return self._clock() - self._last

    @property
    def allowed(self) -> float:
        """Seconds that `idle` may be, where a limit holds."""
        if self.timeout is not None:
            return self.timeout
        return max(FLOOR_SECONDS, TIMES * max(self._slowest, self._slowest_before))

    def limit(self, state: str) -> float | None:
        """The same; None where no limit holds."""
        return self.allowed if self.steps and state in TRAINING else None
