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
refused request costs nothing, a granted one is paid from then on, and the next call has the answer. A run of
unknown age is taken to have begun midway since somebody last looked, so that a job on on-demand asks again
when a move would probably be worth its restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from spottrain_operator.policies.cost_table import IMPOSSIBLE, Problem, table_for
from spottrain_operator.policies.spot_runs import SpotRun, learn

Choice = Literal["spot", "on-demand", "wait"]
HOUR: Final = 3600.0


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
    """

    restart: float
    on_demand_p99: float
    decision: float
    lost_work: float = 0.0


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
    """

    now: float
    deadline: float | None
    work_left: float | None
    running: Choice = "wait"
    startup_left: float = 0.0
    spot: bool | None = None
    history: tuple[SpotRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice, and a sentence that explains it."""

    choice: Choice
    reason: str


def choose(situation: Situation, prices: Prices, overheads: Overheads) -> Decision:
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
    if situation.deadline is None:
        return _cheapest(situation, prices, overheads)
    if situation.work_left is None:
        choice: Choice = "on-demand" if situation.spot is False else "spot"
        return Decision(
            choice, "the remaining work is unknown, so meeting the deadline cannot be planned; never waits"
        )
    slack = _slack(situation, overheads)
    allowed = _allowed(situation, overheads, slack)
    if allowed == ["on-demand"]:
        return Decision("on-demand", _out_of_slack(situation, overheads, slack))
    costs = _costs(situation, prices, overheads, slack)
    best = min(allowed, key=lambda choice: costs[choice])
    sums = {choice: costs[choice] for choice in allowed if costs[choice] < IMPOSSIBLE / 2}
    words = ", ".join(f"{choice} {cost * prices.on_demand:.2f}" for choice, cost in sums.items())
    return Decision(best, f"expected cost of the rest: {words}; slack {slack / HOUR:.2f} h")


def _slack(situation: Situation, overheads: Overheads) -> float:
    """Returns the seconds that the job can lose and still be done by on-demand."""
    assert situation.deadline is not None and situation.work_left is not None
    startup = 0.0 if situation.running == "wait" else situation.startup_left
    reserve = overheads.restart + overheads.on_demand_p99 + overheads.lost_work
    return situation.deadline - situation.now - situation.work_left - startup - reserve


def _allowed(situation: Situation, overheads: Overheads, slack: float) -> list[Choice]:
    """Returns the choices after which on-demand can still finish in time."""
    found: list[Choice] = ["on-demand"]
    if slack >= overheads.decision:
        found.append("wait")
    loss = situation.startup_left if situation.running == "spot" else overheads.restart
    if situation.spot is None:
        loss = max(loss, overheads.decision)
    if situation.spot is not False and slack >= loss:
        found.append("spot")
    return found


def _out_of_slack(situation: Situation, overheads: Overheads, slack: float) -> str:
    on_demand = overheads.restart + overheads.on_demand_p99 + overheads.lost_work
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
    return table.compare(hours, slack / HOUR, situation.running, _age(situation, spot), spot)


def _problem(situation: Situation, prices: Prices, overheads: Overheads) -> Problem:
    """Rounds, so that few distinct tables are computed."""
    return Problem(
        up=learn(situation.history, True),
        down=learn(situation.history, False),
        spot_price=round(prices.spot / prices.on_demand, 2),
        overhead=round(overheads.restart / HOUR, 3),
    )


def _age(situation: Situation, spot: bool) -> float:
    """Returns the hours since availability last changed; half of the time in which nobody looked."""
    if not situation.history:
        return 0.0
    last = situation.history[-1]
    if last.available is spot:
        return (situation.now - last.start) / HOUR
    return (situation.now - last.end) / 2 / HOUR


def _cheapest(situation: Situation, prices: Prices, overheads: Overheads) -> Decision:
    """Decides without a deadline: what an hour of work costs, interruptions included."""
    lost = (overheads.restart + overheads.lost_work) / HOUR
    share = learn(situation.history, True).useful_share(lost)
    if share <= 0 or prices.spot / share >= prices.on_demand:
        return Decision(
            "on-demand", "without a deadline: interruptions or prices make spot dearer than on-demand"
        )
    price = f"{prices.spot / share:.2f} per hour of work, on-demand {prices.on_demand:.2f}"
    choice: Choice = "wait" if situation.spot is False else "spot"
    return Decision(choice, f"without a deadline: spot costs {price}")


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
    if any(run.end < run.start or run.start > situation.now for run in situation.history):
        raise ValueError("history has a run that ends before it starts, or starts after now")
