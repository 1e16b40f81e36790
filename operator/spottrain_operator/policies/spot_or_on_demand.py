"""Chooses between spot, on-demand and waiting, so that a job costs least and is never late. Pure.

How it decides, with a deadline:

1. Slack is the time left minus the remaining work minus what a start of on-demand takes at worst.
2. A choice is allowed only if slack remains after it at worst: after a wait until the next decision, after a
   start on spot that is interrupted at once. On-demand is always allowed. So the job is late only if
   on-demand cannot be had within its p99.
3. Spot comes and goes in runs. The older a run, the longer it will probably last. How long runs are is
   learned from the job's own history, on top of a prior (`spot_runs`).
4. A table holds the expected cost of finishing, for each time left, slack and age of a run (`cost_table`).
   The allowed choice with the least expected cost is taken.

Without a deadline, waiting is free: spot, unless its interruptions make it dearer than on-demand.
With a deadline but unknown work, it never waits, and says that the deadline cannot be planned for.

Availability may be known (`spot` is True or False) or not (None). Then the choice "spot" means a request. A
granted one is paid from then on; what a refused one costs is `Overheads.request`:

- 0: nothing, and it is known at once. A run of unknown age is taken to have begun midway since somebody last
  looked, so that a job on on-demand asks again when a move would probably be worth its restart.
- above 0: so many seconds in which the job stands still, because a request needs the job's pods; on-demand is
  then a start with its restart. So the expected cost weighs both outcomes, by the chance that the history
  tells, and a job on on-demand asks the more rarely the dearer its stop is. A choice that changes the place
  must promise to save more than MARGIN: each change has a price, and the table's figures have an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from spottrain_operator.policies.cost_table import IMPOSSIBLE, Problem, table_for
from spottrain_operator.policies.spot_runs import SpotRun, chance, joined, learn

Choice = Literal["spot", "on-demand", "wait"]
HOUR: Final = 3600.0
MARGIN: Final = 0.1
"""Hours of on-demand that a change of place must save where a refused request has a cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices of the whole job per hour, in one currency."""

    spot: float
    on_demand: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """Seconds that work stands still.

    Attributes:
        restart: From a node that is being paid to progress beyond the last checkpoint.
        on_demand_p99: The 99th percentile of the wait for an on-demand node, not paid.
        decision: The longest time until the next call of `choose`.
        lost_work: Work since the last durable checkpoint that an interruption can lose.
        request: The longest that a job stands still for a request for spot that is refused. 0: a refusal is
            known at once, and costs nothing.
    """

    restart: float
    on_demand_p99: float
    decision: float
    lost_work: float = 0.0
    request: float = 0.0

    @property
    def reserve(self) -> float:
        """What is kept for a start on demand."""
        return self.restart + self.on_demand_p99 + self.lost_work


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What is known of a job. Times in seconds on any one clock.

    Attributes:
        now: The current time.
        deadline: When the job must be done; None if there is no deadline.
        work_left: Seconds of training that remain; None if unknown.
        running: Where the job runs; "wait" if nowhere, also right after an interruption.
        startup_left: What remains of the restart of the running node.
        spot: Whether a spot node can be had now; None if only a request can tell. With None, the choice
            "spot" is a request; if it is refused, call again with False.
        history: Runs with and without spot, oldest first, up to now.
        granted: The chance that a request is granted, where more is known than the history tells; else None.
    """

    now: float
    deadline: float | None
    work_left: float | None
    running: Choice = "wait"
    startup_left: float = 0.0
    spot: bool | None = None
    history: tuple[SpotRun, ...] = ()
    granted: float | None = None


@dataclass(frozen=True, slots=True)
class SpotDecision:
    """A choice, and a sentence that explains it."""

    choice: Choice
    reason: str


def choose(situation: Situation, prices: Prices, overheads: Overheads) -> SpotDecision:
    """Decides where a job runs until the next decision.

    Args:
        situation: What is known of the job.
        prices: Current prices.
        overheads: Time that starts and waits take.

    Returns:
        The choice and its reason.

    Raises:
        ValueError: An argument is negative, NaN or infinite, or a price is zero.
    """
    _check(situation, prices, overheads)
    situation = replace(situation, history=joined(situation.history))
    if situation.deadline is None:
        return _cheapest(situation, prices, overheads)
    if situation.work_left is None:
        choice: Choice = "on-demand" if situation.spot is False else "spot"
        return SpotDecision(
            choice, "the remaining work is unknown, so meeting the deadline cannot be planned; never waits"
        )
    slack = _slack(situation, overheads)
    allowed = _allowed(situation, overheads, slack)
    if allowed == ["on-demand"]:
        return SpotDecision("on-demand", _out_of_slack(situation, overheads, slack))
    costs = _costs(situation, prices, overheads, slack)
    same = _same(situation)
    margin = MARGIN if overheads.request else 0.0
    best = min(allowed, key=lambda choice: costs[choice] + (0.0 if choice == same else margin))
    sums = {choice: costs[choice] for choice in allowed if costs[choice] < IMPOSSIBLE / 2}
    words = ", ".join(f"{choice} {cost * prices.on_demand:.2f}" for choice, cost in sums.items())
    return SpotDecision(best, f"expected cost of the rest: {words}; slack {slack / HOUR:.2f} h")


