"""A job on demand goes back to spot: it trains until its spot node is there, and no step is lost."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from tests.support.lab import Lab, Raw, paced

STEPS = 300
LABEL = "spottrain.test/spot"


def job(lab: Lab, name: str, **more: Raw) -> Raw:
    env = paced(later=0.2)
    return lab.job(
        name,
        training={"maxSteps": STEPS},
        checkpoint={"interval": "10steps"},
        container={"env": env},
        **more,
    )


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


def test_it_trains_on_until_its_spot_node_is_there_and_ends_with_the_same_weights(lab: Lab) -> None:
    sure, spot = lab.cluster.nodes
    lab.apply(job(lab, "returns", capacity=cheapest(sure)), lab.job("alone", training={"maxSteps": STEPS}))

    def request() -> Raw | None:
        pods = [p for p in lab.pods("returns") if p["metadata"]["labels"]["spottrain.io/attempt"] == "3"]
        return pods[0] if pods else None

    lab.wait("a request for spot beside the training", request, name="returns", seconds=240)
    asked_at = lab.status("returns")["progress"]["step"]
    assert lab.status("returns")["attempt"] == 2
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
    ended = [(r["number"], r["capacityType"], r["cause"]) for r in status["attempts"]]
    assert ended == [(1, "Spot", "SchedulingTimeout"), (2, "OnDemand", "Moved"), (3, "Spot", "Done")]
    old, new = status["attempts"][1:]
    assert (old["node"], new["node"]) == (sure, spot)
    assert old["lastStep"] == new["startStep"] > asked_at, "the checkpoint of the end"
    assert (status.get("failures", 0), status.get("interruptions", 0)) == (0, 0)
    lab.wait_for_phase("Succeeded", name="alone", seconds=240)
    assert digest(lab, "returns", 3) == digest(lab, "alone", 1)
