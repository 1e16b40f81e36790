"""An advice to save makes one save, on which rank soever it comes, and none where there is little to lose."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.core.preemption import Preemption
from spottrain.core.run_config import Interval
from spottrain.lifecycle.rebalance import RebalanceAdvice
from spottrain.lifecycle.save_interval import SaveInterval


class File:
    value: float | None = None

    def __call__(self) -> float | None:
        return self.value


def test_each_new_time_is_taken_once() -> None:
    file = File()
    advice = RebalanceAdvice(file)
    advice.begin()
    assert advice.take() is None
    file.value = 5.0
    assert [advice.take(), advice.take()] == [5.0, None]
    file.value = 4.0
    assert [advice.take(), advice.take()] == [4.0, None], "another time is a new advice, be it an earlier one"


def test_what_stands_there_when_the_training_begins_is_not_new() -> None:
    file = File()
    advice = RebalanceAdvice(file)
    file.value = 5.0
    assert advice.take() is None, "nothing was trained yet"
    advice.begin()
    assert advice.take() is None
    file.value = 6.0
    assert advice.take() == 6.0


def test_what_another_pod_was_advised_counts_too_once() -> None:
    advice = RebalanceAdvice(File())
    advice.begin()
    advice.tell(7.0)
    assert [advice.take(), advice.take()] == [7.0, None]


def test_two_pods_that_are_advised_at_once_make_one_save() -> None:
    file = File()
    advice = RebalanceAdvice(file)
    advice.begin()
    advice.tell(7.0)
    file.value = 8.0
    assert [advice.take(), advice.take()] == [8.0, None]


@pytest.mark.parametrize(
    ("interval", "steps", "seconds", "fresh"),
    [
        ("500steps", 49, 1e6, True),
        ("500steps", 50, 0.0, False),
        ("10m", 1, 59.9, True),
        ("10m", 1, 60.0, False),
        ("10m", 0, 1e6, True),
        ("auto", 1, 9.9, True),
        ("auto", 1, 10.0, False),
    ],
)
def test_a_save_younger_than_a_tenth_of_the_interval_makes_another_one_needless(
    interval: str, steps: int, seconds: float, fresh: bool
) -> None:
    cadence = SaveInterval(Interval.parse(interval), seconds=lambda: 100.0)
    assert cadence.fresh(steps=steps, seconds=seconds) is fresh


def test_what_is_no_time_is_no_advice(tmp_path: Path) -> None:
    file = tmp_path / "save-advised"
    preemption = Preemption(grace=30.0, save_advised_file=file)
    for text in ("", "soon", "2026-03-0"):
        file.write_text(text)
        preemption._read_files()
        assert preemption.advised is None
    file.write_text("2026-03-01T12:00:00Z\n")
    preemption._read_files()
    assert preemption.advised == 1772366400.0
    file.unlink()
    preemption._read_files()
    assert preemption.advised == 1772366400.0 and not preemption.stopping
