"""The trainer's own last lines are newer than the status."""

from __future__ import annotations

import json
from decimal import Decimal

from spottrain_cli.jobs import Progress
from spottrain_cli.live import updated

STATUS = Progress(step=100, totalSteps=200, loss=Decimal(3), etaSeconds=Decimal(50), durableStep=90)


def test_the_last_step_and_the_last_checkpoint_count() -> None:
    seen = updated(
        STATUS,
        [
            "2026-11-26T19:00:46.707Z step=149/200 loss=2.75 lr=0.1 samples/s=17.7 epoch=0",
            "a line of the script: step=7",
            "2026-11-26T19:00:47.707Z step=150/200 loss=2.5 lr=0.1 samples/s=20.0 epoch=0",
            "2026-11-26T19:00:48.000Z event=committed step=150 seconds=0.1 bytes=1 key=checkpoints/x/",
        ],
    )
    assert (seen.step, seen.totalSteps, seen.loss, seen.samplesPerSecond) == (
        150,
        200,
        Decimal("2.5"),
        Decimal(20),
    )
    assert seen.etaSeconds == 25 and seen.durableStep == 150
    assert seen.saved is not None and seen.pollTime is not None and seen.saved > seen.pollTime


def test_lines_of_json_are_read_too() -> None:
    step = {"time": "2026-11-26T19:00:46.707Z", "event": "step", "step": 120, "total_steps": 200, "loss": 2.5}
    seen = updated(STATUS, [json.dumps(step | {"samples_per_second": 9.0}), "{not json", '{"event": "step"}'])
    assert (seen.step, seen.loss, seen.samplesPerSecond) == (120, Decimal("2.5"), Decimal(9))


def test_older_lines_change_nothing() -> None:
    line = "2026-11-26T19:00:46.707Z step=99/200 loss=2.75 lr=0.1 samples/s=17.7 epoch=0"
    assert updated(STATUS, [line, "", "step=1/2"]) == STATUS
