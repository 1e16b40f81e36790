"""Expected cost of finishing a job, by time, slack, place, and age of the current spot run. Pure.

Dynamic programming backwards from the deadline in steps of STEP hours, with the price of on-demand as the
unit of cost. Slack is what remains of the time after the work and one start of an on-demand node. Working
leaves the slack as it is, waiting uses it up, and each start uses the restart overhead.

Availability may be known at all times, or, where `Problem.request` is above zero, only to a job that has or
awaits a spot node. Then a job on on-demand has to stop for a request, which is granted with a chance that
grows with the time since it last looked (`spot_runs.chance_after`). If it is refused, it has cost the time of
the request and a start.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from spottrain_operator.policies.spot_runs import RunLengths, chance_after

STEP: Final = 1 / 4
AGES: Final = tuple(STEP * steps for steps in (0, 1, 3, 8, 20))
"""Hours at which the age groups of a run begin."""
MIDDLES: Final = (0.125, 0.5, 1.375, 3.5, 8.0)
"""Hours in the middle of each age group."""
SLACKS: Final = (0, 0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 11, 15, 20, 27, 36)
"""Hours of slack that the table has; values between them are interpolated."""
HORIZONS: Final = (6, 24, 54, 72)
"""Hours that a table may cover. A longer job is judged by 72 hours with their share of its slack."""
WIDTHS: Final = (1, 4, 11, 36)
"""Hours of slack that a table may cover; more slack than that counts as much. All are in SLACKS."""
TABLES: Final = 32
"""Tables that are kept: each takes up to half a second to compute, and up to 2 MiB."""
IMPOSSIBLE: Final = 1e9

Costs = Sequence[float]
"""By slack."""
Place = tuple[int, float]
"""Of a slack between two of SLACKS: the lower entry (-1: below all), and the weight of the upper one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a table is computed for. Hours; the price of on-demand is 1.

    `request`: how long the job stands still for a request that is refused; 0 if availability is known.
    """

    up: RunLengths
    down: RunLengths
    spot_price: float
    overhead: float
    request: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """Costs at one time before the deadline, by age group and slack."""

    waiting: tuple[list[Costs], list[Costs]]
    """Without, with spot available."""
    on_demand: tuple[list[Costs], list[Costs]]
    """The same. Where availability is not known, only the first one, by the groups (`_blind`) of how long
    spot had been away when the job last looked and of how long ago that was."""
    spot: list[Costs]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Layers by steps before the deadline, from the deadline itself on."""

    problem: Problem
    slacks: Sequence[float]
    layers: Sequence[Layer]

    def compare(
        self,
        hours: float,
        slack: float,
        running: str,
        age: float,
        spot: bool,
        *,
        granted: float = 1.0,
        away: float = 0.0,
        looked: float = 0.0,
    ) -> dict[str, float]:
        """Returns the expected cost of each choice that the slack permits.

        Args:
            hours: Time left, without the time that one on-demand start takes.
            slack: Hours; at least 0.
            running: "spot", "on-demand" or "wait".
            age: Hours since availability last changed, if it is as `spot` says.
            spot: Whether spot is available, or may be.
            granted: The chance that a request is granted; below 1 only if the problem has a `request`.
            away: Hours that spot had been away when availability was last known.
            looked: Hours since then.
        """
        scale = max(1.0, hours / HORIZONS[-1])
        slack, hours = slack / scale, hours / scale
        step = min(max(1, round(hours / STEP)), len(self.layers) - 1)
        after, work = self.layers[step - 1], min(STEP, max(0.0, hours - slack))
        change, blind = self._change(age, spot), self.problem.request > 0

        costs = {"wait": self._mean(after.waiting, spot, change, slack - STEP)}
        loss = 0.0 if running == "on-demand" else self.problem.overhead
        owned = (1.0, _blind(away, looked + STEP)) if blind else change
        costs["on-demand"] = work + self._mean(after.on_demand, spot and not blind, owned, slack - loss)
        if slack < loss:
            costs["on-demand"] = loss + hours - slack
        if spot:
            loss = 0.0 if running == "spot" else self.problem.overhead
            held = self._mean((after.waiting[False], after.spot), True, change, slack - loss)
            costs["spot"] = work * self.problem.spot_price + held
            if granted < 1:
                refused = self._refused(after, work, slack, away + looked)
                costs["spot"] = granted * costs["spot"] + (1 - granted) * refused
                costs["wait"] = IMPOSSIBLE
        return {choice: scale * cost for choice, cost in costs.items()}

    def _change(self, age: float, spot: bool) -> tuple[float, int]:
        """Returns the chance that a run of `age` goes on for a STEP, and its age group then."""
        kind = self.problem.up if spot else self.problem.down
        return 1 - kind.end_within(STEP, age), _group(age + STEP)

    def _mean(
        self, costs: tuple[list[Costs], list[Costs]], spot: bool, change: tuple[float, int], slack: float
    ) -> float:
        """Returns the expected cost a STEP later, of the run that goes on or of the other kind of run."""
        if slack < 0:
            return IMPOSSIBLE
        lasts, group = change
        place = _place(self.slacks, slack)
        same = _at(costs[spot][group], place)
        return same if lasts == 1 else lasts * same + (1 - lasts) * _at(costs[not spot][0], place)

    def _refused(self, after: Layer, work: float, slack: float, away: float) -> float:
        """Returns the cost after a refused request: on-demand is started, or the job waits on."""
        problem, rest = self.problem, slack - max(0.0, self.problem.request - STEP)
        share = min(1.0, problem.request / STEP)
        if rest < STEP:
            rest, share = slack - problem.request, 0.0
        begin = work + self._mean(after.on_demand, False, (1.0, _blind(away, STEP)), rest - problem.overhead)
        if share == 0:
            return begin
        waits = self._mean(after.waiting, False, self._change(away, False), rest - STEP)
        return (1 - share) * min(begin, waits) + share * waits


