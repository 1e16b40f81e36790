"""Old and new prices together: nothing known is lost, nothing unknown becomes known."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spottrain_operator.api.prices import VALID_FOR, Kind, PriceList, Rate, parse
from spottrain_prices.rates import Change, as_text, merged, rates_of

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
WEEK = timedelta(days=7)
P4D: Kind = ("p4d.24xlarge", "Spot", "us-east-1b")
G5: Kind = ("g5.xlarge", "Spot", "us-east-1b")


def hours(*changes: tuple[float, float | None], now: datetime = NOON) -> tuple[Rate, ...]:
    """A history from (hours before noon, dollars)."""
    return rates_of(
        [(NOON - ago * HOUR, None if usd is None else Decimal(str(usd))) for ago, usd in changes], now
    )


def known(rates: dict[Kind, list[Rate]], kind: Kind, *ago: float) -> list[Decimal | None]:
    """What the operator reads of the written text, for times before noon."""
    text, dropped = as_text(rates)
    found = parse(text)
    assert not dropped and not found.problems
    prices = (found.rate(*kind, NOON - each * HOUR) for each in ago)
    return [rate.usd_per_hour if rate else None for rate in prices]


def test_what_the_operator_reads_is_what_was_fetched() -> None:
    fetched = {P4D: hours((30, 7), (5, 8.19)), G5: hours((1, 0.4))}
    result = merged({}, fetched, since=NOON - WEEK)
    found = parse(as_text(result)[0])
    assert found == PriceList(rates={kind: tuple(rates) for kind, rates in result.items()})
    assert known(result, P4D, 31, 30, 6, 5, 0) == [None, 7, 7, Decimal("8.19"), Decimal("8.19")]


def test_a_new_history_goes_on_where_the_old_one_was() -> None:
    old = {P4D: hours((100, 5), (60, 6), now=NOON - 20 * HOUR)}
    result = merged(old, {P4D: hours((70, 5.5), (10, 8))}, since=NOON - WEEK)
    assert known(result, P4D, 99, 71, 70, 60, 11, 10, 0) == [
        5,
        5,
        Decimal("5.5"),
        Decimal("5.5"),
        Decimal("5.5"),
        8,
        8,
    ]


def test_what_was_not_fetched_stays_and_becomes_unknown_after_a_day() -> None:
    old = {P4D: hours((50, 6), now=NOON - 23 * HOUR), G5: hours((50, 0.4), now=NOON - 30 * HOUR)}
    result = merged(old, {}, since=NOON - WEEK)
    assert known(result, P4D, 40, 0, -1, -1.1) == [6, 6, 6, None]
    assert known(result, G5, 40, 6, 5) == [Decimal("0.4"), Decimal("0.4"), None]
    assert merged(old, {G5: hours((1, 0.5))}, since=NOON - WEEK)[P4D] == list(old[P4D])


def test_a_gap_in_which_nobody_looked_stays_unknown_where_the_cloud_does_not_fill_it() -> None:
    old = {P4D: hours((100, 5), now=NOON - 90 * HOUR)}
    result = merged(old, {P4D: hours((10, 8))}, since=NOON - WEEK)
    assert known(result, P4D, 100, 67, 65, 11, 10) == [5, 5, None, None, 8]


def test_what_ended_before_the_history_begins_is_dropped_and_a_price_in_force_is_not() -> None:
    old = {P4D: hours((400, 5), (300, 6), (100, 7)), G5: hours((500, 0.4), now=NOON - 200 * HOUR)}
    result = merged(old, {P4D: hours((90, 8))}, since=NOON - WEEK)
    assert [rate.usd_per_hour for rate in result[P4D]] == [6, 7, 8] and G5 not in result


def test_rates_without_a_date_are_kept() -> None:
    contract = parse('[{"instanceType": "p4d.24xlarge", "capacityType": "Reserved", "usdPerHour": 12.5}]')
    result = merged(contract.rates, {P4D: hours((1, 8))}, since=NOON - WEEK)
    assert parse(as_text(result)[0]).rate("p4d.24xlarge", "Reserved", "x", NOON) == Rate(
        usd_per_hour=Decimal("12.5")
    )


def test_too_long_a_list_loses_what_ended_first_and_says_how_much() -> None:
    rates = {P4D: list(hours(*((100 - n, 1 + n) for n in range(100)))), G5: list(hours((500, 0.4)))}
    whole, none = as_text(rates)
    text, dropped = as_text(rates, largest=len(whole) // 2)
    found = parse(text)
    assert not none and 40 < dropped < 60 and len(text) <= len(whole) // 2
    assert len(json.loads(text)) == 101 - dropped
    assert found.rate(*G5, NOON) is not None, "a price in force for weeks is not an old one"
    newest, gone = found.rate(*P4D, NOON), NOON - (101 - dropped) * HOUR
    assert newest is not None and newest.usd_per_hour == 100
    assert found.rate(*P4D, gone) is None, "the time before is unknown"


@pytest.mark.parametrize(
    "history",
    [
        hours((5, 2), (0, 1)),  # the second began when it was fetched
        hours((5, 2), (3, 1), (1, None)),  # and one that ended in an unknown price
    ],
)
def test_the_newest_rate_is_the_last_to_be_dropped(history: tuple[Rate, ...]) -> None:
    one = len(as_text({P4D: history[1:]})[0]) + 2
    text, dropped = as_text({P4D: history}, largest=one)
    assert dropped == 1 and [rate.usd_per_hour for rate in parse(text).rates[P4D]] == [1]
    late = merged({P4D: history}, {}, since=NOON - 2 * HOUR)
    assert late[P4D][-1] == history[-1]


def test_prices_are_written_exactly() -> None:
    for usd in ("0.00001", "113.9328", "10.000", "21.957642"):
        rates = {P4D: [Rate(usd_per_hour=Decimal(usd))]}
        (rate,) = parse(as_text(rates)[0]).rates[P4D]
        assert rate.usd_per_hour == Decimal(usd)
    assert '"10"' in as_text({P4D: [Rate(usd_per_hour=Decimal("10.000"))]})[0]


changes = st.lists(
    st.tuples(
        st.integers(min_value=-500, max_value=0).map(lambda n: NOON + n * HOUR),
        st.sampled_from([None, Decimal(1), Decimal(2), Decimal(3)]),
    ),
    max_size=8,
    unique_by=lambda change: change[0],
)


@given(changes=changes, ago=st.integers(min_value=-40, max_value=520))
def test_a_history_says_at_each_time_what_its_changes_say(changes: list[Change], ago: int) -> None:
    at = NOON - ago * HOUR
    begun = [change for change in sorted(changes, key=lambda c: c[0]) if change[0] <= at]
    expected = begun[-1][1] if begun and at <= NOON + VALID_FOR else None
    found = PriceList(rates={P4D: rates_of(changes, NOON)}).rate(*P4D, at + timedelta(seconds=1))
    if at + timedelta(seconds=1) > NOON + VALID_FOR:
        expected = None
    assert (found.usd_per_hour if found else None) == expected


@pytest.mark.parametrize("since", [WEEK, 10 * WEEK])
@given(first=changes, second=changes, room=st.integers(min_value=2, max_value=3000))
def test_nothing_is_known_that_neither_run_knew(
    since: timedelta, first: list[Change], second: list[Change], room: int
) -> None:
    before = rates_of(first, NOON - 30 * HOUR)
    now = rates_of(second, NOON)
    result = merged({P4D: before} if before else {}, {P4D: now} if now else {}, since=NOON - since)
    text, _ = as_text(result, largest=room)
    assert len(text.encode()) <= room
    found, old, new = parse(text), PriceList(rates={P4D: before}), PriceList(rates={P4D: now})
    for ago in range(-40, 520, 3):
        at = NOON - ago * HOUR + timedelta(seconds=1)
        rate = found.rate(*P4D, at)
        if rate is not None:
            sources = [source.rate(*P4D, at) for source in (old, new)]
            assert rate.usd_per_hour in [each.usd_per_hour for each in sources if each]
