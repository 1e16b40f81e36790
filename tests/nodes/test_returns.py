"""A job on demand goes back to spot: it trains until its spot node is there, and no step is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from demo.kubectl import Kubectl
from localcluster.api import Cluster

from tests.support.lab import TRAIN, Lab, Raw, new_lab, paced

LABEL = "spottrain.test/spot"


@pytest.fixture
def lab(cluster: Cluster, installed: Kubectl) -> Iterator[Lab]:
    """Its slow jobs are slow in their second attempt, the one on demand."""
    with new_lab(cluster, installed, {"train.py": TRAIN.replace('== "1"', '== "2"')}) as lab:
        yield lab


def cheapest(node: str) -> Raw:
    """On demand on this node, or on spot where a node has the label: none has it at first."""
    spot: Raw = {"name": "spot", "platform": "AWS", "nodeSelector": {LABEL: "yes"}}
    sure: Raw = {"name": "sure", "platform": "AWS", "type": "OnDemand"}
    sure["nodeSelector"] = {"kubernetes.io/hostname": node}
    deadline = (datetime.now(UTC) + timedelta(hours=20)).isoformat()
    return {
        "type": "Cheapest",
        "cheapest": {"deadline": deadline, "pendingSeconds": 30},
        "pools": [spot, sure],
    }


def digest(lab: Lab, name: str, attempt: int) -> str:
    found = re.search(r"digest=(\w+)", lab.stored_log(attempt=attempt, name=name))
    assert found is not None
    return found[1]


@pytest.mark.heavy
def test_it_trains_on_until_its_spot_node_is_there_and_ends_with_the_same_weights(lab: Lab) -> None:
    sure, spot = lab.cluster.nodes
    slow = {"checkpoint": {"interval": "10steps"}, "container": {"env": paced(first=1.0, later=0)}}
    lab.apply(lab.slow_job("returns", capacity=cheapest(sure), **slow), lab.slow_job("alone", **slow))

    def request() -> Raw | None:
        """Its record, while the attempt on demand trains."""
        status = lab.status("returns")
        return next((r for r in status.get("attempts", []) if r["number"] > status["attempt"] == 2), None)

    lab.wait("a request for spot beside the training", request, name="returns", seconds=240)
    asked_at = lab.status("returns")["progress"]["step"]
    lab.wait(
        "more steps while it asks",
        lambda: lab.status("returns")["progress"]["step"] > asked_at,
        name="returns",
    )
    lab.kubectl.run("label", "node", spot, f"{LABEL}=yes")
    try:
        status = lab.wait_for_phase("Succeeded", name="returns", seconds=240)
    finally:
        lab.kubectl.run("label", "node", spot, f"{LABEL}-")
    ended = [(r["capacityType"], r["cause"]) for r in status["attempts"]]
    assert ended == [("Spot", "SchedulingTimeout"), ("OnDemand", "Moved"), ("Spot", "Done")]
    old, new = status["attempts"][1:]
    assert (old["node"], new["node"]) == (sure, spot)
    assert old["lastStep"] == new["startStep"] > asked_at, "the checkpoint of the end"
    assert (status.get("failures", 0), status.get("interruptions", 0)) == (0, 0)
    lab.wait_for_phase("Succeeded", name="alone", seconds=240)
    assert digest(lab, "returns", status["attempt"]) == digest(lab, "alone", 1)
