"""A real etcd and kube-apiserver; the test plays scheduler and kubelet by writing to pods, as they would.

There is no controller manager: nothing collects garbage, and a bound pod that is deleted stays until the
"kubelet" removes it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import layout, versions
from localcluster.apiserver import ApiServer, api_server, ensure_programs
from localcluster.binaries import API_PROGRAMS

from tests.api import chart
from tests.api.kube import Kube
from tests.api.scene import OperatorProcess, Scene
from tests.support import optional

CRD = Path(__file__).resolve().parents[2] / "crds" / "trainingjobs.yaml"
_count = itertools.count(1)


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of Kubernetes' programs: pinned ones, or those that `make test-with X=kubernetes` names."""
    paths, version = layout.default_paths(), os.environ.get("SPOTTRAIN_TEST_KUBERNETES")
    with optional.built():
        ensure_programs(paths, API_PROGRAMS | {"kube-scheduler"})
        return versions.programs(version) if version else paths.bin


@pytest.fixture(scope="session")
def server(programs: Path) -> Iterator[ApiServer]:
    with api_server(programs=programs) as running:
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


@pytest.fixture(scope="session")
def operators_kubeconfig(kube: Kube, server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's own account, with the chart's roles and under the chart's admission policies."""
    chart.install(kube, "operator")
    return chart.kubeconfig(kube, server.kubeconfig, "spottrain-operator", tmp_path_factory.mktemp("account"))


@pytest.fixture(scope="module")
def operator(kube: Kube, operators_kubeconfig: Path) -> Iterator[OperatorProcess]:
    """One operator process for the tests of a module, with waits cut short; it watches one namespace.

    It has no more rights than the chart gives it.
    """
    name = f"shared-{next(_count)}"
    kube.make_namespace(name)
    with OperatorProcess(kubeconfig=operators_kubeconfig, namespace=name) as process:
        process.wait_ready()
        yield process


@pytest.fixture
def scene(kube: Kube, operator: OperatorProcess) -> Scene:
    return Scene(kube=kube, namespace=operator.namespace, job=f"job-{next(_count)}")
