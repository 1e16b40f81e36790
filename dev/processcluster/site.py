"""Where one cluster listens and keeps its files. Each has a network of loopback addresses of its own.

127.77.N.1 is the control plane, 127.77.N.11 and up are the nodes, 127.(100 + N).x.y the pods. Whoever
listens on port LOCK_PORT of the control plane's address owns network N, whichever user or folder it belongs
to; the kernel gives it back with the process.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from localcluster import layout
from localcluster.layout import Paths
from localcluster.shell import ClusterError

LOCK_PORT: Final = 6440
NETWORKS: Final = range(1, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessNode(layout.Node):
    """A node of network `network`."""

    network: int

    @property
    def address(self) -> str:
        return f"127.77.{self.network}.{10 + self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One cluster's folder, network and lock."""

    folder: Path
    network: int
    lock: socket.socket

    @classmethod
    def claim(cls, folder: Path) -> Site:
        """Takes the first network that nobody has. Raises ClusterError where there is none."""
        refused = ""
        for network in NETWORKS:
            lock = socket.socket()
            lock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                lock.bind((_control(network), LOCK_PORT))
                lock.listen(1)
                _must_be_free(network)
            except OSError as error:
                lock.close()
                refused = f"{_control(network)}: {error}"
                continue
            return cls(folder=folder, network=network, lock=lock)
        raise ClusterError(
            f"no network 127.77.N.0 of this machine is free ({refused}); `make cluster-down` ends a cluster"
        )

    @property
    def paths(self) -> Paths:
        return Paths(state=self.folder)

    @property
    def address(self) -> str:
        return _control(self.network)

    @property
    def nodes(self) -> tuple[ProcessNode, ...]:
        return tuple(ProcessNode(name=n.name, index=n.index, network=self.network) for n in layout.NODES)

    def pod_addresses(self) -> Callable[[], str]:
        """A function that gives a new address at each call, and begins again after 60,000."""
        second = 100 + self.network if self.network <= 100 else self.network
        numbers = itertools.cycle(range(250 * 250))

        def new() -> str:
            number = next(numbers)
            return f"127.{second}.{number // 250}.{number % 250 + 1}"

        return new


def _control(network: int) -> str:
    return f"127.77.{network}.1"


def _must_be_free(network: int) -> None:
    """Raises OSError where another program listens on one of the ports, on all addresses for example."""
    for port in (layout.API_PORT, layout.S3_PORT, 2379, 2380):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_control(network), port))
