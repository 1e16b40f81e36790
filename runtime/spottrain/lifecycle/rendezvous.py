"""All pods of a gang meet before anything heavy is imported. Called by `__main__`, where there are several.

Nodes come minutes apart, and the name of pod 0 with its node; a rendezvous of torch's would give up meanwhile
and could not be left at a SIGTERM. So pod 0 listens on the port after the rendezvous, each other pod says who
it is, and when all are there they are told to go. Whoever is told to stop goes on at once: what follows ends
it with 75, and nothing was lost.
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
"""How often a wait looks whether it should go on."""
RETRY_SECONDS: Final = 0.5
"""Between two tries to reach pod 0, whose name may not exist yet."""
TELL_SECONDS: Final = 60.0
"""Of waiting, after which the log says for whom, again and again."""
PATIENCE: Final = 10.0
"""For a connection to say who it is."""
GO: Final = b"go\n"


def meet(gang: Gang, env: Mapping[str, str], stopping: Callable[[], bool] | None = None) -> bool:
    """Returns when all pods of this attempt are there (True), or when this one is told to stop (False)."""
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
    # To the end of the process: a pod that lost its connection before it heard the word asks again.
    threading.Thread(target=_welcome, args=[server, there], name="spottrain-muster", daemon=True).start()
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
        except OSError as error:  # no file descriptor is free, say: who calls waits, and accept fails at once
            if str(error) != told:
                told = str(error)
                log.event("accept-failed", error=told, next="it is tried again")
            time.sleep(RETRY_SECONDS)
            continue
        threading.Thread(target=_host, args=[connection, there], daemon=True).start()


def _host(connection: socket.socket, there: _There) -> None:
    """One pod's connection: it counts as there for as long as it stands, until all are."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(PATIENCE)
        words, _, index = _line(connection).rpartition(b" ")
        if words != there.name or not index.isdigit():
            return  # of another attempt, or no pod of ours
        there.note(int(index), here=True)
        while not there.all_came.wait(LOOK_SECONDS):
            if _gone(connection):
                return there.note(int(index), here=False)
        connection.sendall(GO)


def _gone(connection: socket.socket) -> bool:
    """Whether the other side has closed; it says nothing more before that."""
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
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # pod 0's node may vanish
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
    """Without its end; OSError where none comes."""
    text = b""
    while not text.endswith(b"\n"):
        part = connection.recv(256)
        if not part or len(text) > 1024:
            raise ConnectionError("no line of ours")
        text += part
    return text[:-1]
