"""Every address, name and path of the local cluster, in one place. Used by all other modules."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CONTEXT = "spottrain-local"
KUBERNETES_VERSION = "1.34.4"

HOST_LINK = "spottrain0"  # the host's end of the only veth between the host and the cluster
HOST_PEER = "host0"  # its other end, a port of the control plane's bridge
BRIDGE = "br-spot"
HOST_ADDRESS = "10.201.0.254"
CONTROL_ADDRESS = "10.201.0.1"
NODE_SUBNET = "10.201.0.0/24"
POD_SUBNET = "10.244.0.0/16"
SERVICE_SUBNET = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
METADATA_ADDRESS = "169.254.169.254"
API_PORT = 6443
S3_PORT = 7070
DNS_PORT = 53
DNS_DOMAIN = "cluster.local"
S3_REGION = "us-east-1"
CGROUP = "spottrain"
GPUS_PER_NODE = 4

PAUSE_IMAGE = "localhost/spottrain-pause:dev"
OPERATOR_IMAGE = "localhost/spottrain-operator:dev"
RUNTIME_IMAGE = "localhost/spottrain-runtime:dev"
SYNC_IMAGE = "localhost/spottrain-sync:dev"
TESTS_IMAGE = (
    "localhost/spottrain-runtime-tests:dev"  # the runtime's, and what the cluster tests need beside it
)
BASE_IMAGE = "localhost/spottrain-base:bookworm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node of the cluster: a network, process and mount namespace with a kubelet of its own."""

    name: str
    index: int

    @property
    def address(self) -> str:
        return f"10.201.0.{10 + self.index}"

    @property
    def pod_subnet(self) -> str:
        return f"10.244.{self.index}.0/24"

    @property
    def pod_gateway(self) -> str:
        return f"10.244.{self.index}.1"

    @property
    def zone(self) -> str:
        return "local-" + self.name.rsplit("-", 1)[1]

    @property
    def link(self) -> str:
        return f"ve-{self.name}"

    @property
    def labels(self) -> dict[str, str]:
        """What Karpenter puts on a spot node; the operator reads these."""
        return {
            "karpenter.sh/capacity-type": "spot",
            "karpenter.sh/nodepool": "spot-gpu",
            "topology.kubernetes.io/zone": self.zone,
            "node.kubernetes.io/instance-type": "local.gpu",
        }


NODES = (Node(name="spot-a", index=1), Node(name="spot-b", index=2))


def node_named(name: str) -> Node:
    for node in NODES:
        if node.name == name:
            return node
    raise ValueError(f"no node is called {name!r}; the nodes are {', '.join(n.name for n in NODES)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePaths:
    """The files of one node. All but the log vanish when the node is restored."""

    root: Path

    @property
    def containerd(self) -> Path:
        return self.root / "containerd"

    @property
    def socket(self) -> Path:
        return self.root / "cri.sock"

    @property
    def kubelet(self) -> Path:
        return self.root / "kubelet"

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def notice(self) -> Path:
        return self.root / "notice.json"

    @property
    def loaded(self) -> Path:
        return self.root / "loaded.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """The state folder. `run` is of one cluster and is emptied by `up`; the rest is kept for the next one."""

    state: Path

    @property
    def bin(self) -> Path:
        return self.state / "bin"

    @property
    def go(self) -> Path:
        return self.state / "go"

    @property
    def buildah(self) -> Path:
        return self.state / "buildah"

    @property
    def golden(self) -> Path:
        """The image store that every node starts from, as a cloud's nodes start from a machine image."""
        return self.state / "golden"

    @property
    def run(self) -> Path:
        return self.state / "run"

    @property
    def trash(self) -> Path:
        return self.state / "trash"

    @property
    def logs(self) -> Path:
        return self.run / "log"

    @property
    def pki(self) -> Path:
        return self.run / "pki"

    @property
    def kubeconfig(self) -> Path:
        return self.run / "kubeconfig"

    @property
    def socket(self) -> Path:
        return self.run / "supervisor.sock"

    @property
    def s3_credentials(self) -> Path:
        return self.run / "s3.json"

    @property
    def audit_log(self) -> Path:
        return self.run / "audit.log"

    @property
    def events(self) -> Path:
        """One JSON line for everything done to a node: notice, cancel, kill, deleted, restored."""
        return self.run / "events.jsonl"

    @property
    def measures(self) -> Path:
        return self.state / "measures.json"

    def node(self, name: str) -> NodePaths:
        return NodePaths(root=self.run / "nodes" / name)


def default_paths() -> Paths:
    """SPOTTRAIN_DEV_DIR, else the user's cache, else, where that cannot be written, a folder of the
    checkout.
    """
    if given := os.environ.get("SPOTTRAIN_DEV_DIR"):
        return Paths(state=Path(given).absolute())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spottrain" / "dev"
    return Paths(state=cache if is_writable(cache) else repository() / ".tools" / "dev")


def is_writable(folder: Path) -> bool:
    """Whether a file can be made in a folder, or in the one that it would be made in."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def repository() -> Path:
    return Path(__file__).resolve().parents[2]


def source_folder() -> Path:
    """What PYTHONPATH must hold for `-m localcluster.supervisor` and `-m localcluster.node`."""
    return Path(__file__).resolve().parents[1]
