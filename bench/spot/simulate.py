"""Replays one job over recorded spot availability, a decision a tick.

The rules are those of the simulator of "Can't Be Late" (NSDI'24), so that its figures can be reproduced:

- A tick is billed whole, at the price at its beginning. A job that is done is billed no further.
- A start costs `overhead` seconds of paid time without progress. A start that is interrupted has to be made
  again in full: the overhead is counted from its beginning, and what was left of it is not added.
- An interruption happens between ticks and loses no work.

Beyond them there may be several zones, and prices that change. There are two sights, of what a rule knows of
the coming tick before it decides:

- "free": availability of every zone, at no cost.
- "stopped": what the operator does. It knows that of the zone in which the job runs on spot, and learns the
  others' by requests for a node. A request needs the job's pods, so a job on on-demand saves, ends, and
  stands still until the request is granted or has waited `Job.request` seconds (in whole ticks). Then the
  rule decides again: on-demand is a start with its overhead. A job that waits leaves a request open. An open
  request is granted at the first tick with spot, without another decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, Protocol

Choice = Literal["spot", "on-demand", "wait"]
Sight = Literal["free", "stopped"]
TINY: Final = 1e-3
"""Seconds below which overhead or work counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is replayed. Times in seconds, prices in dollars per hour.

    Attributes:
        request: How long a request for spot waits before it is given up; with "stopped" sight only.
    """

    work: float
    deadline: float
    overhead: float
    on_demand_price: float
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
        zone: Where it runs on spot, or where it last asked for spot.
        known: Availability of the zones during the coming tick; None where only a request can tell.
        seen: The same of each tick before this one, requests included.
        interrupted: Zones that took the job's node back at this tick: one or none.
    """

    job: Job
    tick: float
    zones: Sequence[Zone]
    now: float = 0.0
    done: float = 0.0
    running: Choice = "wait"
    zone: int = 0
    overhead_left: float = 0.0
    known: tuple[bool | None, ...] = ()
    seen: list[tuple[bool | None, ...]] = field(default_factory=list)
    interrupted: tuple[int, ...] = ()

    @property
    def left(self) -> float:
        return self.job.work - self.done

    @property
    def works(self) -> bool:
        """Whether the job runs and its start is over."""
        return self.running != "wait" and self.overhead_left < TINY

    @property
    def spot(self) -> bool | None:
        """Whether spot can be had in some zone; None if only a request can tell."""
        return any(self.known) or (None if None in self.known else False)

    @property
    def available(self) -> bool:
        """Whether spot may be available: True too where the rule does not know, because then it may ask."""
        return self.spot is not False


class Rule(Protocol):
    """Decides for the coming tick. A rule may keep state: one rule object replays one job."""

    def __call__(self, view: View) -> Choice: ...


Pick = Callable[[View], int]
"""Chooses the zone of the next request, among those that are not known to be without spot."""


def stay(view: View) -> int:
    """Picks the zone of the job, or else the first one that may have spot."""
    may = [zone for zone, known in enumerate(view.known) if known is not False]
    return view.zone if view.zone in may else may[0]


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

    def __init__(
        self,
        job: Job,
        zones: Sequence[Zone],
        tick: float,
        sight: Sight = "free",
        *,
        pick: Pick = stay,
    ) -> None:
        self._job, self._zones, self._sight, self._pick = job, zones, sight, pick
        self._view = View(job, tick, zones)
        self._places: list[Choice] = []
        self._starts = 0
        self._cost = 0.0
        self._open = False
        """Whether a request for a node in `view.zone` is open."""
        self._asks_until = 0.0
        """Until when it is, if it is not granted before."""
        self._refused: set[int] = set()
        """Zones that refused a request since the job stands still."""

    def run(self, rule: Rule) -> Outcome:
        """Replays until the work is done or the deadline has passed."""
        view, job = self._view, self._job
        for number in range(len(self._zones[0].available)):
            view.now = number * view.tick
            if view.now + view.tick > job.deadline + TINY:
                break
            there = tuple(zone.available[number] for zone in self._zones)
            self._interrupt(there)
            chosen, zone = self._decide(rule, there)
            view.seen.append(view.known)
            self._work(chosen, zone)
            if view.left < TINY:
                return self._outcome((number + 1) * view.tick)
        return self._outcome(float("inf"))

    def _interrupt(self, there: Sequence[bool]) -> None:
        view = self._view
        view.interrupted = ()
        if view.running != "spot" or there[view.zone]:
            return
        view.running, view.interrupted = "wait", (view.zone,)

    def _decide(self, rule: Rule, there: tuple[bool, ...]) -> tuple[Choice, int]:
        """Returns the place of the coming tick, and its zone."""
        view = self._view
        held = view.running == "spot"
        if self._open and (there[view.zone] or view.now < self._asks_until - TINY):
            view.known = (None,) * len(there)
            return self._asked(view.zone, there)
        self._open = False
        view.known = there if self._sight == "free" else self._known(held)
        chosen = rule(view)
        if chosen == "spot" and view.spot is False:
            chosen = "wait"
        if chosen == "wait" and self._sight == "stopped" and view.spot is not True:
            return self._wait(there)
        if chosen != "spot":
            return chosen, view.zone
        zone = self._pick(view)
        if self._sight == "stopped" and not (held and zone == view.zone):
            self._asks_until = view.now + self._job.request
            return self._asked(zone, there)
        return "spot", zone

    def _known(self, held: bool) -> tuple[bool | None, ...]:
        """Returns what is known before any request of this tick."""
        view = self._view
        if view.running != "wait" or view.interrupted:
            self._refused.clear()
        found: list[bool | None] = [
            False if zone in self._refused else None for zone in range(len(self._zones))
        ]
        if held:
            found[view.zone] = True
        return tuple(found)

    def _wait(self, there: Sequence[bool]) -> tuple[Choice, int]:
        """Returns the place after a tick of waiting, with a request in the zone that promises most."""
        view = self._view
        if view.spot is False:
            view.known = (None,) * len(there)
        self._asks_until = view.now
        return self._asked(self._pick(view), there)

    def _asked(self, zone: int, there: Sequence[bool]) -> tuple[Choice, int]:
        """Returns the place after a tick with an open request; the job has ended for it."""
        view = self._view
        view.known = tuple(
            there[zone] if each == zone else known or None for each, known in enumerate(view.known)
        )
        self._refused.add(zone)
        view.running, view.zone, self._open = "wait", zone, not there[zone]
        return ("spot" if there[zone] else "wait"), zone

    def _work(self, chosen: Choice, zone: int) -> None:
        view = self._view
        self._places.append(chosen)
        moves = chosen == "spot" and zone != view.zone
        if chosen != "wait" and (moves or chosen != view.running):
            self._starts += 1
            view.overhead_left = self._job.overhead
        view.running, view.zone = chosen, zone
        if chosen == "wait":
            return
        price = self._zones[zone].price(view.now) if chosen == "spot" else self._job.on_demand_price
        self._cost += price * view.tick / 3600
        idle = min(view.tick, view.overhead_left)
        view.overhead_left -= idle
        view.done += min(view.tick - idle, view.left)

    def _outcome(self, finished: float) -> Outcome:
        return Outcome(self._cost, tuple(self._places), self._starts, finished)
