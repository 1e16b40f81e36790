"""Advice to save, such as a rebalance recommendation of the cloud: one extra save for each. Used by `keeper`.

It is no stop: most nodes that are so advised live on. What is advised is a time, in a file that
`interruption` reads; a new time is a new advice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Advice:
    """`read` gives the time in the file, Unix seconds; None while there is none."""

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read = read
        self._seen: float | None = None
        self._begun = False
        self._told: deque[float] = deque(maxlen=1)

    def begin(self) -> None:
        """Training begins: what stands there now is older than anything that could be lost."""
        self._seen, self._begun = self._read(), True

    def tell(self, advised: float) -> None:
        """From any thread: another pod's."""
        self._told.append(advised)

    def take(self) -> float | None:
        """What was advised since it was last asked."""
        found = self._read()
        if self._begun and found is not None and found != self._seen:
            self._seen = found
            self._told.clear()
            return found
        return self._told.pop() if self._told else None
