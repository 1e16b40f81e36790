"""`up`, `down`, `status`: the host's side of the cluster. Called by cli.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from localcluster import binaries, cgroups, images, layout, network, preflight, processes, store
from localcluster.control import ask
from localcluster.disk import Meter, used_gb
from localcluster.layout import Paths
from localcluster.shell import (
    ClusterError,
    discard,
    locked,
    read_json,
    run,
    say,
    start_daemon,
    tail,
    wait_until,
)

_NAMESPACES = (
    "--pid",
    "--fork",
    "--kill-child",
    "--mount",
    "--mount-proc",
    "--net",
    "--propagation",
    "private",
)


def up(paths: Paths, *, with_images: bool = True, dns: bool = True) -> None:
    """Brings the cluster up, or finds it up and healthy.

    `with_images`: the project's own images too. `dns`: with CoreDNS, which only jobs of several pods need.
    """
    with locked(paths.state / "lock"):
        started = time.monotonic()
        if processes.find_supervisor(paths.state) is not None and _is_healthy(paths, dns=dns):
            say("the cluster is up")
            if with_images:
                build_and_load(paths)
        else:
            _clear(paths)
            _prepare(paths, with_images=with_images, dns=dns)
            _start(paths, dns=dns)
            say(f"the cluster is up after {time.monotonic() - started:.0f} s")
        _print_access(paths)


def _prepare(paths: Paths, *, with_images: bool, dns: bool) -> None:
    """Packages, programs and images; these before the nodes, which start from them and share their disk."""
    preflight.check(paths, cold=preflight.is_cold(paths))
    preflight.ensure_packages()
    network.refuse_taken_addresses()
    meter = _meter(paths)
    binaries.ensure(paths, binaries.CONTAINER_PROGRAMS | (binaries.DNS_PROGRAMS if dns else frozenset()))
    if with_images:
        build_and_load(paths)
    elif layout.PAUSE_IMAGE not in store.loaded(paths):
        builder = images.Builder(paths=paths, meter=meter)
        images.build_all(builder, targets={})
        images.load_all(builder, [layout.PAUSE_IMAGE])


def build_and_load(paths: Paths, *, load: bool = True) -> None:
    """The project's images, from the repository as it is now."""
    builder = images.Builder(paths=paths, meter=_meter(paths))
    images.build_all(builder)
    if load:
        images.load_all(builder, [layout.PAUSE_IMAGE, *images.PROJECT_IMAGES])
    measures = read_json(paths.measures) or {}
    say(
        f"disk: {used_gb(paths.state):.1f} GB now, "
        f"{measures.get('peak_gb', 0)} GB at the highest ({paths.measures})"
    )


def _meter(paths: Paths) -> Meter:
    paths.state.mkdir(parents=True, exist_ok=True)
    return Meter(state=paths.state, file=paths.measures)


def _is_healthy(paths: Paths, *, dns: bool = False) -> bool:
    if dns and not (paths.logs / "coredns.log").exists():
        return False  # it was started without
    try:
        nodes = ask(paths.socket, do="status", timeout=20)
    except (ClusterError, OSError):
        return False
    return all(node["ready"] or not node["up"] for node in nodes.values())


def _clear(paths: Paths) -> None:
    """Ends what an earlier run left. Its links and mounts have gone with their namespaces."""
    pid = processes.find_supervisor(paths.state)
    if pid is not None:
        processes.end_supervisor(pid, paths.state)
    cgroups.remove()
    discard(paths.run, paths.trash)


def _start(paths: Paths, *, dns: bool) -> None:
    for folder in (paths.logs, paths.run / "nodes"):
        folder.mkdir(parents=True)
    for shared in ("/var/log", "/var/lib/cni", "/var/lib/kubelet"):  # mount points for the nodes' own
        Path(shared).mkdir(parents=True, exist_ok=True)
    log = paths.logs / "supervisor.log"
    environment = {"PYTHONPATH": str(layout.source_folder()), "PYTHONUNBUFFERED": "1"}
    command: list[str | Path] = [
        "unshare",
        *_NAMESPACES,
        sys.executable,
        "-m",
        processes.SUPERVISOR_MODULE,
        paths.state,
        *(["--dns"] if dns else []),
    ]
    process = start_daemon(command, log=log, env=environment)
    wait_until(
        "the supervisor", lambda: processes.find_supervisor(paths.state) is not None, seconds=10, log=log
    )
    network.link_host(processes.find_supervisor(paths.state) or 0)
    wait_until("the cluster", lambda: _answers(paths, process), seconds=120, log=log, every=0.1)


def _answers(paths: Paths, process: subprocess.Popen[bytes]) -> bool:
    failure: Any = read_json(paths.run / "failed.json")
    if failure:
        raise ClusterError(f"the cluster did not start: {failure['error']}")
    if process.poll() is not None:
        raise ClusterError(
            f"the supervisor ended at its start; its log ends:\n{tail(paths.logs / 'supervisor.log')}"
        )
    return paths.socket.exists()


def down(paths: Paths) -> None:
    """Ends the cluster; programs and images stay for the next one."""
    with locked(paths.state / "lock"):
        was_up = processes.find_supervisor(paths.state) is not None
        _clear_but_logs(paths)
        say("the cluster is down" if was_up else "no cluster was up")


def _clear_but_logs(paths: Paths) -> None:
    kept = paths.state / "last-log"
    shutil.rmtree(kept, ignore_errors=True)
    if paths.logs.exists():
        paths.logs.rename(kept)
    _clear(paths)


def status(paths: Paths) -> int:
    """Prints how the cluster is; 0 when it is up and every node that should be is Ready."""
    if processes.find_supervisor(paths.state) is None:
        say("no cluster is up")
        return 1
    for name, node in ask(paths.socket, do="status").items():
        notice = f", ends at {node['notice']['time']}" if node["notice"] else ""
        say(f"{name}: {'Ready' if node['ready'] else 'up, not Ready' if node['up'] else 'gone'}{notice}")
    _print_access(paths)
    return 0 if _is_healthy(paths) else 1


def _print_access(paths: Paths) -> None:
    access = read_json(paths.s3_credentials)
    say(f"kubeconfig {paths.kubeconfig} (context {layout.CONTEXT})")
    say(f"S3 {access['endpoint']}, credentials in {paths.s3_credentials}")


def kubectl(paths: Paths, words: list[str]) -> int:
    return subprocess.call([str(paths.bin / "kubectl"), f"--kubeconfig={paths.kubeconfig}", *words])


def purge(paths: Paths) -> None:
    """Takes away everything that the tool made: cluster, images, programs."""
    down(paths)
    run(["rm", "-rf", paths.state], timeout=300)  # beside `discard`'s rm, which may still be at it
