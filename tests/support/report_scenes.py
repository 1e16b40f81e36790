"""A job and the series of its steps, as `spottrain report` reads them, for tests of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from spottrain.contract import Outcome, TimeSplit
from spottrain.core.series import Attempt, Point, Series, SeriesBuilder

DIAGNOSIS: Final = (
    "data-bound: The device waits for data 31% of the time. Set training.data.numWorkers to 6 (now 2). Gain: "
    "at most 45% (with loading spread over 6 workers)."
)
BEGUN: Final = datetime(2026, 11, 26, 8, tzinfo=UTC)
NOW: Final = BEGUN + timedelta(hours=5)
UID: Final = "0b6f"


def at(minutes: float) -> str:
    return (BEGUN + timedelta(minutes=minutes)).isoformat().replace("+00:00", "Z")


def attempt(number: int, begun: float, ended: float | None, **more: Any) -> dict[str, Any]:
    """An entry of status.attempts; times in minutes."""
    times = {"startTime": begun, "boundTime": begun + 2, "firstStepTime": begun + 6, "endTime": ended}
    place = {"node": f"ip-10-0-1-{number}.ec2.internal", "instanceType": "g6e.xlarge", "zone": "us-east-1a"}
    written = {name: at(minutes) for name, minutes in times.items() if minutes is not None}
    return {"number": number, "capacityType": "Spot", "workers": 1} | place | written | more


NOTICE: Final = {"cause": "SpotNotice", "evidence": "the cloud reclaims the node", "exitCode": 75}
ATTEMPTS: Final = [
    attempt(1, 0, 60, **NOTICE, startStep=0, lastStep=2000, durableStep=2000, spent="0.80"),
    attempt(2, 62, 150, cause="NodeLost", startStep=2000, lastStep=5200, durableStep=5000, spent="1.10"),
    attempt(3, 155, 280, cause="Done", exitCode=0, startStep=5000, lastStep=9000, durableStep=9000),
]
GOODPUT: Final = {
    "productive": "14100",
    "startup": "1200",
    "dataWait": "300",
    "checkpointStall": "60",
    "restore": "90",
    "rollback": "330",
    "waiting": "600",
    "other": "120",
    "wanted": "16800",
    "allocated": "16200",
    "scheduling": "96.4%",
    "runtime": "87.0%",
    "paid": "84.1%",
}
COST: Final = {
    "spent": "3.41",
    "use": "3.10",
    "boot": "0.21",
    "idle": "0.10",
    "onDemandIdeal": "8.90",
    "saving": "61.7%",
}


def job(attempts: Sequence[dict[str, Any]] = ATTEMPTS, **status: Any) -> dict[str, Any]:
    """A TrainingJob as the API server returns it, which has succeeded."""
    done = {"type": "Succeeded", "status": "True", "reason": "Done", "message": "Trained 9000 steps."}
    return {
        "apiVersion": "spottrain.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"namespace": "vision", "name": "vit-l16", "uid": UID, "creationTimestamp": at(0)},
        "spec": {"workers": 1, "checkpoint": {"uri": "s3://bucket/vit-l16"}},
        "status": {
            "phase": "Succeeded",
            "attempt": len(attempts),
            "interruptions": 2,
            "conditions": [done],
            "attempts": list(attempts),
            "progress": {"state": "Done", "step": 9000, "totalSteps": 9000, "loss": "1.234"},
            "cost": COST,
            "goodput": GOODPUT,
        }
        | status,
    }


def loss(step: int) -> float:
    """Falls, with noise that is the same each time."""
    return 2 + 8 / (1 + step / 400) + 0.3 * math.sin(step * 12.9898) * math.sin(step * 78.233)


def series(number: int, first: int, last: int, *, outcome: str = "", every: int = 10) -> Series:
    """The steps after `first` of an attempt, two a second; `last` is the last one that it has done."""
    builder, begun = SeriesBuilder(), BEGUN.timestamp() + first / 2 + 300 * number
    for step in range(first + every, last + 1, every):
        time, seconds = begun + (step - first) / 2, 12.0 if step == first + every else 0.5 * every
        builder.add(
            Point(step=step, time=time, loss=loss(step), steps=every, seconds=seconds, samples=every * 32)
        )
    return Series(
        attempt=Attempt(
            term=number,
            job="vit-l16",
            jobUID=UID,
            number=number,
            bornTime=begun - 90,
            writtenTime=begun + (last - first) / 2,
            startStep=first,
            totalSteps=9000,
            step=last,
            durableStep=last,
            outcome=outcome,
            diagnosis=DIAGNOSIS,
            timeSplit=TimeSplit(
                productive=(last - first) / 2, startup=80.0, unsaved=0.0 if outcome else 40.0
            ),
        ),
        points=builder.points(),
    )


def all_series() -> list[Series]:
    """Of the three attempts; the second one was lost 200 steps after its last checkpoint."""
    return [
        series(1, 0, 2000, outcome=Outcome.INTERRUPTED),
        series(2, 2000, 5200),
        series(3, 5000, 9000, outcome=Outcome.DONE),
    ]
