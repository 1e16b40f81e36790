"""Waits until all pods of a gang are running, before any heavy import.

Nodes, and the DNS name of pod 0, may appear minutes apart. A torch rendezvous would time out meanwhile and
cannot be left on SIGTERM. So pod 0 listens on the port after the rendezvous port, and the other pods connect.
When all are connected, pod 0 tells them to go. A pod that must stop continues at once: the code that follows
ends it with exit code 75, and no work is lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from spottrain.contract import BIND_ADDRESS, Env
from spottrain.core import log, run_config
from spottrain.core.preemption import told_to_stop
from spottrain.distributed.channel import Meeting, join
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.topology import Gang

RETRY_SECONDS: Final = 0.5
"""Seconds between two attempts to reach pod 0, whose DNS name may not exist yet."""
TELL_SECONDS: Final = 60.0
"""Seconds of waiting between two log lines about missing pods."""
DIAL_SECONDS: Final = 10.0


def meet(gang: Gang, env: Mapping[str, str], stopping: Callable[[], bool] | None = None) -> bool:
    """Waits for the other pods. Returns True if all pods of this attempt are connected, False on a stop.

    Raises ConfigurationError if this is pod 0 and it cannot listen.
    """
    stopping = stopping or partial(told_to_stop, run_config.deadline_file(env))
    began = time.monotonic()
    # It keeps other attempts and strangers out; anyone who may read the pods can know it.
    key = f"spottrain {env.get(Env.JOB_UID, '')} {env.get(Env.ATTEMPT, '')}".encode()
    met = _lead(gang, key, stopping) if gang.index == 0 else _follow(gang, key, stopping)
    log.event(
        "rendezvous-complete" if met else "rendezvous-left",
        pods=gang.workers,
        seconds=time.monotonic() - began,
    )
    return met


def _lead(gang: Gang, key: bytes, stopping: Callable[[], bool]) -> bool:
    port = gang.port + 1
    try:
        meeting = Meeting(gang.workers, key, port, gang.bind)
    except OSError as error:
        where = f"{gang.bind}, port {port}" if gang.bind else f"port {port}"
        raise ConfigurationError(
            f"pod 0 cannot listen on {where} for the rendezvous ({error}): another program of this pod uses "
            f"the port, or {BIND_ADDRESS} is not an address of this pod"
        ) from error
    met = meeting.wait(_waiting(gang, stopping, lambda: {"missing": ",".join(map(str, meeting.missing))}))
    if not met:
        meeting.close(members=True)
        return False
    meeting.welcome()
    # It runs until the process ends: a pod that lost its connection before the welcome connects again.
    threading.Thread(target=_serve, args=[meeting], name="spottrain-rendezvous", daemon=True).start()
    return True


def _serve(meeting: Meeting) -> None:
    while True:
        meeting.turn(TELL_SECONDS)


def _follow(gang: Gang, key: bytes, stopping: Callable[[], bool]) -> bool:
    first = (gang.host, gang.port + 1)
    go_on = _waiting(gang, stopping, lambda: {"first": f"{gang.host}:{gang.port + 1}"})
    while go_on():
        with (
            contextlib.suppress(OSError),
            socket.create_connection(first, timeout=DIAL_SECONDS) as connection,
        ):
            if join(connection, key, gang.index, go_on) is not None:
                return True
        time.sleep(RETRY_SECONDS)
    return False


def _waiting(
    gang: Gang, stopping: Callable[[], bool], facts: Callable[[], dict[str, str]]
) -> Callable[[], bool]:
    """Returns a function: whether to wait on. It logs the wait from time to time."""
    told = time.monotonic()

    def go_on() -> bool:
        nonlocal told
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            log.event("rendezvous-waiting", pods=gang.workers, **facts())
        return not stopping()

    return go_on
