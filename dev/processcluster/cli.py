"""`make cluster-up`, `make cluster-down`, and what a person does to the nodes in between."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import Final

from localcluster import layout
from localcluster.api import Cluster
from localcluster.layout import Paths
from localcluster.progress import Progress
from localcluster.shell import ClusterError, say

from processcluster import install, lifecycle

FOLDER: Final = layout.default_paths().state / "cluster"
_LONGEST_SOCKET_PATH: Final = 100


def main(words: Sequence[str]) -> int:
    given = _parser().parse_args(words)
    try:
        return _do(given)
    except ClusterError as error:
        say(f"error: {error}")
    except KeyboardInterrupt:
        say("stopped")
        return 130
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m processcluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start the cluster, with spottrain installed")
    commands.add_parser("down", help="end it, and delete what was on it")
    commands.add_parser("status", help="how its nodes are, and where its logs lie")
    nodes = [node.name for node in layout.NODES]
    for name, text in (("cancel", "take a notice back"), ("restore", "a fresh node of this name")):
        commands.add_parser(name, help=text).add_argument("node", choices=nodes)
    vanish = commands.add_parser("vanish", help="end a node at once, without a notice")
    vanish.add_argument("node", choices=nodes)
    reclaim = commands.add_parser("reclaim", help="give a node its notice; it ends at the deadline")
    reclaim.add_argument("node", choices=nodes)
    reclaim.add_argument("--in", dest="seconds", type=float, default=30, help="seconds of warning (30)")
    return parser


def _do(given: argparse.Namespace) -> int:
    if given.command == "up":
        return _up()
    if given.command == "down":
        return _down()
    cluster = Cluster.attach(Paths(state=FOLDER))
    match given.command:
        case "status":
            print(json.dumps(cluster.status(), indent=2))
            print(by_hand(cluster))
        case "reclaim":
            cluster.reclaim(given.node, given.seconds)
            print(f"{given.node} has its notice and ends in {given.seconds:.0f} s")
        case "cancel":
            cluster.cancel(given.node)
        case "vanish":
            cluster.vanish(given.node)
        case "restore":
            print(f"{given.node} is Ready after {cluster.restore(given.node):.1f} s")
    return 0


def _up() -> int:
    if len(str(FOLDER)) > _LONGEST_SOCKET_PATH - len("/run/supervisor.sock"):
        raise ClusterError(
            f"the path {FOLDER} is too long for a socket in it; set SPOTTRAIN_DEV_DIR to a shorter one"
        )
    lifecycle.sweep()
    lifecycle.clear(FOLDER)
    began = time.monotonic()
    running = lifecycle.start(FOLDER, with_us=False)
    try:
        with Progress("Starting etcd, API server, controllers, scheduler, S3 server and two nodes", usual=10):
            running.wait_ready()
        with Progress("Installing spottrain from charts/spottrain", usual=8):
            cluster = running.cluster
            install.install(cluster)
            _apply(cluster, install.credentials(cluster))
    except BaseException:
        running.stop()
        raise
    print(f"The cluster is up after {time.monotonic() - began:.0f} s. `make cluster-down` ends it.\n")
    print(by_hand(cluster))
    return 0


def _apply(cluster: Cluster, body: dict[str, object]) -> None:
    subprocess.run(
        [str(cluster.kubectl), "apply", "-f", "-"],
        input=json.dumps(body), text=True, check=True, capture_output=True, env=install.environment(cluster),
    )  # fmt: skip


def _down() -> int:
    found = lifecycle.end(FOLDER)
    say("the cluster has ended" if found else f"no cluster runs in {FOLDER}")
    return 0


def by_hand(cluster: Cluster) -> str:
    """How to go on at a prompt."""
    programs = [layout.repository() / ".venv" / "bin", layout.default_paths().bin]
    path = shlex.quote(":".join(map(str, programs)))
    keys = " ".join(f"{name}={shlex.quote(value)}" for name, value in install.keys(cluster).items())
    return f"""  export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}
  export PATH={path}:$PATH
  export {keys}
  spottrain submit examples/gpt-local.yaml
  spottrain watch gpt
  make reclaim NODE=spot-a   # its notice now, its end in 30 s; `make restore` brings a new one
  spottrain status gpt       # kubectl get tj; spottrain report gpt; spottrain logs gpt
  spottrain checkpoints download gpt --to gpt-model
  # a script of your own:
  spottrain submit train.py --image spottrain-runtime:checkout --bucket s3://{install.BUCKET}/runs \\
      --endpoint {cluster.s3_endpoint} --secret {install.SECRET}"""
