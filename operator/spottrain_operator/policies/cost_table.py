"""Expected cost of finishing a job, by time, slack, place, and age of the current spot run. Pure.

Dynamic programming backwards from the deadline in steps of STEP hours, with the price of on-demand as the
unit of cost. Slack is what remains of the time after the work and one start of an on-demand node. Working
leaves the slack as it is, waiting uses it up, and each start uses the restart overhead.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from spottrain_operator.policies.spot_runs import RunLengths

STEP: Final = 1 / 4
AGES: Final = tuple(STEP * steps for steps in (0, 1, 3, 8, 20))
"""Hours at which the age groups of a run begin."""
SLACKS: Final = (0, 0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 11, 15, 20, 27, 36)
"""Hours of slack that the table has; values between them are interpolated."""
HORIZONS: Final = (6, 24, 54, 72)
"""Hours that a table may cover. A longer job is judged by 72 hours with their share of its slack."""
WIDTHS: Final = (1, 4, 11, 36)
"""Hours of slack that a table may cover; more slack than that counts as much. All are in SLACKS."""
TABLES: Final = 64
"""Tables that are kept: each takes up to 0.1 s to compute, and up to a megabyte."""
IMPOSSIBLE: Final = 1e9

Costs = Sequence[float]
"""By slack."""
Shift = list[tuple[int, float]]
"""For each slack: the entry below it after a loss, and the weight of the entry above that one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a table is computed for. Hours; the price of on-demand is 1."""

    up: RunLengths
    down: RunLengths
    spot_price: float
    overhead: float


@dataclass(frozen=True, slots=True)
class Layer:
    """Costs at one time before the deadline, by age group and slack."""

    waiting: tuple[list[Costs], list[Costs]]
    """Without, with spot available."""
    on_demand: tuple[list[Costs], list[Costs]]
    spot: list[Costs]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Layers by steps before the deadline, from the deadline itself on."""

    problem: Problem
    slacks: Sequence[float]
    layers: Sequence[Layer]

    def compare(self, hours: float, slack: float, running: str, age: float, spot: bool) -> dict[str, float]:
        """Returns the expected cost of each choice that the slack permits.

        Args:
            hours: Time left, without the time that one on-demand start takes.
            slack: Hours; at least 0.
            running: "spot", "on-demand" or "wait".
            age: Hours since availability last changed.
            spot: Whether spot is available.
        """
        scale = max(1.0, hours / HORIZONS[-1])
        slack, hours = slack / scale, hours / scale
        step = min(max(1, round(hours / STEP)), len(self.layers) - 1)
        after, work = self.layers[step - 1], min(STEP, max(0.0, hours - slack))
        problem, kind = self.problem, (self.problem.down, self.problem.up)[spot]
        ends = kind.end_within(STEP, age)
        group = _group(age + STEP)

        def expected(same: list[Costs], changed: list[Costs], loss: float) -> float:
            left = slack - loss
            if left < 0:
                return IMPOSSIBLE
            return (1 - ends) * self._at(same[group], left) + ends * self._at(changed[0], left)

        costs = {"wait": expected(after.waiting[spot], after.waiting[not spot], STEP)}
        loss = 0.0 if running == "on-demand" else problem.overhead
        costs["on-demand"] = work + expected(after.on_demand[spot], after.on_demand[not spot], loss)
        if slack < loss:
            costs["on-demand"] = loss + hours - slack
        if spot:
            loss = 0.0 if running == "spot" else problem.overhead
            costs["spot"] = work * problem.spot_price + expected(after.spot, after.waiting[False], loss)
        return {choice: scale * cost for choice, cost in costs.items()}

    def _at(self, costs: Costs, slack: float) -> float:
        at = min(bisect_right(self.slacks, slack), len(self.slacks) - 1) - 1
        low, high = self.slacks[at], self.slacks[at + 1]
        share = min(1.0, (slack - low) / (high - low))
        return costs[at] * (1 - share) + costs[at + 1] * share


def table_for(problem: Problem, hours: float, slack: float) -> CostTable:
    """Returns a table that covers so much time and slack. Tables are kept: few distinct ones occur."""
    if hours > HORIZONS[-1]:
        slack, hours = slack * HORIZONS[-1] / hours, HORIZONS[-1]
    horizon = next(h for h in HORIZONS if h >= hours)
    return _solve(problem, horizon, next((width for width in WIDTHS if width >= slack), WIDTHS[-1]))


