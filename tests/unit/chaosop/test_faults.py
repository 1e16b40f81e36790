"""Faults are drawn from the seed: the same ones each time, all kinds, and no more than is said."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaosop.faults import (
    EVENTS,
    KINDS,
    STREAMS,
    Fault,
    event_fate,
    jumps,
    kill_at,
    request_fate,
    stream_fate,
)
from tests.chaosop.scene import Kill, Scene

DRAWS = 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_requests_meet_each_fault_as_often_as_is_said(kind: str) -> None:
    met = Counter(request_fate(1, "chaos-1", kind, n).fault for n in range(DRAWS))
    assert set(met) == {Fault.NONE, *KINDS[kind]}
    for fault, share in KINDS[kind].items():
        assert share / 2 < met[fault] / DRAWS < share * 2, fault


def test_events_and_streams_meet_each_fault() -> None:
    assert {event_fate(1, "chaos-1", n).fault for n in range(DRAWS)} == {Fault.NONE, *EVENTS}
    assert {stream_fate(1, n) for n in range(2 * DRAWS)} == {Fault.NONE, *STREAMS}


def test_a_fate_is_the_same_each_time_and_another_in_another_scene() -> None:
    fates = [[request_fate(1, place, "write", n) for n in range(200)] for place in ("a", "a", "b")]
    assert fates[0] == fates[1] != fates[2]


def test_the_operator_dies_at_the_writes_of_the_scene_alone() -> None:
    scene = Scene(seed=1, number=1, kills=(Kill(write=3, before=True), Kill(write=7, before=False)))
    assert [kill_at(scene, n) for n in range(1, 9)] == [None, None, True, None, None, None, False, None]


def test_the_clock_jumps_both_ways_and_comes_back() -> None:
    moments = jumps(1, longest=600, until=3600)
    ahead = [jump.ahead for jump in moments]
    assert (
        moments[-1].at >= 3600
        and min(ahead) < -100
        and max(ahead) > 100
        and ahead.count(0.0) > len(ahead) / 4
    )
    assert max(map(abs, ahead)) <= 600
    assert not any(jump.ahead for jump in jumps(1, longest=0, until=3600))
