"""A job that version 0.3.0 has run goes on: its status, as that version wrote it, is in a file beside."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from spottrain_operator.api.upgrade import status_of_0_3
from spottrain_operator.api.validation import parse_job
from spottrain_operator.api.wire import timestamp
from spottrain_operator.control.plan import plan
from spottrain_operator.policies import accounting, runtime

from tests.builders import KEY, make_node, make_observed, make_pod, raw_job, raw_spec
from tests.unit.controller.fake_cluster import World

WRITTEN: dict[str, Any] = json.loads((Path(__file__).parent / "status_of_0_3.json").read_text())
"""Of a gang of two in its second attempt, 400 s after its pods were bound; the first one was interrupted."""
JOB = parse_job(raw_job(raw_spec(workers=2)) | {"status": WRITTEN})
UNTIL = timestamp(WRITTEN["cost"]["time"])
BOOKS = accounting.rebuilt(JOB.status, UNTIL)
BORN = timestamp("2026-03-01T12:00:00Z")


def test_its_attempts_and_counters_are_read() -> None:
    status = JOB.status
    assert (status.attempt, status.interruptions, status.known_durable_step) == (2, 1, 40)
    first, second = status.attempts
    assert (first.cause, first.ended) == ("Interrupted", timestamp("2026-03-01T12:01:55Z"))
    assert second.bound == timestamp("2026-03-01T12:02:05Z") and second.complete
    assert status.progress is not None and status.progress.poll_time == UNTIL
    assert JOB.old_status == WRITTEN, "and goes with the next write"


def test_conditions_that_went_are_left_out() -> None:
    when = "2026-03-01T12:01:55Z"
    old = [("Interrupted", "True"), ("RuntimeAttached", "True"), ("Running", "True")]
    conditions = [{"type": kind, "status": value, "lastTransitionTime": when} for kind, value in old]
    found = status_of_0_3({"ready": "1/1", "conditions": conditions})
    assert [c["type"] for c in found["conditions"]] == ["Running"]
    assert runtime.attached(JOB.status), "it trains since"


def test_its_bookkeeping_is_rebuilt_with_the_same_sums() -> None:
    for name in ("spent", "use", "boot", "idle"):
        assert getattr(BOOKS.ledger.sums, name) == Decimal(WRITTEN["cost"][name]), name
    for record in JOB.status.attempts:
        assert BOOKS.ledger.of(record.number).spent == record.spent > 0
    assert BOOKS.times.counted == 1


def test_it_goes_on_from_these_sums_and_is_written_with_the_new_names_alone() -> None:
    pods = [
        make_pod(2, rank, node=node, bound=timestamp("2026-03-01T12:02:05Z"), gpus=1)
        for rank, node in enumerate(("node-a", "node-c"))
    ]
    nodes = tuple(make_node(f"node-{n}", created=BORN, instance_type="g5", gpus=1) for n in "abc")
    now = UNTIL + timedelta(minutes=6)
    made = plan(make_observed(*pods, job=JOB, nodes=nodes, now=now, books=BOOKS))
    assert made.status is not None and made.status.cost is not None and made.books is not None
    assert made.status.cost.spent == Decimal("14.5") and made.status.cost.lost_time == UNTIL
    assert made.status.cost.unknown_seconds == 2 * 360, "of this test's empty price list"
    written = made.status.to_json()
    assert not {"ready", "activeSince"} & written.keys() and "nodes" not in written["cost"]
    assert {"started", "useSeconds"}.isdisjoint(written["attempts"][0])


async def test_the_first_write_of_the_status_takes_the_old_names_away() -> None:
    world = World({"workers": 2})
    world.cluster.jobs[KEY.name]["status"] = WRITTEN
    await world.settle()
    written = world.cluster.jobs[KEY.name]["status"]
    assert not {"ready", "activeSince"} & written.keys() and "nodes" not in written["cost"]
    assert "time" not in written["progress"] and written["attempt"] >= 2
    assert world.books.lost == UNTIL and world.books.ledger.sums.spent >= Decimal("14.5")
