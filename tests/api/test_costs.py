"""status.cost on a real API server: nodes and pods come and go, the operator is killed, prices change."""

from __future__ import annotations

import json
import time
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from localcluster.apiserver import ApiServer

from tests.api.kube import MERGE, Kube, wait_for
from tests.api.scene import STRATEGIC, OperatorProcess, Scene

LABELS = {
    "karpenter.sh/capacity-type": "spot",
    "node.kubernetes.io/instance-type": "g5.xlarge",
    "topology.kubernetes.io/zone": "us-east-1a",
}
A_DOLLAR_A_SECOND = [
    {"instanceType": "g5.xlarge", "capacityType": "Spot", "zone": "us-east-1a", "usdPerHour": 3600}
]


def seconds(since: str, until: str) -> Decimal:
    begin, end = (datetime.fromisoformat(text) for text in (since, until))
    return Decimal(int((end - begin).total_seconds()))


def add_node(scene: Scene, kube: Kube) -> dict[str, Any]:
    name = scene.add_node()
    kube.call("PATCH", f"/api/v1/nodes/{name}", {"metadata": {"labels": LABELS}}, kind=MERGE)
    body = {"status": {"allocatable": {"nvidia.com/gpu": "1"}, "capacity": {"nvidia.com/gpu": "1"}}}
    kube.call("PATCH", f"/api/v1/nodes/{name}/status", body, kind=STRATEGIC)
    found = kube.get(f"/api/v1/nodes/{name}")
    assert found is not None
    return found


def cost_of(scene: Scene) -> dict[str, Any]:
    found: dict[str, Any] = wait_for("status.cost", lambda: scene.status().get("cost"))
    return found


def test_a_job_s_nodes_are_paid_for_to_the_second_though_the_operator_is_killed(
    kube: Kube, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(A_DOLLAR_A_SECOND))
    settings = {"kubeconfig": server.kubeconfig, "namespace": namespace, "price_file": str(prices)}
    with OperatorProcess(**settings) as operator:  # type: ignore[arg-type]
        operator.wait_ready()
        scene = Scene(kube=kube, namespace=namespace, job="paid")
        scene.create()
        pod = scene.wait_attempt(1)
        time.sleep(1.1)  # times of the API server are whole seconds
        node = add_node(scene, kube)
        scene.bind(pod, node["metadata"]["name"])
        cost_of(scene)
        operator.kill()
        time.sleep(2.1)  # nobody counts meanwhile
        scene.end(pod, 1, "")
        operator.start()
        operator.wait_ready()
        wait_for("the end in the sums", lambda: _entry(scene).get("ended"))
        entry = _entry(scene)
        kube.call("DELETE", f"/api/v1/nodes/{node['metadata']['name']}")
        wait_for("the node's end in the sums", lambda: _entry(scene).get("closed", True))
    cost = cost_of(scene)
    created, bound, gone = node["metadata"]["creationTimestamp"], entry["bound"], cost["time"]
    by_hand = {
        "boot": seconds(created, bound),
        "use + idle": seconds(bound, gone),
        "spent": seconds(created, gone),
    }
    found = {name: Decimal(cost[name]) for name in ("boot", "use", "idle", "spent")}
    assert found["boot"] == by_hand["boot"] and found["spent"] == by_hand["spent"]
    assert found["use"] + found["idle"] == by_hand["use + idle"]
    assert found["use"] >= seconds(bound, entry["ended"]) and cost["state"] == "Estimated"
    assert entry["capacityType"] == "Spot" and entry["instanceType"] == "g5.xlarge"


def test_without_a_price_list_the_cost_is_unknown(kube: Kube, server: ApiServer, namespace: str) -> None:
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace) as operator:
        operator.wait_ready()
        scene = Scene(kube=kube, namespace=namespace, job="unknown")
        scene.create()
        scene.bind(scene.wait_attempt(1), add_node(scene, kube)["metadata"]["name"])
        wait_for("Unknown", lambda: cost_of(scene)["state"] == "Unknown")
        assert "no price list, so all prices are unknown" in operator.log.read_text()
        assert Decimal(cost_of(scene)["spent"]) == 0


def _entry(scene: Scene) -> dict[str, Any]:
    nodes = cost_of(scene).get("nodes") or [{}]
    entry: dict[str, Any] = nodes[0]
    return entry
