"""What levers on cost bring one after the other: on the price of an hour, the hours of a run, or the runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Part(StrEnum):
    """The three factors of a bill, and fields of `Bill`."""

    PRICE = "price"
    HOURS = "hours"
    RUNS = "runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    price: float
    """Dollars per hour of all GPUs."""
    hours: float
    """Paid hours of one run."""
    runs: float
    """Runs; one that is stopped at 60 % of its hours is 0.6."""

    @property
    def run(self) -> float:
        """Dollars of one run."""
        return self.price * self.hours

    @property
    def total(self) -> float:
        return self.run * self.runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    name: str
    part: Part
    factor: float
    """After / before."""


def breakdown(bill: Bill, levers: Iterable[Lever]) -> list[Bill]:
    """Returns the bill after each lever, each on top of those before it."""
    bills = []
    for lever in levers:
        bill = replace(bill, **{lever.part: getattr(bill, lever.part) * lever.factor})
        bills.append(bill)
    return bills