def table_for(problem: Problem, hours: float, slack: float) -> CostTable:
    """Returns a table that covers so much time and slack. Tables are kept: few distinct ones occur."""
    if hours > HORIZONS[-1]:
        slack, hours = slack * HORIZONS[-1] / hours, HORIZONS[-1]
    horizon = next(h for h in HORIZONS if h >= hours)
    return _solve(problem, horizon, next((width for width in WIDTHS if width >= slack), WIDTHS[-1]))


@lru_cache(maxsize=TABLES)
def _solve(problem: Problem, horizon: int, width: int) -> CostTable:
    slacks = SLACKS[: SLACKS.index(width) + 1]

    def nothing(rows: int = len(AGES)) -> list[Costs]:
        return [[0.0] * len(slacks) for _ in range(rows)]

    on_demand = (nothing(len(AGES) ** 2), nothing(0)) if problem.request else (nothing(), nothing())
    layers = [Layer((nothing(), nothing()), on_demand, nothing())]
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
        self._blind = problem.request > 0
        self._wait = _shift(slacks, STEP)
        self._start = _shift(slacks, problem.overhead)
        self._again = _shift(slacks, problem.overhead + max(0.0, problem.request - STEP))
        self._never: Costs = [IMPOSSIBLE] * len(slacks)
        kinds = (problem.down, problem.up)
        self._moves = [[_moves(kind, group) for group in range(len(AGES))] for kind in kinds]

    def before(self, after: Layer, hours: float) -> Layer:
        """Returns the costs at `hours` before the deadline, given those a STEP later."""
        works = [min(STEP, max(0.0, hours - slack)) for slack in self._slacks]
        rest = [hours - slack + self._problem.overhead for slack in self._slacks]
        layer = Layer(([], []), ([], []), [])
        for group in range(len(AGES)):
            self._fill(layer, after, works, rest, group)
        if self._blind:
            layer.on_demand[False].extend(self._asks(after, works, rest))
        return layer

    def _fill(self, layer: Layer, after: Layer, works: Costs, rest: Costs, group: int) -> None:
        """Adds the costs of one age group. A choice is the place of the next STEP."""
        hold = self._hold(after, works, group)
        for up in (False, True):
            wait = self._waits(after, up, group)
            stay = self._stays(after, works, up, group)
            begin = _lose(stay, self._start, rest)
            move = _lose(hold, self._start, self._never) if up else self._never
            layer.waiting[up].append(_least(works, wait, begin, move))
            if not self._blind:
                layer.on_demand[up].append(_least(works, wait, stay, move))
        layer.spot.append(_least(works, hold, begin))

    def _asks(self, after: Layer, works: Costs, rest: Costs) -> list[Costs]:
        """Returns the costs of on-demand where availability is not known: to stay, or to ask for spot."""
        problem = self._problem
        share = min(1.0, problem.request / STEP)
        moves = [
            _lose(self._hold(after, works, group), self._start, self._never) for group in range(len(AGES))
        ]
        refusals = []
        for group in range(len(AGES)):
            begin = _lose(self._stays(after, works, False, group), self._again, rest)
            refusals.append(_mix(share, self._waits(after, False, group), begin))
        found = []
        for away in MIDDLES:
            for group, looked in enumerate(AGES):
                chance = chance_after(problem.up, problem.down, away=away, gap=looked, within=problem.request)
                refused = refusals[_group(away + looked + problem.request)]
                ask = _mix(chance, moves[_group(looked / 2)], refused)
                later = AGES[min(group + 1, len(AGES) - 1)]
                rows = (after.on_demand[False][_blind(away, hours)] for hours in (later, looked))
                found.append(_least(works, _plus(_mix(_ages(group), *rows), works), ask))
        return found

    def _waits(self, after: Layer, up: bool, group: int) -> Costs:
        idle = self._expect(after.waiting[up], after.waiting[not up], up, group)
        return _lose(idle, self._wait, self._never)

    def _stays(self, after: Layer, works: Costs, up: bool, group: int) -> Costs:
        """Returns the costs of on-demand from the next STEP on, if it has started."""
        if self._blind:
            owned = after.on_demand[False][_blind(0.0 if up else AGES[group], STEP)]
        else:
            owned = self._expect(after.on_demand[up], after.on_demand[not up], up, group)
        return _plus(owned, works)

    def _hold(self, after: Layer, works: Costs, group: int) -> Costs:
        held = self._expect(after.spot, after.waiting[False], True, group)
        return _plus(held, works, self._problem.spot_price)

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
    older = _ages(group)
    return lasts * (1 - older), lasts * older, 1 - lasts


