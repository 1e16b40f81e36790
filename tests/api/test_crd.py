"""What the API server itself accepts and refuses: every example, immutability, and the rules on status."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from spottrain_operator.api.validation import parse_spec
from spottrain_operator.names import API_VERSION

from tests.api.kube import MERGE, Json, Kube, Refused, jobs
from tests.api.scene import job_body
from tests.support.pages import manifests

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "crds" / "examples"
FILES = [*sorted((EXAMPLES / "valid").glob("*.yaml")), *sorted((ROOT / "examples").glob("*.yaml"))]
VALID = [file for file in FILES if yaml.safe_load(file.read_text()).get("kind") == "TrainingJob"]
INVALID = sorted((EXAMPLES / "invalid").glob("*.yaml"))
IN_PAGES = manifests("TrainingJob")
DRY = "fieldValidation=Strict&dryRun=All"


@pytest.mark.parametrize("file", VALID, ids=lambda f: f.stem)
def test_a_valid_example_is_accepted(kube: Kube, file: Path) -> None:
    kube.create_job("default", yaml.safe_load(file.read_text()), query=DRY)


@pytest.mark.parametrize("job", [job for _, job in IN_PAGES], ids=[place for place, _ in IN_PAGES])
def test_each_job_of_the_documentation_is_accepted(kube: Kube, job: Json) -> None:
    job["metadata"].pop("namespace", None)
    kube.create_job("default", job, query=DRY)


@pytest.mark.parametrize("file", INVALID, ids=lambda f: f.stem)
def test_an_invalid_example_is_refused_with_the_words_it_names(kube: Kube, file: Path) -> None:
    comment, _, _ = file.read_text().partition("\n")
    with pytest.raises(Refused) as refused:
        kube.create_job("default", yaml.safe_load(file.read_text()), query=DRY)
    assert comment.removeprefix("# breaks: ") in str(refused.value)


def test_kubectl_get_shows_how_far_a_job_is(kube: Kube, namespace: str) -> None:
    kube.create_job(namespace, job_body("shown"))
    progress = {"step": 120, "totalSteps": 500, "steps": "120/500", "remaining": "1h30m", "loss": "2.31"}
    status = {"phase": "Running", "interruptions": 2, "progress": progress, "cost": {"saving": "61.7%"}}
    path = jobs(namespace, "shown")
    kube.call("PATCH", f"{path}/status", {"status": status}, kind=MERGE)
    table = kube.call("GET", path, headers={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"})
    cells = zip(table["columnDefinitions"], table["rows"][0]["cells"], strict=True)
    narrow = [(column["name"], cell) for column, cell in cells if not column["priority"]]
    assert narrow[:-1] == [
        ("Name", "shown"),
        ("Phase", "Running"),
        ("Step", "120/500"),
        ("ETA", "1h30m"),
        ("Loss", "2.31"),
        ("Interruptions", 2),
        ("Saving", "61.7%"),
    ]
    assert narrow[-1][0] == "Age"


def test_defaults_are_filled_in(kube: Kube) -> None:
    spec = kube.create_job("default", job_body("defaults"), query=DRY)["spec"]
    assert spec["workers"] == 1 and not spec["suspend"]
    assert "gpusPerWorker" not in spec, "then nobody could tell whether it was said"
    assert spec["checkpoint"] == {
        "uri": "s3://bucket/run",
        "mode": "Runtime",
        "interval": "10m",
        "keep": 3,
        "keepBest": True,
        "onExisting": "Fail",
        "compileCache": "Keep",
        "logs": "Keep",
    }
    assert spec["capacity"] == {
        "type": "Spot",
        "sameZone": True,
        "pendingTimeoutSeconds": 900,
    }
    assert spec["failurePolicy"] == {
        "maxFailures": 3,
        "maxInterruptions": 100,
        "maxNoProgress": 10,
        "startTimeoutSeconds": 300,
        "backoffSeconds": 1,
        "storeOutageSeconds": 86400,
    }


def test_the_defaults_of_the_schema_are_those_of_the_dataclasses(kube: Kube) -> None:
    given = kube.create_job("default", job_body("defaults"), query=DRY)["spec"]
    bare = parse_spec({"template": given["template"], "checkpoint": {"uri": "s3://bucket/run"}})
    policy = replace(bare.failure_policy, backoff_seconds=1)
    assert parse_spec(given) == replace(bare, failure_policy=policy)


OTHER = {"spec": {"containers": [{"name": "trainer", "image": "other"}]}}
CHANGES: list[tuple[Json, str]] = [
    ({"checkpoint": {"uri": "s3://bucket/other"}}, "checkpoint.uri is immutable"),
    ({"checkpoint": {"uri": None, "mode": "Self"}}, "checkpoint.mode is immutable"),
    ({"runtime": {"inject": True}}, "runtime.inject is immutable"),
    ({"checkpoint": {"initFrom": {"path": "/models/base"}}}, "checkpoint.initFrom is immutable"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[w for _, w in CHANGES])
def test_where_the_checkpoints_are_and_who_makes_them_cannot_change(
    kube: Kube, namespace: str, change: Json, words: str
) -> None:
    kube.create_job(namespace, job_body("fixed"))
    with pytest.raises(Refused, match=words):
        kube.call("PATCH", jobs(namespace, "fixed"), {"spec": change}, kind=MERGE)


@pytest.mark.parametrize("uri", [None, "s3://bucket/other"])
def test_a_checkpoint_uri_can_neither_go_nor_come_once_an_attempt_has_begun(
    kube: Kube, namespace: str, uri: str | None
) -> None:
    given = {} if uri else {"uri": "s3://bucket/run"}
    kube.create_job(namespace, job_body("placed", checkpoint=given, capacity={"type": "OnDemand"}))
    kube.call("PATCH", jobs(namespace, "placed") + "/status", {"status": {"attempt": 1}}, kind=MERGE)
    with pytest.raises(Refused, match=r"checkpoint.uri is immutable"):
        kube.call("PATCH", jobs(namespace, "placed"), {"spec": {"checkpoint": {"uri": uri}}}, kind=MERGE)


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
@pytest.mark.parametrize("suspended", [False, True])
def test_of_a_job_that_has_ended_nothing_can_change_that_would_need_a_start(
    kube: Kube, namespace: str, end: str, suspended: bool
) -> None:
    kube.create_job(namespace, job_body("over", suspend=suspended))
    done = {"attempt": 1, "conditions": [_condition(end)], "completionTime": "2026-01-01T00:00:00Z"}
    status = {"status": done}
    kube.call("PATCH", jobs(namespace, "over") + "/status", status, kind=MERGE)
    for change in ({"template": OTHER}, {"training": {"seed": 3}}, {"workers": 4}):
        with pytest.raises(Refused) as refused:
            kube.call("PATCH", jobs(namespace, "over"), {"spec": change}, kind=MERGE)
        words = str(refused.value)
        assert "training and workers cannot change" in words and "checkpoint.onExisting: Resume" in words
    kept = {"ttlSecondsAfterFinished": 60}
    kube.call("PATCH", jobs(namespace, "over"), {"spec": kept}, kind=MERGE)


def test_what_acts_from_the_next_attempt_on_can_change(kube: Kube, namespace: str) -> None:
    kube.create_job(namespace, job_body("open"))
    change = {
        "checkpoint": {"keep": 7, "interval": "auto", "keepBest": False, "compileCache": "None"},
        "failurePolicy": {"maxFailures": 9},
        "capacity": {"sameZone": False},
    }
    changed = kube.call("PATCH", jobs(namespace, "open"), {"spec": change}, kind=MERGE)
    assert changed["spec"]["checkpoint"]["keep"] == 7 and changed["metadata"]["generation"] == 2


def _condition(kind: str, status: str = "True") -> Json:
    return {"type": kind, "status": status, "reason": "Test", "lastTransitionTime": "2026-01-01T00:00:00Z"}


STATUS: Json = {"attempt": 3, "failures": 1, "interruptions": 1, "conditions": [_condition("Succeeded")]}


def _without(status: Json, *names: str) -> Json:
    return {k: v for k, v in status.items() if k not in names}


BAD_STATUS: list[tuple[str, Json | None, str]] = [
    ("attempt down", STATUS | {"attempt": 2}, "attempt never goes down"),
    ("attempt away", _without(STATUS, "attempt"), "attempt never goes down"),
    ("failures down", STATUS | {"failures": 0}, "failures never goes down"),
    ("interruptions down", STATUS | {"interruptions": 0}, "interruptions never goes down"),
    ("success taken back", STATUS | {"conditions": [_condition("Succeeded", "False")]}, "stay True"),
    ("success removed", STATUS | {"conditions": []}, "stay True"),
    ("conditions removed", _without(STATUS, "conditions"), "stay True"),
    (
        "both ends",
        STATUS | {"conditions": [_condition("Succeeded"), _condition("Failed")]},
        "cannot be both Succeeded and Failed",
    ),
    ("no status", None, "attempt never goes down"),
]


@pytest.mark.parametrize(("status", "words"), [b[1:] for b in BAD_STATUS], ids=[b[0] for b in BAD_STATUS])
def test_a_status_cannot_go_back(kube: Kube, namespace: str, status: Any, words: str) -> None:
    raw = kube.create_job(namespace, job_body("job"))
    path = f"{jobs(namespace, 'job')}/status"
    raw = kube.call("PUT", path, raw | {"status": copy.deepcopy(STATUS)})
    changed = _without(raw, "status") | ({"status": status} if status is not None else {})
    with pytest.raises(Refused, match=words):
        kube.call("PUT", path, changed | {"apiVersion": API_VERSION, "kind": "TrainingJob"})
