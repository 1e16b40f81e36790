"""The price list: what an instance type costs in a zone at a time. Pure.

A list is a JSON array of rates, as a person, Helm values or a CronJob writes it:

    [{"instanceType": "p4d.24xlarge", "capacityType": "OnDemand", "usdPerHour": 21.957642},
     {"instanceType": "p4d.24xlarge", "capacityType": "Spot", "zone": "us-east-1b", "usdPerHour": 8.19,
      "since": "2026-11-23T10:00:00Z", "checked": "2026-11-23T12:00:00Z"}]

`since`: when the rate came into force; a list may hold several of one kind, which are its history. `checked`:
when somebody last saw that it holds; a day later it is unknown. A rate without it is a contract, such as the
user's own rate of reserved capacity, and does not age. A rate for a zone counts before one without.

What is not known is never taken for free: zero and negative rates are refused.

There may be two lists: a person's own, and one that a CronJob fetches. `overlaid` makes one of both.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, Field

from spottrain_operator.api.wire import decode
from spottrain_operator.errors import InvalidSpec

VALID_FOR: Final = timedelta(days=1)
"""After `checked`, a rate holds for so long."""
HOUR: Final = Decimal(3600)
ALWAYS: Final = datetime(1970, 1, 1, tzinfo=UTC)

Kind = tuple[str, str, str]
"""Instance type, capacity type, zone ("" for all zones)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    usd_per_hour: Decimal
    since: datetime = ALWAYS
    checked: datetime | None = None
    """None: it does not age."""

    def holds(self, at: datetime) -> bool:
        return self.checked is None or at <= self.checked + VALID_FOR


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """What a node cost over some time."""

    usd: Decimal = Decimal(0)
    unknown_seconds: Decimal = Decimal(0)
    """Seconds of that time whose price is not known; they are not in `usd`."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(usd=self.usd + other.usd, unknown_seconds=self.unknown_seconds + other.unknown_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceList:
    rates: Mapping[Kind, tuple[Rate, ...]] = field(default_factory=dict)
    """By kind: oldest first."""
    problems: tuple[str, ...] = ()
    """A sentence for each entry that was left out."""

    def rate(self, instance_type: str, capacity_type: str, zone: str, at: datetime) -> Rate | None:
        """Returns the rate in force at that time; None if it is not known."""
        for place in dict.fromkeys((zone, "")):
            history = self.rates.get((instance_type, capacity_type, place), ())
            count = bisect_right(history, at, key=_since)
            if count:
                found = history[count - 1]
                return found if found.holds(at) else None
        return None

    def cost(
        self, instance_type: str, capacity_type: str, zone: str, start: datetime, end: datetime
    ) -> Amount:
        """Returns what one node costs from `start` to `end`, over changes of its price."""
        total = Amount()
        kind = (instance_type, capacity_type, zone)
        for begin, until in self._pieces(kind, start, end):
            seconds = Decimal((until - begin) // timedelta(microseconds=1)) / 1_000_000
            rate = self.rate(*kind, begin)
            if rate is None:
                total += Amount(unknown_seconds=seconds)
            else:
                total += Amount(usd=rate.usd_per_hour * seconds / HOUR)
        return total

    def _pieces(self, kind: Kind, start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Yields the parts of the time in which no rate begins or becomes too old."""
        instance_type, capacity_type, zone = kind
        cuts = {end}
        for place in (zone, ""):
            history = self.rates.get((instance_type, capacity_type, place), ())
            first = max(0, bisect_right(history, start, key=_since) - 1)
            for rate in history[first : bisect_right(history, end, key=_since)]:
                cuts.add(rate.since)
                if rate.checked is not None:
                    cuts.add(rate.checked + VALID_FOR + timedelta(microseconds=1))
        begin = start
        for cut in sorted(cut for cut in cuts if start < cut <= end):
            yield begin, cut
            begin = cut


def _since(rate: Rate) -> datetime:
    return rate.since


NO_PRICES: Final = PriceList()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    instance_type: Annotated[str, Field(min_length=1)]
    capacity_type: Literal["Spot", "OnDemand", "Reserved"]
    zone: str = ""
    usd_per_hour: Annotated[Decimal, Field(gt=0, allow_inf_nan=False)]
    since: AwareDatetime = ALWAYS
    checked: AwareDatetime | None = None


def parse(text: str) -> PriceList:
    """Parses a price list. What cannot be read is left out, so unknown, and named in `problems`."""
    try:
        entries = json.loads(text) if text.strip() else []
    except ValueError as error:
        return PriceList(problems=(f"the price list is not JSON: {error}",))
    if not isinstance(entries, list):
        return PriceList(problems=("the price list is not a JSON array of rates",))
    found: dict[Kind, list[Rate]] = {}
    problems = []
    for number, entry in enumerate(entries):
        try:
            read = decode(_Entry, entry, "", extra="forbid")
        except InvalidSpec as error:
            problems.append(f"rate {number} is left out: {error}")
            continue
        rate = Rate(usd_per_hour=read.usd_per_hour, since=read.since, checked=read.checked)
        found.setdefault((read.instance_type, read.capacity_type, read.zone), []).append(rate)
    rates = {kind: tuple(sorted(history, key=_since)) for kind, history in found.items()}
    return PriceList(rates=rates, problems=tuple(problems))


def overlaid(own: PriceList, fetched: PriceList) -> PriceList:
    """Returns one list of both, in which a person's own rates replace the fetched ones of their kind.

    An own rate without zone replaces those of all zones.
    """
    everywhere = {kind[:2] for kind in own.rates if kind[2] == ""}
    others = {kind: rates for kind, rates in fetched.rates.items() if kind[:2] not in everywhere}
    return PriceList(rates={**others, **own.rates}, problems=own.problems + fetched.problems)
