"""Replays one job over recorded spot availability, a decision a tick.

The rules are those of the simulator of "Can't Be Late" (NSDI'24), so that its figures can be reproduced:

- A tick is billed whole, at the price at its beginning. A job that is done is billed no further.
- A start costs `overhead` seconds of paid time without progress. A start that is interrupted has to be made
  again in full: the overhead is counted from its beginning, and what was left of it is not added.
- An interruption happens between ticks and loses no work.

Beyond them there may be several zones, and prices that change. A job without a spot node has a request open
in one zone at a time, and knows of that zone alone whether it has spot in the coming tick. After an
interruption, or when the request has waited `Job.request` seconds, the next zone is asked. A job on demand
trains on beside its request: the first `Job.boot` seconds of a start on spot overlap with its training, and
both nodes are paid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

Choice = Literal["spot", "on-demand", "wait"]
TINY: Final = 1e-3
"""Seconds below which overhead or work counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is replayed. Times in seconds, prices in dollars per hour.

    Attributes:
        overhead: Of a start, with the boot.
        boot: The part of it in which a job that moves from on-demand to spot still trains.
        request: How long a request for spot waits in a zone, where there are others.
    """

    work: float
    deadline: float
    overhead: float
    on_demand_price: float
    boot: float = 0.0
    request: float = 0.0


@dataclass(frozen=True, slots=True)
class Zone:
    """Spot in one zone.

    Attributes:
        name: Of the zone.
        available: By tick.
        prices: (since, dollars per hour), oldest first; the first one also holds before its time.
    """

    name: str
    available: Sequence[bool]
    prices: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        if not self.prices or any(later <= earlier for (earlier, _), (later, _) in pairwise(self.prices)):
            raise ValueError(f"the prices of {self.name} must be a list by time, oldest first")

    def price(self, now: float) -> float:
        """Returns the dollars per hour that are in force at `now`."""
        return next((usd for since, usd in reversed(self.prices) if since <= now + TINY), self.prices[0][1])


@dataclass(slots=True)
class View:
    """What a rule sees at the start of a tick.

    Attributes:
        running: Where the job runs; "wait" if nowhere, also right after an interruption.
        zone: Where it runs on spot, or asks for spot.
        available: Whether that zone has spot in the coming tick.
        interrupted: Whether the zone before took the job's node back at this tick.
        granted: Whether a request that was open before this tick is granted.
    """

    job: Job
    tick: float
    now: float = 0.0
    done: float = 0.0
    running: Choice = "wait"
    zone: int = 0
    overhead_left: float = 0.0
    available: bool = False
    interrupted: bool = False
    granted: bool = False

    @property
    def left(self) -> float:
        return self.job.work - self.done

    @property
    def works(self) -> bool:
        """Whether the job runs and its start is over."""
        return self.running != "wait" and self.overhead_left < TINY


Rule = Callable[[View], Choice]
"""Decides for the coming tick. It may keep state: one rule replays one job."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The bill of one replayed job.

    Attributes:
        cost: Dollars for every tick.
        places: Where the job was, by tick.
        starts: How often a node was started.
        finished: Seconds from the start of the job until it was done; infinite if the deadline came first.
    """

    cost: float
    places: tuple[Choice, ...]
    starts: int
    finished: float

    @property
    def spot_ticks(self) -> int:
        return self.places.count("spot")

    @property
    def on_demand_ticks(self) -> int:
        return self.places.count("on-demand")

    @property
    def late(self) -> bool:
        return self.finished == float("inf")


class Replay:
    """One job on one set of zones, which are as long as each other."""

    def __init__(self, job: Job, zones: Sequence[Zone], tick: float) -> None:
        self._job, self._zones = job, zones
        self._view = View(job, tick)
        self._places: list[Choice] = []
        self._starts = 0
        self._cost = 0.0
        self._asked = 0.0
        """Since when the zone is asked."""

    def run(self, rule: Rule) -> Outcome:
        """Replays until the work is done or the deadline has passed."""
        view, job = self._view, self._job
        for number in range(len(self._zones[0].available)):
            view.now = number * view.tick
            if view.now + view.tick > job.deadline + TINY:
                break
            self._look(tuple(zone.available[number] for zone in self._zones))
            chosen = rule(view)
            if chosen == "spot" and not view.available:
                chosen = view.running
            self._work(chosen)
            if view.left < TINY:
                return self._outcome((number + 1) * view.tick)
        return self._outcome(float("inf"))

    def _look(self, there: Sequence[bool]) -> None:
        """Fills in what the job sees of the coming tick, after interruption or a change of the asked zone."""
        view = self._view
        before = view.zone
        view.interrupted = view.running == "spot" and not there[view.zone]
        given_up = view.running != "spot" and view.now - self._asked >= self._job.request - TINY
        if view.interrupted or given_up:
            view.zone, self._asked = (view.zone + 1) % len(there), view.now
        if view.interrupted:
            view.running = "wait"
        view.available = there[view.zone]
        view.granted = view.available and view.now > 0 and view.zone == before and not view.interrupted

    def _work(self, chosen: Choice) -> None:
        view, job = self._view, self._job
        self._places.append(chosen)
        beside = 0.0
        if chosen not in ("wait", view.running):
            self._starts += 1
            if (view.running, chosen) == ("on-demand", "spot"):
                beside = self._train(job.boot)
                self._cost += job.on_demand_price * job.boot / 3600
            view.overhead_left = job.overhead - beside
        view.running = chosen
        if chosen == "wait":
            return
        price = self._zones[view.zone].price(view.now) if chosen == "spot" else job.on_demand_price
        self._cost += price * view.tick / 3600
        self._train(view.tick - beside)

    def _train(self, seconds: float) -> float:
        """Lets so many seconds pass on the node, and returns them."""
        view = self._view
        idle = min(seconds, view.overhead_left)
        view.overhead_left -= idle
        view.done += min(seconds - idle, view.left)
        return seconds

    def _outcome(self, finished: float) -> Outcome:
        return Outcome(self._cost, tuple(self._places), self._starts, finished)
