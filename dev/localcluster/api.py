"""What tests, the demo and benchmarks import: the running cluster, and what they may do to its nodes.

cluster = Cluster.attach()
cluster.reclaim("spot-a", seconds=30)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster import layout
from localcluster.control import ask
from localcluster.layout import Paths
from localcluster.shell import read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A running local cluster. Times are seconds since the epoch."""

    paths: Paths
    s3_endpoint: str
    s3_access_key: str
    s3_secret_key: str
    s3_region: str

    @classmethod
    def attach(cls, paths: Paths | None = None) -> Cluster:
        """The cluster that is up; raises ClusterError where none is."""
        paths = paths or layout.default_paths()
        ask(paths.socket, do="status")
        access = read_json(paths.s3_credentials)
        return cls(
            paths=paths,
            s3_endpoint=access["endpoint"],
            s3_access_key=access["access_key"],
            s3_secret_key=access["secret_key"],
            s3_region=access["region"],
        )

    @property
    def context(self) -> str:
        return layout.CONTEXT

    @property
    def kubeconfig(self) -> Path:
        return self.paths.kubeconfig

    @property
    def kubectl(self) -> Path:
        return self.paths.bin / "kubectl"

    @property
    def helm(self) -> Path:
        return self.paths.bin / "helm"

    @property
    def audit_log(self) -> Path:
        return self.paths.audit_log

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in layout.NODES)

    def status(self) -> dict[str, Any]:
        return dict(self._ask("status"))

    def reclaim(self, node: str, seconds: float = 120) -> float:
        """Publishes the notice and returns when it was published; the node ends `seconds` later."""
        return float(self._ask("reclaim", node, seconds=seconds)["published_at"])

    def cancel(self, node: str) -> None:
        """Takes a pending notice back."""
        self._ask("cancel", node)

    def vanish(self, node: str, *, delete_node: bool = True) -> None:
        """Ends the node at once, without a notice; with delete_node=False its Node object stays, NotReady."""
        self._ask("vanish", node, delete_node=delete_node)

    def restore(self, node: str) -> float:
        """A fresh node of this name, Ready; the seconds it took, 0 when it was there."""
        return float(self._ask("restore", node))

    def events(self, node: str | None = None) -> list[dict[str, Any]]:
        """What was done to the nodes, oldest first: notice, cancelled, killed, deleted, restored."""
        try:
            lines = self.paths.events.read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines]
        return [event for event in found if node is None or event["node"] == node]

    def _ask(self, call: str, node: str | None = None, **more: Any) -> Any:
        if node is None:
            return ask(self.paths.socket, do=call, **more)
        return ask(self.paths.socket, do=call, node=layout.node_named(node).name, **more)
