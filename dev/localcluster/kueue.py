"""The real Kueue with its webhooks, beside `api_server()`. The caller brings the program.

    with api_server(flags=FLAGS) as server, kueue(server, program, checkout):
        ...  # make ResourceFlavors, ClusterQueues and LocalQueues; Workloads are then admitted

`checkout` is a folder with the manifests of the same version: `config/components` of its source. Kueue runs
with the service account and the roles of these manifests: what else it needs, the caller must grant.

Nothing here routes a Service, so the API server is told to call webhooks at their endpoints: Kueue's is this
machine, by an address that is not the loopback's, which an endpoint may not have.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

from localcluster import layout
from localcluster.apiserver import ApiServer, free_ports, running
from localcluster.shell import run, wait_until

Json = dict[str, Any]
NAMESPACE: Final = "kueue-system"
_SECRET: Final = "kueue-webhook-server-cert"
_ACCOUNT: Final = "kueue-controller-manager"
_COMPONENTS: Final = ("crd", "rbac", "webhook", "internalcert")
"""What is installed of Kueue's manifests; not its Deployment."""
FLAGS: Final = ("--enable-aggregator-routing=true",)
"""For kube-apiserver: webhooks are called at their endpoints."""
_SERVICE: Final = "kueue-webhook-service"


@contextmanager
def kueue(server: ApiServer, program: Path, checkout: Path, **configuration: Any) -> Iterator[Path]:
    """Starts it, gives its log, and ends it, also when the body fails.

    configuration: more of Kueue's own, such as waitForPodsReady.
    """
    webhooks, health = free_ports(2)
    _prepare(server, checkout, webhooks)
    certificates = server.logs / "kueue-certificates"
    certificates.mkdir()
    file, log = server.logs / "kueue.json", server.logs / "kueue.log"
    file.write_text(json.dumps(_configuration(webhooks, health, certificates) | configuration))
    command: list[str | Path] = ["env", f"KUBECONFIG={_account(server)}", program, "--config", file]
    with running([*command, "--zap-log-level=2"], log) as process:
        wait_until(
            "Kueue's certificate",
            lambda: _mounted(server, certificates),
            seconds=60,
            log=log,
            process=process,
            every=0.5,
        )
        wait_until("Kueue", lambda: _ready(health), seconds=120, log=log, process=process)
        yield log


def _configuration(webhooks: int, health: int, certificates: Path) -> Json:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": webhooks, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "featureGates": {"VisibilityOnDemand": False},  # it needs an aggregated API
        "internalCertManagement": {"enable": True},
        "integrations": {
            "frameworks": ["batch/job", "pod"],
            "externalFrameworks": ["TrainingJob.v1alpha1.spottrain.io"],
        },
    }


def _prepare(server: ApiServer, checkout: Path, port: int) -> None:
    """Makes what an installation brings, under the names that it gives; `port` is that of the webhooks."""
    folder = (server.logs / "kueue").resolve()
    folder.mkdir()
    components = checkout.resolve() / "config" / "components"
    installation = {
        "namespace": NAMESPACE,
        "namePrefix": "kueue-",
        "resources": [os.path.relpath(components / name, folder) for name in _COMPONENTS],
        "configurations": ["references.json"],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(installation))
    (folder / "references.json").write_text(json.dumps({"nameReference": list(_references())}))
    (folder / "endpoint.json").write_text(json.dumps(_endpoint(port)))
    _kubectl(server, "create", "namespace", NAMESPACE)
    _kubectl(server, "apply", "--server-side", "-k", folder)
    _kubectl(server, "apply", "--server-side", "-f", folder / "endpoint.json")
    _kubectl(server, "wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")


def _references() -> Iterator[Json]:
    """Yields that Kueue's role names its webhook configurations, which get a prefix."""
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        named = {"group": "rbac.authorization.k8s.io", "kind": "ClusterRole", "path": "rules/resourceNames"}
        yield {"group": "admissionregistration.k8s.io", "kind": kind, "fieldSpecs": [named]}


def _endpoint(port: int) -> Json:
    """Returns the only endpoint of Kueue's webhooks."""
    labels = {"kubernetes.io/service-name": _SERVICE}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"namespace": NAMESPACE, "name": _SERVICE, "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [_address()], "conditions": {"ready": True}}],
    }


def _address() -> str:
    """Returns an address of this machine that is not the loopback's; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def _account(server: ApiServer) -> Path:
    """Returns a kubeconfig with a token of Kueue's service account, as its pod would have it."""
    words = ("create", "token", _ACCOUNT, "-n", NAMESPACE, "--duration=2h")
    config = json.loads(_kubectl(server, "config", "view", "--raw", "-o", "json"))
    config["users"][0]["user"] = {"token": _kubectl(server, *words).strip()}
    file = server.logs / "kueue.kubeconfig"
    file.write_text(json.dumps(config))
    return file


def _mounted(server: ApiServer, folder: Path) -> bool:
    """Writes the Secret that Kueue fills into its folder, as the kubelet mounts it; whether it is filled."""
    secret = json.loads(_kubectl(server, "get", "secret", _SECRET, "-n", NAMESPACE, "-o", "json"))
    for name, value in (secret.get("data") or {}).items():
        (folder / name).write_bytes(base64.b64decode(value))
    return bool(secret.get("data"))


def _kubectl(server: ApiServer, *words: str | Path) -> str:
    return run(
        [layout.default_paths().bin / "kubectl", "--kubeconfig", server.kubeconfig, *words], timeout=120
    )


def _ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False
