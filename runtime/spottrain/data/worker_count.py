"""Finds how many loader processes a rank needs, from measured times and the available cores.

A fixed number (4, or the number of cores) is wrong on most machines. Workers only have to keep up with the
step, and each extra one takes memory. So the first steps run without workers, and fetching and the rest of
the step are timed, with a clock that waits for the GPU. Then the workers that fetching needs are started.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat, tee
from pathlib import Path
from typing import Any, Final

from spottrain.core import container, log
from spottrain.data.plan import Step

TRIAL_STEPS: Final = 5
"""Timed steps. The first step is not among them: it compiles and opens files."""
HEADROOM: Final = 1.25
"""Factor on the measured fetch time: some samples take longer than others."""
NEGLIGIBLE: Final = 0.02
"""Share of a step below which fetching is cheap enough for the training process itself."""


def cores(cgroups: Path = container.CGROUPS, local_ranks: int = 1) -> float:
    """Returns the CPU cores for this rank: the container's cores, divided by its `local_ranks`."""
    return container.cores(cgroups) / max(local_ranks, 1)


def needed(fetch_seconds: float, other_seconds: float, available: float) -> int:
    """Returns how many workers keep up with a step.

    fetch_seconds: one core's work to fetch a step. other_seconds: the rest of the step.
    available: cores. One is kept for the training process, which launches kernels and must not wait.
    """
    if fetch_seconds <= NEGLIGIBLE * (fetch_seconds + other_seconds):
        return 0
    wanted = math.ceil(HEADROOM * fetch_seconds / max(other_seconds, 1e-9))
    return max(1, min(wanted, int(available) - 1))


class WorkerTrial:
    """Times the first steps, then says how many workers to use. It may span passes."""

    def __init__(self, clock: Callable[[], float], available: float) -> None:
        self._clock, self._available = clock, available
        self._steps: list[tuple[float, float]] = []
        """Seconds of fetching, and from the first fetch of a step to the first fetch of the next one."""
        self._began: float | None = None
        self._fetching = 0.0
        self.found: int | None = None

    def timed(self, batches: Iterator[Any]) -> Any:
        """Returns the next batch; its fetch counts as fetching of this step."""
        began = self._clock()
        batch = next(batches)
        self._fetching += self._clock() - began
        return batch

    def step(self) -> int | None:
        """Marks the beginning of a step. Returns the number of workers once it is known, else None."""
        now = self._clock()
        if self._began is not None:
            self._steps.append((self._fetching, now - self._began))
        self._began, self._fetching = now, 0.0
        if len(self._steps) > TRIAL_STEPS:
            fetch, step = map(statistics.median, zip(*self._steps[1:], strict=True))
            self.found = needed(fetch, max(step - fetch, 0.0), self._available)
            log.event("loader-workers", workers=self.found, fetch=fetch, step=step, cores=self._available)
        return self.found


def fetched(
    steps: Iterator[Step],
    fetch: Callable[[Iterator[Step], int], Iterator[Any]],
    workers: int,
    trial: WorkerTrial | None = None,
) -> Iterator[tuple[Step, Iterator[Any]]]:
    """Yields each step with its micro-batches, which must be taken before the next step.

    fetch: (steps, number of workers) -> their micro-batches. trial: replaces `workers` once it knows better.
    """
    asked, given = tee(steps)  # one order of an epoch in memory, not two
    stream = fetch(asked, workers)
    for step in given:
        if trial is not None and (found := trial.step()) is not None:
            del asked, stream  # else `tee` keeps all that `given` yields for them
            yield from fetched(chain([step], given), fetch, found)
            return
        count = len(step.micro_batches)
        yield step, islice(stream, count) if trial is None else map(trial.timed, repeat(stream, count))
