"""The life of a run, in every phase, with whatever may end it and all facts that count."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from spottrain.lifecycle.life import POLL_SHARE, REST_SHARE, Action, Cause, Facts, Phase, on_stop

SPENT = (0.0, POLL_SHARE, REST_SHARE, 1.0)
SWITCHES = ("stopping", "step_near", "alone", "loop_over", "told", "unsaved")
NOTHING_TO_SAVE = {Phase.STARTING, Phase.CLAIMING, Phase.READY}
INTACT = {Phase.BOUNDARY, Phase.WAITING, Phase.BETWEEN}
IN_TRAINING = {*INTACT, Phase.STEP}


def every_case() -> Iterator[tuple[Phase, Facts, Action]]:
    switches = [
        dict(zip(SWITCHES, each, strict=True))
        for each in itertools.product((False, True), repeat=len(SWITCHES))
    ]
    for phase, cause, spent, switched in itertools.product(Phase, Cause, SPENT, switches):
        facts = Facts(cause=cause, spent=spent, **switched)
        if facts.stopping or cause in (Cause.SCRIPT_ENDED, Cause.SCRIPT_RAISED):
            yield phase, facts, on_stop(phase, facts)


CASES = list(every_case())


def actions(*phases: Phase, **wanted: object) -> set[Action]:
    """All actions in these phases where the facts are as wanted."""
    return {
        action
        for phase, facts, action in CASES
        if phase in phases and all(getattr(facts, name) == value for name, value in wanted.items())
    }


def test_every_action_but_leaving_it_to_the_training_is_one_that_ends_the_run_in_some_case() -> None:
    assert {action for _, _, action in CASES} == set(Action)


def test_when_the_time_is_up_each_phase_ends_at_once() -> None:
    at_once = {
        Action.END_UNBEGUN,
        Action.END_AS_IT_IS,
        Action.END_STORED,
        Action.END_DONE,
        Action.LEAVE,
    }
    assert actions(*Phase, cause=Cause.TIME_UP) == at_once


def test_the_state_is_saved_only_where_it_is_that_of_a_finished_step() -> None:
    saves = {phase for phase, _, action in CASES if action is Action.SAVE}
    assert saves == INTACT


def test_another_thread_saves_only_where_the_training_thread_may_not_come_to_its_boundary() -> None:
    notice = {p for p, facts, action in CASES if facts.cause is Cause.NOTICE and action is Action.SAVE}
    assert notice == {Phase.WAITING, Phase.BETWEEN}


def test_several_ranks_never_save_by_an_exception_of_one_of_them() -> None:
    assert Action.SAVE not in actions(*Phase, alone=False, cause=Cause.SCRIPT_RAISED)


def test_while_head_may_be_claimed_a_signal_ends_nothing() -> None:
    assert actions(Phase.CLAIMING, cause=Cause.NOTICE) == {Action.GO_ON}


def test_what_is_being_stored_is_not_cut_short_by_a_notice_and_a_done_run_stays_done() -> None:
    assert actions(Phase.STORING, cause=Cause.NOTICE) == {Action.GO_ON}
    ends = actions(Phase.DONE, stopping=True, told=False)
    assert ends == {Action.END_DONE}
    failing = actions(Phase.DONE, stopping=False, told=False)
    assert failing == {Action.END_DONE, Action.FAIL}, "the script after it fails"


def test_before_a_step_was_done_nothing_is_saved_and_after_it_no_step_is_dropped_silently() -> None:
    dropping = {Action.END_UNBEGUN, Action.END_UNTRAINED}
    for phase, facts, action in CASES:
        assert not (phase in NOTHING_TO_SAVE and action is Action.SAVE), (phase, facts)
        assert not (phase in IN_TRAINING and action in dropping), (phase, facts)


def test_a_written_message_is_the_last_word_until_the_time_is_up() -> None:
    begun = [phase for phase in Phase if phase.begun and phase not in (Phase.DONE, Phase.OVER)]
    assert actions(*begun, told=True, cause=Cause.NOTICE) == {Action.GO_ON}
    for cause in (Cause.TIME_UP, Cause.SCRIPT_ENDED, Cause.SCRIPT_RAISED):
        assert actions(*Phase, told=True, cause=cause) == {Action.LEAVE}


def test_once_the_script_is_over_only_its_exit_code_counts() -> None:
    assert actions(Phase.OVER) == {Action.LEAVE}


@pytest.mark.parametrize(
    ("phase", "facts", "action"),
    [
        (Phase.STARTING, {}, Action.END_UNBEGUN),
        (Phase.READY, {}, Action.GIVE_UP),
        (Phase.WAITING, {"spent": POLL_SHARE / 2}, Action.GO_ON),
        (Phase.WAITING, {"spent": POLL_SHARE, "step_near": True}, Action.SAVE),
        (Phase.BETWEEN, {"spent": POLL_SHARE, "step_near": True}, Action.GO_ON),
        (Phase.BETWEEN, {"spent": REST_SHARE, "step_near": True}, Action.SAVE),
        (Phase.STORED, {"spent": POLL_SHARE}, Action.GO_ON),
        (Phase.STORED, {"spent": REST_SHARE}, Action.END_STORED),
        (Phase.ENDED, {}, Action.GO_ON),
        (Phase.ENDED, {"unsaved": True}, Action.END_UNBEGUN),
        (Phase.STEP, {"cause": Cause.SCRIPT_RAISED}, Action.GIVE_UP),
        (Phase.BOUNDARY, {"cause": Cause.SCRIPT_RAISED, "stopping": False}, Action.FAIL),
        (Phase.STARTING, {"cause": Cause.SCRIPT_ENDED}, Action.END_UNTRAINED),
        (Phase.STORED, {"cause": Cause.SCRIPT_ENDED}, Action.COMPLETE),
        (Phase.BETWEEN, {"cause": Cause.SCRIPT_ENDED, "loop_over": True}, Action.FINISH),
        (Phase.BETWEEN, {"cause": Cause.SCRIPT_ENDED, "stopping": False}, Action.END_UNFINISHED),
        (Phase.BETWEEN, {"cause": Cause.SCRIPT_ENDED}, Action.SAVE),
        (Phase.ENDED, {"cause": Cause.SCRIPT_ENDED, "loop_over": True}, Action.GIVE_UP),
    ],
)
def test_each_end_is_as_the_phase_asks_for(phase: Phase, facts: dict[str, object], action: Action) -> None:
    assert on_stop(phase, Facts(**{"cause": Cause.NOTICE} | facts)) is action  # type: ignore[arg-type]
