"""The pods of a gang meet before they start: in any order, late, again after a lost connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from spottrain.distributed.channel import join
from spottrain.lifecycle.topology import LOOPBACK, Gang, meet

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


def waits(pod: Future[bool]) -> None:
    with pytest.raises(TimeoutError):
        pod.result(timeout=0.1)


def dial(port: int) -> socket.socket:
    """Connects to pod 0 as soon as it listens."""
    give_up = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection((LOOPBACK, port + 1), timeout=SECONDS)
        except ConnectionRefusedError:
            assert time.monotonic() < give_up, "nobody listens"
            time.sleep(0.01)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_go_when_the_last_has_come(come: Come, order: tuple[int, ...]) -> None:
    early = [come(index) for index in order[:2]]
    waits(early[0])
    last = come(order[2])
    assert all(each.result(timeout=SECONDS) for each in (*early, last))


def test_whoever_is_told_to_stop_goes_on_at_once(come: Come, stop: threading.Event) -> None:
    waiting = [come(0), come(1)]
    stop.set()
    assert [each.result(timeout=SECONDS) for each in waiting] == [False, False]


def test_a_pod_of_another_attempt_is_not_one_of_them(come: Come, port: int) -> None:
    leader = come(0, workers=2)
    dial(port).close()
    follower = come(1, workers=2, env=ENV | {"SPOTTRAIN_ATTEMPT": "1"})
    waits(leader)
    waits(follower)
    assert come(1, workers=2).result(timeout=SECONDS) and leader.result(timeout=SECONDS)


def test_a_pod_that_went_before_all_had_come_is_waited_for_again(come: Come, port: int) -> None:
    leader = come(0)
    with dial(port) as brief:
        until = time.monotonic() + 0.3
        assert join(brief, b"spottrain uid 2", 1, lambda: time.monotonic() < until) is None
    second = come(2)
    waits(leader)
    first = come(1)
    assert all(each.result(timeout=SECONDS) for each in (leader, first, second))


def test_strangers_at_the_port_disturb_nobody(come: Come, port: int) -> None:
    leader = come(0, workers=2)
    with contextlib.ExitStack() as open_ones:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\n", b"spottrain uid 2 1\n", b"x" * 5000, b""):
            open_ones.enter_context(dial(port)).sendall(words)
        waits(leader)
        assert come(1, workers=2).result(timeout=SECONDS) and leader.result(timeout=SECONDS)
