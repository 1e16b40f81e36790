"""capacity.type Cheapest on a real API server: it falls back in time, though the operator is killed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from localcluster.apiserver import ApiServer
from spottrain.contract import Outcome, TimeSplit

from tests.api.kube import Kube, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.builders import word

LABEL: Final = "node.kubernetes.io/instance-type"
PRICES: Final = [
    {"instanceType": "g5.xlarge", "capacityType": "Spot", "usdPerHour": 0.4},
    {"instanceType": "g5.xlarge", "capacityType": "OnDemand", "usdPerHour": 1.0},
]
CAPACITY: Final = {
    "type": "Cheapest",
    "pendingTimeoutSeconds": 600,
    "cheapest": {"pendingSeconds": 30},
    "pools": [
        {"name": "cheap", "platform": "AWS", "nodeSelector": {LABEL: "g5.xlarge"}},
        {"name": "sure", "platform": "AWS", "type": "OnDemand", "nodeSelector": {LABEL: "g5.xlarge"}},
    ],
}
RESERVE: Final = 300 + 600 + 1
"""Seconds that are kept for a start on demand: a restart, pendingTimeoutSeconds, the interval of saves."""
REQUEST: Final = 30 + 60 + 300
"""What a request for spot may cost: pendingSeconds and some, and a start that is lost."""


def later(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def by(deadline: str) -> dict[str, Any]:
    return {"cheapest": {"pendingSeconds": 30, "deadline": deadline}}


def records(scene: Scene) -> list[tuple[str, str]]:
    return [(r["capacityType"], r.get("cause", "")) for r in scene.status()["attempts"]]


def test_a_job_whose_request_for_spot_is_refused_runs_on_demand_in_time_though_the_operator_is_killed(
    kube: Kube, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    with OperatorProcess(
        kubeconfig=server.kubeconfig, namespace=namespace, price_file=str(prices)
    ) as operator:
        operator.wait_ready()
        scene = Scene(kube=kube, namespace=namespace, job="cheapest")
        store = {"uri": "s3://bucket/run", "interval": "1s"}
        scene.create(capacity=CAPACITY | by(later(3600)), checkpoint=store)
        first = scene.wait_attempt(1)
        assert first["spec"]["nodeSelector"] == {LABEL: "g5.xlarge"}
        assert scene.wait_condition("OnTime", "Unknown", "WorkUnknown")
        scene.bind(first)
        # A hundred seconds of work are left, and a minute more than a request for spot may cost.
        scene.change(capacity=by(later(100 + RESERVE + REQUEST + 60)))
        wait_for("the deadline to be seen", lambda: scene.status()["observedGeneration"] == 2)
        split = TimeSplit(productive=99, startup=20)
        done = {"startStep": 0, "step": 100, "durableStep": 100, "totalSteps": 200}
        scene.end(first, 75, word(Outcome.INTERRUPTED, timeSplit=split, **done))
        second = scene.wait_attempt(2)
        assert records(scene) == [("Spot", "Interrupted"), ("Spot", "")]
        assert "at least the" in scene.status()["attempts"][1]["choice"]
        scene.wait_condition("OnTime", "True", "OnSchedule")
        operator.kill()  # while the request is pending
        operator.start(ahead=70)
        operator.wait_ready()
        third = scene.wait_attempt(3)
        assert second["metadata"]["name"] != third["metadata"]["name"]
        assert records(scene)[1:] == [("Spot", "SchedulingTimeout"), ("OnDemand", "")]
        assert "less than the" in scene.status()["attempts"][2]["choice"]
        scene.bind(third)
        scene.end(third, 0, word(Outcome.DONE, step=200, durableStep=200, startStep=100))
        scene.wait_condition("Succeeded", "True")
        assert "was done before" in scene.wait_condition("OnTime", "True", "OnSchedule")["message"]
        assert scene.counters() == (3, 0, 1), "the refused request is no interruption"


def test_a_deadline_in_the_past_is_refused_with_a_sentence_and_a_later_one_starts_the_job(
    scene: Scene,
) -> None:
    past: dict[str, Any] = CAPACITY | by("2020-01-01T00:00:00Z")
    scene.create(capacity=past)
    found = scene.wait_condition("Accepted", "False", "InvalidSpec")
    assert "spec.capacity.cheapest.deadline (2020-01-01T00:00:00Z) is in the past" in found["message"]
    assert not scene.pods()
    scene.change(capacity=by(later(36_000)))
    scene.wait_attempt(1)
    scene.wait_condition("Accepted", "True")
