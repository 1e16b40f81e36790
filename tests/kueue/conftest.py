"""A real API server and the real Kueue; the test plays scheduler and kubelet. Opt-in.

Nothing here builds Kueue. The caller has its program and a checkout of the same version, named by
SPOTTRAIN_KUEUE_PROGRAM and SPOTTRAIN_KUEUE (`make test-with X=kueue KUEUE=/checkout PROGRAM=/kueue`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster.apiserver import ApiServer, api_server
from localcluster.kueue import FLAGS, kueue

from tests.api import chart
from tests.api.conftest import CRD
from tests.api.kube import Kube
from tests.api.scene import OperatorProcess, Scene
from tests.kueue.queues import Queues
from tests.support import optional

CHECKOUT, PROGRAM = (os.environ.get(name, "") for name in ("SPOTTRAIN_KUEUE", "SPOTTRAIN_KUEUE_PROGRAM"))
_count = itertools.count(1)


def missing(checkout: str, program: str) -> str:
    """What is not there, and how to name it; empty if both are."""
    way = "`make test-with X=kueue KUEUE=/path/of/checkout PROGRAM=/path/of/kueue` names both, of one version"
    if not (checkout and program):
        return f"tests/kueue needs a checkout of Kueue and its program, which nothing here builds: {way}"
    manifests = Path(checkout) / "config" / "components"
    if not manifests.is_dir():
        return f"SPOTTRAIN_KUEUE={checkout} is no checkout of Kueue, for it has no config/components: {way}"
    return "" if Path(program).is_file() else f"SPOTTRAIN_KUEUE_PROGRAM={program} is no file: {way}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    optional.require(config, items, Path(__file__).parent, missing(CHECKOUT, PROGRAM))


@pytest.fixture(scope="session")
def server() -> Iterator[ApiServer]:
    checkout, program = Path(CHECKOUT).resolve(), Path(PROGRAM).resolve()
    with api_server(flags=FLAGS) as running:
        Kube.from_kubeconfig(running.kubeconfig).install(CRD)
        settings = {"waitForPodsReady": {"timeout": "5m"}, "manageJobsWithoutQueueName": True}
        with kueue(running, program, checkout, **settings):
            yield running


@pytest.fixture(scope="session")
def kube(server: ApiServer) -> Kube:
    return Kube.from_kubeconfig(server.kubeconfig)


@pytest.fixture(scope="session")
def operator(
    kube: Kube, server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """It has the chart's rights, and is under the chart's admission policies. So is Kueue, beside its own."""
    kube.make_namespace("training")
    for component in ("operator", "kueue"):
        chart.install(kube, component, "kueue.enabled=true")
    folder = tmp_path_factory.mktemp("account")
    account = chart.kubeconfig(kube, server.kubeconfig, "spottrain-operator", folder)
    with OperatorProcess(kubeconfig=account, namespace="training", kueue="true") as process:
        process.wait_ready()
        yield process


@pytest.fixture
def queues(kube: Kube, operator: OperatorProcess) -> Queues:
    """A queue of the test's own."""
    return Queues(kube=kube, namespace=operator.namespace, name=f"team-{next(_count)}")


@pytest.fixture
def scenes(kube: Kube, operator: OperatorProcess) -> Iterator[Scene]:
    """As many jobs as the test wants: `next(scenes)`."""
    return (Scene(kube=kube, namespace=operator.namespace, job=f"job-{n}") for n in _count)
