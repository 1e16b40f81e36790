"""Estimates the time of a save at a preemption notice and compares it with the notice period. Pure.

seconds = one step + copy + 1.2 x bytes / bandwidth + 2
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median_low
from typing import Final

MARGIN: Final = 1.2
"""Safety factor on the upload time: a shared network is slower at times."""
COMMIT_SECONDS: Final = 2.0
"""Seconds for the manifest and HEAD: a few round trips, one of them retried."""
STEPS_MEASURED: Final = 15
FULL_SHARE: Final = 0.8
"""Share of the notice period. A save estimated to take more may not fit."""


class StepTimes:
    """The time of a step: the median of the last ones. An evaluation between two of them does not count."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=STEPS_MEASURED)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def typical(self) -> float:
        """Seconds; 0 before the first step."""
        return median_low(self._last) if self._last else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeBudget:
    """`bytes`: of this rank's part; `bandwidth`: of its uploads, in bytes per second; `grace`: seconds."""

    bytes: int
    bandwidth: float
    step_seconds: float
    copy_seconds: float
    grace: float

    @property
    def seconds(self) -> float:
        upload = MARGIN * self.bytes / self.bandwidth
        return self.step_seconds + self.copy_seconds + upload + COMMIT_SECONDS

    @property
    def share(self) -> float:
        return self.seconds / self.grace

    @property
    def fits(self) -> bool:
        return self.share <= FULL_SHARE

    @property
    def warning(self) -> str:
        """A sentence if the save may not fit into the notice period, else empty."""
        if self.fits:
            return ""
        return (
            f"a save at a notice is reckoned to take {self.seconds:.0f} s (a step {self.step_seconds:.1f} s, "
            f"{self.bytes / 1e9:.2f} GB at {self.bandwidth / 1e6:.0f} MB/s) of {self.grace:.0f} s of notice: "
            "an interruption may lose the steps since the last periodic save. Use nodes with a longer "
            "notice, a faster way to the store, more workers, a smaller state, or a shorter interval of saves"
        )
