"""When a periodic save is due, and what `auto` makes of what was measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from spottrain.core.run_config import Interval
from spottrain.lifecycle.save_interval import (
    AGAIN_SECONDS,
    FIRST_SECONDS,
    LEAST_SECONDS,
    MOST_SECONDS,
    PRIOR_SECONDS,
    Observed,
    SaveInterval,
    auto_seconds,
    young,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_save_that_was_not_started_is_due_until_it_is() -> None:
    cadence = SaveInterval(Interval.parse("5steps"))
    assert not cadence.due(4)
    assert cadence.due(5) and cadence.due(6)
    cadence.started(6)
    assert not cadence.due(10) and cadence.due(11)


def test_a_save_that_failed_is_tried_again_long_before_a_long_interval() -> None:
    clock = Clock()
    cadence = SaveInterval(Interval.parse("1h"), clock=clock)
    cadence.started(7)
    clock.now += AGAIN_SECONDS - 1
    assert not cadence.due(8, failed=True)
    clock.now += 1
    assert cadence.due(8, failed=True) and not cadence.due(8)


def test_an_interval_of_steps_tells_the_next_step_and_one_of_time_does_not() -> None:
    cadence = SaveInterval(Interval.parse("5steps"))
    assert cadence.next_step == 5
    cadence.started(7)
    assert cadence.next_step == 12
    assert SaveInterval(Interval.parse("10m")).next_step is None
    assert SaveInterval(Interval.parse("auto")).next_step is None


def test_auto_asks_for_its_seconds_each_time_and_needs_a_step_to_save() -> None:
    clock, seconds = Clock(), [60.0]
    cadence = SaveInterval(Interval.parse("auto"), lambda: seconds[0], clock)
    cadence.started(7)
    clock.now += 60
    assert not cadence.due(7), "there is nothing new to save"
    assert cadence.due(8)
    seconds[0] = 61.0
    assert not cadence.due(8)
    clock.now += 1
    assert cadence.due(8)


def wasted(interval: float, cost: float, mean_time: float) -> float:
    """Seconds per second of work, with losses at random: Daly 2006, equation 20, without the restart."""
    return mean_time * math.expm1((interval + cost) / mean_time) / interval - 1


def exact(cost: float, mean_time: float) -> float:
    """The best interval, by golden section: `wasted` falls and then rises."""
    low, high, ratio = 1e-6 * mean_time, 20 * mean_time, (math.sqrt(5) - 1) / 2
    for _ in range(200):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if wasted(a, cost, mean_time) < wasted(b, cost, mean_time):
            high = b
        else:
            low = a
    return (low + high) / 2


@given(st.floats(1e-3, 1e3), st.floats(1.0, 1e6))
def test_what_young_s_interval_wastes_is_within_1_percent_of_the_least_that_can_be(
    cost: float, mean_time: float
) -> None:
    assume(cost < 0.1 * mean_time)
    best = exact(cost, mean_time)
    ours = young(cost, mean_time)
    assert ours == pytest.approx(best, rel=0.01)
    assert wasted(ours, cost, mean_time) <= 1.01 * wasted(best, cost, mean_time)


def test_where_a_save_costs_more_than_is_lost_it_is_not_made_more_often_than_things_are_lost() -> None:
    assert young(100, 50) == young(1e9, 50) == 50


@given(st.floats(0, 1e6), st.none() | st.floats(0, 1e5), st.floats(0, 1e8), st.integers(0, 1000))
def test_auto_stays_within_its_bounds(
    stall: float, upload: float | None, trained: float, losses: int
) -> None:
    seconds = auto_seconds(stall=stall, upload=upload, observed=Observed(trained=trained, losses=losses))
    assert LEAST_SECONDS <= seconds <= MOST_SECONDS
    assert seconds >= min(upload or 0, MOST_SECONDS), "uploads do not overlap"


def test_before_the_first_save_auto_knows_no_cost() -> None:
    observed = Observed(trained=1e6, losses=0)
    assert auto_seconds(stall=None, upload=None, observed=observed) == FIRST_SECONDS


def test_each_loss_makes_auto_save_more_often_and_each_hour_without_one_more_seldom() -> None:
    def at(trained: float, losses: int) -> float:
        return auto_seconds(stall=1.0, upload=1.0, observed=Observed(trained=trained, losses=losses))

    assert Observed(trained=0, losses=0).mean_time == PRIOR_SECONDS
    assert at(0, 9) < at(0, 1) < at(0, 0) < at(7200, 0)
    assert at(1e5, 100) == pytest.approx(young(1.0, 1e5 / 100), rel=0.03), "observations outweigh the guess"
