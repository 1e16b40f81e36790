"""When a save is due, periodic or advised, and what one at a notice is estimated to take."""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from spottrain.contract import LONGEST_AUTO_INTERVAL
from spottrain.core.preemption import Preemption
from spottrain.core.progress import ProgressFacts
from spottrain.core.run_config import Interval
from spottrain.lifecycle.notice_budget import COMMIT_SECONDS, FULL_SHARE, MARGIN, NoticeBudget
from spottrain.lifecycle.save_interval import (
    AGAIN_SECONDS,
    AGE_SECONDS,
    FIRST_SECONDS,
    MIN_SECONDS,
    SHAPE,
    Losses,
    RebalanceAdvice,
    SavePolicy,
    SlowerSteps,
    auto_seconds,
    young,
)

from tests.support.sentences import Told


@pytest.mark.parametrize(
    ("interval", "last", "seconds", "step", "failed", "due"),
    [
        ("5steps", 0, 0, 4, False, False),
        ("5steps", 0, 0, 5, False, True),
        ("5steps", 0, 0, 6, False, True),  # it stays due until it is started
        ("5steps", 6, 0, 10, False, False),
        ("5steps", 6, 0, 11, False, True),
        ("1h", 7, AGAIN_SECONDS - 1, 8, True, False),
        ("1h", 7, AGAIN_SECONDS, 8, True, True),  # a failed save is tried again long before
        ("1h", 7, AGAIN_SECONDS, 8, False, False),
        ("auto", 7, FIRST_SECONDS, 7, False, False),  # there is nothing new to save
        ("auto", 7, FIRST_SECONDS, 8, False, True),
        ("auto", 7, FIRST_SECONDS - 1, 8, False, False),
    ],
)
def test_a_save_is_due_an_interval_after_the_last(
    interval: str, last: int, seconds: float, step: int, failed: bool, due: bool
) -> None:
    times = deque([0.0, 0.0, seconds])
    it = SavePolicy(Interval.parse(interval), 1, clock=times.popleft)
    it.started(last, 0.0)
    facts = ProgressFacts(step=step)
    assert it.due(step, lambda: facts, 0.0, 0.0, uploading=None, failed=failed) is due


def test_a_save_that_is_due_waits_for_the_upload_of_the_one_before() -> None:
    it = SavePolicy(Interval.parse("5steps"), 1)
    assert not it.due(9, ProgressFacts, 0.0, 0.0, uploading=5, failed=False)
    assert it.due(10, ProgressFacts, 0.0, 0.0, uploading=None, failed=False)


@pytest.mark.parametrize(("interval", "following"), [("5steps", 12), ("10m", None), ("auto", None)])
def test_an_interval_of_steps_tells_the_next_step_and_one_of_time_does_not(
    interval: str, following: int | None
) -> None:
    it = SavePolicy(Interval.parse(interval), 1)
    it.started(7, 0.0)
    assert it.next_step() == following
    assert it.next_step(9) == (following and following + 2)


# --- auto -----------------------------------------------------------------------------------------------
def wasted(interval: float, cost: float, mean_time: float) -> float:
    """Seconds per second of work, with losses at random: Daly 2006, equation 20, without the restart."""
    return mean_time * math.expm1((interval + cost) / mean_time) / interval - 1


def exact(cost: float, mean_time: float) -> float:
    """The best interval, by golden section: `wasted` falls and then rises."""
    low, high, ratio = 1e-6 * mean_time, 20 * mean_time, (math.sqrt(5) - 1) / 2
    for _ in range(80):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if wasted(a, cost, mean_time) < wasted(b, cost, mean_time):
            high = b
        else:
            low = a
    return (low + high) / 2


@settings(max_examples=50)
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


@settings(max_examples=50)
@given(
    cost=st.floats(0, 1e6),
    upload=st.none() | st.floats(0, 1e5),
    trained=st.floats(0, 1e8),
    here=st.floats(0, 1),
    attempts=st.integers(0, 1000),
    lost=st.integers(0, 1000),
)
def test_auto_stays_within_its_bounds(
    cost: float, upload: float | None, trained: float, here: float, attempts: int, lost: int
) -> None:
    losses = Losses(trained=trained, here=here * trained, attempts=attempts, lost=lost)
    seconds = auto_seconds(cost=cost, upload=upload, losses=losses)
    assert MIN_SECONDS <= seconds <= LONGEST_AUTO_INTERVAL
    assert seconds >= min(upload or 0, LONGEST_AUTO_INTERVAL), "uploads do not overlap"


