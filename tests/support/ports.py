"""Ports of this machine that nobody uses."""

from __future__ import annotations

import random
import socket
from typing import Final

from spottrain.lifecycle.topology import LOOPBACK

_BELOW_EPHEMERAL: Final = range(15_000, 32_000)
"""The kernel gives none of these to a connection, so one that is free now is free a moment later."""


def free_port() -> int:
    """One with a free neighbour above it, where the pods of a gang meet."""
    while True:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        try:
            with socket.socket() as one, socket.socket() as other:
                one.bind((LOOPBACK, port))
                other.bind((LOOPBACK, port + 1))
        except OSError:
            continue
        return port