@lru_cache(maxsize=TABLES)
def _solve(problem: Problem, horizon: int, width: int) -> CostTable:
    slacks = SLACKS[: SLACKS.index(width) + 1]
    count, groups = len(slacks), range(len(AGES))

    def nothing() -> list[Costs]:
        return [[0.0] * count for _ in groups]

    layers = [Layer((nothing(), nothing()), (nothing(), nothing()), nothing())]
    solver = _Solver(problem, slacks)
    for number in range(1, round(horizon / STEP) + 1):
        layers.append(solver.before(layers[-1], number * STEP))
    return CostTable(problem, slacks, [_packed(layer) for layer in layers])


def _packed(layer: Layer) -> Layer:
    """Returns the layer in an eighth of the memory."""

    def pack(rows: Sequence[Costs]) -> list[Costs]:
        return [array("f", row) for row in rows]

    waiting, on_demand = ((pack(without), pack(with_)) for without, with_ in (layer.waiting, layer.on_demand))
    return Layer(waiting, on_demand, pack(layer.spot))


class _Solver:
    """Computes the costs of a time from those of the next one."""

    def __init__(self, problem: Problem, slacks: Sequence[float]) -> None:
        self._problem, self._slacks = problem, slacks
        self._wait = _shift(slacks, STEP)
        self._start = _shift(slacks, problem.overhead)
        kinds = (problem.down, problem.up)
        self._moves = [[_moves(kind, group) for group in range(len(AGES))] for kind in kinds]

    def before(self, after: Layer, hours: float) -> Layer:
        """Returns the costs at `hours` before the deadline, given those a STEP later."""
        works = [min(STEP, max(0.0, hours - slack)) for slack in self._slacks]
        layer = Layer(([], []), ([], []), [])
        for up in (False, True):
            for group in range(len(AGES)):
                self._fill(layer, after, works, hours, up, group)
        return layer

    def _fill(self, layer: Layer, after: Layer, works: Costs, hours: float, up: bool, group: int) -> None:
        """Adds the costs of one age group. A choice is the place of the next STEP."""
        never: Costs = [IMPOSSIBLE] * len(works)
        idle = self._expect(after.waiting[up], after.waiting[not up], up, group)
        owned = self._expect(after.on_demand[up], after.on_demand[not up], up, group)
        stay = [cost + work for cost, work in zip(owned, works, strict=True)]
        rest = [hours - slack + self._problem.overhead for slack in self._slacks]
        wait, begin, move = _lose(idle, self._wait, never), _lose(stay, self._start, rest), never
        if up:
            held = self._expect(after.spot, after.waiting[False], up, group)
            price = self._problem.spot_price
            hold = [cost + price * work for cost, work in zip(held, works, strict=True)]
            move = _lose(hold, self._start, never)
            layer.spot.append(_least(works, hold, begin))
        layer.waiting[up].append(_least(works, wait, begin, move))
        layer.on_demand[up].append(_least(works, wait, stay, move))

    def _expect(self, same: list[Costs], changed: list[Costs], up: bool, group: int) -> Costs:
        younger, older, ends = self._moves[up][group]
        following = same[min(group + 1, len(same) - 1)]
        return [
            younger * a + older * b + ends * c
            for a, b, c in zip(same[group], following, changed[0], strict=True)
        ]


def _moves(kind: RunLengths, group: int) -> tuple[float, float, float]:
    """Returns the probabilities that a run stays in its age group, enters the next one, or ends."""
    first = AGES[group]
    last = AGES[group + 1] if group + 1 < len(AGES) else 3 * first
    steps = (last - first) / STEP
    lasts = (1 - kind.end_within(last - first, first)) ** (1 / steps)
    older = 1 / steps if group + 1 < len(AGES) else 0.0
    return lasts * (1 - older), lasts * older, 1 - lasts


def _group(age: float) -> int:
    return bisect_right(AGES, age + 1e-9) - 1


def _least(works: Costs, *choices: Costs) -> Costs:
    """Returns the least cost for each slack; nothing where no work remains."""
    return [min(costs) if work > 0 else 0.0 for work, *costs in zip(works, *choices, strict=True)]


def _shift(slacks: Sequence[float], loss: float) -> Shift:
    """Returns where each slack is after a loss."""
    found = []
    for slack in slacks:
        left = slack - loss
        at = min(bisect_right(slacks, left + 1e-9), len(slacks) - 1) - 1
        share = 0.0 if at < 0 else max(0.0, (left - slacks[at]) / (slacks[at + 1] - slacks[at]))
        found.append((at, share))
    return found


def _lose(costs: Costs, shift: Shift, otherwise: Costs) -> Costs:
    """Returns the costs after a loss of slack; `otherwise` where the slack does not suffice."""
    return [
        costs[at] + (costs[at + 1] - costs[at]) * share if at >= 0 else other
        for (at, share), other in zip(shift, otherwise, strict=True)
    ]
