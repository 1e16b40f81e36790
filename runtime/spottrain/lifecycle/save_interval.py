"""Decides on rank 0, between steps, when the next periodic save is due.

`auto` is Young's interval with measured inputs: sqrt(2 x cost of a save x mean time between losses; Young
1974, Daly 2006). The cost is the time that training pauses for a save, and what the steps beside it take
longer. The older an attempt, the rarer its end, so that the interval grows with it. The interval is never
below the time of an upload, because uploads do not overlap.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spottrain.contract import LONGEST_AUTO_INTERVAL
from spottrain.core import log
from spottrain.core.progress import ProgressFacts
from spottrain.core.run_config import Interval

AGAIN_SECONDS: Final = 30.0
"""Seconds from the start of a failed save to the next try; the interval, if that is shorter."""
PRIOR_SECONDS: Final = 3600.0
"""Prior: one attempt that trained for so many seconds (a guess for spot; observations outweigh it)."""
PRIOR_LOST: Final = 0.5
"""Prior: so many attempts that lost steps, of as many."""
SHAPE: Final = 0.6
"""Weibull shape of the length of attempts: on spot most are short, and an old one lasts. 1: no ageing."""
AGE_SECONDS: Final = 180.0
"""How long the nodes were probably there before the training began: boot, image, start-up."""
FIRST_SECONDS: Final = 60.0
"""Interval in seconds until the first save has shown what one costs."""
FRESH_SHARE: Final = 0.1
"""Share of the interval. A durable save younger than that makes an advised save unnecessary."""
MIN_SECONDS: Final = 5.0
SAVES_MEASURED: Final = 5
"""Saves whose median tells what the next one takes from the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """What a job knows of losses.

    Attributes:
        trained: Seconds of training of all attempts, this one included.
        here: Those of this attempt.
        attempts: Attempts before this one.
        lost: How many of them lost steps. One that saved at its notice lost none.
    """

    trained: float = 0.0
    here: float = 0.0
    attempts: int = 0
    lost: float = 0

    def seconds_between(self, interval: float) -> float:
        """Returns the mean seconds between losses at the rate of the next `interval` seconds."""
        attempts = max(self.attempts, self.lost)
        mean = (self.trained + PRIOR_SECONDS) / (attempts + 1)
        share = (self.lost + PRIOR_LOST) / (attempts + PRIOR_LOST)
        scale, age = mean / math.gamma(1 + 1 / SHAPE), AGE_SECONDS + self.here
        ends = ((age + interval) / scale) ** SHAPE - (age / scale) ** SHAPE
        return interval / (share * float(ends))


def young(cost: float, mean_time: float) -> float:
    """Returns the seconds of work between saves, by Daly's higher-order formula. Inputs in seconds."""
    if cost >= 2 * mean_time:
        return mean_time
    root = math.sqrt(2 * cost * mean_time)
    ratio = cost / (2 * mean_time)
    return root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def auto_seconds(*, cost: float | None, upload: float | None, losses: Losses) -> float:
    """Seconds of `auto`. `cost`: seconds of training that a save takes; `upload`: until it is durable."""
    if cost is None:
        return FIRST_SECONDS
    found = FIRST_SECONDS
    for _ in range(8):  # the rate of losses depends on the interval, but little: this converges
        best = young(max(cost, 1e-3), losses.seconds_between(found))
        found = min(max(best, upload or 0.0, MIN_SECONDS), LONGEST_AUTO_INTERVAL)
    return found


class SlowerSteps:
    """Measures what a save takes from the steps beside it, against the mean of the steps before it.

    `stepped`: seconds of all steps up to `step`, without pauses for saves and without evaluations.
    """

    def __init__(self) -> None:
        self._since = 0, 0.0
        """`step` and `stepped` when the last save began, or was over."""
        self._saving = True  # the first step is no measure either
        self._usual: float | None = None
        """Mean seconds of a step with no save beside it."""
        self._found: deque[float] = deque(maxlen=SAVES_MEASURED)

    @property
    def seconds(self) -> float:
        """Seconds that a save takes from the steps; 0 before one was measured."""
        return statistics.median_low(self._found) if self._found else 0.0

    def save_began(self, step: int, stepped: float) -> None:
        if not self._saving and step > self._since[0]:
            self._usual = (stepped - self._since[1]) / (step - self._since[0])
        self._since, self._saving = (step, stepped), True

    def save_over(self, step: int, stepped: float, took: float | None) -> None:
        """Notes that no save is under way. `took`: seconds of the last one; None if it failed."""
        if not self._saving or step <= self._since[0]:
            return
        if self._usual is not None and took is not None:
            longer = stepped - self._since[1] - (step - self._since[0]) * self._usual
            # A save takes at most all of the time until it is over: the rest is a compilation, or such.
            self._found.append(min(max(longer, 0.0), took))
        self._since, self._saving = (step, stepped), False


