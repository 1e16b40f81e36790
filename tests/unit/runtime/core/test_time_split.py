"""Where the seconds of an attempt go: each is in one part, and only what is durable is saved."""

from __future__ import annotations

import json
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields

import pytest
from spottrain.contract import TIME_BEFORE, Outcome, TimeSplit
from spottrain.core.progress import ProgressBoard
from spottrain.core.time_split import (
    CHECKPOINT_STALL,
    DATA_WAIT,
    OTHER,
    PARTS,
    PRODUCTIVE,
    RESTORE,
    STARTUP,
    WAITING,
    TimeSplitClock,
    before_this_process,
    timed,
)


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


def training(time: Time, *, startup: float = 10.0, before: TimeSplit | None = None) -> TimeSplitClock:
    """A clock after the first step, which ended `startup` seconds after its start."""
    clock = TimeSplitClock(clock=time, before=before)
    clock.begin()
    time.passes(startup)
    clock.step_done()
    return clock


def test_the_parts_are_those_of_the_contract() -> None:
    assert {*PARTS, "unsaved"} == {field.name for field in fields(TimeSplit)}
    numbers = (PRODUCTIVE, DATA_WAIT, STARTUP, CHECKPOINT_STALL, RESTORE, WAITING, OTHER)
    names = ("productive", "dataWait", "startup", "checkpointStall", "restore", "waiting", "other")
    assert [PARTS[number] for number in numbers] == list(names)


# --- an attempt -----------------------------------------------------------------------------------------
def test_an_attempt_from_its_first_to_its_last_second(time: Time) -> None:
    clock = TimeSplitClock(age=4.0, clock=time)
    with clock.part(WAITING):
        time.passes(7)
    with clock.part(RESTORE):
        time.passes(3)
    with clock.data:
        time.passes(1)  # before the first step it is a part of the start-up
    time.passes(1)
    clock.step_done()
    with clock.data:
        time.passes(2)
    time.passes(20)
    clock.step_done()
    with clock.part(CHECKPOINT_STALL):
        time.passes(0.5)
    clock.enter(OTHER)
    time.passes(0.25)
    wanted = TimeSplit(
        startup=6.0,
        waiting=7.0,
        restore=3.0,
        productive=20.0,
        dataWait=2.0,
        checkpointStall=0.5,
        other=0.25,
        unsaved=20.0,
    )
    assert clock.split() == wanted and wanted.total == 38.75


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_parts_add_up_to_the_time_and_never_shrink(time: Time, seed: int) -> None:
    chance, waits = random.Random(seed), ExitStack()
    clock = TimeSplitClock(age=5.0, before=TimeSplit(startup=2.0, productive=3.0, unsaved=1.0), clock=time)
    acts = (
        lambda: clock.enter(chance.randrange(len(PARTS))),
        clock.begin,
        clock.step_done,
        clock.mark,
        lambda: waits.enter_context(clock.data),
        waits.close,
        lambda: clock.between_steps(chance.randrange(len(PARTS))),
        lambda: clock.durable(clock.done),
        clock.store_silent,
        clock.store_responds,
    )
    was, elapsed = clock.split(), 10.0
    for _ in range(300):
        chance.choice(acts)()
        seconds = chance.choice((0.0, 0.001, 0.5, 30.0))
        time.passes(seconds)
        elapsed += seconds
        split = clock.split()
        assert split.total == pytest.approx(elapsed, abs=0.01)
        assert all(getattr(split, part) >= getattr(was, part) for part in PARTS)
        assert 0 <= split.unsaved <= split.productive
        was = split


def test_a_wait_for_data_counts_only_while_steps_are_made(time: Time) -> None:
    clock = training(time)
    clock.enter(OTHER)
    with clock.data:
        time.passes(1)
    assert clock.split().dataWait == 0 and clock.split().other == 1


def test_a_step_is_timed_without_the_evaluation_and_the_save_before_it(time: Time) -> None:
    clock = training(time)
    assert clock.step_seconds == 0.0, "the first step compiles"
    for _ in range(3):
        with clock.part(PRODUCTIVE):
            time.passes(8)
            clock.mark()
        with clock.part(CHECKPOINT_STALL):
            time.passes(5)
        with clock.data:
            time.passes(0.5)
        time.passes(1)
        clock.step_done()
    assert clock.step_seconds == 1.5 and clock.stepped == 3 * 1.5
    assert clock.trained == 3 * 9.5, "a loss costs the evaluations too"
    time.passes(4)
    assert clock.seconds_since_step == 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_within_a_wait_does_not_end_it(time: Time, fails: bool) -> None:
    clock = training(time)
    with clock.data:
        time.passes(1)
        with suppress(StopIteration), clock.data:
            time.passes(2)
            if fails:
                raise StopIteration
        time.passes(4)
    time.passes(8)
    assert (clock.split().dataWait, clock.split().productive) == (7, 8)


