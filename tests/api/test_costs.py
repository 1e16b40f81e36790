"""status.cost on a real API server: nodes and pods come and go, the operator is killed, prices change."""

from __future__ import annotations

import json
import time
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from localcluster.apiserver import ApiServer
from spottrain.contract import Outcome, TerminationMessage, TimeSplit
from spottrain_operator.api.wire import camel
from spottrain_operator.policies.goodput import PARTS

from tests.api.kube import MERGE, Kube, wait_for
from tests.api.scene import STRATEGIC, OperatorProcess, Scene

LABELS = {
    "karpenter.sh/capacity-type": "spot",
    "node.kubernetes.io/instance-type": "g5.xlarge",
    "topology.kubernetes.io/zone": "us-east-1a",
}
A_DOLLAR_A_SECOND = [
    {"instanceType": "g5.xlarge", "capacityType": "Spot", "zone": "us-east-1a", "usdPerHour": 3600},
    {"instanceType": "g5.xlarge", "capacityType": "OnDemand", "usdPerHour": 10800},
]
"""And three on demand."""


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
    place = str(prices)
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace, price_file=place) as operator:
        operator.wait_ready()
        scene = Scene(kube=kube, namespace=namespace, job="paid")
        scene.create()
        pod = scene.wait_attempt(1)
        time.sleep(1.1)  # times of the API server are whole seconds
        node = add_node(scene, kube)
        scene.bind(pod, node["metadata"]["name"])
        cost_of(scene)
        operator.kill()
        time.sleep(1.1)  # nobody counts meanwhile
        scene.end(pod, 1, "")
        operator.start()
        operator.wait_ready()
        (entry,) = wait_for(
            "the end in the bookkeeping", lambda: scene.books().get("ledger", {}).get("nodes")
        )
        time.sleep(1.1)
        kube.call("DELETE", f"/api/v1/nodes/{node['metadata']['name']}")
        wait_for("the node's end in the sums", lambda: Decimal(cost_of(scene)["idle"]) > 0)
    cost = cost_of(scene)
    created, bound, gone = node["metadata"]["creationTimestamp"], entry["boundTime"], cost["updateTime"]
    by_hand = {
        "boot": seconds(created, bound),
        "use + idle": seconds(bound, gone),
        "spent": seconds(created, gone),
    }
    found = {name: Decimal(cost[name]) for name in ("boot", "use", "idle", "spent")}
    assert found["boot"] == by_hand["boot"] and found["spent"] == by_hand["spent"]
    assert found["use"] + found["idle"] == by_hand["use + idle"]
    assert found["use"] >= seconds(bound, entry["endTime"]) and Decimal(cost["unknownSeconds"]) == 0
    assert entry["capacityType"] == "Spot" and entry["instanceType"] == "g5.xlarge"


def test_without_a_price_list_the_cost_is_unknown(kube: Kube, server: ApiServer, namespace: str) -> None:
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace) as operator:
        operator.wait_ready()
        scene = Scene(kube=kube, namespace=namespace, job="unknown")
        scene.create()
        pod, node = scene.wait_attempt(1), add_node(scene, kube)
        time.sleep(1.1)  # a whole second without a price, else the sums say so only a minute later
        scene.bind(pod, node["metadata"]["name"])
        wait_for("unknown seconds", lambda: Decimal(cost_of(scene)["unknownSeconds"]) > 0)
        assert "no price list, so its prices are unknown" in operator.log.read_text()
        assert Decimal(cost_of(scene)["spent"]) == 0


