"""rank(): the zone in which an hour of work costs least, as far as the job has seen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from spottrain_operator.policies.spot_or_on_demand import Overheads
from spottrain_operator.policies.spot_runs import RunLengths, SpotRun, chance
from spottrain_operator.policies.spot_zones import RankedZone, SpotTry, SpotZone, observed, rank

HOUR = 3600.0
NOW = 100 * HOUR
OVERHEADS = Overheads(restart=180, on_demand_p99=300, decision=600, request=600)
PLAIN = SpotZone(name="a", price=1.0)


def up(start: float, end: float, *, ended: bool = True) -> SpotRun:
    return SpotRun(available=True, start=start * HOUR, end=end * HOUR, ended=ended)


def down(start: float, end: float, *, ended: bool = False) -> SpotRun:
    return SpotRun(available=False, start=start * HOUR, end=end * HOUR, ended=ended)


def names(*zones: SpotZone, **more: Any) -> list[str]:
    return [each.name for each in ranked(*zones, **more)]


def ranked(*zones: SpotZone, **more: Any) -> tuple[RankedZone, ...]:
    return rank(zones, OVERHEADS, now=NOW, **{"value_of_time": 3.0} | more)


def test_of_zones_without_history_the_cheapest_is_first_and_of_equals_the_first() -> None:
    dear = replace(PLAIN, name="b", price=1.2)
    assert names(dear, PLAIN, replace(PLAIN, name="c")) == ["a", "c", "b"]


def test_a_zone_that_has_just_interrupted_the_job_comes_after_a_slightly_dearer_one() -> None:
    lost, dear = replace(PLAIN, history=(up(90, 100),)), replace(PLAIN, name="b", price=1.1)
    assert names(lost, dear) == ["b", "a"]
    assert names(replace(lost, history=(up(80, 90),)), dear) == ["a", "b"]  # ten hours later it is forgotten


def test_a_zone_that_refused_a_request_comes_after_one_that_did_not_for_some_time() -> None:
    refused, other = replace(PLAIN, history=(down(99, 100),)), replace(PLAIN, name="b", price=1.1)
    assert names(refused, other) == ["b", "a"]


def test_a_zone_with_long_runs_is_worth_a_higher_price_than_one_with_runs_as_short_as_a_restart() -> None:
    short = replace(PLAIN, history=tuple(up(hour, hour + 0.07) for hour in range(60, 90)))
    long = replace(
        PLAIN, name="b", price=1.3, history=tuple(up(hour, hour + 4.9) for hour in range(0, 95, 5))
    )
    assert names(short, long) == ["b", "a"]


def test_an_unknown_price_is_not_free_and_comes_last() -> None:
    found = ranked(replace(PLAIN, name="b", price=None), replace(PLAIN, price=99.0))
    assert [each.name for each in found] == ["a", "b"]
    assert math.isinf(found[1].cost) and "unknown" in found[1].reason


def test_a_running_job_moves_only_where_the_saving_is_worth_a_restart() -> None:
    here = replace(PLAIN, history=(up(99, 100, ended=False),))
    assert names(here, replace(PLAIN, name="b", price=0.97), running="a")[0] == "a"
    assert names(here, replace(PLAIN, name="b", price=0.2), running="a")[0] == "b"


def test_a_move_is_charged_for_in_time_and_in_money() -> None:
    cheap = replace(PLAIN, name="b", price=0.7)
    assert names(PLAIN, cheap) == ["b", "a"]
    assert names(PLAIN, replace(cheap, moving_cost=1.0)) == ["a", "b"]
    assert names(PLAIN, replace(cheap, moving_seconds=1800)) == ["a", "b"]


def test_a_running_job_does_not_move_away_from_an_unknown_price() -> None:
    here = replace(PLAIN, price=None, history=(up(99, 100, ended=False),))
    assert names(here, replace(PLAIN, name="b", price=0.2), running="a") == ["a", "b"]


def test_without_a_value_of_time_the_highest_known_price_counts() -> None:
    zones = (PLAIN, replace(PLAIN, name="b", price=2.0), replace(PLAIN, name="c", price=None))
    assert ranked(*zones, value_of_time=None) == ranked(*zones, value_of_time=2.0)


@pytest.mark.parametrize("price", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_price_gets_a_sentence_with_the_zone(price: float) -> None:
    with pytest.raises(ValueError, match="the price of a must be above zero or None"):
        ranked(replace(PLAIN, price=price))


def test_a_job_runs_in_one_of_the_zones() -> None:
    with pytest.raises(ValueError, match="the job runs in b, which is not among the zones"):
        ranked(PLAIN, running="b")
    with pytest.raises(ValueError, match="now must be a time"):
        rank([PLAIN], OVERHEADS, now=math.nan)


def test_attempts_become_runs() -> None:
    tries = [
        SpotTry(requested=0, bound=100, ended=5000, reclaimed=True),  # at once: a node boots
        SpotTry(requested=5010, bound=None, ended=5610),  # timed out
        SpotTry(requested=6000, bound=7000, ended=9000),  # granted late; ended by the job itself
        SpotTry(requested=9000, bound=9060),
    ]
    assert observed(tries, 9500) == (
        SpotRun(available=True, start=100, end=5000),
        SpotRun(available=False, start=5010, end=5610, ended=False),
        SpotRun(available=False, start=6000, end=7000),
        SpotRun(available=True, start=7000, end=9000, ended=False),
        SpotRun(available=True, start=9060, end=9500, ended=False),
    )


def test_a_request_that_waits_has_seen_no_spot_until_now() -> None:
    waiting = SpotTry(requested=0, bound=None)
    assert observed([waiting], 700) == (SpotRun(available=False, start=0, end=700, ended=False),)


def test_the_chance_of_spot_rises_after_a_refusal_and_falls_after_a_sight() -> None:
    refused = [chance((down(99, 100),), (100 + hours) * HOUR) for hours in (0, 1, 10, 1000)]
    assert refused[0] == 0 and refused == sorted(refused)
    held = [chance((up(99, 100, ended=False),), (100 + hours) * HOUR) for hours in (0, 1, 10, 1000)]
    assert held[0] == 1 and held == sorted(held, reverse=True)
    assert refused[-1] == pytest.approx(held[-1], abs=0.1)
    assert chance((up(99, 100),), NOW) == 0 and chance((down(99, 100, ended=True),), NOW) == 1


def test_a_request_that_waits_longer_is_granted_more_often() -> None:
    waits = [chance((down(99, 100),), NOW, within) for within in (0.0, 0.1, 1.0)]
    assert waits == sorted(waits) and waits[0] == 0 < waits[1] and waits[2] < 1


def test_the_older_a_run_the_more_of_it_is_left() -> None:
    lengths = RunLengths(0.7)
    assert lengths.left(0.0) == pytest.approx(0.7 * math.gamma(1 + 1 / 0.6), rel=0.02)
    assert lengths.left(0.0) < lengths.left(1.0) < lengths.left(10.0)
    assert lengths.useful_share(0.0) == 1 > lengths.useful_share(0.2) > lengths.useful_share(1.0) > 0
