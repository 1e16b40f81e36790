"""From the points of a series to the columns of a screen. Pure.

A column is the mean of its points, with the least and the greatest value among them, so that no spike of a
long run is lost, and a page is as large for a million steps as for a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from spottrain.core.series import Point

COLUMNS: Final = 800
LOG_RANGE: Final = 30
"""Positive values of which the greatest is so many times the least get a logarithmic axis."""
TICKS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    step: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A scale of values. `logarithmic`: of positive ones."""

    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where the value is: 0 at the lower end, 1 at the upper one."""
        low, high, value = map(self._scaled, (self.low, self.high, max(self.low, min(self.high, value))))
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values within the axis."""
        if self.logarithmic:
            return _powers(self.low, self.high)
        step = _round_step((self.high - self.low) / TICKS)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def columns(
    points: Sequence[Point], value: Callable[[Point], tuple[float, float, float] | None], last: int
) -> list[Column]:
    """Returns the columns of steps 0 to `last`. `value`: mean, least and greatest of a point, if known."""
    width = max(last / COLUMNS, 1.0)
    found: dict[int, list[tuple[Point, tuple[float, float, float]]]] = {}
    for point in points:
        if (values := value(point)) is not None:
            found.setdefault(int(point.step / width), []).append((point, values))
    return [_column(each) for _, each in sorted(found.items())]


def _column(found: list[tuple[Point, tuple[float, float, float]]]) -> Column:
    weight = sum(max(point.steps, 1) for point, _ in found)
    return Column(
        step=found[-1][0].step,
        mean=sum(values[0] * max(point.steps, 1) for point, values in found) / weight,
        low=min(values[1] for _, values in found),
        high=max(values[2] for _, values in found),
    )


def axis_of(found: Sequence[Column], *, from_zero: bool = False) -> Axis:
    """Returns an axis with all means on it, and the extremes as far as they do not squeeze them."""
    low, high = min(each.mean for each in found), max(each.mean for each in found)
    if from_zero:
        return Axis(low=0.0, high=high * 1.1 or 1.0)
    if low > 0 and high / low > LOG_RANGE:
        return Axis(low=low * 0.9, high=high * 1.1, logarithmic=True)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low=low - margin, high=high + margin)


def number(value: float) -> str:
    """Writes 12,000, 0.35, 3e-05."""
    if value and abs(value) < 1e-3:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _round_step(step: float) -> float:
    """Returns the next greater of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(factor for factor in (1, 2, 5, 10) if step <= factor * power * (1 + 1e-9))


def _powers(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten, or the powers alone where that is too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [f * 10.0**power for power in powers for f in factors if low <= f * 10.0**power <= high]
        if len(found) <= TICKS + 2:
            return found
    return found[:: -(-len(found) // (TICKS + 1))]
