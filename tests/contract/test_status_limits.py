"""No word from a container is too long for the CRD: one would make every write of the status a 422."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Observed, Waiting
from spottrain_operator.api.training_job import (
    CHOICE_LIMIT,
    EVIDENCE_LIMIT,
    REASON_LIMIT,
    STATE_LIMIT,
    TIME_LIMIT,
    URI_LIMIT,
    WARNING_LIMIT,
    AttemptRecord,
    ProgressStatus,
    Status,
    with_record,
)
from spottrain_operator.control.plan import plan

from tests.builders import NOW, ended_pod, make_job, make_observed, make_pod, raw_spec, started, told

ROOT = Path(__file__).resolve().parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "trainingjobs.yaml").read_text())
STATUS: dict[str, Any] = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
LONG = "x" * 20_000
DONE = told(Outcome.DONE, reason=LONG, message=LONG, outputURI="s3://" + LONG, key=LONG)
BAD = told(Outcome.BAD_CONFIGURATION, reason=LONG, message=LONG)
WAITS = make_pod(phase="Pending", running_since=None, waiting=Waiting(reason=LONG, message=LONG))
INIT = make_pod(phase="Failed", init_failure=LONG, message=LONG, reason="Error")
LIMITS = [
    (("conditions", "reason"), REASON_LIMIT),
    (("progress", "state"), STATE_LIMIT),
    (("progress", "durableTime"), TIME_LIMIT),
    (("progress", "warning"), WARNING_LIMIT),
    (("output", "uri"), URI_LIMIT),
]


@pytest.mark.parametrize(("path", "limit"), LIMITS, ids=[".".join(p) for p, _ in LIMITS])
def test_the_limits_of_the_code_are_those_of_the_crd(path: tuple[str, str], limit: int) -> None:
    schema = STATUS["properties"][path[0]]
    assert schema.get("items", schema)["properties"][path[1]]["maxLength"] == limit


def _too_long(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        yield path
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _too_long(item, schema["items"], f"{path}[{i}]")
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _too_long(item, schema["properties"][name], f"{path}.{name}")


SCENES: dict[str, Observed] = {
    "done": make_observed(DONE),
    "bad configuration": make_observed(BAD),
    "warns": make_observed(told(Outcome.INTERRUPTED, warning=LONG)),
    "crash": make_observed(ended_pod(code=1, message=LONG)),
    "waits": make_observed(WAITS),
    "rejected": make_observed(make_pod(phase="Failed", reason=LONG, message=LONG)),
    "evicted": make_observed(make_pod(phase="Failed", reason="Evicted", message=LONG)),
    "init": make_observed(INIT),
    "unschedulable": make_observed(make_pod(node="", phase="Pending", unschedulable=LONG)),
    "disrupted": make_observed(ended_pod(code=1, disruption=LONG)),
    "invalid": make_observed(job=replace(make_job(status=started()), spec=None, invalid=LONG)),
}


@pytest.mark.parametrize("name", SCENES)
def test_no_word_from_a_container_is_longer_than_the_crd_allows(name: str) -> None:
    status = plan(SCENES[name]).status
    assert isinstance(status, Status)
    assert list(_too_long(status.to_json(), STATUS, "status")) == []


# --- the size of the whole ------------------------------------------------------------------------------
LARGEST = 16 * 1024
"""Bytes of a status as JSON."""
NAME = "ip-10-120-130-140.us-west-2.compute.internal"


def after(attempts: int, workers: int) -> Status:
    """The status of a job after so many attempts, each with the longest texts that there are."""
    status = Status(attempt=attempts, conditions=())
    for number in range(1, attempts + 1):
        record = AttemptRecord(
            number=number,
            pod=f"{'j' * 50}-abcdef12-{number}-0",
            node=NAME,
            zone="us-west-2a",
            instance_type="p4d.24xlarge",
            capacity_type="OnDemand",
            choice=LONG[:CHOICE_LIMIT],
            pool="p" * 63,
            platform="AWS",
            notice_seconds=110,
            node_labels=("karpenter.sh/capacity-type=spot", "eks.amazonaws.com/capacityType=SPOT"),
            workers=workers,
            started=NOW,
            bound=NOW,
            stepped=NOW,
            ended=NOW,
            cause="SchedulingTimeout",
            evidence=LONG[:EVIDENCE_LIMIT],
            charged=True,
            reason="r" * REASON_LIMIT,
            faulty_node=NAME,
            exit_code=143,
            ran=True,
            start_step=10**9,
            last_step=10**9,
            durable_step=10**9,
            spent=Decimal("123456.123456"),
            unknown_seconds=Decimal("123456.123"),
            created_workers=workers,
        )
        status = with_record(status, record)
    current = replace(status.attempts[-1], cause="", ended=None)
    warned = ProgressStatus(
        state="WaitingForStore",
        warning=LONG[:WARNING_LIMIT],
        waiting_for=LONG[:WARNING_LIMIT],
        checkpoint_uri="s3://" + LONG[:1000],
        emergency_seconds=Decimal("100"),
        grace_seconds=Decimal("110"),
    )
    return with_record(replace(status, progress=warned), current)


@pytest.mark.parametrize(("workers", "attempts"), [(8, 1), (8, 20), (1024, 1), (1024, 20), (1024, 1000)])
def test_a_status_is_small_whatever_the_workers_the_attempts_and_what_they_say(
    workers: int, attempts: int
) -> None:
    spec = raw_spec(workers=workers, failurePolicy={"maxFailures": 10**6})
    for codes in ((1,), (1, 75), (1, 75, 137)):
        pods = [
            ended_pod(attempts, codes[rank % len(codes)], rank=rank, node=f"{rank}-{NAME}", message=LONG)
            for rank in range(workers)
        ]
        status = plan(make_observed(*pods, job=make_job(spec, status=after(attempts, workers)))).status
        assert status is not None
        assert len(json.dumps(status.to_json(), separators=(",", ":"))) < LARGEST


@pytest.mark.parametrize("name", SCENES)
def test_no_word_from_a_container_makes_it_large(name: str) -> None:
    status = plan(SCENES[name]).status
    assert status is not None and len(json.dumps(status.to_json(), separators=(",", ":"))) < LARGEST