def test_an_evaluation_within_a_wait_has_waits_of_its_own(time: Time) -> None:
    clock = training(time)
    with clock.data:
        with clock.part(PRODUCTIVE):
            time.passes(1)
            with clock.data:
                time.passes(2)
            time.passes(4)
        time.passes(8)
    time.passes(16)
    assert (clock.split().dataWait, clock.split().productive) == (10, 21)


def test_hooks_that_note_a_wait_end_it_and_no_loader_does(time: Time) -> None:
    clock = training(time)
    clock.between_steps(DATA_WAIT)
    with clock.data:
        time.passes(1)
    time.passes(2)
    clock.between_steps(PRODUCTIVE)
    time.passes(4)
    assert (clock.split().dataWait, clock.split().productive) == (3, 4)


def test_a_thread_that_saves_while_the_loop_waits_for_data_ends_the_wait(time: Time) -> None:
    clock = training(time)
    with clock.data:
        time.passes(2)
        clock.enter(CHECKPOINT_STALL)
        time.passes(3)
    time.passes(1)
    split = clock.split()
    assert (split.dataWait, split.checkpointStall, split.productive) == (2, 4, 0)


def test_hooks_between_steps_change_neither_start_up_nor_end(time: Time) -> None:
    clock = TimeSplitClock(clock=time)
    clock.between_steps(PRODUCTIVE)
    time.passes(1)
    clock.step_done()
    clock.between_steps(DATA_WAIT)
    time.passes(2)
    clock.between_steps(PRODUCTIVE)
    clock.enter(OTHER)
    clock.between_steps(DATA_WAIT)
    time.passes(3)
    split = clock.split()
    assert (split.startup, split.dataWait, split.other) == (1, 2, 3)


class Interrupting(Time):
    """Lets something happen to the next thread that has read it."""

    after: Callable[[], None] | None = None

    def __call__(self) -> float:
        now = self.now
        after, self.after = self.after, None
        if after is not None:
            after()
        return now


@pytest.mark.parametrize("part", [DATA_WAIT, CHECKPOINT_STALL])
def test_a_reader_waits_for_a_change_whose_time_was_read(part: int) -> None:
    time, found = Interrupting(), list[TimeSplit]()
    clock = training(time)
    reader = threading.Thread(target=lambda: found.append(clock.split()), daemon=True)

    def a_reader_comes() -> None:
        time.passes(5)
        reader.start()

    time.passes(2)
    time.after = a_reader_comes
    if part == DATA_WAIT:
        clock.data.__enter__()
    else:
        clock.enter(part)
    reader.join(10)
    assert found == [clock.split()], "the 5 seconds are in one part for both"
    assert (found[0].productive, getattr(found[0], PARTS[part])) == (2, 5)


def test_a_signal_handler_that_reads_in_the_middle_of_a_change_gets_what_was() -> None:
    time, found = Interrupting(), list[TimeSplit]()
    clock = training(time)
    time.passes(2)
    time.after = lambda: found.append(clock.split())
    clock.enter(CHECKPOINT_STALL)
    assert found == [TimeSplit(startup=10.0, productive=2.0, unsaved=2.0)]


# --- what is saved ----------------------------------------------------------------------------------------
def test_work_is_saved_when_its_checkpoint_is_durable_and_not_when_it_is_taken(time: Time) -> None:
    clock = training(time)
    time.passes(30)
    clock.step_done()
    taken = clock.done
    time.passes(5)
    clock.step_done()
    assert clock.split().unsaved == 35
    clock.durable(taken)
    assert clock.split().unsaved == 5
    clock.durable(10.0)  # an older one
    assert clock.split().unsaved == 5


def test_a_step_that_a_stop_cuts_short_stays_unsaved(time: Time) -> None:
    clock = training(time)
    time.passes(30)
    clock.step_done()
    time.passes(4)
    with clock.part(CHECKPOINT_STALL):
        clock.durable(clock.done)
    assert clock.split().unsaved == 4


def test_a_completed_training_has_nothing_to_lose(time: Time) -> None:
    clock = training(time)
    time.passes(30)
    clock.enter(OTHER)
    clock.completed()
    assert clock.split().unsaved == 0 and clock.split().productive == 30


def test_what_ranks_lost_before_they_were_started_again_stays_unsaved(time: Time) -> None:
    before = TimeSplit(startup=5.0, productive=100.0, restore=1.0, unsaved=12.0)
    clock = training(time, startup=3.0, before=before)
    assert clock.split() == TimeSplit(startup=8.0, productive=100.0, restore=1.0, unsaved=12.0)
    time.passes(7)
    clock.step_done()
    clock.durable(clock.done)
    split = clock.split()
    assert (split.productive, split.unsaved) == (107, 12)
    clock.completed()
    assert clock.split().unsaved == 12


def test_a_second_training_in_one_process_loses_what_the_first_had_not_saved(time: Time) -> None:
    clock = training(time)
    time.passes(10)
    clock.step_done()
    clock.durable(clock.done)
    time.passes(4)
    clock.step_done()
    clock.begin()
    time.passes(1)
    clock.step_done()
    time.passes(2)
    clock.step_done()
    clock.durable(clock.done)
    split = clock.split()
    assert (split.startup, split.productive, split.unsaved) == (11, 16, 4)


