"""Waits until all pods of a gang are running, before any heavy import.

Nodes, and the DNS name of pod 0, may appear minutes apart. A torch rendezvous would time out meanwhile and
cannot be left on SIGTERM. So pod 0 listens on the port after the rendezvous port, and each other pod connects
and identifies itself. When all are connected, pod 0 tells them to go. A pod that must stop continues at once:
the code that follows ends it with exit code 75, and no work is lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from spottrain.contract import Env
from spottrain.core import log, run_config
from spottrain.core.preemption import told_to_stop
from spottrain.lifecycle.topology import Gang

LOOK_SECONDS: Final = 0.2
"""Seconds between two checks for a stop."""
RETRY_SECONDS: Final = 0.5
"""Seconds between two attempts to reach pod 0, whose DNS name may not exist yet."""
TELL_SECONDS: Final = 60.0
"""Seconds of waiting between two log lines about missing pods."""
PATIENCE: Final = 10.0
"""Seconds for a connection to identify itself."""
GO: Final = b"go\n"


def meet(gang: Gang, env: Mapping[str, str], stopping: Callable[[], bool] | None = None) -> bool:
    """Waits for the other pods. Returns True if all pods of this attempt are connected, False on a stop."""
    stopping = stopping or partial(told_to_stop, run_config.deadline_file(env))
    began = time.monotonic()
    name = f"spottrain {env.get(Env.JOB_UID, '')} {env.get(Env.ATTEMPT, '')}".encode()
    come = _lead(gang, name, stopping) if gang.index == 0 else _follow(gang, name, stopping)
    log.event("gang-met" if come else "gang-left", pods=gang.workers, seconds=time.monotonic() - began)
    return come


# --- pod 0 ----------------------------------------------------------------------------------------------
def _lead(gang: Gang, name: bytes, stopping: Callable[[], bool]) -> bool:
    there = _There(gang.workers, name)
    server = _listen(gang.port + 1, gang.workers)
    # It runs until the process ends: a pod that lost its connection before GO connects again.
    threading.Thread(target=_welcome, args=[server, there], name="spottrain-rendezvous", daemon=True).start()
    told = time.monotonic()
    while not there.all_came.wait(LOOK_SECONDS):
        if stopping():
            return False
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            log.event("gang-waits", pods=gang.workers, missing=",".join(map(str, there.missing)))
    return True


def _listen(port: int, backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)


class _There:
    def __init__(self, workers: int, name: bytes) -> None:
        self.name = name
        self.all_came = threading.Event()
        self._workers = workers
        self._came = {0}
        self._lock = threading.Lock()

    @property
    def missing(self) -> list[int]:
        with self._lock:
            return [index for index in range(self._workers) if index not in self._came]

    def note(self, index: int, *, here: bool) -> None:
        with self._lock:
            if here and 0 < index < self._workers:
                self._came.add(index)
            elif not self.all_came.is_set():
                self._came.discard(index)
            if len(self._came) == self._workers:
                self.all_came.set()


def _welcome(server: socket.socket, there: _There) -> None:
    told = ""
    while True:
        try:
            connection, _ = server.accept()
        except OSError as error:  # such as no free file descriptor; accept fails at once
            if str(error) != told:
                told = str(error)
                log.event("accept-failed", error=told, next="it is tried again")
            time.sleep(RETRY_SECONDS)
            continue
        threading.Thread(target=_host, args=[connection, there], daemon=True).start()


def _host(connection: socket.socket, there: _There) -> None:
    """Serves one pod's connection. The pod counts as present while it is connected, until all pods are."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(PATIENCE)
        words, _, index = _line(connection).rpartition(b" ")
        if words != there.name or not index.isdigit():
            return  # of another attempt, or not one of our pods
        there.note(int(index), here=True)
        while not there.all_came.wait(LOOK_SECONDS):
            if _gone(connection):
                return there.note(int(index), here=False)
        connection.sendall(GO)


def _gone(connection: socket.socket) -> bool:
    """Whether the peer has closed the connection; it sends no more data before that."""
    connection.settimeout(0.0)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(PATIENCE)


# --- the others -----------------------------------------------------------------------------------------
def _follow(gang: Gang, name: bytes, stopping: Callable[[], bool]) -> bool:
    told = time.monotonic()
    while not stopping():
        with contextlib.suppress(OSError):
            if _heard(gang, name, stopping):
                return True
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            log.event("gang-waits", pods=gang.workers, first=f"{gang.host}:{gang.port + 1}")
        time.sleep(RETRY_SECONDS)
    return False


def _heard(gang: Gang, name: bytes, stopping: Callable[[], bool]) -> bool:
    with socket.create_connection((gang.host, gang.port + 1), timeout=PATIENCE) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a vanished node of pod 0
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.sendall(b"%s %d\n" % (name, gang.index))
        connection.settimeout(LOOK_SECONDS)
        heard = b""
        while not stopping():
            try:
                part = connection.recv(len(GO))
            except TimeoutError:
                continue
            heard += part
            if heard == GO:
                return True
            if not part:
                return False
    return False


def _line(connection: socket.socket) -> bytes:
    """Returns one line without its end. Raises OSError if none arrives."""
    text = b""
    while not text.endswith(b"\n"):
        part = connection.recv(256)
        if not part or len(text) > 1024:
            raise ConnectionError("no line of ours")
        text += part
    return text[:-1]
