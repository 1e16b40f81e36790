"""How long spot stays available or away: a model of run lengths, learned from history. Pure.

A run is a time without a change of availability. Its survival function is Weibull's, S(t) = exp(-(t / scale)
** SHAPE). A shape below 1 means that the chance of an end falls with the age of a run: most runs are short,
and the hours are in the long ones. The constants were fitted to four public traces (K80 and V100, us-west-2a,
2022); a job's own runs move the scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
        return self.left(overhead) * (1 - self.end_within(overhead)) / self.left(0.0)

    def left(self, age: float) -> float:
        """Returns the expected hours that remain of a run of `age`."""
        return _left(self, age)


@lru_cache(maxsize=4096)
def _left(lengths: RunLengths, age: float) -> float:
    step, before = lengths.scale / 50, lengths.cumulative(age)
    times = (age + step * (number + 0.5) for number in range(5000))
    return step * sum(math.exp(before - lengths.cumulative(time)) for time in times)


def joined(history: Sequence[SpotRun]) -> tuple[SpotRun, ...]:
    """Joins runs without spot between which nobody looked: spot was probably away all the time."""
    found: list[SpotRun] = []
    for run in history:
        last = found[-1] if found else None
        if last is not None and not (last.available or last.ended or run.available):
            found[-1] = replace(run, start=last.start)
        else:
            found.append(run)
    return tuple(found)


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


def chance(history: Sequence[SpotRun], now: float, within: float = 0.0) -> float:
    """Returns the probability that spot is available, or will be for the first time `within` hours.

    The older the last observation, the nearer it is to the long-run share of time with spot.

    Args:
        history: Runs with and without spot, oldest first.
        now: The current time in seconds, on the clock of `history`.
        within: Hours that a request may wait.
    """
    up, down = learn(history, True), learn(history, False)
    share = up.left(0.0) / (up.left(0.0) + down.left(0.0))
    if not history:
        return share + (1 - share) * down.end_within(within)
    last = history[-1]
    gap, age = (now - last.end) / 3600, (last.end - last.start) / 3600
    seen, age = (not last.available, 0.0) if last.ended else (last.available, age)
    if not seen:
        return chance_after(up, down, away=age, gap=gap, within=within)
    stays = 1 - up.end_within(gap, age)
    there = stays + (1 - stays) * share
    return there + (1 - there) * down.end_within(within)


def chance_after(up: RunLengths, down: RunLengths, *, away: float, gap: float, within: float) -> float:
    """Returns the chance of spot that had been away for `away` hours when last observed, `gap` hours ago."""
    share = up.left(0.0) / (up.left(0.0) + down.left(0.0))
    there = down.end_within(gap, away) * max(share, 1 - up.end_within(gap / 2))
    return there + (1 - there) * down.end_within(within, away + gap)
