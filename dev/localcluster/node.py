"""One node: the first process of its process, network, mount and host name namespaces.

Started by the supervisor.

Ending this process ends kubelet, containerd, kube-proxy and every container of the node at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from localcluster import configs, layout, network
from localcluster.layout import Node, NodePaths, Paths
from localcluster.metadata import Metadata, serve
from localcluster.pki import Authority
from localcluster.shell import run, start_daemon, wait_until

# Folders of the machine that node programs write to by a fixed name: each node gets its own behind the name.
_PRIVATE = ("/var/log", "/var/lib/cni", "/var/lib/kubelet")


def main(words: list[str]) -> int:
    node, paths = layout.node_named(words[0]), Paths(state=Path(words[1]))
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process of a namespace must ask for these
        signal.signal(number, lambda *_: os._exit(0))
    socket.sethostname(node.name)
    _mount_private(paths.node(node.name))
    network.build_node(node)
    serve(Metadata(node=node, paths=paths.node(node.name), instance_id=f"i-{os.urandom(8).hex()}0"))
    daemons = _start(node, paths)
    return _reap(daemons)


def _mount_private(paths: NodePaths) -> None:
    run(["mount", "--make-rprivate", "/"])
    run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"])  # sockets, network namespaces, locks
    for folder in _PRIVATE:
        own = paths.root / "private" / folder.strip("/").replace("/", "-")
        own.mkdir(parents=True, exist_ok=True)
        run(["mount", "--bind", own, folder])
    run(["mount", "--make-rshared", "/"])  # the kubelet propagates its mounts to containers


def _start(node: Node, paths: Paths) -> dict[int, str]:
    """Starts the node's three programs; gives their pids and names."""
    own = paths.node(node.name)
    _write_configs(node, own, paths)
    containerd = _daemon("containerd", node, paths, ["--config", own.config / "containerd.toml"])
    wait_until("containerd's socket", own.socket.exists, seconds=20, log=log_of(paths, node, "containerd"))
    kubelet = _daemon(
        "kubelet",
        node,
        paths,
        [
            f"--config={own.config / 'kubelet.json'}",
            f"--kubeconfig={own.config / 'kubelet.kubeconfig'}",
            f"--root-dir={own.kubelet}",
            f"--cert-dir={own.kubelet / 'pki'}",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            "--node-labels=" + ",".join(f"{key}={value}" for key, value in node.labels.items()),
        ],
    )
    proxy = _daemon(
        "kube-proxy",
        node,
        paths,
        [
            f"--kubeconfig={paths.pki / 'kube-proxy.kubeconfig'}",
            f"--hostname-override={node.name}",
            f"--cluster-cidr={layout.POD_SUBNET}",
            "--proxy-mode=iptables",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ],
    )
    return {containerd.pid: "containerd", kubelet.pid: "kubelet", proxy.pid: "kube-proxy"}


def log_of(paths: Paths, node: Node, program: str) -> Path:
    return paths.logs / f"{node.name}-{program}.log"


def _daemon(name: str, node: Node, paths: Paths, words: list[str | Path]) -> subprocess.Popen[bytes]:
    built = paths.bin / name
    program: str | Path = built if built.exists() else name
    return start_daemon([program, *words], log=log_of(paths, node, name))


def _write_configs(node: Node, own: NodePaths, paths: Paths) -> None:
    network_folder = own.config / "cni"
    network_folder.mkdir(parents=True, exist_ok=True)
    (network_folder / "10-pods.conflist").write_text(configs.pod_network(node))
    containerd = configs.containerd(own.containerd, "/run/containerd", own.socket, cni=network_folder)
    (own.config / "containerd.toml").write_text(containerd)
    authority = Authority(folder=paths.pki)
    authority.kubeconfig(
        own.config / "kubelet.kubeconfig",
        server=f"https://{layout.CONTROL_ADDRESS}:{layout.API_PORT}",
        name=node.name,
    )
    (own.config / "kubelet.json").write_text(json.dumps(configs.kubelet(node, own, authority.certificate)))


def _reap(daemons: dict[int, str]) -> int:
    """Collects every process that ends here, orphans too; ends when one of the node's programs does."""
    while True:
        pid, status = os.wait()
        if pid in daemons:
            print(f"{daemons[pid]} ended with status {status}: so does the node", flush=True)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
