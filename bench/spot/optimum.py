"""The least cost of a job on a trace that is known in advance, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from bench.spot.simulate import TINY, Job, Zone

ON_DEMAND: Final = -1
"""The place beside the zones, by number."""


def least_cost(job: Job, zones: Sequence[Zone], tick: float) -> float:
    """Returns the cost of the best schedule under the rules of `simulate`; infinite if each one is late.

    Works backwards over the ticks. An array holds the cost from here on by units of work done. There is one
    array for a job that waits, and for each place one by `phase`: the ticks since the start of its node, up
    to the first tick without overhead. It asks for nothing, and no start overlaps with on-demand.
    """
    unit = math.gcd(_whole(tick), _whole(job.overhead), _whole(job.work))
    work, per_tick, overhead = (_whole(seconds) // unit for seconds in (job.work, tick, job.overhead))
    gains = _gains(overhead, per_tick)
    late = np.full(work + 1, math.inf)
    late[work] = 0.0
    places = (*range(len(zones)), ON_DEMAND)
    waiting, running = late, {place: [late] * len(gains) for place in places}
    ticks = min(len(zones[0].available), int((job.deadline + TINY) // tick))
    for number in reversed(range(ticks)):
        prices = {place: zones[place].price(number * tick) for place in places[:-1]}
        prices[ON_DEMAND] = job.on_demand_price
        usable = [place for place in places if place == ON_DEMAND or zones[place].available[number]]
        runs = {place: _run(running[place], gains, prices[place] * tick / 3600) for place in usable}
        waiting = np.minimum.reduce([waiting, *(run[0] for run in runs.values())])
        running = {
            place: [np.minimum(waiting, run) for run in runs.get(place, [waiting] * len(gains))]
            for place in places
        }
    return float(waiting[0])


def _run(after: list[Any], gains: list[int], price: float) -> list[Any]:
    """Returns the costs of one more tick in a place, by phase. Work that is done costs nothing."""
    costs = []
    for phase, gain in enumerate(gains):
        following = after[min(phase + 1, len(gains) - 1)]
        cost = np.full_like(following, price)
        cost[: len(cost) - gain] += following[gain:]
        cost[-1] = 0.0
        costs.append(cost)
    return costs


def _gains(overhead: int, per_tick: int) -> list[int]:
    """Returns the units of work of the first tick after a start, of the second, and so on, to a whole one."""
    gains = []
    while overhead > 0:
        idle = min(overhead, per_tick)
        gains.append(per_tick - idle)
        overhead -= idle
    return [*gains, per_tick]


def _whole(seconds: float) -> int:
    if seconds != int(seconds):
        raise ValueError(f"the optimum needs whole seconds, not {seconds}")
    return int(seconds)