class RebalanceAdvice:
    """Detects advice to save, such as a rebalance recommendation of the cloud: one extra save for each.

    Advice is not a stop: most nodes that receive it continue to run. `read` returns the time in the advice
    file, in Unix seconds; None if there is none. A new time is a new advice.
    """

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


class SavePolicy:
    """When all ranks save, as rank 0 decides, and what a checkpoint keeps for this in later attempts.

    The interval counts from the start of the last save, or from the start of the run. `attempt`: number of
    this attempt. `advised`: returns the time of the advice to save (`RebalanceAdvice`).
    """

    def __init__(
        self,
        interval: Interval,
        attempt: int,
        advised: Callable[[], float | None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.advice = RebalanceAdvice(advised)
        self._interval, self._clock = interval, clock
        self._attempts = max(attempt - 1, 0)
        self._losses = self._attempts
        """Attempts so far that lost steps; without a checkpoint all of them did."""
        self._trained_before = 0.0
        """Seconds of training of the attempts before this one."""
        self._skipped_for: int | None = None
        self._slower = SlowerSteps()
        self._step, self._time = 0, self._clock()

    def begin(self, step: int) -> None:
        """Notes that the training goes on from `step`."""
        self._step, self._time = step, self._clock()
        self.advice.begin()

    def started(self, step: int, stepped: float) -> None:
        """Notes that a save of `step` has begun. `stepped`: see `due`."""
        self._step, self._time = step, self._clock()
        self._slower.save_began(step, stepped)

    def next_step(self, saving: int | None = None) -> int | None:
        """Step of the save after the last, or after `saving`, if the interval counts steps, else None."""
        last = self._step if saving is None else saving
        return None if self._interval.steps is None else last + self._interval.steps

    def due(
        self,
        step: int,
        facts: Callable[[], ProgressFacts],
        trained: float,
        stepped: float,
        *,
        uploading: int | None,
        failed: bool,
    ) -> bool:
        """Whether to save now.

        `facts`: returns those of the run, by a copy that most steps do without. `trained`: seconds of
        training of this attempt; `stepped`: those of its steps, without evaluations. `uploading`: step of the
        save in progress. `failed`: whether the last save failed.
        """
        interval = self._interval
        if interval.auto:
            known = facts()
            if uploading is None:
                self._slower.save_over(step, stepped, None if failed else known.save_seconds)
            interval = self._auto(known, trained)
        advised = self.advice.take()
        if advised is not None and self._accepts(advised, interval, facts(), uploading):
            return True
        steps, seconds = step - self._step, self._clock() - self._time
        tried_again = failed and seconds >= AGAIN_SECONDS
        nothing_new = self._interval.auto and not steps
        if nothing_new or not (tried_again or interval.due(steps=steps, seconds=seconds)):
            return False
        if uploading is None:
            return True
        if uploading != self._skipped_for:  # logged once for each upload, not at every step
            log.event("save-skipped", step=step, uploading=uploading)
        self._skipped_for = uploading
        return False

    def _accepts(
        self, advised: float, interval: Interval, facts: ProgressFacts, uploading: int | None
    ) -> bool:
        """Whether an advice to save justifies a save now."""
        why, lost = None, facts.lost_steps
        age = time.time() - (facts.durable_time or 0.0)
        share = lost / interval.steps if interval.steps else age / (interval.seconds or math.inf)
        if uploading is not None:
            why = "a save is under way"
        elif not lost or share < FRESH_SHARE:
            why = f"there is little to lose: {lost} step(s) since what is durable"
        log.event("save-advised", step=facts.step, advised=log.rfc3339(advised), skipped=why)
        return why is None

    def _auto(self, facts: ProgressFacts, trained: float) -> Interval:
        losses = Losses(
            trained=self._trained_before + trained,
            here=trained,
            attempts=self._attempts,
            lost=self._losses,
        )
        stall = facts.stall_seconds
        cost = None if stall is None else stall + self._slower.seconds
        return Interval(seconds=auto_seconds(cost=cost, upload=facts.save_seconds, losses=losses))

    def record(self, trained: float, *, at_stop: bool) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"trained": self._trained_before + trained, "losses": self._losses, "saved_at_stop": at_stop}

    def load_record(self, saved: Mapping[str, Any]) -> None:
        """Restores it. The attempt that saved it lost steps, unless it saved at its stop."""
        self._trained_before = saved["trained"]
        self._losses = saved.get("losses", 0) + (0 if saved.get("saved_at_stop") else 1)
