"""Cloud and spot labels, found on nodes of a real API server that has no NodePools of Karpenter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from localcluster.apiserver import ApiServer

from tests.api.kube import Kube, wait_for
from tests.api.scene import OperatorProcess, Scene

SPOT = {"eks.amazonaws.com/capacityType": "SPOT"}


@pytest.fixture
def spot_node(kube: Kube) -> Iterator[str]:
    """The only node: scenes leave theirs, some under a notice, and each new pod avoids those."""
    for left in kube.call("GET", "/api/v1/nodes")["items"]:
        kube.call("DELETE", f"/api/v1/nodes/{left['metadata']['name']}")
    name = "spot-node"
    spec = {"providerID": "aws:///us-east-1a/i-0123"}
    kube.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": SPOT}, "spec": spec})
    yield name
    kube.call("DELETE", f"/api/v1/nodes/{name}")


def test_a_job_is_pinned_to_what_the_nodes_tell_and_its_status_holds_it(
    kube: Kube, server: ApiServer, namespace: str, spot_node: str
) -> None:
    setting = {"default_pool": '{"platform": "Auto"}'}
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace, **setting) as operator:
        operator.wait_ready()
        scene = Scene(kube=kube, namespace=namespace, job="found")
        scene.create()
        pod = scene.wait_attempt(1)
        node = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        rule = {"key": "eks.amazonaws.com/capacityType", "operator": "In", "values": ["SPOT"]}
        assert node == {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
        assert pod["spec"]["terminationGracePeriodSeconds"] == 110
        record = wait_for("the attempt's record", lambda: scene.status().get("attempts"))[-1]
        found = {name: record[name] for name in ("platform", "noticeSeconds", "nodeLabels")}
        assert found == {
            "platform": "AWS",
            "noticeSeconds": 110,
            "nodeLabels": ["eks.amazonaws.com/capacityType=SPOT"],
        }
        assert "NodePools" not in operator.log.read_text(), "a cluster without Karpenter is fine"
