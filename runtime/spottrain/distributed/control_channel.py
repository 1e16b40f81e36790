"""Messages between the ranks of a gang outside of collectives, over a TCP connection of each rank to rank 0.

A TCP connection, unlike a torch store, tells both sides at once that a rank is gone: see
docs/adr/0005-agreement.md. Of torch only the default store is used: rank 0 publishes there its port and the
key of the handshake.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from spottrain.core import log
from spottrain.distributed import channel
from spottrain.distributed.channel import LOOK_SECONDS, Link
from spottrain.distributed.world import World
from spottrain.errors import PeerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ADDRESS_KEY: Final = "spottrain/control"
DIAL_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 300.0
"""Seconds for all ranks to connect: the same as torch's rendezvous timeout."""
END_SECONDS: Final = 5.0
"""Seconds for the receiving thread to read what arrived before a connection's end."""
TELL_AFTER_SECONDS: Final = 60.0
"""Seconds of waiting after which the log says for what."""
BYE: Final = "bye"


class ControlChannel:
    """Message channel between the ranks; messages are JSON values, addressed by name. One rank has no links.

    Every message is kept until it is read. Messages of the same name and rank are read in the order of
    sending. A rank that disconnects without `close` is lost: `lost` is set, and waits for that rank end.
    """

    def __init__(
        self,
        world: World,
        links: Mapping[int, Link] | None = None,
        *,
        on_lost: Callable[[PeerLost], None] = lambda lost: None,
    ) -> None:
        self.world = world
        self.lost: PeerLost | None = None
        """The first rank that disconnected without `close`."""
        self._links = dict(links or {})
        self._open = set(self._links)
        self._on_lost = on_lost
        self._closing = False
        self._arrived = threading.Condition()
        self._inbox: dict[tuple[str, int], deque[Any]] = {}
        self._receiver = threading.Thread(target=self._listen, name="spottrain-control", daemon=True)
        if self._links:
            # A forked loader worker would keep the connections open after this process has died.
            os.register_at_fork(after_in_child=self._close_links)
            self._receiver.start()

    # --- rank 0 to all ------------------------------------------------------------------------------
    def broadcast(self, name: str, facts: Any) -> None:
        """Rank 0: sends to all other ranks, without waiting for them. Raises PeerLost."""
        body = json.dumps(facts).encode()
        for rank in sorted(self._open):
            try:
                self._links[rank].send(name, body)
            except OSError:
                self._await_end(rank)
        if self.lost is not None:
            raise self.lost

    def receive(self, name: str, timeout: float = math.inf) -> Any:
        """Other ranks: returns rank 0's next message of this name; None if none arrives in time.

        Raises PeerLost if rank 0 is gone and all its messages of this name have been read.
        """
        key = (name, 0)
        with self._arrived:
            self._wait(lambda: key in self._inbox or 0 not in self._open, timeout, name)
            body = self._pop(key)
            if body is not None or 0 in self._open:
                return body
        raise self.lost or _ended()

    def has_message(self, name: str) -> bool:
        """Other ranks: whether `receive` would return or raise at once."""
        with self._arrived:
            return (name, 0) in self._inbox or 0 not in self._open

    # --- all ranks to rank 0 ------------------------------------------------------------------------
    def send_to_leader(self, name: str, facts: Any) -> None:
        """Any rank: sends its part of `name` to rank 0. Raises PeerLost."""
        body = json.dumps(facts).encode()
        if self.world.first:
            self._keep(name, 0, body)
            return
        try:
            self._links[0].send(name, body)
        except OSError as error:
            self._await_end(0)
            raise self.lost or _ended() from error

    def collect(self, name: str, timeout: float, give_up: Callable[[], bool] = lambda: False) -> list[Any]:
        """Rank 0: returns all parts of `name`, by rank; None for ranks that are gone or not in time."""
        ranks = range(self.world.size)

        def complete() -> bool:
            return give_up() or all((name, r) in self._inbox or (r and r not in self._open) for r in ranks)

        with self._arrived:
            self._wait(complete, timeout, name)
            return [self._pop((name, rank)) for rank in ranks]

    def all_gather(self, name: str, facts: Any) -> list[Any]:
        """Any rank: waits for all ranks, and returns their parts of `name`, by rank. Raises PeerLost."""
        self.send_to_leader(name, facts)
        if not self.world.first:
            return list(self.receive(name))
        parts = self.collect(name, math.inf)
        if self.lost is not None:
            raise self.lost
        if None in parts:
            raise PeerLost("another rank has ended its run; its log says why")
        self.broadcast(name, parts)
        return parts

    def take(self, name: str) -> list[tuple[int, Any]]:
        """Rank 0: returns the messages of this name that have arrived, each with its rank. Does not wait."""
        with self._arrived:
            ranks = [rank for kind, rank in self._inbox if kind == name]
            return [(rank, body) for rank in ranks for body in self._inbox.pop((name, rank))]

    def await_loss(self, seconds: float) -> bool:
        """Returns whether a rank is lost, or gets lost within `seconds`."""
        with self._arrived:
            self._wait(lambda: self.lost is not None, seconds, "loss")
            return self.lost is not None

    @property
    def gone(self) -> list[int]:
        """Ranks that have closed or are lost. Rank 0 sees all of them, the others see only rank 0."""
        return sorted(self._links.keys() - self._open)

    def close(self, timeout: float = 10.0) -> None:
        """Closes the channel. Rank 0 closes last: it waits for the other ranks, at most `timeout` seconds."""
        if self._closing:
            return
        if self.world.first:
            with self._arrived:
                self._wait(lambda: not self._open, timeout, BYE)
        self._closing = True
        for rank in sorted(self._open):
            with contextlib.suppress(OSError):
                self._links[rank].send(BYE)
            self._links[rank].shut(socket.SHUT_WR)
        if self._links and self._receiver is not threading.current_thread():
            self._receiver.join(timeout=min(timeout, 2.0))
        self._close_links()

    # --- inside -------------------------------------------------------------------------------------
    def _close_links(self) -> None:
        """Takes no lock: in a forked child a thread of the parent may have held it."""
        for link in self._links.values():
            link.socket.close()

    def _wait(self, done: Callable[[], Any], timeout: float, name: str) -> None:
        """Waits with `_arrived` held. In slices, so that the log can say what it waits for."""
        began = time.monotonic()
        told = False
        while not done():
            waited = time.monotonic() - began
            if waited >= timeout:
                return
            if waited >= TELL_AFTER_SECONDS and not told:
                told = True
                # Not `event`: a full pipe must not keep the receiving thread from the lock that is held here.
                log.unhindered("waiting-for-rank", rank=self.world.rank, what=name, seconds=waited)
            self._arrived.wait(min(LOOK_SECONDS, timeout - waited))

    def _pop(self, key: tuple[str, int]) -> Any:
        queue = self._inbox.get(key)
        if queue is None:
            return None
        body = queue.popleft()
        if not queue:
            del self._inbox[key]
        return body

    def _keep(self, name: str, rank: int, body: bytes) -> None:
        """Stores a message for its reader. Raises ValueError if it is not JSON."""
        facts = json.loads(body)
        with self._arrived:
            self._inbox.setdefault((name, rank), deque()).append(facts)
            self._arrived.notify_all()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                if self._take(rank):  # what came right behind the welcome
                    selector.register(link.socket, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._take(key.data):
                        selector.unregister(key.fileobj)

    def _take(self, rank: int) -> bool:
        """Handles what has arrived; returns False at the connection's end."""
        try:
            while (message := self._links[rank].receive(0)) is not None:
                if message[0] == BYE:
                    with self._arrived:
                        self._open.discard(rank)
                        self._arrived.notify_all()
                else:
                    self._keep(message[0], rank, message[1])
        except (OSError, ValueError) as error:
            self._note_end(rank, error)
            return False
        return True

    def _await_end(self, rank: int) -> None:
        """After a failed send: waits until the receiving thread has read the rest and sees the end."""
        with self._arrived:
            self._wait(lambda: rank not in self._open, END_SECONDS, BYE)

    def _note_end(self, rank: int, error: Exception) -> None:
        with self._arrived:
            known = rank not in self._open
            self._open.discard(rank)
            fresh = not (known or self.lost or self._closing)
            if fresh:
                self.lost = PeerLost(
                    f"rank {rank} is gone: its connection to rank {self.world.rank} broke ({error}). Its own "
                    "log says why; the next attempt goes on from the last checkpoint"
                )
            self._arrived.notify_all()
        self._links[rank].shut()
        if fresh and self.lost is not None:
            self._on_lost(self.lost)


def _ended() -> PeerLost:
    return PeerLost("rank 0 has ended its run, so this rank cannot go on; rank 0's log says why")


def connect(
    world: World,
    *,
    host: str,
    bind: str = "",
    store: Store | None = None,
    timeout: float = CONNECT_SECONDS,
    on_lost: Callable[[PeerLost], None] = lambda lost: None,
) -> ControlChannel:
    """Connects all ranks, if there are several, once torch's default process group exists. All must call it.

    `host`: address of rank 0 as seen from here (MASTER_ADDR). `bind`: IP address on which rank 0 listens,
    which the others then dial in place of `host`; "" for all. `on_lost` is called once, on the receiving
    thread: the main thread may be stuck in a collective that the lost rank will never join. `store`: None for
    the store of torch's default process group. Raises PeerLost if a rank does not connect within `timeout`
    seconds.
    """
    if not world.distributed:
        return ControlChannel(world)
    if store is None:
        from torch.distributed import distributed_c10d

        store = distributed_c10d._get_default_store()
    links = _lead(world, bind, store, timeout) if world.first else {0: _follow(world, host, store, timeout)}
    return ControlChannel(world, links, on_lost=on_lost)


def _lead(world: World, bind: str, store: Store, timeout: float) -> dict[int, Link]:
    until = time.monotonic() + timeout
    token = secrets.token_hex(32)
    meeting = channel.Meeting(world.size, token.encode(), host=bind)
    all_came = False
    try:
        at = {"host": bind, "port": meeting.server.getsockname()[1]}
        store.set(ADDRESS_KEY, json.dumps({**at, "token": token}))
        all_came = meeting.wait(lambda: time.monotonic() < until and not meeting.gone)
        if all_came:
            # Deleted before any rank is welcomed, so the next `connect` of the same processes cannot read it.
            store.delete_key(ADDRESS_KEY)
            meeting.welcome()
            return meeting.links
    finally:
        gone = meeting.gone
        meeting.close(members=not all_came)
    if gone:
        raise PeerLost(f"rank {gone[0]} had connected to rank 0 and is gone; its own log says why")
    raise PeerLost(
        f"of {world.size} ranks these did not connect to rank 0 within {timeout:.0f} s: "
        f"{', '.join(map(str, meeting.missing))}. Their logs say why; between pods, a NetworkPolicy must let "
        "all ports through, as NCCL and gloo need too"
    )


def _follow(world: World, host: str, store: Store, timeout: float) -> Link:
    until = time.monotonic() + timeout
    address = json.loads(store.get(ADDRESS_KEY))
    host, port = address.get("host") or host, int(address["port"])
    try:  # rank 0 is listening already, so a failure does not go away
        connection = socket.create_connection((host, port), timeout=min(timeout, DIAL_SECONDS))
    except OSError as error:
        raise PeerLost(
            f"rank 0 could not be reached at {host}:{port} ({error}): it is gone, or MASTER_ADDR is not the "
            "address of its host, or a NetworkPolicy closes its port"
        ) from error
    try:
        key = address["token"].encode()
        link = channel.join(connection, key, world.rank, lambda: time.monotonic() < until)
        if link is None:
            raise TimeoutError("it has not answered in time")
        return link
    except OSError as error:
        connection.close()
        raise PeerLost(
            f"rank {world.rank} had reached rank 0, which then hung up ({error}): either rank 0 is gone, or "
            f"other ranks did not connect within {timeout:.0f} s. Rank 0's log says which"
        ) from error