def _same(situation: Situation) -> Choice:
    """Returns the choice that changes nothing; a job that has no node asks for spot before it waits."""
    asks = situation.running == "wait" and situation.spot is not False
    return "spot" if asks else situation.running


def _slack(situation: Situation, overheads: Overheads) -> float:
    """Returns the seconds that the job can lose and still be done by on-demand."""
    assert situation.deadline is not None and situation.work_left is not None
    startup = 0.0 if situation.running == "wait" else situation.startup_left
    return situation.deadline - situation.now - situation.work_left - startup - overheads.reserve


def _allowed(situation: Situation, overheads: Overheads, slack: float) -> list[Choice]:
    """Returns the choices after which on-demand can still finish in time."""
    found: list[Choice] = ["on-demand"]
    waits = overheads.decision + (overheads.restart if overheads.request else 0.0)
    if slack >= waits and situation.running != "spot":
        found.append("wait")
    loss = situation.startup_left if situation.running == "spot" else overheads.restart
    if situation.spot is None:
        loss = max(loss + overheads.request, overheads.decision)
    if situation.spot is not False and slack >= loss:
        found.append("spot")
    return found


def _out_of_slack(situation: Situation, overheads: Overheads, slack: float) -> str:
    on_demand = overheads.reserve
    if situation.running == "on-demand":
        slack, on_demand = slack + on_demand, 0.0
    if slack < -on_demand:
        return f"the deadline cannot be met: on-demand ends up to {(-slack - on_demand) / HOUR:.2f} h late"
    return f"only on-demand is sure to meet the deadline; slack {slack / HOUR:.2f} h"


def _costs(situation: Situation, prices: Prices, overheads: Overheads, slack: float) -> dict[str, float]:
    assert situation.deadline is not None
    spot = situation.spot is not False
    hours = max(0.0, slack + (situation.work_left or 0.0)) / HOUR
    table = table_for(_problem(situation, prices, overheads), hours, slack / HOUR)
    looked = _looked(situation)
    return table.compare(
        hours,
        slack / HOUR,
        situation.running,
        _age(situation, spot),
        spot,
        granted=_granted(situation, overheads),
        away=max(0.0, _age(situation, False) - looked),
        looked=looked,
    )


def _granted(situation: Situation, overheads: Overheads) -> float:
    """Returns the chance that a request is granted; 1 where a refusal costs nothing."""
    if situation.spot is not None or not overheads.request:
        return 1.0
    if situation.granted is not None:
        return situation.granted
    return chance(situation.history, situation.now, overheads.request / HOUR)


def _looked(situation: Situation) -> float:
    """Returns the hours since availability was last known."""
    known = situation.spot is not None or not situation.history
    return 0.0 if known else (situation.now - situation.history[-1].end) / HOUR


def _problem(situation: Situation, prices: Prices, overheads: Overheads) -> Problem:
    """Rounds, so that few distinct tables are computed."""
    return Problem(
        up=learn(situation.history, True),
        down=learn(situation.history, False),
        spot_price=round(prices.spot / prices.on_demand, 2),
        overhead=round(overheads.restart / HOUR, 3),
        request=round(overheads.request / HOUR, 3),
    )


def _age(situation: Situation, spot: bool) -> float:
    """Returns the hours since availability last changed; half of the time in which nobody looked."""
    if not situation.history:
        return 0.0
    last = situation.history[-1]
    if last.available is spot:
        return (situation.now - last.start) / HOUR
    return (situation.now - last.end) / 2 / HOUR


def _cheapest(situation: Situation, prices: Prices, overheads: Overheads) -> SpotDecision:
    """Decides without a deadline: what an hour of work costs, interruptions included."""
    lost = (overheads.restart + overheads.lost_work) / HOUR
    share = learn(situation.history, True).useful_share(lost)
    if share <= 0 or prices.spot / share >= prices.on_demand:
        return SpotDecision(
            "on-demand", "without a deadline: interruptions or prices make spot dearer than on-demand"
        )
    price = f"{prices.spot / share:.2f} per hour of work, on-demand {prices.on_demand:.2f}"
    choice: Choice = "wait" if situation.spot is False else "spot"
    return SpotDecision(choice, f"without a deadline: spot costs {price}")


def _check(situation: Situation, prices: Prices, overheads: Overheads) -> None:
    amounts = {
        "work_left": situation.work_left,
        "startup_left": situation.startup_left,
        **{f"overheads.{name}": getattr(overheads, name) for name in Overheads.__slots__},
    }
    for name, value in amounts.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a number of seconds that is not negative, not {value}")
    for name, value in (("now", situation.now), ("deadline", situation.deadline)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} must be a time in seconds, not {value}")
    for name in Prices.__slots__:
        price = getattr(prices, name)
        if not (math.isfinite(price) and price > 0):
            raise ValueError(f"prices.{name} must be above zero, not {price}: an unknown price is not free")
    if situation.running not in get_args(Choice):
        raise ValueError(f"running must be one of {', '.join(get_args(Choice))}, not {situation.running!r}")
    if situation.granted is not None and not 0 <= situation.granted <= 1:
        raise ValueError(f"granted must be a chance from 0 to 1, not {situation.granted}")
    if any(run.end < run.start or run.start > situation.now for run in situation.history):
        raise ValueError("history has a run that ends before it starts, or starts after now")
