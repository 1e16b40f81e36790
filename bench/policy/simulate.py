"""Replays one job over one availability trace, a decision a tick.

The rules are those of the simulator of "Can't Be Late" (NSDI'24), so that its figures can be reproduced:

- A tick is billed whole. Prices are constant. A job that is done is billed no further.
- A start costs `overhead` seconds of paid time without progress. An interrupted start begins anew: what is
  left of the overhead is replaced by the whole overhead, not added to it.
- An interruption happens between ticks and loses no work.
- Availability during the coming tick is known before the decision, without cost ("free sight").

With `sight="paid"` availability is learned by asking for a node only. See `Replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

Choice = Literal["spot", "on-demand", "wait"]
Sight = Literal["free", "paid"]
TINY: Final = 1e-3
"""Seconds below which overhead or work counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is replayed. Times in seconds, prices in dollars per hour."""

    work: float
    deadline: float
    overhead: float
    on_demand_price: float
    spot_price: float


@dataclass(slots=True)
class View:
    """What a rule sees at the start of a tick."""

    job: Job
    tick: float
    now: float = 0.0
    done: float = 0.0
    running: Choice = "wait"
    """Where the job runs; "wait" also right after an interruption."""
    overhead_left: float = 0.0
    available: bool = False
    """Whether spot can be had during the coming tick."""
    seen: list[bool | None] = field(default_factory=list)
    """Availability of each tick so far, this one included; None where nobody asked."""

    @property
    def left(self) -> float:
        return self.job.work - self.done

    @property
    def works(self) -> bool:
        """Whether the job runs and its start is over."""
        return self.running != "wait" and self.overhead_left < TINY


class Rule(Protocol):
    """Decides for the coming tick. A rule may keep state: one rule object replays one job."""

    def __call__(self, view: View) -> Choice: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The bill of one replayed job."""

    cost: float
    spot_ticks: int
    on_demand_ticks: int
    starts: int
    finished: float
    """Seconds from the start of the job until it was done; infinite if the deadline came first."""

    @property
    def late(self) -> bool:
        return self.finished == float("inf")


class Replay:
    """One job, one trace.

    Paid sight: nothing is known about a tick until a spot node is asked for. A rule is first asked as if spot
    were available. Only if it chooses spot is a request made. A refused request costs nothing, and the rule
    decides again, now without spot. A granted one is paid from then on, boot and restart included: give both
    as `job.overhead`.
    """

    def __init__(self, job: Job, available: Sequence[bool], tick: float, sight: Sight = "free") -> None:
        self._job, self._available, self._paid = job, available, sight == "paid"
        self._view = View(job, tick)
        self._ticks = {"spot": 0, "on-demand": 0, "wait": 0}
        self._starts = 0

    def run(self, rule: Rule) -> Outcome:
        """Replays until the work is done or the deadline has passed."""
        view, job = self._view, self._job
        for number, available in enumerate(self._available):
            view.now = number * view.tick
            if view.now + view.tick > job.deadline + TINY:
                break
            if view.running == "spot" and not available:
                view.running = "wait"
            self._work(self._ask(rule, available), view)
            if view.left < TINY:
                return self._outcome((number + 1) * view.tick)
        return self._outcome(float("inf"))

    def _ask(self, rule: Rule, available: bool) -> Choice:
        view = self._view
        held = view.running == "spot"
        view.available = available or self._paid
        view.seen.append(available if held or not self._paid else None)
        chosen = rule(view)
        if self._paid and chosen == "spot" and not held:
            view.seen[-1] = available
            if not available:
                view.available = False
                chosen = rule(view)
        if chosen == "spot" and not available:
            return "wait"
        return chosen

    def _work(self, chosen: Choice, view: View) -> None:
        self._ticks[chosen] += 1
        if chosen not in (view.running, "wait"):
            self._starts += 1
            view.overhead_left = self._job.overhead
        view.running = chosen
        if chosen == "wait":
            return
        idle = min(view.tick, view.overhead_left)
        view.overhead_left -= idle
        view.done += min(view.tick - idle, view.left)

    def _outcome(self, finished: float) -> Outcome:
        hours = self._view.tick / 3600
        spot, on_demand = self._ticks["spot"], self._ticks["on-demand"]
        cost = hours * (spot * self._job.spot_price + on_demand * self._job.on_demand_price)
        return Outcome(cost, spot, on_demand, self._starts, finished)
