"""kube-controller-manager beside `api_server()`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from localcluster import layout
from localcluster.apiserver import ApiServer, ensure_programs
from localcluster.layout import Paths

ALL: Final = ("*", "-node-ipam-controller", "-cloud-node-lifecycle-controller")
"""Those that a cluster without a cloud has."""


def controller_manager(
    server: ApiServer, controllers: Sequence[str], *flags: str, paths: Paths | None = None
) -> list[str | Path]:
    """Its command line, for nodes of kwok's, which have no leases here. Builds it where it is missing."""
    paths = paths or layout.default_paths()
    ensure_programs(paths, frozenset({"kube-controller-manager"}))
    return [
        paths.bin / "kube-controller-manager",
        f"--kubeconfig={server.kubeconfig}",
        f"--controllers={','.join(controllers)}",
        "--leader-elect=false",
        "--secure-port=0",  # several may run on this machine
        "--node-monitor-grace-period=24h",
        *flags,
    ]
