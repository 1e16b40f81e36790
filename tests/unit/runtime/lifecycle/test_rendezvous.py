"""The pods of a gang meet before they start: in any order, late, again after a lost connection."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from spottrain.lifecycle import rendezvous
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
        early[0].result(timeout=1.0)
    last = come(order[2])
    assert all(each.result(timeout=SECONDS) for each in (*early, last))


def test_whoever_is_told_to_stop_goes_on_at_once(come: Come, stop: threading.Event) -> None:
    waiting = [come(0), come(1)]
    stop.set()
    assert [each.result(timeout=SECONDS) for each in waiting] == [False, False]


def test_a_pod_of_another_attempt_is_not_one_of_them(come: Come) -> None:
    leader, follower = come(0, workers=2), come(1, workers=2, env=ENV | {"SPOTTRAIN_ATTEMPT": "1"})
    with pytest.raises(TimeoutError):
        leader.result(timeout=1.5)
    assert not follower.done()
    assert come(1, workers=2).result(timeout=SECONDS) and leader.result(timeout=SECONDS)


def test_a_pod_that_went_before_all_had_come_is_waited_for_again(come: Come, port: int) -> None:
    leader = come(0)
    with pytest.raises(TimeoutError):
        leader.result(timeout=0.5)  # it listens
    with socket.create_connection((LOOPBACK, port + 1), timeout=SECONDS) as brief:
        brief.sendall(b"spottrain uid 2 1\n")
        with pytest.raises(TimeoutError):
            leader.result(timeout=0.5)
    with pytest.raises(TimeoutError):
        leader.result(timeout=1.0)
    second = come(2)
    with pytest.raises(TimeoutError):
        leader.result(timeout=1.0)
    first = come(1)
    assert all(each.result(timeout=SECONDS) for each in (leader, first, second))


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"\n", b"spottrain uid 2 x\n", b"x" * 5000, b""]
)
def test_a_stranger_at_the_port_disturbs_nobody(come: Come, port: int, words: bytes) -> None:
    leader = come(0, workers=2)
    with pytest.raises(TimeoutError):
        leader.result(timeout=0.5)
    with socket.create_connection((LOOPBACK, port + 1), timeout=SECONDS) as stranger:
        stranger.sendall(words)
        assert come(1, workers=2).result(timeout=SECONDS) and leader.result(timeout=SECONDS)


def test_while_no_connection_can_be_taken_the_port_rests_between_two_tries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """accept() fails at once where no file descriptor is free, and whoever calls stays in the queue."""

    class Full:
        accepted = 0

        def accept(self) -> None:
            self.accepted += 1
            raise OSError(errno.EMFILE, "Too many open files")

    class Enough(Exception):
        pass

    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            raise Enough

    server: Any = Full()
    monkeypatch.setattr("spottrain.lifecycle.rendezvous.time.sleep", rest)
    with pytest.raises(Enough):
        rendezvous._welcome(server, rendezvous._There(2, b"name"))
    assert server.accepted == len(rests) == 3 and min(rests) > 0
    assert capsys.readouterr().out.count("event=accept-failed") == 1
