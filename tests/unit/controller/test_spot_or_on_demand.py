"""choose(): spends slack evenly, explains itself, and is never late while on-demand can be had."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain_operator.policies.spot_or_on_demand import (
    HOLD_UNIT,
    Overheads,
    Place,
    Situation,
    SpotDecision,
    choose,
)

HOUR = 3600.0
OVERHEADS = Overheads(restart=300, reserve=1800, decision=600)
WORK = 48 * HOUR
RELAXED = Situation(now=0, begun=0, deadline=70 * HOUR, work=WORK, work_left=WORK)


def decide(overheads: Overheads = OVERHEADS, **changes: Any) -> SpotDecision:
    return choose(replace(RELAXED, **changes), overheads)


def with_slack(seconds: float, **changes: Any) -> SpotDecision:
    """Decides halfway through the time, with so much slack left."""
    now = 35 * HOUR
    left = RELAXED.deadline - now - OVERHEADS.reserve - seconds
    return decide(now=now, work_left=left, **changes)


def least_slack(**changes: Any) -> float:
    """Returns the minutes of slack from which on spot is chosen."""
    return next(minutes for minutes in range(3000) if with_slack(60.0 * minutes, **changes).spot)


def test_a_job_waits_for_spot_while_it_has_more_slack_than_is_due_for_later() -> None:
    assert decide().spot
    kept = least_slack()
    assert 60 < kept < 21.5 * 60, "a part of the slack that it began with"
    assert decide(now=5 * HOUR, work_left=WORK).spot, "early it may use a part of it"
    assert not decide(now=20 * HOUR, work_left=WORK).spot, "but not all"


def test_a_move_to_spot_needs_less_slack_than_a_wait() -> None:
    assert least_slack(running="on-demand") < least_slack()


def test_a_dearer_restart_keeps_more_slack() -> None:
    dear = replace(OVERHEADS, restart=900)
    kept = [
        next(m for m in range(3000) if not with_slack(60.0 * (3000 - m), overheads=o).spot)
        for o in (OVERHEADS, dear)
    ]
    assert kept[0] > kept[1]


def test_a_job_that_runs_on_spot_stays_there() -> None:
    assert with_slack(0, running="spot").spot
    assert decide(deadline=HOUR, running="spot").spot, "though it will be late"


def test_a_job_that_cannot_be_in_time_runs_on_demand() -> None:
    for running in ("nowhere", "on-demand"):
        assert not decide(deadline=40 * HOUR, running=running).spot


def test_after_a_loss_a_job_on_demand_asks_for_spot_again_later_the_dearer_its_restart_is() -> None:
    for restart in (180.0, 300.0, 900.0):
        overheads, hold = replace(OVERHEADS, restart=restart), restart**2 / HOLD_UNIT
        early, late = (
            choose(replace(RELAXED, now=HOUR + after, running="on-demand", lost=HOUR), overheads)
            for after in (hold - 1, hold)
        )
        assert (early.spot, late.spot) == (False, True)
        assert "spot was lost lately" in early.reason
    assert decide(lost=0.0).spot, "a job that has no node asks at once"


def test_the_reason_says_how_much_slack_there_is_and_how_much_spot_needs() -> None:
    assert decide(deadline=52 * HOUR).reason == "slack 3.50 h, at least the 3.50 h that spot needs now"
    assert "less than the" in decide(deadline=48 * HOUR).reason


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_job_is_never_late_while_on_demand_can_be_had(data: st.DataObject) -> None:
    """Spot, the time between decisions, overheads and the wait for on-demand are all adverse."""
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    wait, restart = draw.choice([0, 300, 900]), draw.choice([0, 180, 2000])
    overheads = Overheads(restart=restart, reserve=restart + wait, decision=draw.choice([60, 600, 3000]))
    work = draw.uniform(0.2, 3) * HOUR
    deadline = work + restart + wait + draw.choice([0.0, 1e3, 6e3, 2e4])
    finished = play(draw, overheads, work, deadline, wait)
    assert finished <= deadline + 1e-6


def play(draw: random.Random, overheads: Overheads, work: float, deadline: float, wait: float) -> float:
    """Returns when the job is done. Decisions come early or late, and spot is lost whenever it hurts."""
    now, startup, whole = 0.0, 0.0, work
    running: Place = "nowhere"
    lost: float | None = None
    while work > 1e-6:
        if running == "spot" and draw.random() < 0.3:
            running, lost = "nowhere", now
        seen = Situation(
            now=now, begun=0, deadline=deadline, work=whole, work_left=work, running=running, lost=lost
        )
        spot = choose(seen, overheads).spot
        granted = running == "spot" or (spot and draw.random() < 0.4)
        if granted and running != "spot":
            if running == "nowhere":
                now += draw.choice([0, 1]) * overheads.decision  # the request is granted at the last moment
            running, startup = "spot", overheads.restart
        elif not spot and running == "nowhere":
            running, startup = "on-demand", overheads.restart + wait
        step = draw.choice([1.0, draw.random()]) * overheads.decision
        if running == "spot" and startup and draw.random() < 0.5:  # it is lost before its first step
            now, running, lost = now + startup, "nowhere", now + startup
            continue
        now += step
        if running != "nowhere":
            done = max(0.0, step - startup)
            startup = max(0.0, startup - step)
            now -= max(0.0, done - work)
            work -= min(work, done)
    return now
