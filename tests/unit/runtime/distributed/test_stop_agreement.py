"""All ranks save and stop at the same steps, whatever each of them knew when. The lines are the test's."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain.distributed.control_channel import ControlChannel
from spottrain.distributed.stop_agreement import (
    GO_ON,
    MAX_STEPS,
    REACH_SECONDS,
    REACH_SECONDS_PER_RANK,
    Order,
    StopAgreement,
    reach,
)
from spottrain.distributed.world import World
from spottrain.errors import PeerLost

from tests.support.gang import STEP_SECONDS, FakeLine, Gang
from tests.support.sentences import Told

FEW = settings(max_examples=50, deadline=None)


# --- how far an order reaches ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("last", "step_seconds", "steps"),
    [(None, 0.001, 1), (Order(at=0, until=8), 0.02, 12), (Order(at=0, until=8), 3.0, 1)],
    ids=["the first", "a quarter of a second", "slow steps one by one"],
)
def test_an_order_reaches_a_quarter_of_a_second(last: Order | None, step_seconds: float, steps: int) -> None:
    assert reach(last=last, at=8, step_seconds=step_seconds, size=2) == steps


@FEW
@given(span=st.integers(1, 3000), seconds=st.floats(1e-9, 1e3), size=st.integers(2, 2000))
def test_an_order_reaches_at_most_twice_as_far_as_the_last(span: int, seconds: float, size: int) -> None:
    steps = reach(last=Order(at=5, until=5 + span), at=5 + span, step_seconds=seconds, size=size)
    assert 1 <= steps <= min(2 * span, MAX_STEPS)
    assert steps == 1 or steps * seconds <= max(REACH_SECONDS, REACH_SECONDS_PER_RANK * size) * (1 + 1e-9)


# --- what an order says ---------------------------------------------------------------------------------
def test_a_stop_ends_the_orders_at_this_boundary_and_carries_the_deadline() -> None:
    gang = Gang.of(2, total=100)
    gang.players[0].agreement.request_stop(99.0, "SIGTERM")
    gang.move(0)
    order = Order(**gang.wires[1].orders[-1])
    assert (order.at, order.until, order.stop, order.save) == (0, 0, True, False)
    assert (order.deadline, order.reason) == (99.0, "SIGTERM")


@FEW
@given(st.builds(Order, at=st.integers(), until=st.integers(), save=st.booleans()))
def test_an_order_is_read_as_it_was_written(order: Order) -> None:
    assert Order(**json.loads(json.dumps(asdict(order)))) == order


@FEW
@given(st.lists(st.floats(0, 1e10), min_size=1))
def test_the_least_deadline_counts_and_the_first_reason(deadlines: list[float]) -> None:
    agreement = StopAgreement()
    for number, deadline in enumerate(deadlines):
        agreement.request_stop(deadline, str(number))
    assert (agreement.stop_deadline, agreement.stop_reason) == (min(deadlines), "0")


# --- a world of one -------------------------------------------------------------------------------------
def test_alone_a_rank_is_asked_at_every_boundary() -> None:
    stopping = False
    agreement = StopAgreement(stopping=lambda: stopping)
    assert agreement.begin(3, 10) is GO_ON
    assert agreement.at_boundary(4, save=True) == Order(at=4, until=4, save=True)
    stopping = True
    assert agreement.at_boundary(5, save=True) == Order(at=5, until=5, stop=True)
    assert agreement.begin(10, 10) is GO_ON, "all steps are done"


# --- a gang ---------------------------------------------------------------------------------------------
def test_inside_an_order_nothing_is_sent() -> None:
    gang = Gang.of(2, total=100)
    while gang.players[0].step < 60:
        gang.move(0, seconds=0.0085)
    orders = [Order(**each) for each in gang.wires[1].orders]
    assert [order.until - order.at for order in orders] == [1, 2, 4, 8, 16, 29, 29]


def test_a_rank_that_is_told_nothing_stops_with_the_others() -> None:
    gang = Gang.of(3, total=100)
    for _ in range(10):
        for rank in range(3):
            gang.move(rank)
    gang.ask_for_stop(2, 77.0)
    gang.deliver(2)
    gang.finish()
    assert {player.step for player in gang.players} == {gang.players[0].step}
    assert gang.players[0].step < 100
    assert [player.agreement.stop_deadline for player in gang.players] == [77.0] * 3
    assert gang.players[1].agreement.stop_reason == "rank 2: SIGTERM"


def test_a_stop_that_was_asked_for_before_the_first_step_comes_before_it() -> None:
    gang = Gang.of(2, total=100, start=30)
    gang.ask_for_stop(0, 5.0)
    gang.finish()
    assert [(player.step, player.stopped) for player in gang.players] == [(30, True)] * 2


def test_who_stopped_is_told_so_again_without_a_new_order() -> None:
    gang = Gang.of(2, total=100)
    gang.ask_for_stop(0, 5.0)
    gang.finish()
    for player in gang.players:
        again = player.agreement.at_boundary(0, save=True)
        assert again.stop and not again.save


def test_all_stop_at_the_same_batch_of_an_evaluation() -> None:
    gang = Gang.of(2, total=100)
    first, second = (player.agreement for player in gang.players)
    assert not first.stops_evaluation(1) and not second.stops_evaluation(1)
    first.request_stop(5.0, "SIGTERM")
    assert first.stops_evaluation(2) and second.stops_evaluation(2)
    assert (second.stop_deadline, second.stop_reason) == (5.0, "SIGTERM")


def test_nothing_is_ordered_when_all_steps_are_done() -> None:
    gang = Gang.of(2, total=30, start=30)
    gang.finish()
    assert not gang.wires[1].orders


def test_a_save_due_by_steps_is_made_at_its_step() -> None:
    gang = Gang.of(2, total=1000)
    leader = gang.players[0]
    saved: list[int] = []
    leader.act(leader.agreement.begin(0, 1000))
    for step in range(1, 1000):
        gang.now[0] += 0.001
        due, horizon = step % 70 == 0, step // 70 * 70 + 70
        due = due and leader.agreement.decides(step)
        saved += [step] if leader.agreement.at_boundary(step, save=due, next_save=horizon).save else []
    assert saved == list(range(70, 1000, 70))


def test_ranks_that_would_do_different_numbers_of_steps_are_told_before_the_first(told: Told) -> None:
    gang = Gang.of(2, total=100)
    gang.players[1].total = 90
    gang.move(0)
    told(lambda: gang.move(1))


def test_a_lost_rank_is_told_at_the_next_boundary(told: Told) -> None:
    for rank in range(2):
        gang = Gang.of(2, total=100)
        gang.move(0), gang.move(1)
        gang.lines[rank].lost = PeerLost("rank 9 is gone")
        with pytest.raises(PeerLost) as refused:
            gang.move(rank)
        told(refused)


class Emptied(FakeLine):
    @property
    def gone(self) -> list[int]:
        return [3]


def test_rank_0_does_not_go_on_without_a_rank_that_has_ended(told: Told) -> None:
    agreement = StopAgreement(
        cast(ControlChannel, Emptied(World(rank=0, size=4, local_rank=0, local_size=4), {}))
    )
    told(lambda: agreement.begin(5, 8))


# --- any interleaving -----------------------------------------------------------------------------------
Move = tuple[str, int, float]
"""What, of which rank, and a number: the seconds of a step or a deadline."""


def happen(gang: Gang, move: Move) -> None:
    what, rank, number = move
    if what == "stop":
        gang.ask_for_stop(rank, number)
    elif what == "deliver":
        gang.deliver(rank)
    else:
        gang.move(rank, seconds=number, save=what == "save")


@st.composite
def moves(draw: st.DrawFn, size: int) -> list[Move]:
    rank = st.integers(0, size - 1)
    seconds = st.sampled_from([1e-6, 0.004, 0.03, STEP_SECONDS, 0.4, 20.0])
    step = st.tuples(st.sampled_from(["move", "move", "move", "save", "deliver"]), rank, seconds)
    scene: list[Move] = draw(st.lists(step, max_size=150))
    for who in draw(st.lists(rank, max_size=3)):
        scene.insert(draw(st.integers(0, len(scene))), ("stop", who, draw(st.floats(1, 1e6))))
    return scene


@settings(max_examples=120, deadline=None)
@given(data=st.data(), size=st.integers(2, 4), total=st.integers(0, 60))
def test_no_two_ranks_ever_save_or_stop_at_different_steps(
    data: st.DataObject, size: int, total: int
) -> None:
    gang = Gang.of(size, total=total)
    asked: list[float] = []
    for move in data.draw(moves(size)):
        happen(gang, move)
        asked += [move[2]] if move[0] == "stop" else []
    for rank in range(1, size):
        while gang.deliver(rank):
            pass
    gang.finish()
    leader = gang.players[0]
    for player in gang.players:
        assert (player.step, player.stopped, player.saves) == (leader.step, leader.stopped, leader.saves)
    if leader.stopped:
        leader.agreement.hear()
        assert leader.agreement.stop_deadline == min(asked)


@settings(max_examples=40, deadline=None)
@given(seconds=st.lists(st.sampled_from([1e-6, 0.01, 0.1, 0.24, 0.3, 5.0]), min_size=1, max_size=200))
def test_a_stop_comes_within_the_order_in_hand(seconds: list[float]) -> None:
    gang = Gang.of(2, total=10**6)
    for each in seconds:
        gang.move(0, seconds=each)
    order = Order(**gang.wires[1].orders[-1])
    gang.ask_for_stop(0, 1.0)
    gang.finish()
    assert [player.step for player in gang.players] == [order.until] * 2


def test_at_an_even_pace_a_stop_is_at_most_a_reach_late() -> None:
    for pace in (0.001, 0.02, 0.1, 0.24):
        gang = Gang.of(2, total=10**6)
        for _ in range(1000):
            gang.move(0, seconds=pace)
        told = gang.now[0]
        gang.ask_for_stop(0, 1.0)
        while not gang.players[0].ended:
            gang.move(0, seconds=pace)
        assert gang.now[0] - told <= REACH_SECONDS + 1e-9


# --- all interleavings of a small gang ------------------------------------------------------------------
def possible(gang: Gang) -> Iterator[Move]:
    """What can happen next: a quick or slow step, with a save due or not, a request to stop, its arrival."""
    for rank, player in enumerate(gang.players):
        if not player.ended:
            yield "move", rank, 0.1
            if rank == 0:
                yield from (("move", rank, 1.0), ("save", rank, 0.1))
        if rank != 1 and math.isinf(player.agreement.stop_deadline):  # rank 1 never hears of it by itself
            yield "stop", rank, 10.0 - rank
        if rank and gang.wires[rank].requests:
            yield "deliver", rank, 0.0


def test_in_all_that_can_happen_to_a_small_gang_no_two_ranks_differ_and_nobody_waits_for_ever() -> None:
    came: set[str] = set()
    stuck: dict[str, list[Move]] = {}
    """States that nobody has been seen to leave by a move of a rank."""
    queue: deque[tuple[str, list[Move]]] = deque([("", [])])
    while queue:
        parent, path = queue.popleft()
        gang = Gang.of(3, total=3)
        for move in path:
            happen(gang, move)
        state = gang.state()
        if path and path[-1][0] != "stop" and state != parent:
            stuck.pop(parent, None)
        if state in came:
            continue
        came.add(state)
        ended = [player for player in gang.players if player.ended]
        assert len({(p.step, p.stopped, p.saves) for p in ended}) <= 1, path
        if len(ended) < 3:
            stuck[state] = path
        queue.extend((state, [*path, move]) for move in possible(gang))
    assert not stuck
    assert len(came) > 1000