def test_before_the_first_save_auto_knows_no_cost() -> None:
    assert auto_seconds(cost=None, upload=None, losses=Losses()) == FIRST_SECONDS


def auto(**losses: Any) -> float:
    return auto_seconds(cost=1.0, upload=1.0, losses=Losses(**losses))


def test_each_loss_makes_auto_save_more_often_and_each_hour_without_one_more_seldom() -> None:
    assert auto(attempts=9, lost=9) < auto(attempts=1, lost=1) < auto() < auto(trained=7200)


def test_an_attempt_that_lost_nothing_does_not_make_auto_save_as_often_as_one_that_did() -> None:
    lost, saved = auto(trained=1e5, attempts=20, lost=20), auto(trained=1e5, attempts=20, lost=1)
    assert saved > 3 * lost


def test_the_older_an_attempt_the_more_seldom_auto_saves() -> None:
    ages = [auto(trained=1e5, here=here, attempts=20, lost=20) for here in (0, 600, 3600, 36000)]
    assert ages == sorted(ages) and ages[-1] > 2 * ages[0]


def test_the_rate_of_losses_is_that_of_a_weibull_distribution_with_the_observed_mean() -> None:
    seen = Losses(trained=1e9, here=0, attempts=10**5, lost=10**5)
    scale = 1e4 / math.gamma(1 + 1 / SHAPE)
    expected = ((AGE_SECONDS + 600) / scale) ** SHAPE - (AGE_SECONDS / scale) ** SHAPE
    assert 600 / seen.seconds_between(600) == pytest.approx(expected, rel=1e-3)


def test_auto_solves_for_the_interval_at_whose_own_rate_it_is_youngs() -> None:
    for losses in (Losses(), Losses(trained=1e6, here=5e4, attempts=40, lost=3)):
        seconds = auto_seconds(cost=5.0, upload=None, losses=losses)
        assert seconds == pytest.approx(young(5.0, losses.seconds_between(seconds)), rel=1e-3)


def test_more_losses_than_attempts_are_as_many_attempts() -> None:
    assert auto(trained=1e5, attempts=1, lost=9) == auto(trained=1e5, attempts=9, lost=9)


# --- what a save costs ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("saves", "longer"),
    [  # seconds of the steps before each save, and of those until it is over; seconds that the save takes
        ([([2, 2], [2, 2], 3)], 0),
        ([([2, 2], [2.5, 3, 2.25], 7)], 1.75),
        ([([2, 2], [2.75], 1)], 0.75),
        ([([2, 2], [1.5, 2], 3)], 0),
        ([([2, 2], [2, 60, 2], 5)], 5),  # such as a compilation
        ([([2, 2], [3, 3], None)], 0),  # it failed
        ([([], [4], 9)], 0),  # nothing to compare with
        ([([2, 2], [2.5], 9), ([], [4], 9), ([], [4], 9)], 2),  # the usual time is that before all three
        ([([2, 2], [each], 99) for each in (2.5, 30, 2.5, 30)], 0.5),  # the others do not count
        ([([2, 2], [each], 99) for each in (2.5, 2.5, 2.5, 3, 3, 3)], 1),  # it follows what lasts
    ],
)
def test_a_save_costs_what_the_steps_beside_it_take_longer(
    saves: list[tuple[list[float], list[float], float | None]], longer: float
) -> None:
    it, step, stepped = SlowerSteps(), 101, 0.0
    it.save_over(step, stepped, None)
    for before, beside, took in saves:
        step, stepped = step + len(before), stepped + sum(before)
        it.save_began(step, stepped)
        step, stepped = step + len(beside), stepped + sum(beside)
        it.save_over(step, stepped, took)
    assert it.seconds == longer


