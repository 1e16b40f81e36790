"""What `/progress` answers, and that whoever asks cannot disturb the training's log."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

import pytest
from spottrain.contract import MESSAGE_LIMIT, STOP_PATH, WAITING_FOR_STORE, Outcome, Progress, Stop
from spottrain.core.progress import ProgressBoard, serve


class Slow(ProgressBoard):
    """Answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()
        self.fault: Exception | None = None

    def progress(self) -> Progress:
        self.asked.set()
        assert self.go.wait(10)
        if self.fault is not None:
            raise self.fault
        return super().progress()


def served(board: ProgressBoard) -> int:
    port = serve(board, 0)
    assert port is not None
    return port


def until(done: Callable[[], bool], seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def handlers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if "process_request_thread" in each.name]


def ask_and_leave(board: Slow, port: int) -> None:
    """As a poll that times out: the connection is reset before there is an answer."""
    others = handlers()  # of servers that earlier tests have left
    with socket.create_connection(("127.0.0.1", port)) as poll:
        poll.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        poll.sendall(b"GET /progress HTTP/1.1\r\nHost: x\r\n\r\n")
        assert board.asked.wait(10)
    board.go.set()
    until(lambda: set(handlers()) <= set(others))


def test_a_poll_that_is_gone_before_its_answer_leaves_no_word(capfd: pytest.CaptureFixture[str]) -> None:
    board = Slow()
    port = served(board)
    ask_and_leave(board, port)
    said = capfd.readouterr()
    assert said.err == "" and "Traceback" not in said.out
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=5) as answer:
        assert answer.status == 200


def test_an_answer_that_cannot_be_made_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    board = Slow()
    board.fault = ValueError("no number")
    ask_and_leave(board, served(board))
    said = capfd.readouterr()
    assert said.err == "" and 'event=progress-request-failed error="ValueError: no number"' in said.out


def ask(client: HTTPConnection, path: str = "/progress") -> int:
    client.request("GET", path)
    reply = client.getresponse()
    reply.read()
    return reply.status


def test_an_order_to_stop_is_for_one_pod() -> None:
    orders: list[Stop] = []

    def stop(order: Stop) -> bool:
        orders.append(order)
        return order.podUID == "mine"

    port = serve(ProgressBoard(), 0, stop)
    assert port is not None
    client = HTTPConnection("127.0.0.1", port, timeout=10)
    assert ask(client, "/metrics") == ask(client) == 200
    for pod, status in (("mine", 204), ("another", 403)):
        client.request("POST", STOP_PATH, body=Stop(podUID=pod, deadline=1.0).to_json())
        reply = client.getresponse()
        assert (reply.status, not reply.read()) == (status, status == 204)
    assert [order.podUID for order in orders] == ["mine", "another"]


def test_while_the_store_is_waited_for_that_is_the_state_whatever_comes_after() -> None:
    board = ProgressBoard()
    changes: list[dict[str, Any]] = [
        {"state": "Gated"},
        {"waiting_for": "s3://b at x", "waits": True},
        {"state": "Restoring"},
    ]
    for change in changes:
        board.update(**change)
    progress = board.progress()
    assert (progress.state, progress.waitingFor) == (WAITING_FOR_STORE, "s3://b at x")
    assert f'spottrain_state{{state="{WAITING_FOR_STORE}"}} 1' in board.metrics()
    board.update(waits=False)
    assert board.progress().state == "Restoring" and board.progress().waitingFor, "it goes on, and says so"
    board.update(waiting_for="")
    assert board.progress().state == "Restoring"


# --- what the training writes meanwhile -----------------------------------------------------------------
class Interrupted(ProgressBoard):
    """Another thread counts a step just after an update has read the step."""

    armed = False

    @property
    def _step(self) -> int:
        found = self.__dict__["step of this moment"]
        if self.armed:
            self.armed = False
            self.stepped(found + 1)
        return int(found)

    @_step.setter
    def _step(self, value: int) -> None:
        self.__dict__["step of this moment"] = value


def test_a_step_that_is_counted_during_an_update_is_not_lost() -> None:
    board = Interrupted()
    board.update(state="Training")
    board.stepped(8)
    board.armed = True
    board.update(durable_step=7)
    assert (board.facts.step, board.facts.durable_step) == (9, 7)


@pytest.mark.parametrize(
    ("total", "speed", "left"), [(0, 5.0, None), (100, None, None), (100, 5.0, 16.0), (10, 5.0, 0.0)]
)
def test_the_time_left_is_told_where_the_end_and_the_speed_are_known(
    total: int, speed: float | None, left: float | None
) -> None:
    board = ProgressBoard()
    board.update(total_steps=total, step=20, steps_per_second=speed)
    assert board.progress().etaSeconds == left
    assert ("spottrain_total_steps" in board.metrics()) == bool(total)


@pytest.mark.parametrize("character", ["x", "ä", "€", "\U0001f680", '"'])
def test_a_long_error_is_cut_to_what_the_kubelet_keeps_and_its_begin_stays(character: str) -> None:
    text = ProgressBoard().message(Outcome.FAILED, "begin" + 1_000_000 * character).to_json()
    assert MESSAGE_LIMIT - 12 <= len(text.encode()) <= MESSAGE_LIMIT
    assert json.loads(text)["message"].startswith(f"begin{character}")
