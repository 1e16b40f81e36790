"""Connections between the processes of a run: one framing, one handshake, one set of limits.

Ranks and pods talk over TCP, a process and its child over a socket pair. A message is a name and bytes, and
nothing in it is ever executed. Standard library only; no import of torch.

    frame: length of the name (2 bytes), length of the body (4 bytes), name, body

Over TCP a member says hello with its number and a key that all of them know. The leader welcomes them when
all are connected. The other end of a socket pair can only be the child. Nothing is encrypted, as with gloo
and NCCL, and the key keeps out only who cannot read the connection, as that of torch's store.

`multiprocessing.connection` does not serve: on Python 3.11 it authenticates by HMAC-MD5, which FIPS nodes
refuse, and a client that connects and says nothing blocks its `accept` without a limit.
"""

from __future__ import annotations

import hmac
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from spottrain.contract import listening_socket
from spottrain.core.preemption import SIGNALS

SILENT_SECONDS: Final = 25
"""Seconds after which a host counts as gone that acknowledges no keepalive and accepts no bytes."""
LOOK_SECONDS: Final = 0.2
"""Seconds between two checks of a wait's condition."""
RETRY_SECONDS: Final = 0.5
"""Seconds between two attempts to accept when it fails at once."""
MAX_BYTES: Final = 2**30
"""Maximum size of one message; a larger length means that the data is not a frame."""
HELLO_BYTES: Final = 256
"""Maximum size of a message of the handshake."""
FRAME: Final = struct.Struct(">HI")
HELLO: Final = struct.Struct(">I")
"""Number of a member, before the key."""
Message = tuple[str, bytes]


class Link:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, *, most: int = MAX_BYTES) -> None:
        self.socket = connection
        self.most = most
        """Maximum size of a message to receive."""
        self.descriptors: list[int] = []
        """Received file descriptors, in order; whoever uses one takes it off the list."""
        self._turn = threading.Lock()
        self._unread = bytearray()
        if connection.family != socket.AF_UNIX:  # whose ends are both on this machine
            _detect_silence(connection)

    def send(self, name: str, body: bytes = b"", *, descriptor: int | None = None) -> None:
        """Sends a message.

        Raises OSError if the peer is gone, or another host accepts nothing for SILENT_SECONDS. The connection
        has then ended, because half a message may have been sent.
        """
        letters = name.encode()
        data = memoryview(FRAME.pack(len(letters), len(body)) + letters + body)
        with self._turn:
            try:
                if descriptor is not None:
                    data = data[socket.send_fds(self.socket, [data], [descriptor]) :]
                while data:
                    data = data[self.socket.send(data) :]
            except OSError:
                self.shut()
                raise

    def receive(self, seconds: float | None = None) -> Message | None:
        """Returns the next message; None if none is complete in time. Raises OSError at the end."""
        until = None if seconds is None else time.monotonic() + seconds
        while (message := self._next()) is None:
            left = None if until is None else max(0.0, until - time.monotonic()) * 1000
            if self.socket.fileno() < 0:
                raise ConnectionAbortedError("the connection was closed by another thread of this process")
            news = select.poll()
            news.register(self.socket, select.POLLIN)
            if not news.poll(left):
                return None
            data, descriptors, _, _ = socket.recv_fds(self.socket, 2**20, 1)
            if not data:
                raise ConnectionResetError("the connection was closed")
            self.descriptors += descriptors
            self._unread += data
        return message

    def __iter__(self) -> Iterator[Message]:
        """Yields messages until the connection ends."""
        with suppress(OSError):
            while (message := self.receive()) is not None:
                yield message

    def _next(self) -> Message | None:
        if len(self._unread) < FRAME.size:
            return None
        letters, size = FRAME.unpack_from(self._unread)
        if letters + size > self.most:
            raise ConnectionResetError("the data received is not a frame")
        begin, end = FRAME.size + letters, FRAME.size + letters + size
        if len(self._unread) < end:
            return None
        message = self._unread[FRAME.size : begin].decode(errors="replace"), bytes(self._unread[begin:end])
        del self._unread[:end]
        return message

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """Wakes the receiving threads of both sides; each reads what has arrived before it sees the end."""
        with suppress(OSError):
            self.socket.shutdown(how)


