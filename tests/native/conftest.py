"""A real API server and scheduler of a Kubernetes that has gangs; opt-in.

SPOTTRAIN_NATIVE_KUBERNETES=1.37.1 names the version; its programs are built once (`make test-with X=native`).
The scheduler binds; nobody runs what is bound.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import apiserver, fakenodes, versions
from localcluster.apiserver import ApiServer, running

from tests.api.conftest import CRD
from tests.api.kube import Kube
from tests.native.stage import Stage
from tests.support import optional

VERSION = os.environ.get("SPOTTRAIN_NATIVE_KUBERNETES", "")
GATES = {"1.37": "GenericWorkload=true"}
SERVED = {"1.37": "v1beta1"}
"""By minor version."""
_count = itertools.count(1)


def missing(version: str) -> str:
    """What is wrong with the version, and how to name one; empty if nothing is."""
    known = ", ".join(f"{minor}.x" for minor in GATES)
    way = f"`make test-with X=native KUBERNETES=1.37.1` names one ({known}) and builds it once (20 minutes)"
    if not version:
        return f"tests/native needs a Kubernetes with gangs in SPOTTRAIN_NATIVE_KUBERNETES: {way}"
    minor = version.rpartition(".")[0]
    return (
        "" if minor in GATES else f"SPOTTRAIN_NATIVE_KUBERNETES={version} has no gangs that are tested: {way}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    optional.require(config, items, Path(__file__).parent, missing(VERSION))


@pytest.fixture(scope="session", params=["gangs", "gangs in a zone", "neither"])
def served(request: pytest.FixtureRequest) -> str:
    """What an administrator has switched on."""
    return str(request.param)


@pytest.fixture(scope="session")
def server(served: str) -> Iterator[ApiServer]:
    minor = VERSION.rpartition(".")[0]
    with optional.built():
        folder = versions.programs(VERSION)
    zones = ",TopologyAwareWorkloadScheduling=true" if served == "gangs in a zone" else ""
    gates = [f"--feature-gates={GATES[minor]}{zones}"] if served != "neither" else []
    api = [f"--runtime-config=scheduling.k8s.io/{SERVED[minor]}=true"] if served != "neither" else []
    with apiserver.api_server(programs=folder, flags=[*gates, *api]) as up:
        log = up.logs / "kube-scheduler.log"
        with running(fakenodes.scheduler(folder, up, *gates), log):
            yield up


@pytest.fixture(scope="session")
def kube(server: ApiServer) -> Kube:
    kube = Kube.from_kubeconfig(server.kubeconfig)
    kube.install(CRD)
    return kube


@pytest.fixture
def stage(kube: Kube, server: ApiServer) -> Iterator[Stage]:
    """A namespace of its own, and nodes that no other test uses."""
    name = f"native-{next(_count)}"
    kube.make_namespace(name)
    with Stage(kube=kube, namespace=name, job="job", kubeconfig=server.kubeconfig) as made:
        yield made
