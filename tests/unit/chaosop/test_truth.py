"""The truth that the operator's counters are held against: each end's price, and where a job is over."""

from __future__ import annotations

import pytest

from tests.chaosop.chance import scene
from tests.chaosop.scene import POLITE, Blow, Farewell, Policy, Scene
from tests.chaosop.truth import CHARGES, Charge, Deed, truth

GENEROUS = Policy(failures=50, interruptions=50)


def deeds(*blows: Blow) -> list[Deed]:
    return [Deed(attempt=number, blow=blow) for number, blow in enumerate(blows, 1)]


def test_every_blow_has_a_price() -> None:
    assert set(CHARGES) == set(Blow)


@pytest.mark.parametrize("blow", [b for b in Blow if CHARGES[b] is Charge.INTERRUPTION])
def test_what_comes_over_an_attempt_is_an_interruption(blow: Blow) -> None:
    found = truth(deeds(blow), GENEROUS)
    assert (found.phase, found.failures, sorted(found.interruptions)) == ("", 0, [1])
    assert found.charged == {1: False}


@pytest.mark.parametrize("blow", [Blow.CRASHED, Blow.KILLED, Blow.OUT_OF_MEMORY, Blow.OVER_LIMIT])
def test_what_the_trainer_brings_on_itself_is_a_failure(blow: Blow) -> None:
    found = truth(deeds(blow, blow), GENEROUS)
    assert (found.phase, found.failures, sorted(found.interruptions)) == ("", 2, [0])
    assert found.charged == {1: True, 2: True}


@pytest.mark.parametrize("blow", [Blow.REFUSED, Blow.REFUSED_BARE, Blow.DONE_BARE])
def test_bad_configuration_ends_the_job_at_once(blow: Blow) -> None:
    assert truth(deeds(blow), GENEROUS).phase == "Failed"
    assert truth(deeds(blow), GENEROUS).failures == 1


def test_done_ends_the_job_and_costs_nothing() -> None:
    found = truth(deeds(Blow.VANISHED, Blow.CRASHED, Blow.DONE, Blow.CRASHED), GENEROUS)
    assert (found.phase, found.failures, sorted(found.interruptions)) == ("Succeeded", 1, [1])


def test_a_budget_holds_as_many_as_it_says_and_no_more() -> None:
    two = Policy(failures=2, interruptions=50)
    assert truth(deeds(Blow.CRASHED, Blow.KILLED), two).phase == ""
    over = truth(deeds(Blow.CRASHED, Blow.KILLED, Blow.OUT_OF_MEMORY, Blow.DONE), two)
    assert (over.phase, over.failures) == ("Failed", 3)
    none = Policy(failures=50, interruptions=0)
    assert truth(deeds(Blow.SILENT), none).phase == "Failed"


def test_a_trainer_that_finishes_while_it_is_deleted_has_succeeded() -> None:
    found = truth([Deed(attempt=1, blow=Blow.DELETED, finished=True)], GENEROUS)
    assert (found.phase, sorted(found.interruptions)) == ("Succeeded", [0])


def test_under_a_notice_it_may_be_counted_before_it_says_that_it_is_done() -> None:
    found = truth([Deed(attempt=1, blow=Blow.NOTICE, finished=True)], GENEROUS)
    assert (found.phase, sorted(found.interruptions)) == ("Succeeded", [0, 1])


# --- scenes ------------------------------------------------------------------------------------------
SCENES = [scene(7, number, workers=4) for number in range(300)]


def test_a_scene_is_the_same_each_time_and_another_for_another_seed() -> None:
    assert scene(7, 3, workers=4) == SCENES[3] != scene(8, 3, workers=4)


def test_each_scene_ends_its_job_with_its_last_act() -> None:
    for each in SCENES:
        blows = [act.blow for act in each.acts]
        last = blows[:-1] if Blow.LOST_AT_DONE in blows else blows
        assert truth(deeds(*blows), each.policy).phase, each
        assert not truth(deeds(*last[:-1]), each.policy).phase, each


def test_all_kinds_of_ends_and_answers_and_gangs_of_all_sizes_are_played() -> None:
    acts = [act for each in SCENES for act in each.acts]
    assert {act.blow for act in acts} == set(Blow)
    assert {act.farewell for act in acts} == set(Farewell)
    assert {each.workers for each in SCENES} == {1, 2, 3, 4}
    assert {act.rank for act in acts} == {0, 1, 2, 3}
    assert {len(each.kills) for each in SCENES} == {0, 1, 2}


def test_no_scene_asks_for_what_has_two_right_answers() -> None:
    """A trainer that may finish under the notice that may use up the budget."""
    undecided = [s for s in SCENES if s.policy.interruptions < 100 and any(_finishes(s))]
    assert not undecided
    assert any(any(_finishes(s)) for s in SCENES)


def _finishes(each: Scene) -> list[bool]:
    return [a.blow is Blow.NOTICE and a.blow in POLITE and a.farewell is Farewell.FINISHES for a in each.acts]
