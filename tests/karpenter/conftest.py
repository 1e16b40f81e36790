"""A real API server, scheduler and Karpenter; kwok's nodes have no kubelet: the test is theirs.

A level of its own, because Karpenter is built for it: `make test-with X=karpenter`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from localcluster import layout
from localcluster.apiserver import ApiServer, api_server, ensure_programs
from localcluster.binaries import FAKE_NODE_PROGRAMS, KARPENTER_PROGRAMS
from localcluster.fakenodes import fake_nodes
from localcluster.karpenter import crds, instance_type, karpenter

from tests.api.kube import APPLY, Json, Kube, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.karpenter.autoscaler import NODE_CLASS, Autoscaler
from tests.support import optional

CRD = Path(__file__).resolve().parents[2] / "crds" / "trainingjobs.yaml"
TYPES = (
    instance_type("gpu-1", 3.0, {"cpu": "8", "memory": "64Gi", "pods": "20", "nvidia.com/gpu": "1"}),
    instance_type("cpu-4", 1.0, {"cpu": "4100m", "memory": "16Gi", "pods": "20"}),
)
_count = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    with optional.built():
        ensure_programs(layout.default_paths(), KARPENTER_PROGRAMS | FAKE_NODE_PROGRAMS)
    with api_server() as running:
        kube = Kube.from_kubeconfig(running.kubeconfig)
        kube.install(CRD)
        _install_karpenters_own(kube)
        with fake_nodes(running), karpenter(running, TYPES):
            yield running


@pytest.fixture(scope="session")
def kube(server: ApiServer) -> Kube:
    return Kube.from_kubeconfig(server.kubeconfig)


@pytest.fixture(scope="session")
def autoscaler(kube: Kube, server: ApiServer) -> Autoscaler:
    return Autoscaler(kube=kube, audit_log=server.audit_log)


@pytest.fixture(scope="session")
def operator(kube: Kube, server: ApiServer) -> Iterator[OperatorProcess]:
    kube.make_namespace("training")
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace="training") as process:
        process.wait_ready()
        yield process


@pytest.fixture
def scenes(kube: Kube, operator: OperatorProcess) -> Iterator[Scene]:
    """As many jobs as the test wants: `next(scenes)`."""
    return (Scene(kube=kube, namespace=operator.namespace, job=f"job-{n}") for n in _count)


def _install_karpenters_own(kube: Kube) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    bodies: list[Json] = [body for body in yaml.safe_load_all(crds()) if body]
    paths = [f"{path}/{body['metadata']['name']}" for body in bodies]
    for own, body in zip(paths, bodies, strict=True):
        kube.call("PATCH", f"{own}?fieldManager=tests&force=true", body, kind=APPLY)
    wait_for("Karpenter's CRDs to be served", lambda: all(_established(kube, own) for own in paths))
    node_class = {"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": NODE_CLASS}
    body = node_class | {"metadata": {"name": "default"}}
    kube.call("POST", "/apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses", body)


def _established(kube: Kube, path: str) -> bool:
    conditions: list[Json] = kube.call("GET", path).get("status", {}).get("conditions") or []
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)
