"""When a training counts as one that gets on no more, and what is told of it, once."""

from __future__ import annotations

import pytest
from spottrain.core.heartbeat import FLOOR_SECONDS, LAST_STEPS, TIMES, Heartbeat
from spottrain.core.progress import ProgressBoard
from spottrain.lifecycle.hang_watchdog import SLACK_SECONDS, HangWatchdog


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Dumps:
    """Notes what is asked of it; goes off when its time has come, as the real timer does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at: float | None = None
        self.made: list[str] = []

    def dump_traceback_later(self, seconds: float, *, file: int) -> None:
        assert seconds > 0
        self.at = self._clock.now + seconds

    def cancel_dump_traceback_later(self) -> None:
        self.at = None

    def dump_traceback(self, *, file: int) -> None:
        self.made.append("in order")

    def passes(self, seconds: float) -> None:
        self._clock.now += seconds
        if self.at is not None and self._clock.now >= self.at:
            self.at = None
            self.made.append("by the timer")


def stepping(heartbeat: Heartbeat, clock: Clock, steps: int, seconds: float) -> None:
    for _ in range(steps):
        clock.now += seconds
        heartbeat.stepped()


# --- the limit ------------------------------------------------------------------------------------------
def test_a_limit_holds_from_the_first_step_on_while_it_trains_or_evaluates() -> None:
    clock = Clock()
    heartbeat = Heartbeat(clock)
    heartbeat.timeout = 5.0
    clock.now += 10_000
    for state in ("Starting", "Gated", "Restoring", "Compiling", "Training", "Evaluating"):
        assert heartbeat.limit(state) is None
    heartbeat.stepped()
    assert heartbeat.limit("Training") == heartbeat.limit("Evaluating") == 5.0
    assert {heartbeat.limit(state) for state in ("Gated", "Restoring", "Saving", "Done")} == {None}


def test_the_measured_limit_is_a_multiple_of_the_slowest_step_but_the_first_and_has_a_floor() -> None:
    clock = Clock()
    heartbeat = Heartbeat(clock)
    stepping(heartbeat, clock, 1, 500.0)
    assert heartbeat.limit("Training") == FLOOR_SECONDS, "the first was a compilation"
    stepping(heartbeat, clock, 1, 40.0)
    stepping(heartbeat, clock, 1, 1.0)
    assert heartbeat.limit("Training") == TIMES * 40.0
    heartbeat.timeout = 7.0
    assert heartbeat.limit("Training") == 7.0, "what is set by hand wins"


def test_a_slow_step_is_forgotten_only_after_a_hundred_others() -> None:
    clock = Clock()
    heartbeat = Heartbeat(clock)
    stepping(heartbeat, clock, LAST_STEPS - 2, 1.0)
    stepping(heartbeat, clock, 1, 50.0)
    stepping(heartbeat, clock, LAST_STEPS, 1.0)
    assert heartbeat.limit("Training") == TIMES * 50.0
    stepping(heartbeat, clock, LAST_STEPS, 1.0)
    assert heartbeat.limit("Training") == FLOOR_SECONDS


def test_what_is_no_step_is_a_sign_of_life_all_the_same() -> None:
    clock = Clock()
    heartbeat = Heartbeat(clock)
    stepping(heartbeat, clock, 2, 1.0)
    clock.now += 30.0
    assert heartbeat.idle == 30.0
    heartbeat.beat()
    assert heartbeat.idle == 0.0
    stepping(heartbeat, clock, 1, 25.0)
    assert heartbeat.limit("Training") == TIMES * 25.0, "a step lasts from the last sign of life"


# --- the board ------------------------------------------------------------------------------------------
def made(timeout: float | None = 60.0) -> tuple[ProgressBoard, Clock, Dumps, HangWatchdog]:
    board, clock = ProgressBoard(attempt=1), Clock()
    board.heartbeat = Heartbeat(clock)
    board.heartbeat.timeout = timeout
    dumps = Dumps(clock)
    return board, clock, dumps, HangWatchdog(board, dumps, clock)


def test_progress_and_metrics_tell_the_silence_and_the_limit_that_holds() -> None:
    board, clock, _, _ = made()
    assert board.progress().hangSeconds is None and "spottrain_hang_seconds" not in board.metrics()
    board.stepped(1)
    clock.now += 12.0
    assert (board.progress().idleSeconds, board.progress().hangSeconds) == (12.0, 60.0)
    assert "spottrain_idle_seconds 12.0\n" in board.metrics()
    assert "spottrain_hang_seconds 60.0\n" in board.metrics()
    board.update(state="Saving")
    assert (board.progress().idleSeconds, board.progress().hangSeconds) == (0.0, None), "a new state is life"
    board.update(state="Saving")
    clock.now += 3.0
    assert board.progress().idleSeconds == 3.0


# --- the watch ------------------------------------------------------------------------------------------
def test_a_hang_is_told_once_with_its_numbers_and_the_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    board, _, dumps, watch = made()
    board.stepped(7)
    for _ in range(300):
        watch.look()
        dumps.passes(1.0)
    assert dumps.made == ["in order"]
    said = capsys.readouterr().out
    assert said.count("event=stalled") == 1
    assert "event=stalled step=7 state=Training idle=60.000 limit=60.000" in said


def test_where_no_python_runs_any_more_the_timer_dumps_and_the_line_comes_when_it_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    board, clock, dumps, watch = made()
    board.stepped(7)
    clock.now += 5.0
    watch.look()
    dumps.passes(55.0 + SLACK_SECONDS - 0.1)
    assert dumps.made == []
    dumps.passes(40.0)
    assert dumps.made == ["by the timer"]
    for _ in range(100):
        watch.look()
        dumps.passes(1.0)
    assert dumps.made == ["by the timer"], "not a second time"
    assert capsys.readouterr().out.count("event=stalled step=7 state=Training idle=101.9") == 1


def test_a_hang_right_after_steps_that_nobody_looked_at_is_told_once_and_from_the_last_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    board, clock, dumps, watch = made()
    board.stepped(7)
    watch.look()
    clock.now += 0.5
    board.stepped(8)
    dumps.passes(70.0)
    for _ in range(100):
        watch.look()
        dumps.passes(1.0)
    assert dumps.made == ["by the timer"]
    assert capsys.readouterr().out.count("event=stalled step=8 state=Training idle=70.000") == 1


def test_what_went_on_after_the_timer_is_told_as_it_was_and_a_second_hang_is_told_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    board, _, dumps, watch = made()
    board.stepped(7)
    watch.look()
    dumps.passes(90.0)
    board.stepped(8)
    dumps.passes(10.0)
    watch.look()
    assert "idle=90.000" in capsys.readouterr().out
    for _ in range(100):
        dumps.passes(1.0)
        watch.look()
    assert dumps.made == ["by the timer", "in order"]
    assert "step=8" in capsys.readouterr().out


def test_a_training_that_gets_on_is_never_dumped_nor_is_one_that_saves() -> None:
    board, _, dumps, watch = made()
    for step in range(1, 100):
        board.stepped(step)
        dumps.passes(30.0)
        watch.look()
    board.update(state="Saving")
    watch.look()
    assert dumps.at is None
    dumps.passes(10_000.0)
    watch.look()
    assert dumps.made == []


def test_metrics_tell_how_busy_and_how_full_the_gpu_is() -> None:
    board = made()[0]
    assert "spottrain_gpu" not in board.metrics()
    board.update(gpu_utilisation=0.73, gpu_memory=0.25)
    assert "spottrain_gpu_utilisation 0.73\n" in board.metrics()
    assert "spottrain_gpu_memory 0.25\n" in board.metrics()
