"""The series of steps of real trainings: each step once, whatever ended the attempts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from spottrain.contract import SERIES_PREFIX, Outcome, series_key
from spottrain.core.series import Series, cut

from tests.runs.conftest import SCRIPT, Lab

PACED = {"PAUSE": "0.05"}


def series_of(folder: Path) -> list[Series]:
    """What a reader has of the attempts at this checkpoint URI."""
    return cut(Series.from_bytes(path.read_bytes()) for path in (folder / SERIES_PREFIX).iterdir())


def wait_for(path: Path, seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < give_up, f"no {path} within {seconds} s"
        time.sleep(0.01)


def test_over_a_sigterm_and_a_sigkill_it_has_each_step_once(lab: Lab) -> None:
    store = lab.folder / "store"
    lab.run(attempt=1, env=PACED).until("step=5/").stopped()
    second = lab.run(attempt=2, env=PACED).until("event=committed")
    wait_for(store / series_key(2))
    second.killed()
    lab.run(attempt=3).done()
    found = series_of(store)
    points = [point for series in found for point in series.points]
    assert [point.step for point in points] == list(range(1, 25))
    losses = lab.alone(SCRIPT).losses.values()
    assert [point.loss for point in points] == pytest.approx([float(text[5:]) for text in losses], rel=1e-6)
    assert {p.samples for p in points} == {8, 2}  # the last batch of an epoch is short
    assert all(p.seconds > 0 and p.learningRate for p in points)
    attempts = [series.attempt for series in found]
    assert [attempt.outcome for attempt in attempts] == [Outcome.INTERRUPTED, "", Outcome.DONE]
    assert [attempt.startStep for attempt in attempts[1:]] == [s.points[-1].step for s in found[:-1]]
    split = attempts[2].timeSplit
    assert split is not None and split.productive > 0 and split.startup > 0


def test_a_store_that_refuses_it_does_not_stop_the_training(lab: Lab) -> None:
    refuse = """
from spottrain.storage.local import FolderStore
put = FolderStore.put
def refusing(self, key, body):
    if key.startswith("series/"):
        raise PermissionError("no series here")
    return put(self, key, body)
FolderStore.put = refusing
"""
    run = lab.run(refuse + SCRIPT, attempt=1).done()
    assert run.log.count("event=series-not-written") == 1 and "no series here" in run.log
    assert lab.head["state"] == "done"
