"""The real cluster for this level: two nodes, S3, our chart installed by helm; a namespace for each test.

Refuses any kube-context that is not the local cluster's own: these tests take nodes away.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo.kubectl import Kubectl
from demo.target import install_local_chart, local_kubectl, make_bucket
from localcluster import images
from localcluster.api import Cluster
from localcluster.layout import TESTS_IMAGE, default_paths

from tests.support.lab import BUCKET, Lab, new_lab

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = "spottrain-local"


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Up with both nodes and all images; it is left running, for the next run to be quick."""
    subprocess.run([sys.executable, str(ROOT / "dev" / "cluster.py"), "up"], check=True)
    return Cluster.attach()


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Kubectl:
    """kubectl for the cluster on which helm has installed the chart from this checkout."""
    kubectl = local_kubectl(cluster, "default")
    context = kubectl.run("config", "current-context").strip()
    assert context == CONTEXT, f"these tests take nodes away: they run on {CONTEXT}, never on {context}"
    install_local_chart(kubectl)
    make_bucket(cluster, BUCKET)
    return kubectl


@pytest.fixture
def lab(cluster: Cluster, installed: Kubectl) -> Iterator[Lab]:
    with new_lab(cluster, installed, {}) as lab:
        yield lab


@pytest.fixture(scope="session")
def tests_image(cluster: Cluster) -> str:
    """The runtime's image with Accelerate in it, on the nodes."""
    images.bring(default_paths(), TESTS_IMAGE, "runtime-tests")
    return TESTS_IMAGE
