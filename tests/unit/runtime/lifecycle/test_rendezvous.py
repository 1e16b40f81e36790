"""The pods of a gang meet before they start: in any order, late, again after a lost connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from spottrain.distributed.channel import join
from spottrain.lifecycle.rendezvous import meet
from spottrain.lifecycle.topology import LOOPBACK, Gang

from tests.support.ports import free_port

ENV = {"SPOTTRAIN_JOB_UID": "uid", "SPOTTRAIN_ATTEMPT": "2"}
SECONDS = 30.0
Come = Callable[..., Future[bool]]


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def come(stop: threading.Event, port: int) -> Iterator[Come]:
    with ThreadPoolExecutor(8) as pool:

        def start(index: int, *, workers: int = 3, env: dict[str, str] = ENV) -> Future[bool]:
            gang = Gang(workers=workers, index=index, host=LOOPBACK, port=port)
            return pool.submit(meet, gang, env, stop.is_set)

        yield start
        stop.set()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_go_when_the_last_has_come(come: Come, order: tuple[int, ...]) -> None:
    early = [come(index) for index in order[:2]]
    with pytest.raises(TimeoutError):
        early[0].result(timeout=0.3)
    last = come(order[2])
    assert all(each.result(timeout=SECONDS) for each in (*early, last))


def test_whoever_is_told_to_stop_goes_on_at_once(come: Come, stop: threading.Event) -> None:
    waiting = [come(0), come(1)]
    stop.set()
    assert [each.result(timeout=SECONDS) for each in waiting] == [False, False]


def test_a_pod_of_another_attempt_is_not_one_of_them(come: Come) -> None:
    leader, follower = come(0, workers=2), come(1, workers=2, env=ENV | {"SPOTTRAIN_ATTEMPT": "1"})
    with pytest.raises(TimeoutError):
        leader.result(timeout=0.5)
    assert not follower.done()
    assert come(1, workers=2).result(timeout=SECONDS) and leader.result(timeout=SECONDS)


def test_a_pod_that_went_before_all_had_come_is_waited_for_again(come: Come, port: int) -> None:
    leader = come(0)
    with pytest.raises(TimeoutError):
        leader.result(timeout=0.5)  # it listens
    with socket.create_connection((LOOPBACK, port + 1), timeout=SECONDS) as brief:
        until = time.monotonic() + 0.5
        assert join(brief, b"spottrain uid 2", 1, lambda: time.monotonic() < until) is None
        with pytest.raises(TimeoutError):
            leader.result(timeout=0.5)
    with pytest.raises(TimeoutError):
        leader.result(timeout=0.3)
    second = come(2)
    with pytest.raises(TimeoutError):
        leader.result(timeout=0.3)
    first = come(1)
    assert all(each.result(timeout=SECONDS) for each in (leader, first, second))


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"\n", b"spottrain uid 2 1\n", b"x" * 5000, b""]
)
def test_a_stranger_at_the_port_disturbs_nobody(come: Come, port: int, words: bytes) -> None:
    leader = come(0, workers=2)
    with pytest.raises(TimeoutError):
        leader.result(timeout=0.5)
    with socket.create_connection((LOOPBACK, port + 1), timeout=SECONDS) as stranger:
        stranger.sendall(words)
        assert come(1, workers=2).result(timeout=SECONDS) and leader.result(timeout=SECONDS)
