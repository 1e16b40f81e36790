"""Chooses spot or on-demand, so that a job costs little and is not late. Pure.

The idea is that of Uniform Progress (Wu et al., "Can't Be Late", NSDI 2024): a job spends its slack evenly
over its time. Slack is the time left, less the remaining work and what a start on demand takes at worst.

- While nothing runs, the job waits for spot as long as it has more slack than the part to keep for later.
- While it runs on demand, it asks for spot beside the training if it has enough slack for a move, and if spot
  was not lost just before: spot that is scarce comes in short runs, which do not pay for a restart.
- While it runs on spot, it stays there: what a loss costs is part of the slack.

Each choice leaves the slack for its worst outcome. So the job is late only if on-demand comes later than is
reserved for it. Prices do not matter, as long as spot is the cheaper one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Place = Literal["spot", "on-demand", "nowhere"]
HOUR: Final = 3600.0

RESTARTS_AN_HOUR: Final = 1.2
"""Slack is kept for so many restarts in each hour that is left: a loss in 50 minutes is usual where spot is
scarce."""
KEPT_SHARE: Final = 0.3
"""Of the slack beyond that, this share is spent evenly over the job's time, the rest whenever it helps."""
MOVE_SHARE: Final = 0.6
"""Share of the kept slack that a move from on-demand to spot needs, besides its restart: less than a wait
needs, because the training goes on until the move."""
HOLD_UNIT: Final = 75.0
"""Seconds. After a loss, a job on demand asks for no spot for restart x restart / HOLD_UNIT: 20 minutes for
a restart of 5, 2.6 hours for one of 14. A move costs a restart, and the longer that is, the more often spot
goes before the move has paid, so the square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """Seconds.

    Attributes:
        restart: From a node that is being paid to progress beyond the last checkpoint.
        reserve: What is kept for a start on demand at worst: the wait for its node, the restart, lost work.
        decision: The longest time from a choice until its successor has an effect.
    """

    restart: float
    reserve: float
    decision: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What is known of a job. Times in seconds on one clock.

    Attributes:
        begun: When the job began.
        deadline: When it must be done.
        work: Seconds of training from beginning to end.
        work_left: Those that remain.
        running: Where it runs; a request that waits for its node is "nowhere".
        lost: When the job last lost a spot node; None if it never has.
    """

    now: float
    begun: float
    deadline: float
    work: float
    work_left: float
    running: Place = "nowhere"
    lost: float | None = None


@dataclass(frozen=True, slots=True)
class SpotDecision:
    """Whether to use spot, or to ask for it; and a sentence that explains it."""

    spot: bool
    reason: str


def choose(situation: Situation, overheads: Overheads) -> SpotDecision:
    """Chooses where a job runs. From "nowhere", spot means a request that stays open."""
    if situation.running == "spot":
        return SpotDecision(True, "it runs on spot")
    slack = situation.deadline - situation.now - situation.work_left - overheads.reserve
    keep = _to_keep(situation, overheads)
    lost_at_once = overheads.restart + overheads.decision
    """What a spot node costs that goes before its first save."""
    if situation.running == "nowhere":
        return _compared(slack, max(lost_at_once, keep))
    hold = overheads.restart**2 / HOLD_UNIT
    if situation.lost is not None and (left := situation.lost + hold - situation.now) > 0:
        return SpotDecision(False, f"spot was lost lately; it is asked for again in {_hours(left)}")
    return _compared(slack, max(lost_at_once, overheads.restart + MOVE_SHARE * keep))


def _to_keep(situation: Situation, overheads: Overheads) -> float:
    """Returns the slack that is kept for the time after now."""
    whole = situation.deadline - situation.begun
    if whole <= 0:
        return 0.0
    first = max(0.0, whole - situation.work - overheads.reserve)
    restarts = min(first, RESTARTS_AN_HOUR * whole / HOUR * overheads.restart)
    left = max(0.0, situation.deadline - situation.now) / whole
    return left * (restarts + KEPT_SHARE * (first - restarts))


def _compared(slack: float, needed: float) -> SpotDecision:
    spot = slack >= needed
    words = "at least" if spot else "less than"
    return SpotDecision(spot, f"slack {_hours(slack)}, {words} the {_hours(needed)} that spot needs now")


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR:.2f} h"
