"""How long spot stays available or away: a model of run lengths, learned from history. Pure.

A run is a time without a change of availability. Its survival function is Weibull's, S(t) = exp(-(t / scale)
** SHAPE). A shape below 1 means that the chance of an end falls with the age of a run: most runs are short,
and the hours are in the long ones. The constants were fitted to four public traces (K80 and V100, us-west-2a,
2022); a job's own runs move the scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

SHAPE: Final = 0.6
UP_HOURS: Final = 0.7
"""Prior scale of runs with spot."""
DOWN_HOURS: Final = 0.36
"""Prior scale of runs without spot."""
PRIOR_RUNS: Final = 12.0
"""Weight of the prior, in runs."""
FORGET: Final = 0.85
"""Weight of a run relative to the next one of its kind: availability drifts."""
RECENT: Final = 20
"""Runs of each kind that are read, newest first; older ones have no weight left."""
LEVEL: Final = 0.4
"""Learned scales are rounded to powers of exp(LEVEL), so that few distinct models occur."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotRun:
    """A time without a change of availability, in seconds on any clock.

    Attributes:
        available: Whether spot was available.
        start: When the run began, or when it was first observed.
        end: When it was last observed.
        ended: Whether its end was observed. False for the current run, and where nobody looked on.
    """

    available: bool
    start: float
    end: float
    ended: bool = True


@dataclass(frozen=True, slots=True)
class RunLengths:
    """Weibull distribution of the hours of one kind of run."""

    scale: float
    shape: float = SHAPE

    def cumulative(self, hours: float) -> float:
        """Returns the cumulative hazard at an age."""
        return math.pow(hours / self.scale, self.shape)

    def end_within(self, hours: float, age: float = 0.0) -> float:
        """Returns the probability that a run of `age` ends within the next `hours`."""
        return -math.expm1(self.cumulative(age) - self.cumulative(age + hours))

    def useful_share(self, overhead: float) -> float:
        """Returns the expected share of a run that is left after `overhead` hours at its beginning."""
        step = self.scale / 50
        survival = [math.exp(-self.cumulative(step * (number + 0.5))) for number in range(5000)]
        whole = sum(survival)
        return sum(survival[round(overhead / step) :]) / whole


def learn(history: Sequence[SpotRun], available: bool) -> RunLengths:
    """Returns the lengths of runs with (or without) spot, from a prior and a job's own runs.

    In the scale t ** SHAPE a run is exponential, so a Gamma prior is conjugate. Runs without an observed end
    count with the time that was observed.
    """
    prior = (UP_HOURS if available else DOWN_HOURS) ** SHAPE
    count, total = PRIOR_RUNS, PRIOR_RUNS * prior
    weight = 1.0
    for run in _newest(history, available):
        total += weight * ((run.end - run.start) / 3600) ** SHAPE
        count += weight * run.ended
        weight *= FORGET
    level = round(math.log(total / count / prior) / LEVEL)
    return RunLengths((prior * math.exp(LEVEL * level)) ** (1 / SHAPE))


def _newest(history: Sequence[SpotRun], available: bool) -> Iterable[SpotRun]:
    return islice((run for run in reversed(history) if run.available is available), RECENT)
