"""Framing, handshake and limits of the one kind of connection, with real sockets."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from spottrain.distributed import channel
from spottrain.distributed.channel import FRAME, Link, Meeting, join, start_child

from tests.support.sentences import Told

SECONDS = 20.0
"""For what must come at once, on a busy machine."""
KEY = b"key of this gang"
Dialled = Callable[[Meeting], socket.socket]


@contextmanager
def pair() -> Iterator[tuple[Link, Link]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Link(ours), Link(theirs)


@contextmanager
def meeting(size: int = 2) -> Iterator[Meeting]:
    it = Meeting(size, KEY)
    yield it
    it.close(members=True)


@pytest.fixture
def dialled() -> Iterator[Dialled]:
    with ExitStack() as connections:

        def dial(to: Meeting) -> socket.socket:
            address = ("127.0.0.1", to.server.getsockname()[1])
            return connections.enter_context(socket.create_connection(address, timeout=SECONDS))

        yield dial


def in_time() -> Callable[[], bool]:
    until = time.monotonic() + SECONDS
    return lambda: time.monotonic() < until


def turn_until(it: Meeting, done: Callable[[], object]) -> None:
    go_on = in_time()
    while not done():
        assert go_on()
        it.turn(0.05)


def closed(connection: socket.socket) -> bool:
    """Whether the other side has hung up, whatever it has sent before."""
    connection.settimeout(0.0)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# --- messages -------------------------------------------------------------------------------------------
def test_messages_arrive_whole_and_in_order_however_large() -> None:
    large = os.urandom(5_000_000)
    with pair() as (ours, theirs), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ours.send, "a", large)
        assert theirs.receive(SECONDS) == ("a", large)
        sent.result(SECONDS)
        ours.send("b")
        ours.send("ä", b"c")
        assert [theirs.receive(SECONDS) for _ in range(2)] == [("b", b""), ("ä", b"c")]
        assert theirs.receive(0) is None


def test_what_was_sent_before_the_end_is_received() -> None:
    with pair() as (ours, theirs):
        ours.send("last")
        ours.socket.close()
        assert list(theirs) == [("last", b"")]
        with pytest.raises(OSError):
            theirs.receive(SECONDS)


def test_a_length_beyond_the_limit_ends_the_connection_before_its_bytes_are_read(told: Told) -> None:
    with pair() as (ours, theirs):
        ours.socket.sendall(FRAME.pack(1, channel.MAX_BYTES))
        told(lambda: theirs.receive(SECONDS))


def test_after_half_a_message_no_other_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (ours, theirs):
        ours.socket.settimeout(0.1)  # nobody reads
        with pytest.raises(TimeoutError):
            ours.send("large", b"x" * 10_000_000)
        with pytest.raises(OSError):
            ours.send("next")
        with pytest.raises(ConnectionResetError):
            theirs.receive(SECONDS)


def test_a_file_descriptor_travels_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with pair() as (ours, theirs), (tmp_path / "file").open("rb") as file:
        ours.send("buffer", b"7", descriptor=file.fileno())
        assert theirs.receive(SECONDS) == ("buffer", b"7")
        with os.fdopen(theirs.descriptors.pop(), "rb") as received:
            assert received.read() == b"content"


# --- handshake ------------------------------------------------------------------------------------------
def test_members_are_welcomed_when_all_are_connected(dialled: Dialled) -> None:
    with meeting(3) as it, ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, dialled(it), KEY, 2, in_time())
        turn_until(it, lambda: it.missing == [1])
        second = pool.submit(join, dialled(it), KEY, 1, in_time())
        assert it.wait(in_time())
        assert not first.done() and not second.done()
        it.welcome()
        for number, member in ((2, first), (1, second)):
            link = member.result(SECONDS)
            assert link is not None
            it.links[number].send("order", b"%d" % number)
            assert link.receive(SECONDS) == ("order", b"%d" % number)


@pytest.mark.parametrize(("key", "number"), [(b"another key", 1), (KEY, 0), (KEY, 2), (KEY, 2**32 - 1)])
def test_whoever_lacks_the_key_or_has_no_place_is_refused(dialled: Dialled, key: bytes, number: int) -> None:
    with meeting() as it, ThreadPoolExecutor(1) as pool:
        member = pool.submit(join, dialled(it), key, number, in_time())
        turn_until(it, member.done)
        with pytest.raises(OSError):
            member.result(SECONDS)
        assert it.missing == [1]


def test_what_is_no_leader_is_refused(told: Told) -> None:
    with pair() as (ours, theirs), ThreadPoolExecutor(1) as pool:
        member: Future[Link | None] = pool.submit(join, ours.socket, KEY, 1, in_time())
        assert theirs.receive(SECONDS) is not None
        theirs.send("another protocol")
        told(lambda: member.result(SECONDS))


def test_a_silent_client_delays_nobody(dialled: Dialled) -> None:
    with meeting() as it, dialled(it) as silent, ThreadPoolExecutor(1) as pool:
        it.turn(SECONDS)
        member = pool.submit(join, dialled(it), KEY, 1, in_time())
        assert it.wait(in_time()) and not closed(silent)
        it.welcome()
        assert member.result(SECONDS) is not None


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", FRAME.pack(5, channel.HELLO_BYTES), b"x" * 5000]
)
def test_a_stranger_is_sent_away_before_much_is_read(dialled: Dialled, words: bytes) -> None:
    with meeting() as it, dialled(it) as stranger:
        stranger.sendall(words)
        turn_until(it, lambda: closed(stranger))
        assert it.missing == [1]


def test_a_member_that_leaves_is_waited_for_and_one_that_comes_again_replaces_itself(
    dialled: Dialled,
) -> None:
    with meeting() as it, ThreadPoolExecutor(3) as pool:
        first = dialled(it)
        left = pool.submit(join, first, KEY, 1, in_time())
        turn_until(it, lambda: not it.missing)
        first.shutdown(socket.SHUT_RDWR)
        turn_until(it, lambda: it.missing)
        half_open = pool.submit(join, dialled(it), KEY, 1, in_time())
        turn_until(it, lambda: not it.missing)
        replaced = it.links[1]
        member = pool.submit(join, dialled(it), KEY, 1, in_time())
        turn_until(it, lambda: it.links.get(1) not in (None, replaced))
        it.welcome()
        assert member.result(SECONDS) is not None
        for gone in (left, half_open):
            with pytest.raises(OSError):
                gone.result(SECONDS)


def test_while_no_connection_can_be_accepted_there_is_a_pause_between_two_attempts(
    dialled: Dialled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accept() fails at once where no file descriptor is free, and whoever calls stays in the queue."""

    class Full(socket.socket):
        accepted = 0

        def accept(self) -> tuple[socket.socket, object]:
            self.accepted += 1
            raise OSError(errno.EMFILE, "Too many open files")

    pauses: list[float] = []
    monkeypatch.setattr("spottrain.distributed.channel.time.sleep", pauses.append)
    with meeting() as it, dialled(it), Full(fileno=os.dup(it.server.fileno())) as full:
        monkeypatch.setattr(it, "server", full)
        for _ in range(3):
            it.turn(SECONDS)
        assert full.accepted == len(pauses) == 3 and min(pauses) > 0
        monkeypatch.undo()


# --- child processes ------------------------------------------------------------------------------------
def test_a_child_talks_over_its_link_and_outlives_a_stop_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo.py").write_text(
        "import sys\n"
        "from spottrain.distributed.channel import to_parent\n"
        "link = to_parent(int(sys.argv[1]))\n"
        "for name, body in link:\n"
        "    link.send(name, body)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process, link = start_child("echo")
    process.terminate()
    link.send("word", b"body")
    assert link.receive(SECONDS) == ("word", b"body")
    process.terminate()
    link.send("again")
    assert link.receive(SECONDS) == ("again", b"")
    link.socket.close()
    assert process.wait(SECONDS) == 0
