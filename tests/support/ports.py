"""Ports of this machine that nobody uses."""

from __future__ import annotations

import socket

from spottrain.lifecycle.topology import LOOPBACK


def free_port() -> int:
    """One with a free neighbour above it, where the pods of a gang meet."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind((LOOPBACK, 0))
            port: int = one.getsockname()[1]
            try:
                other.bind((LOOPBACK, port + 1))
            except OSError:
                continue
            return port
