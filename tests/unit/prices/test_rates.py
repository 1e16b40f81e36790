"""Old and new prices together: nothing known is lost, nothing unknown becomes known."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spottrain_operator.api.prices import Kind, PriceList, Rate, parse
from spottrain_prices.rates import as_text, merged

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
WEEK = timedelta(days=7)
P4D: Kind = ("p4d.24xlarge", "Spot", "us-east-1b")
G5: Kind = ("g5.xlarge", "Spot", "us-east-1b")


def rate(ago: float, usd: float | str, *, checked: float = 0) -> Rate:
    """A rate in force since so many hours before noon, and seen last so many hours before noon."""
    return Rate(usd_per_hour=Decimal(str(usd)), since=NOON - ago * HOUR, checked=NOON - checked * HOUR)


def hours(*changes: tuple[float, float]) -> list[Rate]:
    """A history from (hours before noon, dollars), each of which was seen until the next one."""
    ends = [ago for ago, _ in changes[1:]] + [0.0]
    return [rate(ago, usd, checked=end) for (ago, usd), end in zip(changes, ends, strict=True)]


def known(rates: dict[Kind, list[Rate]], kind: Kind, *ago: float) -> list[Decimal | None]:
    """What the operator reads of the written text, for times before noon."""
    text, dropped = as_text(rates)
    found = parse(text)
    assert not dropped and not found.problems
    prices = (found.rate(*kind, NOON - each * HOUR) for each in ago)
    return [rate.usd_per_hour if rate else None for rate in prices]


def test_what_the_operator_reads_is_what_was_fetched() -> None:
    result = merged({}, {P4D: rate(5, 8.19), G5: rate(1, 0.4)}, since=NOON - WEEK)
    found = parse(as_text(result)[0])
    assert found == PriceList(rates={kind: tuple(rates) for kind, rates in result.items()})
    assert known(result, P4D, 6, 5, 0) == [None, Decimal("8.19"), Decimal("8.19")]


def test_a_price_that_has_changed_begins_where_the_one_before_ends() -> None:
    first = merged({}, {P4D: rate(60, 6, checked=20)}, since=NOON - WEEK)
    again = merged(first, {P4D: rate(60, 6, checked=15)}, since=NOON - WEEK)
    assert again == {P4D: [rate(60, 6, checked=15)]}
    result = merged(again, {P4D: rate(10, 8)}, since=NOON - WEEK)
    assert known(result, P4D, 61, 60, 15, 11, 10, 0) == [None, 6, 6, 6, 8, 8]


def test_what_was_not_fetched_stays_and_becomes_unknown_after_a_day() -> None:
    old = {P4D: [rate(50, 6, checked=23)], G5: [rate(50, 0.4, checked=30)]}
    result = merged(old, {}, since=NOON - WEEK)
    assert known(result, P4D, 40, 0, -1, -1.1) == [6, 6, 6, None]
    assert known(result, G5, 40, 6, 5) == [Decimal("0.4"), Decimal("0.4"), None]
    assert merged(old, {G5: rate(1, 0.5)}, since=NOON - WEEK)[P4D] == old[P4D]


def test_a_gap_in_which_nobody_looked_stays_unknown_where_the_cloud_does_not_fill_it() -> None:
    result = merged({P4D: [rate(100, 5, checked=90)]}, {P4D: rate(10, 8)}, since=NOON - WEEK)
    assert known(result, P4D, 100, 67, 65, 11, 10) == [5, 5, None, None, 8]


def test_what_ended_before_the_history_begins_is_dropped_and_a_price_in_force_is_not() -> None:
    old = {P4D: hours((400, 5), (300, 6), (100, 7)), G5: [rate(500, 0.4, checked=200)]}
    result = merged(old, {P4D: rate(90, 8)}, since=NOON - WEEK)
    assert [rate.usd_per_hour for rate in result[P4D]] == [6, 7, 8] and G5 not in result


def test_rates_without_a_date_are_kept() -> None:
    contract = parse('[{"instanceType": "p4d.24xlarge", "capacityType": "Reserved", "usdPerHour": 12.5}]')
    result = merged(contract.rates, {P4D: rate(1, 8)}, since=NOON - WEEK)
    assert parse(as_text(result)[0]).rate("p4d.24xlarge", "Reserved", "x", NOON) == Rate(
        usd_per_hour=Decimal("12.5")
    )


def test_too_long_a_list_loses_what_ended_first_and_says_how_much() -> None:
    rates = {P4D: hours(*((100 - n, 1 + n) for n in range(100))), G5: hours((500, 0.4))}
    whole, none = as_text(rates)
    text, dropped = as_text(rates, largest=len(whole) // 2)
    found = parse(text)
    assert not none and 40 < dropped < 60 and len(text) <= len(whole) // 2
    assert len(json.loads(text)) == 101 - dropped
    assert found.rate(*G5, NOON) is not None, "a price in force for weeks is not an old one"
    newest, gone = found.rate(*P4D, NOON), NOON - (101 - dropped) * HOUR
    assert newest is not None and newest.usd_per_hour == 100
    assert found.rate(*P4D, gone) is None, "the time before is unknown"


@pytest.mark.parametrize("ago", [0, 1])
def test_the_newest_rate_is_the_last_to_be_dropped(ago: float) -> None:
    """Even one that began when it was fetched."""
    history = hours((5, 2), (ago, 1))
    text, dropped = as_text({P4D: history}, largest=len(as_text({P4D: history[1:]})[0]) + 2)
    assert dropped == 1 and [rate.usd_per_hour for rate in parse(text).rates[P4D]] == [1]
    assert merged({P4D: history}, {}, since=NOON - 2 * HOUR)[P4D][-1] == history[-1]


def test_prices_are_written_exactly() -> None:
    for usd in ("0.00001", "113.9328", "10.000", "21.957642"):
        rates = {P4D: [Rate(usd_per_hour=Decimal(usd))]}
        (rate,) = parse(as_text(rates)[0]).rates[P4D]
        assert rate.usd_per_hour == Decimal(usd)
    assert '"10"' in as_text({P4D: [Rate(usd_per_hour=Decimal("10.000"))]})[0]


runs = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=300),  # when it ran, hours before noon
        st.integers(min_value=0, max_value=200),  # how long its price had been in force
        st.sampled_from([1, 2, 3]),
    ),
    max_size=8,
    unique_by=lambda run: run[0],
)


@pytest.mark.parametrize("kept", [WEEK, 10 * WEEK])
@given(runs=runs, room=st.integers(min_value=2, max_value=3000))
def test_nothing_is_known_that_no_run_knew(
    kept: timedelta, runs: list[tuple[int, int, int]], room: int
) -> None:
    seen = [rate(ran + age, usd, checked=ran) for ran, age, usd in sorted(runs, reverse=True)]
    result: dict[Kind, list[Rate]] = {}
    for each in seen:
        assert each.checked is not None
        result = merged(result, {P4D: each}, since=each.checked - kept)
    text, _ = as_text(result, largest=room)
    assert len(text.encode()) <= room
    found = parse(text)
    for ago in range(-40, 520, 3):
        at = NOON - ago * HOUR + timedelta(seconds=1)
        known_rate = found.rate(*P4D, at)
        knew = {each.usd_per_hour for each in seen if each.since <= at and each.holds(at)}
        assert known_rate is None or known_rate.usd_per_hour in knew
