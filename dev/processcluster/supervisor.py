"""The process that owns a cluster: it starts the control plane and plays the nodes, and its end ends them
all.

    python -m processcluster.supervisor FOLDER [--until-stdin-closes]

SIGTERM ends it, and with --until-stdin-closes so does the end of whoever holds the other end of its standard
input, however that ended. A SIGKILL of this process ends its programs by the kernel's hand; what those had
started is ended by the next start (`lifecycle.sweep`).
"""

from __future__ import annotations

import os
import secrets
import signal
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from localcluster import control, controlplane, layout
from localcluster.controlplane import Place
from localcluster.kubeapi import KubeApi
from localcluster.pki import Authority, new_authority
from localcluster.processes import end_with_parent
from localcluster.shell import read_json, start_daemon, tail, wait_until, write_json

from processcluster import marks
from processcluster.kube import Kube
from processcluster.machine import ProcessMachine
from processcluster.names import Names
from processcluster.site import Site

READY: Final = "ready.json"
FAILED: Final = "failed.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A running program of the control plane."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Stopped(Exception):
    """Somebody asked for the end."""


def main(words: Sequence[str]) -> int:
    folder = Path(words[0])
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: end.set())
    if "--until-stdin-closes" in words:
        threading.Thread(target=_wait_for_stdin, args=(end,), daemon=True).start()
    cluster = Cluster(folder, end)
    try:
        cluster.start()
        cluster.watch()
    except Stopped:
        pass
    except Exception as error:  # whoever started this waits for the one file or the other
        traceback.print_exc()
        write_json(folder / "run" / FAILED, {"error": str(error)})
        return 1
    finally:
        cluster.stop()
    return 0


def _wait_for_stdin(end: threading.Event) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    end.set()


class Cluster:
    """The control plane's programs, and the machines."""

    def __init__(self, folder: Path, end: threading.Event) -> None:
        self._site, self._end = Site.claim(folder), end
        self._paths = self._site.paths
        self._programs: list[Program] = []
        self._machines: dict[str, ProcessMachine] = {}

    def start(self) -> None:
        authority = self._identities()
        place = self._place(authority)
        api = KubeApi(authority=authority, host=self._site.address)
        self._start_programs(place, api)
        self._machines = self._make_machines(authority, api)
        for machine in self._machines.values():
            machine.restore()
        control.serve(self._paths.socket, self._machines)
        write_json(self._paths.run / READY, {"since": time.time()})

    def watch(self) -> None:
        """Returns never; raises where a program ended: half a cluster helps nobody."""
        while True:
            self._wait(0.5)
            for program in self._programs:
                if program.process.poll() is not None:
                    code = program.process.returncode
                    raise RuntimeError(
                        f"{program.name} ended with {code}; its log ends:\n{tail(program.log)}"
                    )

    def stop(self) -> None:
        for machine in self._machines.values():
            machine.vanish(delete_node=False)
        for program in self._programs:
            program.process.kill()
            program.process.wait()
        marks.kill_marked(marks.CLUSTER, str(self._site.folder))

    def _wait(self, seconds: float) -> None:
        if self._end.wait(seconds):
            raise Stopped

    def _identities(self) -> Authority:
        site, paths = self._site, self._paths
        authority = new_authority(paths.pki)
        server = f"https://{site.address}:{layout.API_PORT}"
        addresses = [site.address, layout.SERVICE_ADDRESS, *(node.address for node in site.nodes)]
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
        alternatives = [*(f"IP:{a}" for a in addresses), *(f"DNS:{n}" for n in names)]
        controlplane.issue_all(authority, server, alternatives)
        authority.kubeconfig(paths.kubeconfig, server=server, name="admin")
        access = {"access_key": "spottrain", "secret_key": secrets.token_hex(20), "region": layout.S3_REGION}
        endpoint = f"http://{site.address}:{layout.S3_PORT}"
        write_json(paths.s3_credentials, {"endpoint": endpoint, **access}, mode=0o600)
        return authority

    def _place(self, authority: Authority) -> Place:
        return Place(
            bin=layout.default_paths().bin,
            folder=self._paths.run,
            authority=authority,
            address=self._site.address,
            api_port=layout.API_PORT,
            etcd_address=self._site.address,
            etcd_port=2379,
            etcd_peer_port=2380,
            audit_log=self._paths.audit_log,
        )

    def _start_programs(self, place: Place, api: KubeApi) -> None:
        objects = self._paths.run / "s3"
        objects.mkdir()
        access = read_json(self._paths.s3_credentials)
        keys = {"ROOT_ACCESS_KEY": access["access_key"], "ROOT_SECRET_KEY": access["secret_key"]}
        self._run("etcd", controlplane.etcd(place))
        self._run("versitygw", controlplane.s3_server(place, objects), keys)
        server = self._run(
            "kube-apiserver", [*controlplane.apiserver(place), "--endpoint-reconciler-type=none"]
        )
        wait_until(
            "the API server", self._or_stopped(api), seconds=90, log=server.log, process=server.process
        )
        grace = "--node-monitor-grace-period=20s"
        self._run("kube-controller-manager", [*controlplane.controller_manager(place), grace])
        self._run("kube-scheduler", controlplane.scheduler(place))

    def _or_stopped(self, api: KubeApi) -> Callable[[], bool]:
        def ready() -> bool:
            self._wait(0)
            return api.is_ready()

        return ready

    def _run(self, name: str, command: Sequence[str | Path], keys: dict[str, str] | None = None) -> Program:
        log = self._paths.logs / f"{name}.log"
        environment = {marks.CLUSTER: str(self._site.folder), **(keys or {})}
        process = start_daemon(command, log=log, env=environment, preexec=end_with_parent)
        program = Program(name=name, process=process, log=log)
        self._programs.append(program)
        return program

    def _make_machines(self, authority: Authority, api: KubeApi) -> dict[str, ProcessMachine]:
        client = ssl.create_default_context(cafile=str(authority.certificate))
        client.load_cert_chain(authority.cert("admin"), authority.key("admin"))
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(authority.cert("apiserver"), authority.key("apiserver"))
        # Pods hold their tokens and Secrets in files below: whoever asks for a log must be the API server.
        server.load_verify_locations(authority.certificate)
        server.verify_mode = ssl.CERT_REQUIRED
        kube = Kube(host=self._site.address, port=layout.API_PORT, context=client)
        new_address, names = self._site.pod_addresses(), Names()
        return {
            node.name: ProcessMachine(
                node=node,
                paths=self._paths,
                api=api,
                kube=kube,
                tls=server,
                new_address=new_address,
                names=names,
            )
            for node in self._site.nodes
        }


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of nodes may wait for an API server that is gone
