"""Detects advice to save, such as a rebalance recommendation of the cloud: one extra save for each.

Advice is not a stop: most nodes that receive it continue to run. It is a time in a file, which
`core/preemption.py` reads; a new time is a new advice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class RebalanceAdvice:
    """`read` returns the time in the file, in Unix seconds; None if there is none."""

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read = read
        self._seen: float | None = None
        self._begun = False
        self._told: deque[float] = deque(maxlen=1)

    def begin(self) -> None:
        """Ignores advice from before the training began: there was no work to lose."""
        self._seen, self._begun = self._read(), True

    def tell(self, advised: float) -> None:
        """Accepts advice from another pod. Thread-safe."""
        self._told.append(advised)

    def take(self) -> float | None:
        """Returns the advice that is new since the last call, in Unix seconds; None if there is none."""
        found = self._read()
        if self._begun and found is not None and found != self._seen:
            self._seen = found
            self._told.clear()
            return found
        return self._told.pop() if self._told else None
