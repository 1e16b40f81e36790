"""A cluster of process nodes for each worker of this level, with our chart; a namespace for each test.

dev/processcluster says what such a node does and what it does not. A trainer's start costs seconds of
processor time: scenes that do not disturb each other are played at once, by one fixture of their module.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from demo.kubectl import Kubectl
from demo.target import local_kubectl, make_bucket
from localcluster.api import Cluster
from processcluster import install, lifecycle

from tests.support.lab import BUCKET, Lab, new_lab

TUNING = "operator.tuning.deadSlackSeconds=3,operator.tuning.progressSeconds=3"
"""Waits of which the length proves nothing: the defaults are 30 and 10 s."""


def install_chart(cluster: Cluster) -> None:
    """As it is for all tests of this level."""
    install.install(cluster, "--set", TUNING)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """With both nodes, and spottrain installed."""
    with lifecycle.temporary_cluster() as running:
        cluster = running.cluster
        install_chart(cluster)
        make_bucket(cluster, BUCKET)
        yield cluster


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Kubectl:
    return local_kubectl(cluster, "default")


@pytest.fixture
def lab(cluster: Cluster, installed: Kubectl) -> Iterator[Lab]:
    with new_lab(cluster, installed, {}) as lab:
        yield lab
