"""Links, addresses and routes. Called by `up` (host side), the supervisor (control plane) and node.py.

    host --- spottrain0/host0 --- br-spot (control plane) --- ve-spot-a/eth0 --- node --- cni0 --- pods

The host gets one link and the routes through it; its iptables and its other routes are not touched. Every
link dies with the namespace at its other end, so there is nothing to take away after a crash.
"""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

from localcluster import layout
from localcluster.layout import Node
from localcluster.shell import ClusterError, run, wait_until


def ip(*words: str) -> str:
    return run(["ip", *words], timeout=10)


def link_exists(name: str) -> bool:
    return Path(f"/sys/class/net/{name}").exists()


def refuse_taken_addresses() -> None:
    """The host must not already use the cluster's addresses for something else."""
    ours = [ipaddress.ip_network(n) for n in (layout.NODE_SUBNET, layout.POD_SUBNET, layout.SERVICE_SUBNET)]
    for route in json.loads(ip("-json", "-4", "route", "show") or "[]"):
        if route["dst"] == "default" or route.get("dev") == layout.HOST_LINK:
            continue
        taken = ipaddress.ip_network(route["dst"], strict=False)
        clash = next((net for net in ours if net.overlaps(taken)), None)
        if clash is not None:
            raise ClusterError(
                f"this machine has a route to {taken} ({route.get('dev')}), and the cluster needs {clash}"
            )


def link_host(control_pid: int) -> None:
    """Host side: one veth into the control plane's namespace, and the routes to nodes and pods through it."""
    if link_exists(layout.HOST_LINK):
        ip("link", "delete", layout.HOST_LINK)
    ip(
        "link",
        "add",
        layout.HOST_LINK,
        "type",
        "veth",
        "peer",
        "name",
        layout.HOST_PEER,
        "netns",
        str(control_pid),
    )
    ip("address", "add", f"{layout.HOST_ADDRESS}/24", "dev", layout.HOST_LINK)
    ip("link", "set", layout.HOST_LINK, "up")
    ip("route", "replace", layout.POD_SUBNET, "via", layout.CONTROL_ADDRESS, "dev", layout.HOST_LINK)


def build_control_plane() -> None:
    """Inside the control plane's namespace: the bridge, its address, and a route to each node's pods."""
    _interface_up("lo")
    ip("link", "add", layout.BRIDGE, "type", "bridge")
    ip("address", "add", f"{layout.CONTROL_ADDRESS}/24", "dev", layout.BRIDGE)
    ip("link", "set", layout.BRIDGE, "up")
    _forward()
    for node in layout.NODES:
        ip("route", "add", node.pod_subnet, "via", node.address, "dev", layout.BRIDGE)
    wait_until("the link from the host", lambda: has_link(layout.HOST_PEER), seconds=15)
    ip("link", "set", layout.HOST_PEER, "master", layout.BRIDGE, "up")


def link_node(node: Node, pid: int) -> None:
    """Control plane side: one veth into the node's namespace."""
    if has_link(node.link):  # of a node that is just going
        ip("link", "delete", node.link)
    ip("link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    ip("link", "set", node.link, "master", layout.BRIDGE, "up")


def build_node(node: Node) -> None:
    """Inside the node's namespace: its address, the way out, and the metadata address of every cloud."""
    _interface_up("lo")
    wait_until(f"the link of {node.name}", lambda: has_link("eth0"), seconds=15)
    ip("address", "add", f"{node.address}/24", "dev", "eth0")
    _interface_up("eth0")
    ip("address", "add", f"{layout.METADATA_ADDRESS}/32", "dev", "lo")
    ip("route", "add", "default", "via", layout.CONTROL_ADDRESS)
    _forward()
    _write_setting("/proc/sys/net/bridge/bridge-nf-call-iptables", "1")


def has_link(name: str) -> bool:
    """Asks the kernel and not /sys, which shows the namespace that mounted it."""
    return any(link.get("ifname") == name for link in json.loads(ip("-json", "link", "show") or "[]"))


def _interface_up(name: str) -> None:
    ip("link", "set", name, "up")


def _forward() -> None:
    _write_setting("/proc/sys/net/ipv4/ip_forward", "1")
    _write_setting("/proc/sys/net/ipv4/conf/all/send_redirects", "0")


def _write_setting(path: str, value: str) -> None:
    """A setting of this network namespace; kernels without the module have no such file."""
    setting = Path(path)
    if setting.exists():
        setting.write_text(value)
