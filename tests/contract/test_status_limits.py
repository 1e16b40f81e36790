"""No word from a container is too long for the CRD: one would make every write of the status a 422."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Observed, Waiting
from spottrain_operator.api.training_job import (
    REASON_LIMIT,
    STATE_LIMIT,
    TIME_LIMIT,
    URI_LIMIT,
    WARNING_LIMIT,
    Status,
)
from spottrain_operator.control.plan import plan

from tests.builders import ended_pod, make_job, make_observed, make_pod, started, told

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
