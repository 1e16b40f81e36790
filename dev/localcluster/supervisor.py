"""The first process of the cluster: it starts everything else, answers the socket, and its end ends it all.

Started by host.py inside new process, network and mount namespaces. One thread answers each call; a node's
state is guarded by that node's lock.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from localcluster import control, controlplane, layout, network
from localcluster.controlplane import Place
from localcluster.kubeapi import KubeApi
from localcluster.kubelet_machine import KubeletMachine
from localcluster.layout import Paths
from localcluster.pki import Authority, new_authority
from localcluster.shell import read_json, start_daemon, tail, wait_until, write_json

SERVER = f"https://{layout.CONTROL_ADDRESS}:{layout.API_PORT}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Daemon:
    """A program of the control plane."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


def main(words: list[str]) -> int:
    paths = Paths(state=Path(words[0]))
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process of a namespace must ask for these
        signal.signal(number, lambda *_: os._exit(0))
    try:
        _run(paths, dns="--dns" in words)
    except Exception as error:  # the host side waits for this file or for readiness
        traceback.print_exc()
        write_json(paths.run / "failed.json", {"error": str(error)})
        return 1
    return 0


def _run(paths: Paths, *, dns: bool) -> None:
    network.build_control_plane()
    authority = _identities(paths)
    api = KubeApi(authority=authority)
    daemons = _start_control_plane(paths, authority, api, dns=dns)
    machines = {node.name: KubeletMachine(node=node, paths=paths, api=api) for node in layout.NODES}
    _all_at_once([machine.restore for machine in machines.values()])
    write_json(paths.run / "ready.json", {"since": time.time()})
    control.serve(paths.socket, machines)
    _watch(daemons)


def _identities(paths: Paths) -> Authority:
    authority = new_authority(paths.pki)
    addresses = (layout.CONTROL_ADDRESS, layout.SERVICE_ADDRESS, "127.0.0.1")
    names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
    controlplane.issue_all(authority, SERVER, [*(f"IP:{a}" for a in addresses), *(f"DNS:{n}" for n in names)])
    for node in layout.NODES:
        authority.issue(node.name, user=f"system:node:{node.name}", group="system:nodes")
    authority.kubeconfig(paths.kubeconfig, server=SERVER, name="admin")
    authority.issue("coredns", user="coredns", group="system:masters")  # no chart here that makes its role
    authority.kubeconfig(paths.pki / "coredns.kubeconfig", server=SERVER, name="coredns")
    access = {"access_key": "spottrain", "secret_key": secrets.token_hex(20), "region": layout.S3_REGION}
    endpoint = f"http://{layout.CONTROL_ADDRESS}:{layout.S3_PORT}"
    write_json(paths.s3_credentials, {"endpoint": endpoint, **access}, mode=0o600)
    return authority


def _start_control_plane(paths: Paths, authority: Authority, api: KubeApi, *, dns: bool) -> list[Daemon]:
    place = Place(
        bin=paths.bin,
        folder=paths.run,
        authority=authority,
        address=layout.CONTROL_ADDRESS,
        api_port=layout.API_PORT,
        etcd_port=2379,
        etcd_peer_port=2380,
        audit_log=paths.audit_log,
    )
    (paths.run / "s3").mkdir()
    daemons = [
        _daemon(paths, "etcd", controlplane.etcd(place)),
        _daemon(
            paths, "versitygw", controlplane.s3_server(place, paths.run / "s3"), env=_s3_environment(paths)
        ),
        _daemon(paths, "kube-apiserver", controlplane.apiserver(place)),
    ]
    server = daemons[-1]
    wait_until("the API server", api.is_ready, seconds=60, log=server.log, process=server.process)
    daemons += [
        _daemon(paths, "kube-controller-manager", controlplane.controller_manager(place)),
        _daemon(paths, "kube-scheduler", controlplane.scheduler(place)),
    ]
    return daemons + ([_daemon(paths, "coredns", controlplane.dns_server(paths))] if dns else [])


def _s3_environment(paths: Paths) -> dict[str, str]:
    access = read_json(paths.s3_credentials)
    return {"ROOT_ACCESS_KEY": access["access_key"], "ROOT_SECRET_KEY": access["secret_key"]}


def _daemon(paths: Paths, name: str, command: list[str | Path], env: dict[str, str] | None = None) -> Daemon:
    log = paths.logs / f"{name}.log"
    return Daemon(name=name, process=start_daemon(command, log=log, env=env), log=log)


def _all_at_once(calls: list[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def _watch(daemons: list[Daemon]) -> None:
    """Ends, and with it the cluster, when a program of the control plane does: half a cluster is no help."""
    while True:
        for daemon in daemons:
            if daemon.process.poll() is not None:
                raise RuntimeError(
                    f"{daemon.name} ended with {daemon.process.returncode}; its log ends:\n{tail(daemon.log)}"
                )
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
