"""kube-scheduler and kwok beside `api_server()`, for tests that need pods bound to nodes that nobody runs.

    with api_server() as server, fake_nodes(server):
        ...

kwok makes each Node Ready that is posted, and not ready once it bears the label SILENT. It has no stages for
pods unless they are given (fakepods.py): what becomes of those is the caller's part. Nobody plays the
controller manager either (controllers.py does); without it the taint that admission puts on a new Node is the
caller's to take off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from localcluster import layout
from localcluster.apiserver import ApiServer, ensure_programs, running
from localcluster.binaries import FAKE_NODE_PROGRAMS
from localcluster.layout import Paths

SILENT: Final = "kwok.spottrain.dev/silent"
"""Label of a Node whose machine is to be silent; its value is `true`."""

_STAGE = """apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata:
  name: {name}
spec:
  resourceRef: {{apiGroup: v1, kind: Node}}
  selector:
    matchExpressions:
    - {{key: '.metadata.labels["{label}"]', operator: {silent}, values: ["true"]}}
    - key: '.status.conditions.[] | select( .type == "Ready" ) | .status'
      operator: NotIn
      values: ["{ready}"]
  next:
    statusTemplate: |
      conditions:
      - type: Ready
        status: "{ready}"
        reason: {reason}
        message: {message}
        lastHeartbeatTime: {{{{ Now | Quote }}}}
        lastTransitionTime: {{{{ Now | Quote }}}}
"""


def stages() -> str:
    """kwok's configuration: the two states of a node."""
    ready = _STAGE.format(
        name="node-ready",
        label=SILENT,
        silent="NotIn",
        ready="True",
        reason="KubeletReady",
        message="kwok says so",
    )
    silent = _STAGE.format(
        name="node-silent",
        label=SILENT,
        silent="In",
        ready="Unknown",
        reason="NodeStatusUnknown",
        message="Kubelet stopped posting node status.",
    )
    return f"{ready}---\n{silent}"


@contextmanager
def fake_nodes(
    server: ApiServer,
    paths: Paths | None = None,
    *,
    more: str = "",
    kwok_flags: Sequence[str] = (),
    scheduler_flags: Sequence[str] = (),
) -> Iterator[None]:
    """Starts both, and ends both, also when the body fails. Their logs lie beside the API server's.

    `more`: further documents of kwok's configuration.
    """
    paths = paths or layout.default_paths()
    ensure_programs(paths, FAKE_NODE_PROGRAMS)
    config = server.logs / "kwok.yaml"
    config.write_text(f"{stages()}---\n{more}" if more else stages())
    kwok = [*_kwok(paths, server, config), *kwok_flags]
    with ExitStack() as both:
        for command in (scheduler(paths.bin, server, *scheduler_flags), kwok):
            both.enter_context(running(command, server.logs / f"{Path(command[0]).name}.log"))
        yield


def scheduler(programs: Path, server: ApiServer, *flags: str) -> list[str | Path]:
    return [
        programs / "kube-scheduler",
        f"--kubeconfig={server.logs / 'pki' / 'scheduler.kubeconfig'}",
        "--leader-elect=false",
        "--secure-port=0",  # several may run on this machine
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        *flags,
    ]


def _kwok(paths: Paths, server: ApiServer, config: Path) -> list[str | Path]:
    return [
        paths.bin / "kwok",
        f"--kubeconfig={server.kubeconfig}",
        f"--config={config}",
        "--manage-all-nodes=true",
        "--node-lease-duration-seconds=0",  # nobody reads leases here, and each costs writes for ever
    ]
