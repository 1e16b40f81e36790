"""Ranks the zones or pools in which a job can ask for spot: what an hour of work will cost in each. Pure.

A request in a zone is granted with a chance that the zone's own history tells (`spot_runs.chance`). If it is
granted, the node is paid until it is lost, and what remains of that time after the restart is work. If it is
refused, the job has lost the time of the request. So an hour of work costs

    (chance x price x run + move + (1 - chance) x value of time x request) / (chance x useful part of a run)

A zone that interrupted the job, or had no nodes, ranks lower for a while and comes back by itself: its chance
rises with the time since then. A zone whose price is unknown comes after all others; it is never free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from spottrain_operator.policies.spot_or_on_demand import Overheads
from spottrain_operator.policies.spot_runs import RunLengths, SpotRun, chance, learn

HOUR: Final = 3600.0
BOOT: Final = 300.0
"""A request that gets its nodes within so many seconds found them at once: a node takes that long to boot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotTry:
    """One attempt of the job on spot, in seconds on any one clock.

    Attributes:
        requested: When its pods were created.
        bound: When all of them had nodes; None if that never happened.
        ended: When it ended or was given up; None while it lasts.
        reclaimed: Whether it ended because its capacity was taken away.
    """

    requested: float
    bound: float | None
    ended: float | None = None
    reclaimed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotZone:
    """A zone or pool, as the job knows it.

    Attributes:
        name: Of the zone or pool.
        price: Of the whole job per hour; None if unknown.
        history: What the job has seen there (`observed`).
        moving_seconds: How much longer a start there takes than where the job was last.
        moving_cost: What the move costs once, as traffic between regions.
    """

    name: str
    price: float | None
    history: tuple[SpotRun, ...] = ()
    moving_seconds: float = 0.0
    moving_cost: float = 0.0


@dataclass(frozen=True, slots=True)
class RankedZone:
    """A zone with what an hour of work will cost there (infinite if unknown), and a sentence about it.

    `chance`: that a request there is granted.
    """

    name: str
    cost: float
    chance: float
    reason: str


def observed(tries: Iterable[SpotTry], now: float) -> tuple[SpotRun, ...]:
    """Returns the runs with and without spot that the attempts in one zone have seen, oldest first.

    A request saw that there was no spot until it was granted or given up. An attempt saw spot for as long as
    it had its nodes. Nobody looked between the attempts.
    """
    found: list[SpotRun] = []
    for each in tries:
        granted, ended = each.bound is not None, now if each.ended is None else each.ended
        bound = ended if each.bound is None else each.bound
        if not granted or bound - each.requested > BOOT:
            found.append(SpotRun(available=False, start=each.requested, end=bound, ended=granted))
        if granted:
            found.append(SpotRun(available=True, start=bound, end=ended, ended=each.reclaimed))
    return tuple(found)


def rank(
    zones: Sequence[SpotZone],
    overheads: Overheads,
    *,
    now: float,
    running: str | None = None,
    value_of_time: float | None = None,
) -> tuple[RankedZone, ...]:
    """Ranks zones by the expected cost of an hour of work, cheapest first.

    Args:
        zones: Those where the job may run; of equals the first one wins.
        overheads: `restart` and `request` are used.
        now: The current time in seconds, on the clock of the histories.
        running: The zone in which the job runs on spot now. It pays for no restart, and a move away has to
            be worth one within what remains of its run. It stays there if its price is unknown.
        value_of_time: Dollars that an hour without progress costs: the price of on-demand. Unknown (None):
            the highest known price of the zones.

    Raises:
        ValueError: A price is not above zero, `running` is not among the zones, or a time is no number.
    """
    _check(zones, running, now)
    known = [zone.price for zone in zones if zone.price is not None]
    value = value_of_time if value_of_time is not None else max(known, default=0.0)
    here = next((zone for zone in zones if zone.name == running), None)
    limit = math.inf if here is None else _lengths(here).left(_age(here, now))
    ranked = [_stays(zone) if zone is here else _asks(zone, overheads, now, value, limit) for zone in zones]
    unknown_here = running if here is not None and here.price is None else None
    return tuple(sorted(ranked, key=lambda each: (each.name != unknown_here, each.cost)))


def _stays(zone: SpotZone) -> RankedZone:
    if zone.price is None:
        return RankedZone(zone.name, math.inf, 1.0, f"{zone.name}: the job runs here; its price is unknown")
    return RankedZone(
        zone.name, zone.price, 1.0, f"{zone.name}: the job runs here, for {zone.price:.2f} an hour"
    )


def _asks(zone: SpotZone, overheads: Overheads, now: float, value: float, limit: float) -> RankedZone:
    """Returns what a request in the zone leads to; only `limit` hours of the run after it count."""
    request, lost = overheads.request / HOUR, (overheads.restart + zone.moving_seconds) / HOUR
    granted, lengths = chance(zone.history, now, request), _lengths(zone)
    run = lengths.left(0.0)
    useful = min(run * lengths.useful_share(lost), max(0.0, limit - lost))
    run = min(run, limit)
    words = f"{zone.name}: a request is granted with {granted:.0%}, a run lasts {run:.1f} h"
    if zone.price is None:
        return RankedZone(zone.name, math.inf, granted, f"{words}, the price is unknown")
    if granted * useful < 1e-9:
        return RankedZone(zone.name, math.inf, granted, f"{words}, shorter than a restart")
    bill = granted * (zone.price * run + zone.moving_cost) + (1 - granted) * value * request
    cost = bill / (granted * useful)
    return RankedZone(
        zone.name,
        cost,
        granted,
        f"{words}, so that an hour of work costs {cost:.2f} at a price of {zone.price:.2f}",
    )


def _lengths(zone: SpotZone) -> RunLengths:
    return learn(zone.history, True)


def _age(zone: SpotZone, now: float) -> float:
    last = zone.history[-1] if zone.history else None
    return (now - last.start) / HOUR if last is not None and last.available and not last.ended else 0.0


def _check(zones: Sequence[SpotZone], running: str | None, now: float) -> None:
    if not math.isfinite(now):
        raise ValueError(f"now must be a time in seconds, not {now}")
    for zone in zones:
        if zone.price is not None and not (math.isfinite(zone.price) and zone.price > 0):
            raise ValueError(f"the price of {zone.name} must be above zero or None, not {zone.price}")
    if running is not None and running not in {zone.name for zone in zones}:
        raise ValueError(f"the job runs in {running}, which is not among the zones")
