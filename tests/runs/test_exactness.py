"""A run that was stopped and went on equals one that was not, bit by bit, at every step and in every way to
train. Eight cells of the matrix; `python -m tests.chaos.matrix` plays all 72. What is compared:
docs/exactness.md.
"""

from __future__ import annotations

import pytest

from tests.chaos import matrix
from tests.chaos.scene import Cell
from tests.chaos.stage import shared

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("cell", matrix.pairwise(), ids=lambda cell: cell.name)
def test_fifty_steps_after_a_stop_equal_those_of_a_run_that_nobody_stopped(cell: Cell) -> None:
    act = shared().play(matrix.scene(cell, seed=1))
    assert not matrix.problems(act), act.logs


def test_the_judge_sees_a_run_that_went_on_otherwise() -> None:
    """Without this, a judge that compares nothing would look just as good."""
    cell = Cell(steps=24)
    stage = shared()
    lines = stage.reference(cell).lines[0]
    lines[20]["optimizer"] = "another"
    act = stage.play(matrix.scene(cell, seed=1))
    assert any("step 20: optimizer differ" in words for words in act.verdict.mismatches)