# --- where the time went --------------------------------------------------------------------------------
def test_the_time_of_a_job_is_divided_to_the_second_though_the_operator_is_killed(
    kube: Kube, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """Two attempts that run, a pause between them; the operator is down when the first one ends."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(A_DOLLAR_A_SECOND))
    place = str(prices)
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace, price_file=place) as operator:
        operator.wait_ready()
        scene = Scene(kube=kube, namespace=namespace, job="divided")
        scene.create()
        first = Life(scene, kube)
        since = scene.status()["startTime"]
        wait_for("the first attempt in the sums", lambda: scene.status().get("goodput"))
        time.sleep(1.1)  # times of the API server are whole seconds
        operator.kill()
        first.end(79, Outcome.INTERRUPTED_LOST, TimeSplit(productive=0.5, startup=0.5, unsaved=0.375))
        time.sleep(1.1)  # nobody counts meanwhile
        operator.start()
        operator.wait_ready()
        scene.wait_attempt(2)
        scene.change(suspend=True)
        paused = scene.wait_condition("Suspended", "True")["lastTransitionTime"]
        time.sleep(1.1)
        scene.change(suspend=False)
        resumed = scene.wait_condition("Suspended", "False")["lastTransitionTime"]
        second = Life(scene, kube)
        time.sleep(1.1)
        second.end(0, Outcome.DONE, TimeSplit(productive=0.5, startup=0.25, dataWait=0.25))
        scene.wait_condition("Succeeded", "True")
        for life in (first, second):
            kube.call("DELETE", f"/api/v1/nodes/{life.node}")
        wait_for("both nodes in the sums", lambda: not open_nodes(scene))
        books = scene.books()
    status = scene.status()
    goodput = {name: Decimal(status["goodput"][name]) for name in ("wanted", "allocated", *map(camel, PARTS))}
    allocated = first.seconds + second.seconds
    wanted = seconds(since, second.ended) - seconds(paused, resumed)
    assert (goodput["wanted"], goodput["allocated"]) == (wanted, allocated)
    by_hand = {
        "productive": Decimal("0.125") + Decimal("0.5"),
        "rollback": Decimal("0.375"),
        "dataWait": Decimal("0.25"),
        "startup": Decimal("0.75") + seconds(first.bound, first.began) + seconds(second.bound, second.began),
        "waiting": wanted - allocated,
        "checkpointStall": Decimal(0),
        "restore": Decimal(0),
    }
    assert {name: goodput[name] for name in by_hand} == by_hand
    assert goodput["other"] == wanted - sum(by_hand.values())
    cost = status["cost"]
    spent, ideal = Decimal(cost["spent"]), 3 * (by_hand["productive"] + by_hand["dataWait"])
    assert Decimal(cost["onDemandIdeal"]) == ideal and cost["saving"] == f"{100 * (1 - spent / ideal):.1f}%"
    assert sum(Decimal(attempt["spent"]) for attempt in status["attempts"]) == spent
    assert Decimal(books["ledger"]["attempts"][0]["sums"]["useSeconds"]) == first.seconds


class Life:
    """The pod of the job's next attempt, on a node of its own, and its times."""

    def __init__(self, scene: Scene, kube: Kube) -> None:
        self._scene, self._kube = scene, kube
        self._pod = wait_for("a pod without a node", lambda: next(filter(_pending, scene.pods()), None))
        self.node = str(add_node(scene, kube)["metadata"]["name"])
        scene.bind(self._pod, self.node)
        status = self._live()["status"]
        self.bound = next(
            c["lastTransitionTime"] for c in status["conditions"] if c["type"] == "PodScheduled"
        )
        self.began = str(status["containerStatuses"][0]["state"]["running"]["startedAt"])
        self.ended = ""

    def end(self, code: int, outcome: Outcome, split: TimeSplit) -> None:
        word = TerminationMessage(outcome=outcome, step=5, durableStep=5, startStep=0, timeSplit=split)
        self._scene.end(self._pod, code, word.to_json())
        self.ended = str(self._live()["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"])

    @property
    def seconds(self) -> Decimal:
        return seconds(self.bound, self.ended)

    def _live(self) -> dict[str, Any]:
        found = self._kube.get(self._scene.path(self._pod))
        assert found is not None
        return found


def _pending(pod: dict[str, Any]) -> bool:
    return "nodeName" not in pod["spec"] and "deletionTimestamp" not in pod["metadata"]


def open_nodes(scene: Scene) -> list[dict[str, Any]]:
    """The nodes that are not accounted to their end, of a job that has ended."""
    nodes = scene.books().get("ledger", {}).get("nodes", ())
    return [node for node in nodes if not node.get("closed")]
