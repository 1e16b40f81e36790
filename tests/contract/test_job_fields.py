"""The command line reads a TrainingJob by the names of the CRD and the words that the operator writes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from spottrain_cli import cluster, cost_report, jobs, kubectl, output, pods, timeline
from spottrain_cli.jobs import BUCKETS, Attempt, Condition, Cost, Goodput, Interrupt, Job, Progress
from spottrain_operator import names
from spottrain_operator.api.training_job import CheckpointMode

ROOT = Path(__file__).resolve().parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "trainingjobs.yaml").read_text())
SCHEMA: Any = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
STATUS: dict[str, Any] = SCHEMA["status"]["properties"]
TYPES = {
    "str": {"string"},
    "int": {"integer"},
    "bool": {"boolean"},
    "Decimal": {"string", "number"},
    "datetime": {"string"},
}
PLACES = [
    (Condition, STATUS["conditions"]["items"]["properties"]),
    (Attempt, STATUS["attempts"]["items"]["properties"]),
    (Progress, STATUS["progress"]["properties"]),
    (Interrupt, STATUS["interrupt"]["properties"]),
    (Cost, STATUS["cost"]["properties"]),
    (Goodput, STATUS["goodput"]["properties"]),
]


@pytest.mark.parametrize(
    ("cls", "schema"), PLACES, ids=["conditions", "attempts", "progress", "interrupt", "cost", "goodput"]
)
def test_every_field_that_is_read_is_in_the_crd_with_its_type(cls: type, schema: dict[str, Any]) -> None:
    for field in fields(cls):
        assert field.name in schema, f"the CRD has no {cls.__name__}.{field.name}"
        annotation = str(field.type).partition(" ")[0]
        assert schema[field.name]["type"] in TYPES[annotation], field.name
        assert (schema[field.name].get("format") == "date-time") == (annotation == "datetime"), field.name


def test_the_rest_of_the_job_that_is_read_is_in_the_crd() -> None:
    ours = {
        "namespace",
        "name",
        "uid",
        "team",
        "created",
        "deleted",
        "output",
    }  # of metadata; status.output.uri
    of_spec = {"workers", "gpus_per_worker", "suspend", "checkpoint", "limit", "deadline"}
    of_spec |= {"active_seconds", "ttl_seconds", "deletes_checkpoints"}
    assert {field.name for field in fields(Job)} - ours - of_spec <= set(STATUS)
    spec = SCHEMA["spec"]["properties"]
    assert {"activeDeadlineSeconds", "ttlSecondsAfterFinished", "gpusPerWorker", "suspend"} <= set(spec)
    capacity, own = spec["capacity"]["properties"], spec["checkpoint"]["properties"]
    assert "maxCostUSD" in capacity and "deadline" in capacity["cheapest"]["properties"]
    assert {"uri", "endpoint", "pathStyle", "encryption", "mode", "logs"} <= set(own)
    assert "kmsKey" in own["encryption"]["properties"] and "None" in own["logs"]["enum"]
    assert {jobs.SELF, jobs.SYNC} == {CheckpointMode.SELF, CheckpointMode.SYNC} <= set(own["mode"]["enum"])
    assert "uri" in STATUS["output"]["properties"]


def test_the_parts_of_the_time_are_those_that_the_crd_names_as_adding_up() -> None:
    described = STATUS["goodput"]["description"]
    parts, _, rest = described.partition("add up to wanted")
    assert rest and all(name in parts for name in BUCKETS)
    percentages = {"runtime", "scheduling", "paid"}
    assert set(BUCKETS) | percentages | {"wanted"} == {field.name for field in fields(Goodput)}


def test_the_names_are_the_operator_s() -> None:
    assert (jobs.GROUP, jobs.KIND) == (names.GROUP, names.KIND)
    assert kubectl.RESOURCE == f"{names.PLURAL}.{names.GROUP}" == CRD["metadata"]["name"]
    assert f"/apis/{names.API_VERSION}" == cluster.PATH and pods.TRAINERS == names.POD_SELECTOR
    labels = ("JOB_LABEL", "JOB_UID_LABEL", "ATTEMPT_LABEL", "RANK_LABEL", "TRAINER_ANNOTATION")
    assert [getattr(pods, name) for name in labels] == [getattr(names, name) for name in labels]
    assert jobs.TEAM_LABEL == names.TEAM_LABEL
    phases = {names.Phase.SUCCEEDED, names.Phase.FAILED}
    assert set(cost_report.RESULT) == {jobs.SUCCEEDED, jobs.FAILED} == phases
    assert {jobs.SUSPENDED, jobs.INVALID} <= set(names.Phase)
    assert set("|".join(output.STYLES.values()).split("|")) == set(names.Phase)
    assert str(timeline.DONE) == names.Cause.DONE
    assert {*timeline.BAD, "Running"} <= set(names.Condition)
