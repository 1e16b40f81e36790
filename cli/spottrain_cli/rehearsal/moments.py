"""How many steps a rehearsal trains, and when it takes a node away: drawn at random, by a seed. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from spottrain.core.log_format import counted

NOTICE_REACHES_SECONDS: Final = 2.0
"""From the decision to reclaim until the trainer has stopped, at most: a training must not end meanwhile."""
SECONDS_OF_ATTEMPT: Final = 10.0
"""Of training that each attempt should have."""
LEAST_STEPS_OF_ATTEMPT: Final = 4
EARLIEST, LATEST = 0.3, 0.8
"""Of the time of a run whose steps nobody sees: the script must have had time to save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast an undisturbed training is."""

    first: int
    """The first step that was seen."""
    step: int
    total: int | None
    """None where the loop has not told: all that is known is what it has done so far."""
    seconds: float
    """From `first` until `step`."""

    @property
    def seconds_of_step(self) -> float:
        return self.seconds / max(1, self.step - self.first)

    @property
    def whole(self) -> float:
        """Seconds of the whole training, as far as it is known."""
        return self.seconds_of_step * self.steps

    @property
    def steps(self) -> int:
        return self.total or self.step


def wanted_seconds(reclaims: int) -> float:
    return SECONDS_OF_ATTEMPT * (reclaims + 1)


def fewer_steps(pace: Pace, reclaims: int) -> int | None:
    """How many steps are enough; None: the whole training is not much longer."""
    if pace.whole <= 2 * wanted_seconds(reclaims):
        return None
    least = LEAST_STEPS_OF_ATTEMPT * (reclaims + 1)
    return min(pace.steps, max(least, math.ceil(wanted_seconds(reclaims) / pace.seconds_of_step)))


def too_short(pace: Pace, reclaims: int) -> str:
    """A sentence where the training ends before so many notices can reach it; else ""."""
    needed = NOTICE_REACHES_SECONDS * (reclaims + 1)
    if pace.whole >= needed and pace.steps > reclaims + 1:
        return ""
    steps = max(
        LEAST_STEPS_OF_ATTEMPT * (reclaims + 1), math.ceil(1.5 * needed / max(pace.seconds_of_step, 1e-6))
    )
    return (
        f"{pace.steps} steps took {pace.whole:.1f} s here, too short for {counted(reclaims, 'reclaim')}; "
        f"give --max-steps {steps}"
    )


def steps(pace: Pace, reclaims: int, chance: random.Random) -> list[int]:
    """After which steps a node is reclaimed, in order; early enough that the notice comes before the end."""
    margin = math.ceil(NOTICE_REACHES_SECONDS / max(pace.seconds_of_step, 1e-6))
    last = max(reclaims, pace.steps - 1 - min(margin, pace.steps // 2))
    return sorted(chance.sample(range(1, last + 1), reclaims))


def seconds(whole: float, reclaims: int, chance: random.Random) -> list[float]:
    """The same for a training whose steps nobody sees: seconds of training over all attempts."""
    return sorted(chance.uniform(EARLIEST * whole, LATEST * whole) for _ in range(reclaims))


def too_short_run(whole: float, reclaims: int) -> str:
    """As `too_short`, for a training whose steps nobody sees."""
    needed = NOTICE_REACHES_SECONDS * (reclaims + 1) / (1 - LATEST)
    if whole >= needed:
        return ""
    return (
        f"the job ran for {whole:.0f} s here, too short for {counted(reclaims, 'reclaim')}; it needs "
        f"{needed:.0f} s: let it train longer"
    )
