"""The command line. Called by dev/cluster.py, and by `python3 -m localcluster` with PYTHONPATH=dev."""

from __future__ import annotations

import argparse
import os
import time

from localcluster import host, layout
from localcluster.api import Cluster
from localcluster.apiserver import api_server
from localcluster.layout import Paths
from localcluster.shell import ClusterError, locked, say


def main(words: list[str]) -> int:
    given = _parser().parse_args(words)
    paths = layout.default_paths()
    # A shell of root's may have the PATH of the user who called `su`, without debootstrap and iptables.
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"
    try:
        return _do(given, paths)
    except ClusterError as error:
        say(f"error: {error}")
    except KeyboardInterrupt:
        say("stopped")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring the cluster up, with the project's images")
    up.add_argument("--no-images", action="store_true", help="leave the project's images as they are")
    up.add_argument("--no-dns", action="store_true", help="without CoreDNS, which only gangs need")
    commands.add_parser("down", help="end the cluster; programs and images stay")
    commands.add_parser("status", help="how the cluster is")
    commands.add_parser("build", help="build the images, load nothing")
    commands.add_parser("load-images", help="build the images and load what changed")
    commands.add_parser("purge", help="end the cluster and delete all that the tool keeps")
    commands.add_parser("api", help="etcd and the API server alone, until Ctrl-C")
    for name, text in (("cancel", "take a notice back"), ("restore", "a fresh node of this name")):
        commands.add_parser(name, help=text).add_argument("node", choices=[n.name for n in layout.NODES])
    vanish = commands.add_parser("vanish", help="end a node at once, without a notice")
    vanish.add_argument("node", choices=[n.name for n in layout.NODES])
    vanish.add_argument("--keep-node", action="store_true", help="leave its Node object, NotReady")
    reclaim = commands.add_parser("reclaim", help="give a node its notice; it ends at the deadline")
    reclaim.add_argument("node", choices=[n.name for n in layout.NODES])
    reclaim.add_argument("--in", dest="seconds", type=float, default=120, help="seconds of warning (120)")
    kubectl = commands.add_parser("kubectl", help="kubectl with the cluster's kubeconfig")
    kubectl.add_argument("words", nargs=argparse.REMAINDER)
    return parser


def _do(given: argparse.Namespace, paths: Paths) -> int:
    match given.command:
        case "up":
            host.up(paths, with_images=not given.no_images, dns=not given.no_dns)
        case "down":
            host.down(paths)
        case "status":
            return host.status(paths)
        case "build" | "load-images":
            with locked(paths.state / "lock"):
                host.build_and_load(paths, load=given.command == "load-images")
        case "purge":
            host.purge(paths)
        case "api":
            _serve_api()
        case "kubectl":
            return host.kubectl(paths, given.words)
        case _:
            _to_node(given, Cluster.attach(paths))
    return 0


def _to_node(given: argparse.Namespace, cluster: Cluster) -> None:
    match given.command:
        case "reclaim":
            cluster.reclaim(given.node, given.seconds)
            say(f"{given.node} has its notice and ends in {given.seconds:.0f} s")
        case "cancel":
            cluster.cancel(given.node)
        case "vanish":
            cluster.vanish(given.node, delete_node=not given.keep_node)
        case "restore":
            say(f"{given.node} is Ready after {cluster.restore(given.node):.1f} s")


def _serve_api() -> None:
    with api_server() as server:
        say(f"kubeconfig {server.kubeconfig}\naudit log {server.audit_log}\nCtrl-C ends it")
        while True:
            time.sleep(3600)
