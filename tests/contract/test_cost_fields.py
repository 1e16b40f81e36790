"""`spottrain cost` reads a TrainingJob by the names of the CRD and the words that the operator writes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from spottrain_cli import kubectl
from spottrain_cli.cost import report as cost_report
from spottrain_cli.cost import status as cost_status
from spottrain_cli.cost.status import BUCKETS, Attempt, Cost, Goodput, JobCost
from spottrain_operator import names
from spottrain_operator.api.training_job import CheckpointMode

ROOT = Path(__file__).resolve().parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "trainingjobs.yaml").read_text())
SCHEMA: Any = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
STATUS: dict[str, Any] = SCHEMA["status"]["properties"]
TYPES = {"str": {"string"}, "int": {"integer"}, "Decimal": {"string", "number"}, "datetime": {"string"}}
PLACES = [
    (Attempt, STATUS["attempts"]["items"]["properties"]),
    (Cost, STATUS["cost"]["properties"]),
    (Goodput, STATUS["goodput"]["properties"]),
]


@pytest.mark.parametrize(("cls", "schema"), PLACES, ids=["attempts", "cost", "goodput"])
def test_every_field_that_is_read_is_in_the_crd_with_its_type(cls: type, schema: dict[str, Any]) -> None:
    for field in fields(cls):
        assert field.name in schema, f"the CRD has no {cls.__name__}.{field.name}"
        annotation = str(field.type).partition(" ")[0]
        assert schema[field.name]["type"] in TYPES[annotation], field.name
        assert (schema[field.name].get("format") == "date-time") == (annotation == "datetime"), field.name


def test_the_rest_of_the_status_that_is_read_is_in_the_crd() -> None:
    ours = {"namespace", "name", "team", "reports", "limit", "reason"}  # of metadata, spec and conditions
    assert "maxCostUSD" in SCHEMA["spec"]["properties"]["capacity"]["properties"]
    assert {"type", "status", "reason"} <= set(STATUS["conditions"]["items"]["properties"])
    assert {field.name for field in fields(JobCost)} - ours <= set(STATUS)
    assert str(CheckpointMode.SELF) == cost_status.SELF
    assert cost_status.SELF in SCHEMA["spec"]["properties"]["checkpoint"]["properties"]["mode"]["enum"]


def test_the_parts_of_the_time_are_those_that_the_crd_names_as_adding_up() -> None:
    described = STATUS["goodput"]["description"]
    parts, _, rest = described.partition("add up to wanted")
    assert rest and all(name in parts for name in BUCKETS)
    percentages = {"runtime", "scheduling", "paid"}
    assert set(BUCKETS) | percentages | {"wanted"} == {field.name for field in fields(Goodput)}


def test_the_names_are_the_operator_s() -> None:
    assert (cost_status.GROUP, cost_status.KIND) == (names.GROUP, names.KIND)
    assert kubectl.RESOURCE == f"{names.PLURAL}.{names.GROUP}" == CRD["metadata"]["name"]
    assert cost_status.TEAM_LABEL == names.TEAM_LABEL
    assert set(cost_report.RESULT) == {names.Phase.SUCCEEDED, names.Phase.FAILED}