def test_auto_saves_more_seldom_where_saves_make_steps_slower() -> None:
    def seconds_between_saves(beside: float) -> float:
        now, saves = 0.0, [-math.inf]
        it = SavePolicy(Interval.parse("auto"), 1, clock=lambda: now)
        facts = ProgressFacts(stall_seconds=0.05, save_seconds=3.0)
        for step in range(1, 9999):
            now += beside if now < saves[-1] + 3.0 else 0.25
            uploading = step if now < saves[-1] + 3.0 else None
            if it.due(step, lambda: facts, now, now, uploading=uploading, failed=False):
                it.started(step, now)
                saves.append(now)
        return saves[-1] - saves[-2]

    assert seconds_between_saves(0.5) > 3 * seconds_between_saves(0.25)


# --- an advice to save ----------------------------------------------------------------------------------
def test_each_advice_is_taken_once_on_which_pod_soever_it_comes() -> None:
    file: list[float | None] = [None, 5.0]
    advice = RebalanceAdvice(lambda: file[-1])
    assert advice.take() is None, "nothing was trained yet"
    advice.begin()
    assert advice.take() is None, "it stood there when the training began"
    for new in (6.0, 4.0):
        file.append(new)
        assert [advice.take(), advice.take()] == [new, None], "another time, be it an earlier one"
    advice.tell(7.0)
    assert [advice.take(), advice.take()] == [7.0, None], "what another pod was advised"
    advice.tell(7.0)
    file.append(8.0)
    assert [advice.take(), advice.take()] == [8.0, None], "two pods at once make one save"


@pytest.mark.parametrize(
    ("interval", "steps", "seconds", "fresh"),
    [
        ("500steps", 49, 1e6, True),
        ("500steps", 50, 0.0, False),
        ("10m", 1, 59.0, True),
        ("10m", 1, 60.0, False),
        ("10m", 0, 1e6, True),
        ("auto", 1, FIRST_SECONDS / 10 - 1, True),
        ("auto", 1, FIRST_SECONDS / 10, False),
    ],
)
def test_a_save_younger_than_a_tenth_of_the_interval_makes_an_advised_one_needless(
    interval: str, steps: int, seconds: float, fresh: bool
) -> None:
    it = SavePolicy(Interval.parse(interval), 1, deque([None, 5.0]).popleft)
    it.begin(100)
    facts = ProgressFacts(step=100 + steps, durable_step=100, durable_time=time.time() - seconds)
    assert it.due(100 + steps, lambda: facts, 0.0, 0.0, uploading=None, failed=False) is not fresh


def test_what_is_no_time_is_no_advice(tmp_path: Path) -> None:
    file = tmp_path / "save-advised"
    preemption = Preemption(grace=30.0, save_advised_file=file)
    noon = 1772366400.0
    for text, advised in (("", None), ("soon", None), ("2026-03-0", None), ("2026-03-01T12:00:00Z\n", noon)):
        file.write_text(text)
        preemption._read_files()
        assert preemption.advised == advised
    file.unlink()
    preemption._read_files()
    assert preemption.advised == noon and not preemption.stopping


# --- a save at a notice ---------------------------------------------------------------------------------
def budget(**more: float) -> NoticeBudget:
    basis = {"bytes": 10**9, "bandwidth": 1e8, "step_seconds": 0.5, "copy_seconds": 0.25, "grace": 30.0}
    return NoticeBudget(**{**basis, **more})  # type: ignore[arg-type]


def test_the_budget_is_a_step_a_copy_an_upload_with_a_margin_and_a_commit() -> None:
    assert budget().seconds == pytest.approx(0.5 + 0.25 + MARGIN * 10 + COMMIT_SECONDS)
    assert budget().share == pytest.approx(14.75 / 30)


def test_above_its_share_of_the_notice_it_warns_with_every_part_and_what_to_do(told: Told) -> None:
    assert budget(grace=14.75 / FULL_SHARE + 0.01).warning == ""
    told(budget(grace=15.0, step_seconds=0.54).warning)


@settings(max_examples=30)
@given(st.integers(0, 10**13), st.floats(1e3, 1e11), st.floats(0, 1e3), st.floats(0, 100), st.floats(1, 1e4))
def test_it_warns_exactly_above_that_share(
    size: int, bandwidth: float, step: float, copy: float, grace: float
) -> None:
    it = budget(bytes=size, bandwidth=bandwidth, step_seconds=step, copy_seconds=copy, grace=grace)
    assert bool(it.warning) == (it.seconds > FULL_SHARE * grace) == (it.share > FULL_SHARE)
