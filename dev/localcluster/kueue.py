"""The real Kueue with its webhooks, beside `api_server()`. The caller brings the program.

    with api_server(flags=FLAGS) as server, kueue(server, program, checkout):
        ...  # make ResourceFlavors, ClusterQueues and LocalQueues; Workloads are then admitted

`checkout` is a folder with the manifests of the same version: `config/components` of its source.

Nothing here routes a Service, so the API server is told to call webhooks at their endpoints: Kueue's is this
machine, by an address that is not the loopback's, which an endpoint may not have.
"""

from __future__ import annotations

import base64
import json
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
_DEFINITIONS: Final = Path("config") / "components" / "crd" / "bases"
FLAGS: Final = ("--enable-aggregator-routing=true",)
"""For kube-apiserver: webhooks are called at their endpoints."""
_MANIFESTS: Final = Path("config") / "components" / "webhook" / "manifests.yaml"
_SERVICE: Final = "kueue-webhook-service"
_WHERE: Final = {"namespace": NAMESPACE, "name": _SERVICE}
_CONVERTED: Final = ("clusterqueues", "cohorts", "localqueues", "multikueueclusters", "workloads")
"""Definitions and webhook configurations into which Kueue writes its certificate before it starts."""


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
    command: list[str | Path] = ["env", f"KUBECONFIG={server.kubeconfig}", program, "--config", file]
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
    """Makes what an installation brings; `port` is that of the webhooks."""
    _kubectl(server, "apply", "--server-side", "-f", checkout / _DEFINITIONS)
    _kubectl(server, "wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    _kubectl(server, "create", "namespace", NAMESPACE)
    _kubectl(server, "create", "secret", "generic", _SECRET, "-n", NAMESPACE)
    for number, body in enumerate((*_service(port), *_webhooks(server, checkout))):
        file = server.logs / f"kueue-{number}.json"
        file.write_text(json.dumps(body))
        _kubectl(server, "create", "-f", file)
    conversion = {
        "clientConfig": {"service": _WHERE | {"path": "/convert"}},
        "conversionReviewVersions": ["v1"],
    }
    patch = json.dumps({"spec": {"conversion": {"strategy": "Webhook", "webhook": conversion}}})
    for plural in _CONVERTED:
        _kubectl(server, "patch", "crd", f"{plural}.kueue.x-k8s.io", "--type=merge", "-p", patch)


def _service(port: int) -> Iterator[Json]:
    """Yields the Service of Kueue's webhooks, and its only endpoint."""
    meta: Json = {"name": _SERVICE, "namespace": NAMESPACE}
    yield {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": [{"port": 443}]}}
    yield {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": meta | {"labels": {"kubernetes.io/service-name": _SERVICE}},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": port, "protocol": "TCP"}],
        "endpoints": [{"addresses": [_address()], "conditions": {"ready": True}}],
    }


def _address() -> str:
    """Returns an address of this machine that is not the loopback's; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def _webhooks(server: ApiServer, checkout: Path) -> Iterator[Json]:
    """Yields Kueue's own webhook configurations, under the names that an installation gives them."""
    words = ("create", "--dry-run=client", "-o", "json", "-f", checkout / _MANIFESTS)
    decoder, text = json.JSONDecoder(), _kubectl(server, *words).strip()
    while text:
        body, end = decoder.raw_decode(text)
        text = text[end:].strip()
        body["metadata"] = {"name": f"kueue-{body['metadata']['name']}"}
        for webhook in body["webhooks"]:
            webhook["clientConfig"]["service"] |= _WHERE
        yield body


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
