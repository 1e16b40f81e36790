"""How many loader workers there are: by what was measured, and by the cores that the container has."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from spottrain.data.plan import Plan
from spottrain.data.source import Batches
from spottrain.data.worker_count import TRIAL_STEPS, WorkerTrial, cores, needed


@pytest.mark.parametrize(
    ("fetch", "other", "available", "workers"),
    [
        (0.001, 1.0, 8, 0),  # 0.1 % of a step: a process would cost more than it brings
        (0.5, 1.0, 8, 1),
        (2.0, 1.0, 8, 3),
        (2.0, 1.0, 96, 3),  # not by the number of cores
        (50.0, 1.0, 8, 7),  # one core is left to the training
        (50.0, 1.0, 1, 1),  # with one core a worker may still fetch while the device computes
        (0.5, 0.0, 4, 3),
    ],
)
def test_as_many_workers_as_the_fetching_needs(
    fetch: float, other: float, available: float, workers: int
) -> None:
    assert needed(fetch, other, available) == workers


def test_the_cores_are_the_container_s_shared_by_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(96)))
    assert (cores(tmp_path), cores(tmp_path, local_ranks=2)) == (96, 48)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert (cores(tmp_path), cores(tmp_path, local_ranks=2)) == (0.5, 0.25)


class Numbers:
    """A set whose samples take a while, by the clock of the test."""

    def __init__(self, cost: float) -> None:
        self.cost, self.now = cost, 0.0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        self.now += self.cost
        return index

    def clock(self) -> float:
        return self.now


def _trained(numbers: Numbers, steps: int, **more: Any) -> tuple[Batches, list[list[int]]]:
    plan = Plan(size=64, global_batch_size=8, micro_batch_size=4, seed=1)
    batches = Batches(numbers, plan, clock=numbers.clock, available=4, **more)
    seen = []
    for step, parts in islice(batches, steps):
        seen.append([int(n) for part, _ in parts for n in part])
        numbers.now += 1.0  # the rest of the step
        batches.done(step)
    return batches, seen


def test_the_first_steps_are_timed_and_then_there_are_as_many_workers_as_needed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    batches, seen = _trained(Numbers(0.2), TRIAL_STEPS + 4, num_workers="auto")
    assert batches.num_workers == 2, "1.6 s of fetching in each 1 s, with head-room"
    assert "event=loader-workers workers=2 fetch=1.6" in capfd.readouterr().out
    assert seen == _trained(Numbers(0.0), TRIAL_STEPS + 4, num_workers=0)[1], "not a sample is other"


def test_a_set_that_is_in_memory_gets_no_worker() -> None:
    assert _trained(Numbers(0.0001), TRIAL_STEPS + 4, num_workers="auto")[0].num_workers == 0


def test_the_first_step_is_no_measure() -> None:
    now = [0.0]
    trial = WorkerTrial(clock=lambda: now[0], available=8)
    found = None

    def fetching(seconds: float) -> Iterator[None]:
        now[0] += seconds
        yield

    for step in range(TRIAL_STEPS + 2):
        found = trial.step()
        trial.timed(fetching(100.0 if step == 0 else 0.5))
        now[0] += 100.0 if step == 0 else 1.0
    assert found == 1


def test_without_workers_the_prefetch_factor_is_left_out() -> None:
    """torch refuses it there; and the number that is found by trial begins at none."""
    batches = Batches(
        list(range(64)), Plan(size=64, global_batch_size=8, micro_batch_size=8), prefetch_factor=4
    )
    _, parts = next(iter(batches))
    assert len(list(parts)) == 1
    assert _trained(Numbers(0.2), TRIAL_STEPS + 4, num_workers="auto", prefetch_factor=4)[0].num_workers == 2