def _detect_silence(connection: socket.socket) -> None:
    """Disables Nagle's delay, and enables detection of a host that vanished without closing."""
    connection.settimeout(SILENT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENT_SECONDS - 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", SILENT_SECONDS * 1000),
    ):
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# --- TCP ------------------------------------------------------------------------------------------------
class Meeting:
    """The leader's side: accepts the members 1 to `size` - 1. One thread uses it.

    A client that is silent, slow or no member delays nobody. A member that disconnects is waited for again,
    and one that connects again replaces its earlier connection, which may be half-open.
    """

    def __init__(self, size: int, key: bytes, port: int = 0, host: str = "") -> None:
        """`host`: IP address on which it listens; "" for all. Raises OSError if it cannot."""
        self.server = listening_socket(host, port, backlog=size)
        self.links: dict[int, Link] = {}
        """The connected members by number."""
        self._size = size
        self._key = key
        self._admitted: set[int] = set()
        self._open = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.server, selectors.EVENT_READ)

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(1, self._size)) - self.links.keys())

    @property
    def gone(self) -> list[int]:
        """Members that had connected and are not connected now."""
        return sorted(self._admitted - self.links.keys())

    def wait(self, go_on: Callable[[], bool]) -> bool:
        """Returns whether all members are connected, as soon as they are or `go_on` returns False."""
        while self.missing:
            if not go_on():
                return False
            self.turn(LOOK_SECONDS)
        return True

    def welcome(self) -> None:
        """Welcomes the connected members, and from now on each that connects."""
        self._open = True
        for link in self.links.values():
            _welcome(link)

    def close(self, *, members: bool = False) -> None:
        """Stops listening. Closes the connections of `members` too, if told to."""
        for key in list(self._selector.get_map().values()):
            if members or key.data not in self.links.values():
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def turn(self, seconds: float) -> None:
        """Handles what arrives within `seconds`."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data.socket.fileno() >= 0:  # not dropped a moment ago
                self._hear(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self.server.accept()
        except OSError:  # such as no free file descriptor; accept fails at once
            return time.sleep(RETRY_SECONDS)
        link = Link(connection, most=HELLO_BYTES)
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _hear(self, link: Link) -> None:
        try:
            while (message := link.receive(0)) is not None:
                self._admit(link, message)
        except (OSError, struct.error):
            self._drop(link)

    def _admit(self, link: Link, message: Message) -> None:
        """Raises OSError or struct.error if the client is no member."""
        (number,) = HELLO.unpack(message[1][: HELLO.size])
        known = hmac.compare_digest(message[1][HELLO.size :], self._key)
        if not known or not 0 < number < self._size or link in self.links.values():
            raise ConnectionRefusedError("not a member")
        if number in self.links:
            self._drop(self.links[number])
        self._admitted.add(number)
        self.links[number] = link
        link.most = MAX_BYTES
        if self._open:
            _welcome(link)

    def _drop(self, link: Link) -> None:
        self.links = {number: other for number, other in self.links.items() if other is not link}
        self._selector.unregister(link.socket)
        link.socket.close()


def _welcome(link: Link) -> None:
    with suppress(OSError):  # whoever reads from it notices the end
        link.send("welcome")


def join(connection: socket.socket, key: bytes, number: int, go_on: Callable[[], bool]) -> Link | None:
    """A member's side: returns the link when the leader has welcomed all members.

    Returns None if `go_on` returns False before. Raises OSError if the leader hangs up. The caller closes the
    connection in both cases.
    """
    link = Link(connection, most=HELLO_BYTES)
    link.send("hello", HELLO.pack(number) + key)
    while (message := link.receive(LOOK_SECONDS)) is None:
        if not go_on():
            return None
    if message[0] != "welcome":
        raise ConnectionRefusedError("the peer is not the leader")
    link.most = MAX_BYTES
    return link


# --- child processes ------------------------------------------------------------------------------------
def start_child(
    module: str, *, pass_fds: Sequence[int] = (), stdout: int | None = None, stderr: int | None = None
) -> tuple[subprocess.Popen[bytes], Link]:
    """Starts `python -m module FD`, which calls `to_parent(FD)`. Raises OSError."""
    ours, theirs = socket.socketpair()
    # Blocked during the start: a stop must not end the new process before it ignores the signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *pass_fds],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": _import_path()},
        )
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return process, Link(ours)


def to_parent(descriptor: int) -> Link:
    """In the child: ignores stop signals, which reach the whole process group, and returns the link."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return Link(socket.socket(fileno=descriptor))


def _import_path() -> str:
    """Returns a PYTHONPATH with which the child imports the same package as this process."""
    home = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH", "")
    return f"{home}{os.pathsep}{rest}" if rest else home
