"""All of the diagnosis in one loop: what is left out, what is counted, and when a verdict is told."""

from __future__ import annotations

import threading

import pytest
import torch
from spottrain.diagnostics.bottleneck import Name
from spottrain.diagnostics.gpu_monitor import GPUMonitor, GPUSample
from spottrain.diagnostics.loop_watch import SETTLED, Watch
from spottrain.diagnostics.step_timer import Shares

CPU = torch.device("cpu")


class Loop:
    """A training whose seconds are made up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = Watch(CPU, clock=lambda: self.now)
        self.model = torch.nn.Linear(4, 4)

    def step(self, *, data: float = 0.0, compute: float = 0.0) -> None:
        timer = self.watch.timer
        with self.watch.counting():
            with timer.data():
                self.now += data
            with timer.compute():
                self.now += compute
                self.model(torch.ones(2, 4)).sum().backward()
        self.watch.step_done()

    def settle(self) -> None:
        for _ in range(SETTLED + 1):
            self.step(compute=100)


def test_the_first_steps_and_the_counted_one_are_left_out() -> None:
    loop = Loop()
    loop.settle()
    loop.step(data=1, compute=3)
    loop.watch.look()
    assert loop.watch.facts is not None and loop.watch.facts.shares == Shares(1, data=1, compute=3)


def test_one_step_is_counted_once() -> None:
    loop = Loop()
    for _ in range(SETTLED):
        loop.step()
    assert loop.watch.work is None
    loop.step()
    first = loop.watch.work
    assert first is not None and first.flops == 2 * (2 * 2 * 4 * 4), "a product forward, one for the weights"
    loop.step()
    assert loop.watch.work is first


def test_a_verdict_is_told_when_it_changes_and_only_then(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.settle()
    capsys.readouterr()
    for data in (1, 1, 0):
        loop.step(data=data, compute=1)
        loop.watch.look()
    lines = [line for line in capsys.readouterr().out.splitlines() if "event=diagnosis" in line]
    assert len(lines) == 2
    assert "verdict=data-bound" in lines[0] and "speed up data loading" in lines[0]
    assert "verdict=launch-bound" in lines[1] and "first=" not in lines[1]
    assert loop.watch.verdict is not None and loop.watch.verdict.name is Name.LAUNCH


def test_a_short_window_is_waited_for_and_not_thrown_away() -> None:
    loop = Loop()
    loop.settle()
    loop.step(data=0.3, compute=0.3)
    assert loop.watch.look() is None
    loop.step(data=0.3, compute=0.3)
    verdict = loop.watch.look()
    assert verdict is not None and verdict.name is Name.DATA
    facts = loop.watch.facts
    assert facts is not None and facts.shares.steps == 2
    assert facts.mfu is None, "a CPU has none"
    loop.watch.close()


def test_how_busy_the_gpu_is_is_among_what_was_measured() -> None:
    loop, settled, taken = Loop(), threading.Event(), threading.Event()
    busy = iter([0.5] * 9)

    def read() -> GPUSample:
        if not settled.is_set():
            return GPUSample(utilisation=0.0, memory=0.25)
        try:
            return GPUSample(utilisation=next(busy), memory=0.25)
        except StopIteration:
            taken.set()
            raise RuntimeError("the driver is gone") from None

    loop.watch = Watch(CPU, clock=lambda: loop.now, sampler=GPUMonitor(CPU, every=0.001, read=read))
    loop.settle()
    settled.set()
    assert taken.wait(10)
    for thread in threading.enumerate():
        if thread.name == "spottrain-nvml":
            thread.join(10)
    loop.step(data=1, compute=3)
    loop.watch.look()
    assert loop.watch.facts is not None and set(loop.watch.facts.busy) == {0.5}
    loop.watch.close()