def _ages(group: int) -> float:
    """Returns the share of an age group that enters the next one in a STEP."""
    return STEP / (AGES[group + 1] - AGES[group]) if group + 1 < len(AGES) else 0.0


def _blind(away: float, looked: float) -> int:
    """Returns the row of on-demand where availability is not known."""
    return _group(away) * len(AGES) + _group(looked)


def _group(age: float) -> int:
    return bisect_right(AGES, age + 1e-9) - 1


def _plus(costs: Costs, works: Costs, price: float = 1.0) -> Costs:
    return [cost + price * work for cost, work in zip(costs, works, strict=True)]


def _mix(share: float, costs: Costs, others: Costs) -> Costs:
    return [share * cost + (1 - share) * other for cost, other in zip(costs, others, strict=True)]


def _least(works: Costs, *choices: Costs) -> Costs:
    """Returns the least cost for each slack; nothing where no work remains."""
    return [min(costs) if work > 0 else 0.0 for work, *costs in zip(works, *choices, strict=True)]


def _shift(slacks: Sequence[float], loss: float) -> list[Place]:
    """Returns where each slack is after a loss."""
    return [_place(slacks, slack - loss) for slack in slacks]


def _place(slacks: Sequence[float], slack: float) -> Place:
    at = min(bisect_right(slacks, slack + 1e-9), len(slacks) - 1) - 1
    if at < 0:
        return -1, 0.0
    return at, min(1.0, max(0.0, (slack - slacks[at]) / (slacks[at + 1] - slacks[at])))


def _at(costs: Costs, place: Place) -> float:
    at, share = place
    return costs[at] + (costs[at + 1] - costs[at]) * share


def _lose(costs: Costs, shift: Sequence[Place], otherwise: Costs) -> Costs:
    """Returns the costs after a loss of slack; `otherwise` where the slack does not suffice."""
    return [
        _at(costs, place) if place[0] >= 0 else other for place, other in zip(shift, otherwise, strict=True)
    ]
