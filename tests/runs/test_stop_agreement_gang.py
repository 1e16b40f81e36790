"""Three real processes with torch's gloo on loopback: they stop together, and none waits for a dead one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.gangs import Rank, gang

pytestmark = pytest.mark.heavy  # five processes that import torch
Ranks = list[Rank]
PROMPTLY = 20.0
"""Seconds. It takes a tenth of one; what must not be waited for is the 30 minutes of torch's timeouts."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with gang(3) as ranks:
        yield ranks


def all_do(ranks: Ranks, name: str, *arguments: object) -> list[Any]:
    for rank in ranks:
        rank.tell(name, *arguments)
    return [rank.answer() for rank in ranks]


def test_200_runs_of_ranks_at_their_own_pace_save_and_stop_at_the_same_steps(ranks: Ranks) -> None:
    ends = all_do(ranks, "scenes", 200, 11)
    assert ends[0] == ends[1] == ends[2]
    steps = [step for step, _ in ends[0]]
    assert min(steps) < 40 == max(steps)  # some were stopped, some came to their end
    assert any(saves for _, saves in ends[0])


def test_runs_with_averaged_gradients_stop_at_the_same_step_with_the_same_weights(ranks: Ranks) -> None:
    answers = all_do(ranks, "ddp", 4, 5)
    assert answers[0] == answers[1] == answers[2]
    assert min(step for step, _ in answers[0][0]) < 40


def test_a_killed_rank_ends_every_wait_for_it(ranks: Ranks) -> None:
    """A child of the killed process, such as a loader's worker, holds nothing open."""
    leader, follower, victim = ranks
    victim.tell("fork")
    child = victim.answer()
    try:
        leader.tell("collect")
        follower.tell("part")
        assert follower.answer() is None
        victim.kill()
        assert leader.answer(PROMPTLY) == [True, True, False]
        leader.tell("train")
        assert "rank 2 is gone" in leader.answer(PROMPTLY)
    finally:
        os.kill(child, signal.SIGKILL)
    leader.tell("fork")
    child = leader.answer()
    try:
        follower.tell("train")
        leader.kill()
        assert "rank 0 is gone" in follower.answer(PROMPTLY)
    finally:
        os.kill(child, signal.SIGKILL)


def test_ranks_that_leave_in_any_order_leave_cleanly() -> None:
    with gang(2) as ranks:
        assert all_do(ranks, "leave") == [None, None]
        for rank in ranks:
            assert rank.process.stdin is not None
            rank.process.stdin.close()
            assert rank.process.wait(PROMPTLY) == 0
