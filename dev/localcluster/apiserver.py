"""etcd and kube-apiserver alone, for tests of the API level.

Needs no root and no namespaces; ready in seconds.

    with api_server() as server:
        subprocess.run(["kubectl", "--kubeconfig", server.kubeconfig, ...])

There is no controller manager: nothing makes service accounts or their tokens, and nothing runs pods. Use the
admin kubeconfig (and impersonation).
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from localcluster import binaries, controlplane, layout
from localcluster.controlplane import Place
from localcluster.kubeapi import KubeApi
from localcluster.layout import Paths
from localcluster.pki import new_authority
from localcluster.processes import end_with_parent
from localcluster.shell import start_daemon, wait_until

_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiServer:
    """A running API server."""

    url: str
    kubeconfig: Path
    audit_log: Path
    logs: Path
    etcd: str
    """URL of etcd, whose /metrics say what it writes."""


@contextmanager
def api_server(
    paths: Paths | None = None, *, programs: Path | None = None, flags: Sequence[str] = ()
) -> Iterator[ApiServer]:
    """Starts both, gives the server, and ends both, also when the body fails.

    `programs`: a folder with others than the pinned ones; `flags`: more of them for kube-apiserver.
    """
    paths = paths or layout.default_paths()
    ensure_programs(paths)
    with tempfile.TemporaryDirectory(prefix="spottrain-api-") as name:
        place = _place(programs or paths.bin, Path(name))
        with running(controlplane.etcd(place), place.folder / "etcd.log"):
            command = [*controlplane.apiserver(place), "--endpoint-reconciler-type=none", *flags]
            with running(command, place.folder / "apiserver.log") as process:
                _wait_ready(place, process)
                yield _describe(place)


def ensure_programs(paths: Paths, names: frozenset[str] = binaries.API_PROGRAMS) -> None:
    """Downloads or builds what is missing, once."""
    binaries.ensure(paths, names)


def _place(programs: Path, folder: Path) -> Place:
    api, client, peer = free_ports(3)
    authority = new_authority(folder / "pki")
    server = f"https://{_ADDRESS}:{api}"
    addresses = [f"IP:{_ADDRESS}", f"IP:{layout.SERVICE_ADDRESS}", "DNS:localhost"]
    controlplane.issue_all(authority, server, addresses)
    authority.kubeconfig(folder / "kubeconfig", server=server, name="admin")
    return Place(
        bin=programs,
        folder=folder,
        authority=authority,
        address=_ADDRESS,
        api_port=api,
        etcd_port=client,
        etcd_peer_port=peer,
        audit_log=folder / "audit.log",
    )


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((_ADDRESS, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def running(command: list[str | Path], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that ends with the body, and with this process should that be killed."""
    process = start_daemon(command, log=log, preexec=end_with_parent)
    try:
        yield process
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)


def _wait_ready(place: Place, process: subprocess.Popen[bytes]) -> None:
    api = KubeApi(authority=place.authority, host=_ADDRESS, port=place.api_port)
    log = place.folder / "apiserver.log"
    wait_until("the API server", api.is_ready, seconds=60, log=log, process=process)


def _describe(place: Place) -> ApiServer:
    return ApiServer(
        url=f"https://{place.address}:{place.api_port}",
        kubeconfig=place.folder / "kubeconfig",
        audit_log=place.audit_log,
        logs=place.folder,
        etcd=f"http://127.0.0.1:{place.etcd_port}",
    )
