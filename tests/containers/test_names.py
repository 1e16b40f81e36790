"""Names in the local cluster: by them the ranks of a gang find each other, and none is asked for outside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from demo.kubectl import Kubectl
from demo.target import local_kubectl, make_namespace
from localcluster.api import Cluster
from localcluster.layout import OPERATOR_IMAGE

from tests.support.lab import fresh_nodes

SERVICE = "gang"
PATIENCE = 60.0
LOOK = """
import socket, sys, time

def address(name):
    try:
        return socket.getaddrinfo(name, 80, socket.AF_INET)[0][4][0]
    except socket.gaierror as error:
        return "none" if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA) else repr(error)

names = sys.argv[1:]
while "none" in [address(name) for name in names]:
    time.sleep(0.2)
print("FOUND", *[address(name) for name in names], flush=True)
began = time.monotonic()
print("OUTSIDE", address("example.com"), time.monotonic() - began < 2, flush=True)
time.sleep(600)
"""


def full_name(rank: int, namespace: str) -> str:
    return f"rank-{rank}.{SERVICE}.{namespace}.svc.cluster.local"


def pod_that_looks(rank: int, node: str, names: list[str]) -> dict[str, Any]:
    """Never ready, as a rank that waits for the others is; it prints the addresses once it has them all."""
    container = {
        "name": "look",
        "image": OPERATOR_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", LOOK, *names],
        "readinessProbe": {"exec": {"command": ["false"]}},
    }
    spec = {
        "nodeName": node,
        "hostname": f"rank-{rank}",
        "subdomain": SERVICE,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    meta = {"name": f"rank-{rank}", "labels": {"gang": "yes"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


@pytest.fixture
def kubectl(cluster: Cluster) -> Iterator[Kubectl]:
    """A namespace with a headless Service that also names pods which are not ready."""
    kubectl = local_kubectl(cluster, f"test-names-{time.time_ns()}")
    fresh_nodes(cluster, kubectl)  # a test before may have taken one
    make_namespace(kubectl, kubectl.namespace)
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"gang": "yes"}}
    kubectl.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE}, "spec": spec})
    yield kubectl
    kubectl.run("delete", "namespace", kubectl.namespace, "--wait=false")


def test_pods_that_are_not_ready_find_each_other_by_name_on_every_node(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    """Also by the short name that pods of one namespace may use; a name outside is quickly said not to be."""
    short = [f"rank-{rank}.{SERVICE}" for rank in range(len(cluster.nodes))]
    full = [full_name(rank, kubectl.namespace) for rank in range(len(cluster.nodes))]
    pods = [pod_that_looks(rank, node, full + short) for rank, node in enumerate(cluster.nodes)]
    kubectl.apply(*pods)
    logs = [log_with(kubectl, pod["metadata"]["name"], "OUTSIDE") for pod in pods]
    addresses = [kubectl.items("pods", "--selector=gang=yes")[rank]["status"]["podIP"] for rank in (0, 1)]
    assert [pod["status"]["containerStatuses"][0]["ready"] for pod in kubectl.items("pods")] == [False, False]
    for log in logs:
        assert log == [["FOUND", *addresses, *addresses], ["OUTSIDE", "none", "True"]]


def log_with(kubectl: Kubectl, pod: str, word: str) -> list[list[str]]:
    """The lines of a pod's log, once one of them holds the word."""
    end = time.monotonic() + PATIENCE
    text = ""
    while word not in text:
        assert time.monotonic() < end, f"{pod} did not say {word} within {PATIENCE:.0f} s; its log: {text}"
        time.sleep(0.5)
        try:
            text = kubectl.run("logs", pod)
        except RuntimeError as not_yet:
            text = f"({not_yet})"
    return [line.split() for line in text.splitlines()]
