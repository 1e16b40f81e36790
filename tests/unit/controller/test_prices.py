"""What an instance costs at a time, and that nothing unknown is free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from spottrain_operator.api.prices import PriceList, Rate, overlaid, parse

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def prices(*entries: dict[str, Any]) -> PriceList:
    base = {"instanceType": "p4d", "capacityType": "Spot", "usdPerHour": 6}
    found = parse(json.dumps([base | entry for entry in entries]))
    assert not found.problems
    return found


def usd(found: PriceList, hours: float, *, zone: str = "a", start: datetime = NOON) -> str:
    amount = found.cost("p4d", "Spot", zone, start, start + hours * HOUR)
    return f"{amount.usd:.2f}" if not amount.unknown_seconds else f"unknown {amount.unknown_seconds:.0f} s"


def test_a_rate_without_a_date_is_a_contract_and_does_not_age() -> None:
    assert usd(prices({}), 1.5) == "9.00"
    assert usd(prices({}), 24 * 365) == "52560.00"


def test_the_zone_s_own_rate_counts_before_that_of_all_zones() -> None:
    found = prices({}, {"zone": "a", "usdPerHour": 2.5})
    assert (usd(found, 1), usd(found, 1, zone="b")) == ("2.50", "6.00")
    assert usd(prices({"zone": "b"}), 1) == "unknown 3600 s"


def test_a_change_of_price_counts_from_when_it_came() -> None:
    found = prices({}, {"since": "2026-11-23T12:30:00Z", "usdPerHour": 12})
    assert usd(found, 1) == "9.00" and usd(found, 1, start=NOON + HOUR) == "12.00"
    late = prices({"since": "2026-11-23T12:30:00Z"})
    assert usd(late, 1) == "unknown 1800 s", "before its first rate nothing is known"


def test_a_day_after_somebody_looked_a_price_is_unknown() -> None:
    found = prices({"checked": "2026-11-22T12:30:00Z"})
    assert usd(found, 0.5) == "3.00"
    amount = found.cost("p4d", "Spot", "a", NOON, NOON + HOUR)
    assert f"{amount.usd:.2f}" == "3.00" and round(amount.unknown_seconds) == 1800
    newer = prices({"checked": "2026-11-22T12:30:00Z"}, {"checked": "2026-11-23T12:30:00Z"})
    assert usd(newer, 1) == "6.00", "the newest entry of one kind counts"


def test_another_type_or_kind_of_capacity_is_unknown() -> None:
    found = prices({})
    for instance_type, kind in (("p5", "Spot"), ("p4d", "OnDemand"), ("", ""), ("p4d", "")):
        assert found.cost(instance_type, kind, "a", NOON, NOON + HOUR).unknown_seconds == 3600


SPOT = {"instanceType": "p4d", "capacityType": "Spot", "usdPerHour": 6}
UNREADABLE: tuple[dict[str, Any], ...] = (
    *({"usdPerHour": bad} for bad in (0, -1, None, "cheap", True)),
    {"capacityType": "SpotFirst"},
    {"instanceType": ""},
    {"zone": 1},
    {"since": "noon"},
    {"checked": 5},
    {"price": 5},
)


@pytest.mark.parametrize("entry", UNREADABLE)
def test_a_rate_that_cannot_be_read_is_left_out_and_named(entry: dict[str, Any]) -> None:
    found = parse(json.dumps([SPOT | entry, SPOT | {"instanceType": "p5"}]))
    (problem,), (field,) = found.problems, entry
    assert problem.startswith("rate 0 is left out: ") and field in problem and len(found.rates) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is not JSON"), ("{}", "not a JSON array"), ("[5]", "rate 0 is left out: it must be an object")],
)
def test_a_list_that_cannot_be_read_leaves_all_prices_unknown(text: str, said: str) -> None:
    found = parse(text)
    assert said in found.problems[0] and not found.rates
    assert not parse("").problems, "an empty list is one without prices"


def test_prices_are_exact_decimals() -> None:
    found = prices({"usdPerHour": 0.1})
    total = sum((found.cost("p4d", "Spot", "a", NOON, NOON + HOUR).usd for _ in range(30)), Decimal(0))
    assert total == 3


def test_an_own_rate_counts_before_a_fetched_one_and_one_without_zone_before_those_of_all_zones() -> None:
    fetched = prices({"zone": "a"}, {"zone": "b", "usdPerHour": 7}, {"instanceType": "p5", "usdPerHour": 50})
    both = overlaid(prices({"zone": "a", "usdPerHour": 2}), fetched)
    assert (usd(both, 1), usd(both, 1, zone="b")) == ("2.00", "7.00")
    everywhere = overlaid(prices({"usdPerHour": 2}), fetched)
    assert (usd(everywhere, 1), usd(everywhere, 1, zone="b")) == ("2.00", "2.00")
    other = overlaid(prices({"capacityType": "Reserved", "usdPerHour": 2}), fetched)
    assert (usd(other, 1), usd(other, 1, zone="b")) == ("6.00", "7.00")
    for found in (both, everywhere, other):
        assert found.cost("p5", "Spot", "x", NOON, NOON + HOUR).usd == 50


def test_an_own_rate_that_is_too_old_is_not_replaced_by_a_fetched_one() -> None:
    own = prices({"usdPerHour": 2, "checked": "2026-11-01T00:00:00Z"})
    assert usd(overlaid(own, prices({"zone": "a"})), 1) == "unknown 3600 s"


class Counted(tuple[Rate, ...]):
    """A history that counts how many of its rates are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Counted.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[Rate]:
        for index in range(len(self)):
            yield self[index]


def test_a_long_history_is_not_read_through_for_each_node() -> None:
    """A change each hour for three months; the present one is asked for, and one of long ago."""
    hours = [{"since": (NOON - n * HOUR).isoformat(), "usdPerHour": 1 + n} for n in range(2000)]
    known = prices(*hours)
    counted = PriceList(rates={kind: Counted(history) for kind, history in known.rates.items()})
    for ago in (0, 1500):
        start, Counted.read = NOON - ago * HOUR, 0
        assert usd(counted, 0.5, start=start) == usd(known, 0.5, start=start)
        assert 0 < Counted.read < 60
    assert usd(counted, 3, start=NOON - 7.5 * HOUR) == usd(known, 3, start=NOON - 7.5 * HOUR) == "22.50"