# --- a store that does not respond ------------------------------------------------------------------------
def test_a_silent_store_is_waited_for_until_it_responds(time: Time) -> None:
    clock = TimeSplitClock(clock=time)
    with clock.part(RESTORE):
        time.passes(5)
        for _ in range(4):
            clock.store_silent()
            time.passes(1)
        clock.store_responds()
        time.passes(2)
    clock.store_responds()
    time.passes(1)
    split = clock.split()
    assert (split.restore, split.waiting, split.startup) == (7, 4, 1)


def test_a_training_that_went_on_before_it_was_noticed_stays_where_it_is(time: Time) -> None:
    clock = TimeSplitClock(clock=time)
    with clock.part(RESTORE):
        clock.store_silent()
        time.passes(4)
    clock.store_responds()
    time.passes(1)
    assert clock.split() == TimeSplit(waiting=4.0, startup=1.0)


# --- from the launcher --------------------------------------------------------------------------------------
def test_the_wait_for_other_pods_is_taken_out_of_the_start_up(time: Time) -> None:
    clock = TimeSplitClock(age=9.0, clock=time)
    clock.waited(6.0)
    time.passes(1)
    assert clock.split() == TimeSplit(startup=4.0, waiting=6.0)


@pytest.mark.parametrize("text", [None, "", "null", "[]", "x", '{"born": 1, "split": {"startup": -1}}'])
def test_without_a_launcher_there_is_no_time_before(text: str | None) -> None:
    assert before_this_process({} if text is None else {TIME_BEFORE: text}, 1000.0) is None


def test_what_the_launcher_does_not_say_of_the_time_before_was_start_up() -> None:
    split = TimeSplit(productive=2.5, waiting=3.0, unsaved=1.0)
    env = {TIME_BEFORE: json.dumps({"born": 990.0, "split": asdict(split)})}
    found = before_this_process(env, 1000.0)
    assert found == TimeSplit(productive=2.5, waiting=3.0, unsaved=1.0, startup=4.5) and found.total == 10


# --- batches ----------------------------------------------------------------------------------------------
def slow(time: Time, count: int) -> Iterator[int]:
    time.passes(3)
    for number in range(count):
        time.passes(2)
        yield number


def test_batches_are_timed_while_the_loop_waits_for_them(time: Time) -> None:
    clock = training(time)
    for _ in timed(lambda: slow(time, 4), clock):
        time.passes(5)
    split = clock.split()
    assert (split.dataWait, split.productive) == (11, 20)


def test_loaders_that_draw_from_each_other_wait_once(time: Time) -> None:
    clock = training(time)

    def outer() -> Iterator[int]:
        for number in timed(lambda: slow(time, 4), clock):
            time.passes(10)  # such as tokenizing
            yield number

    for _ in timed(outer, clock):
        time.passes(5)
    split = clock.split()
    assert (split.dataWait, split.productive) == (51, 20)


def test_a_batch_is_let_go_before_the_next_one_is_fetched(time: Time) -> None:
    class Batch:
        pass

    def batches() -> Iterator[Batch]:
        yield Batch()
        assert first() is None
        yield Batch()

    stream = timed(batches, training(time))
    batch = next(stream)
    first = weakref.ref(batch)
    del batch
    next(stream)


def test_a_thread_that_prefetches_keeps_no_training_waiting(time: Time) -> None:
    clock = training(time)
    thread = threading.Thread(target=lambda: list(timed(lambda: slow(time, 4), clock)))
    thread.start()
    thread.join(10)
    assert clock.split().dataWait == 0 and clock.split().productive == 11


# --- what is reported ---------------------------------------------------------------------------------------
def test_a_process_that_does_not_train_with_the_runtime_reports_no_split() -> None:
    board = ProgressBoard()
    assert board.progress().timeSplit is None and "seconds_total" not in board.metrics()
    assert board.message(Outcome.FAILED, "x").timeSplit is None
    board.trains = True
    assert board.message(Outcome.UNTRAINED, "x").timeSplit is None
    assert board.message(Outcome.FAILED, "x").timeSplit is not None


def test_progress_message_and_metrics_have_the_same_split(time: Time) -> None:
    board = ProgressBoard(clock=TimeSplitClock(clock=time))
    board.trains = True
    time.passes(6)
    board.stepped(1)
    time.passes(2)
    board.update(best_step=1, steps_per_second=0.5)
    split = TimeSplit(startup=6.0, productive=2.0, unsaved=2.0)
    assert board.progress().timeSplit == board.message(Outcome.FAILED, "x").timeSplit == split
    assert board.progress().bestStep == board.message(Outcome.FAILED, "x").bestStep == 1
    lines = board.metrics().splitlines()
    assert [line for line in lines if line.startswith("spottrain_seconds_total")] == [
        f'spottrain_seconds_total{{part="{part}"}} {getattr(split, part)}' for part in PARTS
    ]
    assert "spottrain_steps_per_second 0.5" in lines
    assert "spottrain_unsaved_seconds 2.0" in lines and "spottrain_best_step 1" in lines
