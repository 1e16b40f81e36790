"""TrainingJobs with figures of their cost, as the API server returns them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def attempt(number: int, **more: Any) -> Json:
    ended = {"endTime": "2026-11-23T11:05:00Z", "cause": "NodeLost", "lastStep": 812, "durableStep": 800}
    known = {"spent": "6.100000", "unknownSeconds": "0", "node": "a", "instanceType": "p4d.24xlarge"}
    place = {"zone": "us-east-1b", "capacityType": "Spot", "workers": 2}
    times = {"startTime": "2026-11-23T10:00:00Z", "boundTime": "2026-11-23T10:10:00Z"}
    return {"number": number, **known, **place, **times, **ended, **more}


COST: Json = {
    "spent": "12.700000", "use": "11.000000", "boot": "1.600000", "idle": "0.100000", "unknownSeconds": "0",
    "onDemandIdeal": "33.400000", "saving": "62.0%", "updateTime": "2026-11-23T14:15:00Z",
}  # fmt: skip
GOODPUT: Json = {
    "productive": "6620.000", "startup": "360.000", "dataWait": "60.000", "checkpointStall": "40.000",
    "restore": "30.000", "rollback": "40.000", "waiting": "480.000", "other": "50.000", "wanted": "7680.000",
    "allocated": "7200.000", "runtime": "91.9%", "scheduling": "93.8%", "paid": "86.9%",
}  # fmt: skip
ENDED: Json = {
    "phase": "Succeeded", "attempt": 2, "interruptions": 1, "failures": 0, "cost": COST, "goodput": GOODPUT,
    "attempts": [attempt(1), attempt(2, cause="Done", startStep=800, lastStep=5000, durableStep=5000)],
}  # fmt: skip


def document(status: Json | None = None, *, name: str = "gpt", team: str = "", **more: Any) -> Json:
    labels = {"labels": {"spottrain.io/team": team}} if team else {}
    return {
        "apiVersion": "spottrain.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "ml", **labels},
        "spec": {"checkpoint": {"mode": "Runtime"}},
        **({} if status is None else {"status": status}),
        **more,
    }
