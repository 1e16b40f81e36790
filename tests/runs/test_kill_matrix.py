"""A signal at each place of a run: the exit says what happened, HEAD names only what is whole, and the next
attempt ends like a run that nobody hit. A part of the matrix; `python -m tests.chaos.kills` plays all of it.
"""

from __future__ import annotations

import pytest

from tests.chaos import kills
from tests.chaos.scene import Scene
from tests.chaos.stage import shared

SCENES = [
    kills.scene("before HEAD", "KILL", "pod", 1),
    kills.scene("after HEAD", "KILL", "rank0", 2),
    kills.scene("micro-step", "KILL", "pod", 1, twice=True),
    kills.scene("import", "TERM", "pod", 1),
    kills.scene("compile", "TERM", "pod", 1),
    kills.scene("micro-step", "TERM", "rank1", 2),
    kills.scene("micro-step", "KILL", "rank1", 2),
    kills.scene("evaluation", "TERM", "group", 1),
    kills.scene("loader", "TERM", "group", 1),
    kills.scene("upload", "KILL", "ranks", 2),
    kills.scene("upload", "TERM", "group", 1, twice=True),
    kills.scene("before manifest", "KILL", "group", 1, twice=True),
    kills.scene("before HEAD", "TERM", "ranks", 2),
    kills.scene("pruning", "KILL", "pod", 1),
    kills.scene("release", "KILL", "pod", 1),
    kills.scene("done", "KILL", "pod", 1),
]


@pytest.mark.heavy
@pytest.mark.parametrize("case", SCENES, ids=lambda case: case.name)
def test_whatever_is_hit_wherever_the_next_attempt_goes_on_bit_by_bit(case: Scene) -> None:
    act = shared().play(case)
    assert not kills.problems(act), act.logs
