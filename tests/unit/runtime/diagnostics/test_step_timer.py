"""Each second of a step belongs to one phase, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from spottrain.diagnostics.step_timer import EventMarks, Shares, StepTimer

CPU = torch.device("cpu")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class Device:
    """Makes events as CUDA's: recorded now, completed when the device gets there, read only then."""

    def __init__(self) -> None:
        self.made: list[Event] = []
        self.now = 0.0

    def event(self) -> Event:
        self.made.append(Event(self))
        return self.made[-1]

    def get_there(self) -> None:
        for each in self.made:
            each.complete = True


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.complete, self.at = device, False, -1.0

    def record(self) -> None:
        self.at = self._device.now

    def query(self) -> bool:
        return self.complete

    def elapsed_time(self, other: Event) -> float:
        if not (self.complete and other.complete):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1e3 * (other.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("the host was made to wait for the device")


def in_phase(split: StepTimer, clock: Clock, phase: str, seconds: float) -> None:
    with getattr(split, phase)():
        clock.pass_(seconds)


def test_each_phase_gets_its_seconds_and_the_rest_is_other() -> None:
    clock = Clock()
    split = StepTimer(CPU, clock=clock)
    for number, phase in enumerate(("data", "h2d", "compute", "communication", "checkpoint"), 1):
        in_phase(split, clock, phase, number)
    clock.pass_(5)
    split.step_done()
    shares = split.whole()
    assert shares == Shares(1, data=1, h2d=2, compute=3, communication=4, checkpoint=5, other=5)
    assert shares.shares["compute"] == shares.share("compute") == 3 / 20
    assert sum(shares.shares.values()) == pytest.approx(1)
    assert (shares.mean("total"), shares.own_seconds) == (20, 16)


def test_a_phase_inside_another_counts_once() -> None:
    clock = Clock()
    split = StepTimer(CPU, clock=clock)
    with split.compute():
        clock.pass_(1)
        in_phase(split, clock, "communication", 10)
        clock.pass_(2)
    split.step_done()
    assert split.whole() == Shares(1, compute=3, communication=10)


def test_an_exception_ends_its_phase() -> None:
    clock = Clock()
    split = StepTimer(CPU, clock=clock)
    with pytest.raises(StopIteration), split.data():
        clock.pass_(1)
        raise StopIteration
    clock.pass_(1)
    split.step_done()
    assert split.whole() == Shares(1, data=1, other=1)


def test_what_lies_between_steps_belongs_to_the_next_one_unless_it_is_forgotten() -> None:
    clock = Clock()
    split = StepTimer(CPU, clock=clock)
    split.step_done()
    clock.pass_(3)
    split.step_done()
    assert split.whole() == Shares(2, other=3)
    clock.pass_(100)
    in_phase(split, clock, "compute", 100)
    split.restart()
    in_phase(split, clock, "compute", 1)
    split.step_done()
    assert split.whole() == Shares(3, other=3, compute=1)


def test_a_window_is_what_came_since_the_last_one() -> None:
    clock = Clock()
    split = StepTimer(CPU, clock=clock)
    for seconds in (1.0, 2.0, 3.0):
        in_phase(split, clock, "compute", seconds)
        split.step_done()
        if seconds == 1.0:
            assert split.window(clear=False) == split.window() == split.whole()
    assert (split.window().compute, split.window().steps) == (5, 0)
    assert split.whole().compute == 6


def test_before_the_first_step_nothing_is_known() -> None:
    assert StepTimer(CPU).whole() == Shares()
    assert set(Shares().shares.values()) == {0.0}
    assert Shares().mean("total") == Shares().own_seconds == 0


def test_communication_is_what_backward_takes_after_the_last_bucket_was_handed_over() -> None:
    clock = Clock()
    split = StepTimer(CPU, clock=clock)
    hook = split.timed(lambda state, bucket: clock.pass_(bucket))
    for buckets in ([0.0, 0.5], []):  # the second micro-batch exchanges nothing
        with split.backward():
            for bucket in buckets:
                clock.pass_(2)
                hook(None, bucket)
            clock.pass_(1)
    split.step_done()
    assert split.whole() == Shares(1, compute=4 + 1, communication=0.5 + 1)


def test_events_are_read_when_the_device_got_there_and_not_before() -> None:
    device = Device()
    split = StepTimer(CPU, marks=EventMarks(device.event))
    for _ in range(3):
        with split.data():
            device.now += 1
        with split.compute():
            device.now += 3
        split.step_done()
    assert split.whole() == Shares()
    device.get_there()
    shares = split.whole()
    assert shares.steps == 3
    assert shares.share("compute") == pytest.approx(0.75)


def test_ddp_takes_a_timed_hook() -> None:
    """torch checks a hook's signature; a wrong one would end the training at its start."""
    from torch.nn.parallel.distributed import DistributedDataParallel

    check: Callable[[Any, Any], None] = DistributedDataParallel._check_comm_hook
    check(object.__new__(DistributedDataParallel), StepTimer(CPU).timed())
