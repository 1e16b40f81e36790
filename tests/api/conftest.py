"""A real etcd and kube-apiserver; the test plays scheduler and kubelet by writing to pods, as they would.

There is no controller manager: nothing collects garbage, and a bound pod that is deleted stays until the
"kubelet" removes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster.apiserver import ApiServer, api_server

from tests.api.kube import Kube
from tests.api.scene import OperatorProcess, Scene

CRD = Path(__file__).resolve().parents[2] / "crds" / "trainingjobs.yaml"
_count = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    with api_server() as running:
        yield running


@pytest.fixture(scope="session")
def kube(server: ApiServer) -> Kube:
    """The API server with our CRD."""
    kube = Kube.from_kubeconfig(server.kubeconfig)
    kube.install(CRD)
    return kube


@pytest.fixture
def namespace(kube: Kube) -> str:
    """A new one, with the service account that the controller manager would make."""
    name = f"test-{next(_count)}"
    kube.make_namespace(name)
    return name


@pytest.fixture(scope="module")
def operator(kube: Kube, server: ApiServer) -> Iterator[OperatorProcess]:
    """One operator process for the tests of a module, with waits cut short; it watches one namespace."""
    name = f"shared-{next(_count)}"
    kube.make_namespace(name)
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=name) as process:
        process.wait_ready()
        yield process


@pytest.fixture
def scene(kube: Kube, operator: OperatorProcess) -> Scene:
    return Scene(kube=kube, namespace=operator.namespace, job=f"job-{next(_count)}")
