"""choose(): cheapest, explained, and never late while on-demand can be had."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain_operator.policies.cost_table import Problem, table_for
from spottrain_operator.policies.spot_or_on_demand import (
    Choice,
    Overheads,
    Prices,
    Situation,
    SpotDecision,
    choose,
)
from spottrain_operator.policies.spot_runs import RunLengths, SpotRun, joined, learn

HOUR = 3600.0
PRICES = Prices(spot=0.97, on_demand=3.06)
OVERHEADS = Overheads(restart=180, on_demand_p99=300, decision=600)
RELAXED = Situation(now=0, deadline=70 * HOUR, work_left=48 * HOUR, spot=True)


def decide(**changes: Any) -> SpotDecision:
    return choose(replace(RELAXED, **changes), PRICES, OVERHEADS)


def runs(*hours: float, available: bool = True) -> tuple[SpotRun, ...]:
    """Alternating runs, the first of them with or without spot."""
    found, now = [], 0.0
    for length in hours:
        found.append(SpotRun(available=available, start=now, end=now + length * HOUR))
        now, available = now + length * HOUR, not available
    return tuple(found)


def test_a_job_that_works_on_spot_stays_there_while_an_interruption_could_be_made_up_for() -> None:
    tight = {"deadline": 48 * HOUR + 500, "running": "spot"}
    assert decide(**tight).choice == "spot"
    assert decide(**tight, startup_left=100.0).choice == "on-demand"
    assert decide(deadline=48 * HOUR + 400, running="spot").choice == "on-demand"


def test_a_job_that_works_on_spot_does_not_stop_to_wait() -> None:
    working = replace(RELAXED, running="spot", deadline=7.5 * HOUR, work_left=0.8 * HOUR)
    decision = choose(working, Prices(spot=0.34, on_demand=3.06), replace(OVERHEADS, restart=60))
    assert decision.choice == "spot" and "wait" not in decision.reason


def test_a_deadline_that_cannot_be_met_is_said_so() -> None:
    decision = decide(deadline=40 * HOUR)
    assert decision.choice == "on-demand"
    assert "cannot be met" in decision.reason
    assert "cannot be met" not in decide(deadline=48 * HOUR, running="on-demand").reason


def test_after_a_long_absence_of_spot_a_job_stops_waiting_sooner() -> None:
    away = (SpotRun(available=False, start=0, end=20 * HOUR, ended=False),)
    late = {"now": 20 * HOUR, "deadline": 74 * HOUR, "spot": False}
    fresh = decide(**late, history=(SpotRun(available=True, start=0, end=20 * HOUR),))
    assert (fresh.choice, decide(**late, history=away).choice) == ("wait", "on-demand")


def test_the_reason_leaves_out_what_the_table_rules_out() -> None:
    decision = decide(deadline=48 * HOUR + 480 + 700, spot=False)
    assert decision.choice == "on-demand"
    assert "wait" not in decision.reason and "on-demand 1" in decision.reason


def test_a_job_on_demand_asks_for_spot_only_some_time_after_it_last_looked() -> None:
    away = (SpotRun(available=False, start=0, end=10 * HOUR),)
    costly = replace(OVERHEADS, restart=1500)
    asked = []
    for later in (0.0, 0.5, 8.0):
        now = (10 + later) * HOUR
        on_demand = replace(RELAXED, now=now, deadline=now + 56 * HOUR, running="on-demand")
        asked.append(choose(replace(on_demand, spot=None, history=away), PRICES, costly).choice)
    assert asked == ["on-demand", "on-demand", "spot"]


STOPS = replace(OVERHEADS, request=600)


def on_demand_after(hours: float, overheads: Overheads = STOPS, **changes: Any) -> SpotDecision:
    """Decides for a job on on-demand that was refused spot so many hours ago, after ten hours without it."""
    away = (SpotRun(available=False, start=0, end=10 * HOUR, ended=False),)
    now = (10 + hours) * HOUR
    there = replace(RELAXED, now=now, deadline=now + 58 * HOUR, running="on-demand", spot=None, history=away)
    return choose(replace(there, **changes), PRICES, overheads)


def test_a_job_that_must_stop_for_a_request_asks_later_than_one_that_runs_on() -> None:
    first = [
        next(hours for hours in range(49) if on_demand_after(hours, overheads).choice == "spot")
        for overheads in (OVERHEADS, STOPS)
    ]
    assert first[0] < first[1]


def test_a_dearer_restart_makes_requests_rarer() -> None:
    assert on_demand_after(3).choice == "spot"
    assert on_demand_after(3, replace(STOPS, restart=2400)).choice == "on-demand"


def test_a_chance_that_is_known_counts_before_that_of_the_history() -> None:
    assert on_demand_after(1, granted=1.0).choice == "spot"
    assert on_demand_after(9, granted=0.0).choice == "on-demand"
    for chance in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="granted must be a chance"):
            on_demand_after(1, granted=chance)


def test_a_request_needs_the_slack_of_its_refusal() -> None:
    enough = 48 * HOUR + 480 + 600 + 180
    reasons = [
        choose(replace(RELAXED, running="on-demand", spot=None, deadline=deadline), PRICES, STOPS).reason
        for deadline in (enough, enough - 1)
    ]
    assert ["only on-demand is sure" in reason for reason in reasons] == [False, True]


def test_after_an_interruption_a_job_with_slack_asks_for_spot_again() -> None:
    lost = (SpotRun(available=True, start=0, end=5 * HOUR),)
    now = replace(RELAXED, now=5 * HOUR, deadline=75 * HOUR, spot=None, history=lost)
    assert choose(now, PRICES, STOPS).choice == "spot"


def test_refusals_with_nothing_between_them_are_one_absence() -> None:
    refused = [
        SpotRun(available=False, start=hour * HOUR, end=hour * HOUR + 600, ended=False) for hour in (0, 3)
    ]
    assert joined(refused) == (SpotRun(available=False, start=0, end=3 * HOUR + 600, ended=False),)
    granted = replace(refused[0], ended=True)
    assert joined([granted, refused[1]]) == (granted, refused[1])
    held = [replace(run, available=True) for run in refused]
    assert joined(held) == tuple(held)


def test_without_a_deadline_on_demand_is_cheaper_where_runs_are_as_short_as_restarts() -> None:
    slow = replace(OVERHEADS, restart=2 * HOUR)
    short = runs(*[0.1] * 60)
    decision = choose(replace(RELAXED, now=6 * HOUR, deadline=None, history=short), PRICES, slow)
    assert decision.choice == "on-demand"
    assert "dearer" in decision.reason


def test_an_unknown_availability_is_asked_for_only_if_a_refusal_leaves_slack() -> None:
    assert decide(spot=None).choice == "spot"
    assert decide(spot=None, deadline=48 * HOUR + 480 + 300).choice == "on-demand"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"work_left": -1.0}, "work_left"),
        ({"work_left": float("nan")}, "work_left"),
        ({"startup_left": float("inf")}, "startup_left"),
        ({"deadline": float("nan")}, "deadline"),
        ({"now": float("inf")}, "now"),
        ({"running": "here"}, "running"),
        ({"history": (SpotRun(available=True, start=0, end=-1),)}, "history"),
        ({"history": (SpotRun(available=True, start=5, end=6),)}, "history"),
    ],
)
def test_bad_arguments_get_a_sentence_that_names_them(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        decide(**changes)


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_an_unknown_price_is_not_free(price: float) -> None:
    with pytest.raises(ValueError, match=r"prices\.spot must be above zero"):
        choose(RELAXED, Prices(spot=price, on_demand=3.0), OVERHEADS)
    with pytest.raises(ValueError, match=r"prices\.on_demand must be above zero"):
        choose(RELAXED, Prices(spot=1.0, on_demand=price), OVERHEADS)


def test_negative_overheads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"overheads\.decision"):
        choose(RELAXED, PRICES, replace(OVERHEADS, decision=-1))


def test_a_job_of_a_month_is_judged_by_its_share_of_slack() -> None:
    assert decide(deadline=1000 * HOUR, work_left=700 * HOUR, spot=False).choice == "wait"
    assert decide(deadline=701 * HOUR, work_left=700 * HOUR, spot=False).choice == "on-demand"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_job_is_never_late_while_on_demand_can_be_had(data: st.DataObject) -> None:
    """Spot, the length of steps, overheads and the wait for on-demand are all adverse."""
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    p99, restart = draw.choice([0, 300, 900]), draw.choice([0, 180, 2000])
    overheads = Overheads(
        restart=restart,
        on_demand_p99=p99,
        decision=draw.choice([60, 600, 3000]),
        request=draw.choice([0, 0, 600, 1500]),
    )
    work = draw.uniform(0.2, 3) * HOUR
    deadline = work + restart + p99 + draw.choice([0.0, 1e3, 6e3])
    finished = play(draw, overheads, work, deadline, draw.choice([0.02, 0.2, 0.6]))
    assert finished <= deadline + 1e-6


def play(draw: random.Random, overheads: Overheads, work: float, deadline: float, changes: float) -> float:
    """Returns when the job is done. Steps end early at random; on-demand always takes its p99."""
    now, startup, spot = 0.0, 0.0, draw.random() < 0.5
    running: Choice = "wait"
    history: list[SpotRun] = []
    while work > 1e-6:
        if draw.random() < changes:
            spot = not spot
        if running == "spot" and not spot:
            running = "wait"
        last = history[-1] if history else None
        if last is None or last.available != spot:
            history.append(SpotRun(available=spot, start=now, end=now, ended=False))
        situation = Situation(
            now=now,
            deadline=deadline,
            work_left=work,
            running=running,
            startup_left=startup,
            spot=draw.choice([spot, None]) if running != "spot" else spot,
            history=tuple(history),
        )
        choice = choose(situation, PRICES, overheads).choice
        if choice != running and choice != "wait":
            startup = overheads.restart + (overheads.on_demand_p99 if choice == "on-demand" else 0.0)
        if choice == "spot" and situation.spot is None and overheads.request:  # stands still, refused or not
            now += draw.choice([1.0, draw.random()]) * overheads.request
            running, spot = "wait", draw.random() < 0.5
            if spot:
                running, startup = "spot", overheads.restart
            else:
                history.append(SpotRun(available=False, start=now, end=now, ended=False))
            continue
        running = "wait" if choice == "spot" and not spot else choice
        step = draw.choice([overheads.decision, draw.uniform(1, overheads.decision)])
        now += step
        if running != "wait":
            done = max(0.0, step - startup)
            startup = max(0.0, startup - step)
            now -= max(0.0, done - work)
            work -= min(work, done)
    return now


def test_a_short_history_moves_the_prior_only_a_little_and_a_long_one_more() -> None:
    prior = learn((), True)
    few, many = learn(runs(9.0), True), learn(runs(*[9.0] * 40), True)
    assert prior.scale <= few.scale < many.scale
    assert learn(runs(*[0.1] * 40), True).scale < prior.scale


def test_a_run_without_an_end_counts_with_the_time_that_was_seen() -> None:
    ended = runs(30.0)
    assert learn((replace(ended[0], ended=False),), True).scale >= learn(ended, True).scale


def test_the_chance_of_an_end_falls_with_the_age_of_a_run() -> None:
    lengths = RunLengths(1.0)
    assert lengths.end_within(1.0) > lengths.end_within(1.0, 5.0) > lengths.end_within(1.0, 50.0) > 0


def test_more_slack_is_never_dearer() -> None:
    problem = Problem(up=RunLengths(0.7), down=RunLengths(0.36), spot_price=0.32, overhead=0.05)
    table = table_for(problem, 60, 30)
    costs = [min(table.compare(30 + slack, slack, "wait", 0.0, True).values()) for slack in range(31)]
    assert costs == sorted(costs, reverse=True)
    assert 0.32 * 30 < costs[-1] < costs[0] < 30 + 0.05 + 0.01
