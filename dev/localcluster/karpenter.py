"""The real Karpenter with its kwok provider, beside `api_server()` and `fake_nodes()`.

    with api_server() as server, fake_nodes(server), karpenter(server, [INSTANCE, ...]):
        ...  # make a KWOKNodeClass and NodePools; pending pods then get nodes

Karpenter makes the Node objects, kwok makes them Ready. The parts of the controller manager that look after
nodes run too: without them a new node keeps its not-ready taint, and Karpenter waits for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

from localcluster import layout
from localcluster.apiserver import ApiServer, ensure_programs, running
from localcluster.binaries import KARPENTER_PROGRAMS
from localcluster.controllers import controller_manager
from localcluster.layout import Paths
from localcluster.shell import run

Json = dict[str, Any]
ZONES: Final = ("local-a", "local-b", "local-c")
SPOT: Final = "spot"
ON_DEMAND: Final = "on-demand"
_CONTROLLERS: Final = (
    "node-lifecycle-controller",
    "taint-eviction-controller",
    "pod-garbage-collector-controller",
)
_BATCH: Final = {"BATCH_IDLE_DURATION": "1s", "BATCH_MAX_DURATION": "2s"}
"""A node is left alone for twice the longest batch after a pod was meant for it: 20 s by default."""


def instance_type(name: str, price: float, resources: Mapping[str, str]) -> Json:
    """In every zone, on spot for a third of the price. Karpenter keeps 100m CPU and 10Mi of it for itself."""
    prices = {SPOT: price / 3, ON_DEMAND: price}
    return {
        "name": name,
        "architecture": "amd64",
        "operatingSystems": ["linux"],
        "resources": dict(resources),
        "offerings": [_offering(zone, kind, prices[kind]) for zone, kind in product(ZONES, prices)],
    }


def _offering(zone: str, kind: str, price: float) -> Json:
    labels = {"karpenter.sh/capacity-type": kind, "topology.kubernetes.io/zone": zone}
    requirements = [{"key": k, "operator": "In", "values": [v]} for k, v in labels.items()]
    return {"Price": price, "Available": True, "Requirements": requirements}


def crds(paths: Paths | None = None) -> str:
    """YAML documents. They must be served before Karpenter starts."""
    paths = paths or layout.default_paths()
    ensure_programs(paths, KARPENTER_PROGRAMS)
    return run([paths.bin / "print-karpenter-crds"])


@contextmanager
def karpenter(server: ApiServer, types: Iterable[Json], paths: Paths | None = None) -> Iterator[Path]:
    """Starts it and the controllers, gives Karpenter's log, and ends them, also when the body fails."""
    paths = paths or layout.default_paths()
    ensure_programs(paths, KARPENTER_PROGRAMS)
    file, log = server.logs / "instance-types.json", server.logs / "karpenter.log"
    file.write_text(json.dumps(list(types)))
    with ExitStack() as both:
        both.enter_context(
            running(
                controller_manager(server, _CONTROLLERS, paths=paths), server.logs / "controller-manager.log"
            )
        )
        both.enter_context(running(_karpenter(paths, server, file), log))
        yield log


def _karpenter(paths: Paths, server: ApiServer, types: Path) -> list[str | Path]:
    settings = _BATCH | {
        "KUBECONFIG": str(server.kubeconfig),
        "INSTANCE_TYPES_FILE_PATH": str(types),
        "DISABLE_LEADER_ELECTION": "true",
        "METRICS_PORT": "0",  # any free one
        "HEALTH_PROBE_PORT": "0",
        "CPU_REQUESTS": "1000",
    }
    return ["env", *(f"{name}={value}" for name, value in settings.items()), paths.bin / "karpenter"]
