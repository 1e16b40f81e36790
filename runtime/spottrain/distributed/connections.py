"""TCP connections of a gang's ranks to rank 0: handshake, frames and keepalive."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from spottrain.distributed.world import World
from spottrain.errors import PeerLost

SILENT_SECONDS: Final = 25
"""Seconds after which a host counts as gone that acknowledges no keepalive and accepts no bytes."""
HELLO_SECONDS: Final = 5.0
DIAL_SECONDS: Final = 20.0
ADDRESS_KEY: Final = "spottrain/control"
FRAME: Final = struct.Struct(">HI")
"""Length of the name and length of the body, in bytes."""
MOST_BYTES: Final = 2**30
"""Maximum body of one frame; a larger length means that the data is not a frame."""
WELCOME: Final = "welcome"


class AddressBook(Protocol):
    """The part of a torch Store that is needed here. Every rank can reach it."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


def torch_book() -> AddressBook:
    """Returns the store of torch's default process group, which must be initialized."""
    from torch.distributed import distributed_c10d

    book: AddressBook = distributed_c10d._get_default_store()
    return book


class Link:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.socket = connection
        self._turn = threading.Lock()
        self._unread = bytearray()
        _tune(connection)

    def send(self, name: str, body: bytes = b"") -> None:
        """Sends a frame. Raises OSError if the peer is gone, or accepts nothing for SILENT_SECONDS."""
        letters = name.encode()
        with self._turn:
            self.socket.sendall(FRAME.pack(len(letters), len(body)) + letters + body)

    def receive(self) -> list[tuple[str, bytes]]:
        """Blocks for data and returns the complete frames so far. Raises OSError at the connection's end."""
        news = self.socket.recv(2**20)
        if not news:
            raise ConnectionResetError("the connection was closed")
        self._unread += news
        return list(self._frames())

    def _frames(self) -> Iterable[tuple[str, bytes]]:
        while len(self._unread) >= FRAME.size:
            letters, size = FRAME.unpack_from(self._unread)
            if size > MOST_BYTES:
                raise ConnectionResetError("what came is no frame of ours")
            end = FRAME.size + letters + size
            if len(self._unread) < end:
                return
            name = self._unread[FRAME.size : FRAME.size + letters].decode()
            body = bytes(self._unread[FRAME.size + letters : end])
            del self._unread[:end]
            yield name, body

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """Wakes the receiving threads of both sides; each reads what has arrived before it sees the end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(how)


def welcome_all(world: World, book: AddressBook, timeout: float) -> list[Link]:
    """Rank 0: returns a link to each other rank, once all have connected. Raises PeerLost."""
    token = secrets.token_hex(16)
    with _server(world) as server:
        book.set(ADDRESS_KEY, json.dumps({"port": server.getsockname()[1], "token": token}))
        links = _accept_all(server, world, token, timeout)
    # Deleted before any rank is welcomed, so the next `connect` of the same processes cannot read it.
    book.delete_key(ADDRESS_KEY)
    for link in links:
        with contextlib.suppress(OSError):  # the receiving thread will detect it
            link.send(WELCOME)
    return links


def _server(world: World) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=world.size)


def _accept_all(server: socket.socket, world: World, token: str, timeout: float) -> list[Link]:
    until = time.monotonic() + timeout
    links: dict[int, Link] = {}
    while len(links) < world.size - 1:
        server.settimeout(max(until - time.monotonic(), 0.01))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            for link in links.values():
                link.socket.close()
            raise _did_not_come(world, links, timeout) from None
        except OSError as error:  # for example no free file descriptor
            if time.monotonic() >= until:
                raise _did_not_come(world, links, timeout) from error
            time.sleep(0.2)
            continue
        rank = _rank_of(connection, token)
        if rank is None or not 0 < rank < world.size or rank in links:
            connection.close()  # not of this gang: a port scan, or a rank of another job
        else:
            links[rank] = Link(rank, connection)
    return list(links.values())


def _did_not_come(world: World, links: Mapping[int, Link], timeout: float) -> PeerLost:
    missing = ", ".join(str(rank) for rank in range(1, world.size) if rank not in links)
    return PeerLost(
        f"of {world.size} ranks these did not connect to rank 0 within {timeout:.0f} s: {missing}. Their "
        "logs say why; between pods, a NetworkPolicy must let all ports through, as NCCL and gloo need too"
    )


def _rank_of(connection: socket.socket, token: str) -> int | None:
    """Returns the rank of the connecting peer; None if it is not of this gang."""
    connection.settimeout(HELLO_SECONDS)
    try:
        with connection.makefile("rb") as reader:
            hello = json.loads(reader.readline(4096))
        return int(hello["rank"]) if hmac.compare_digest(str(hello["token"]), token) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def call(world: World, host: str, book: AddressBook, timeout: float) -> Link:
    """Other ranks: returns a link to rank 0, once all have connected to it. Raises PeerLost."""
    address = json.loads(book.get(ADDRESS_KEY))
    connection = _dial(host, int(address["port"]), min(timeout, DIAL_SECONDS))
    try:
        hello = json.dumps({"rank": world.rank, "token": address["token"]})
        connection.sendall(hello.encode() + b"\n")
        connection.settimeout(timeout)
        _read_welcome(connection)
    except OSError as error:
        connection.close()
        raise PeerLost(
            f"rank {world.rank} had reached rank 0, which then hung up ({error}): either rank 0 is gone, or "
            f"other ranks did not come within {timeout:.0f} s. Rank 0's log says which"
        ) from error
    return Link(0, connection)


def _dial(host: str, port: int, patience: float) -> socket.socket:
    """Retries for a moment only: rank 0 is already listening, so a longer failure will not go away."""
    until = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(until - time.monotonic(), 1))
        except OSError as error:
            if time.monotonic() >= until:
                raise PeerLost(
                    f"rank 0 could not be reached at {host}:{port} ({error}): it is gone, or MASTER_ADDR "
                    "is not its host, or a NetworkPolicy shuts its port"
                ) from error
        time.sleep(0.2)


def _read_welcome(connection: socket.socket) -> None:
    """Reads exactly the welcome frame; the bytes after it are for the receiving thread."""
    size = FRAME.size + len(WELCOME)
    while size:
        got = connection.recv(size)
        if not got:
            raise ConnectionResetError("rank 0 hung up")
        size -= len(got)


def _tune(connection: socket.socket) -> None:
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
