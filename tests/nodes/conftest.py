"""A cluster of process nodes for each worker of this level, with our chart; a namespace for each test.

dev/processcluster says what such a node does and what it does not.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from demo.kubectl import Kubectl
from demo.target import local_kubectl, make_bucket, make_namespace
from localcluster.api import Cluster
from processcluster import install, lifecycle

from tests.support.lab import BUCKET, TRAIN, Lab, fresh_nodes


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """With both nodes, and spottrain installed."""
    with lifecycle.temporary_cluster() as running:
        cluster = running.cluster
        install.install(cluster)
        make_bucket(cluster, BUCKET)
        yield cluster


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Kubectl:
    return local_kubectl(cluster, "default")


@pytest.fixture
def lab(cluster: Cluster, installed: Kubectl) -> Iterator[Lab]:
    """A namespace of its own with the store's credentials, on two nodes without a notice."""
    fresh_nodes(cluster, installed)
    kubectl = local_kubectl(cluster, f"test-{uuid.uuid4().hex[:8]}")
    make_namespace(kubectl, kubectl.namespace)
    kubectl.apply(install.credentials(cluster))
    uri = f"s3://{BUCKET}/{kubectl.namespace}"
    yield Lab(
        cluster=cluster,
        kubectl=kubectl,
        uri=uri,
        image="spottrain-runtime:checkout",
        scripts={"train.py": TRAIN},
    )
    kubectl.run("delete", "trainingjobs", "--all", "--wait=false")
    kubectl.run("delete", "namespace", kubectl.namespace, "--wait=false")
