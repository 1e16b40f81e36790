"""How many loader processes a rank needs, by what is measured and what the machine has. Called by `batches`.

A convention (4, or the number of cores) is wrong on most machines: one core of work that feeds the step just
in time is enough, and each worker more holds memory. So the first steps are fetched without workers, their
fetching and the rest of the step are timed, by a clock that waits for the GPU, and as many workers as the
fetching needs are started then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from spottrain.core import container

TRIAL_STEPS: Final = 5
"""Steps that are timed; the first is not one of them: it compiles, and opens files."""
HEADROOM: Final = 1.25
"""Some samples take longer than others."""
NEGLIGIBLE: Final = 0.02
"""Share of a step below which fetching in the training process is no loss worth a process."""


def cores(cgroups: Path = container.CGROUPS, local_ranks: int = 1) -> float:
    """CPU cores that this rank may use, of those that the pod's ranks share."""
    return container.cores(cgroups) / max(local_ranks, 1)


def needed(fetch_seconds: float, other_seconds: float, available: float) -> int:
    """Workers that keep up with a step: `fetch_seconds` of one core's work in each `other_seconds`.

    available: cores. One is left to the training process, which launches kernels and must not wait for one.
    """
    if fetch_seconds <= NEGLIGIBLE * (fetch_seconds + other_seconds):
        return 0
    wanted = math.ceil(HEADROOM * fetch_seconds / max(other_seconds, 1e-9))
    return max(1, min(wanted, int(available) - 1))


@dataclass(kw_only=True, slots=True)
class WorkerTrial:
    """Times the first steps, and says how many workers there should be from then on."""

    clock: Callable[[], float]
    available: float
    steps: int = TRIAL_STEPS
    fetched: list[float] = field(default_factory=list)
    lasted: list[float] = field(default_factory=list)
    """Seconds of each step from its first fetch to the next step's, its fetching included."""
    _began: float | None = None
    _fetching: float = 0.0

    def fetch(self, seconds: float) -> None:
        self._fetching += seconds

    def step(self) -> int | None:
        """Called where a step begins. The number of workers once it is known."""
        now = self.clock()
        if self._began is not None:
            self.fetched.append(self._fetching)
            self.lasted.append(now - self._began)
        self._began, self._fetching = now, 0.0
        if len(self.fetched) <= self.steps:
            return None
        fetched, lasted = _middle(self.fetched[1:]), _middle(self.lasted[1:])
        return needed(fetched, max(lasted - fetched, 0.0), self.available)

    @property
    def figures(self) -> dict[str, float]:
        """For a log line."""
        return {"fetch": _middle(self.fetched[1:]), "step": _middle(self.lasted[1:]), "cores": self.available}


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
