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

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "crds" / "examples"
FILES = [*sorted((EXAMPLES / "valid").glob("*.yaml")), *sorted((ROOT / "examples").glob("*.yaml"))]
VALID = [file for file in FILES if yaml.safe_load(file.read_text()).get("kind") == "TrainingJob"]
INVALID = sorted((EXAMPLES / "invalid").glob("*.yaml"))
DRY = "fieldValidation=Strict&dryRun=All"


@pytest.mark.parametrize("file", VALID, ids=lambda f: f.stem)
def test_a_valid_example_is_accepted(kube: Kube, file: Path) -> None:
    kube.create_job("default", yaml.safe_load(file.read_text()), query=DRY)


def test_the_job_on_the_first_screen_of_the_readme_is_accepted(kube: Kube) -> None:
    block = (ROOT / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    assert len(block.splitlines()) < 25
    kube.create_job("default", yaml.safe_load(block), query=DRY)


@pytest.mark.parametrize("file", INVALID, ids=lambda f: f.stem)
def test_an_invalid_example_is_refused_with_the_words_it_names(kube: Kube, file: Path) -> None:
    comment, _, _ = file.read_text().partition("\n")
    with pytest.raises(Refused) as refused:
        kube.create_job("default", yaml.safe_load(file.read_text()), query=DRY)
    assert comment.removeprefix("# breaks: ") in str(refused.value)


def test_defaults_are_filled_in(kube: Kube) -> None:
    spec = kube.create_job("default", job_body("defaults"), query=DRY)["spec"]
    assert spec["workers"] == 1 and spec["training"] == {} and not spec["suspend"]
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
    ({"template": OTHER}, "template can change only while the job is suspended"),
    ({"training": {"seed": 3}}, "training can change only while the job is suspended"),
    ({"gpusPerWorker": 2}, "gpusPerWorker can change only while the job is suspended"),
    ({"workers": 2}, "workers can change only while the job is suspended"),
    ({"checkpoint": {"uri": "s3://bucket/other"}}, "checkpoint.uri is immutable"),
    ({"dataCache": {"claimRef": {"name": "d"}}}, "dataCache can change only while the job is suspended"),
    ({"checkpoint": {"uri": None, "mode": "Self"}}, "checkpoint.mode is immutable"),
    ({"runtime": {"inject": True}}, "runtime.inject is immutable"),
    ({"checkpoint": {"initFrom": {"path": "/models/base"}}}, "checkpoint.initFrom is immutable"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[w for _, w in CHANGES])
def test_what_a_running_attempt_would_not_see_cannot_change(
    kube: Kube, namespace: str, change: Json, words: str
) -> None:
    kube.create_job(namespace, job_body("fixed"))
    with pytest.raises(Refused, match=words):
        kube.call("PATCH", jobs(namespace, "fixed"), {"spec": change}, kind=MERGE)


def test_while_a_job_is_suspended_all_can_change_but_where_its_checkpoints_are(
    kube: Kube, namespace: str
) -> None:
    kube.create_job(namespace, job_body("paused", suspend=True))
    change = {"template": OTHER, "training": {"seed": 3}, "gpusPerWorker": 2, "workers": 4}
    changed = kube.call("PATCH", jobs(namespace, "paused"), {"spec": change}, kind=MERGE)["spec"]
    assert changed["workers"] == 4 and changed["template"]["spec"]["containers"][0]["image"] == "other"
    with pytest.raises(Refused, match=r"checkpoint.uri is immutable"):
        uri = {"checkpoint": {"uri": "s3://bucket/other"}}
        kube.call("PATCH", jobs(namespace, "paused"), {"spec": uri}, kind=MERGE)


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
@pytest.mark.parametrize("suspended", [False, True])
def test_of_a_job_that_has_ended_nothing_can_change_that_would_need_a_start(
    kube: Kube, namespace: str, end: str, suspended: bool
) -> None:
    kube.create_job(namespace, job_body("over", suspend=suspended))
    status = {"status": {"attempt": 1, "conditions": [_condition(end)]}}
    kube.call("PATCH", jobs(namespace, "over") + "/status", status, kind=MERGE)
    cache = {"dataCache": {"claimRef": {"name": "datasets"}}}
    for change in (
        {"template": OTHER},
        {"training": {"seed": 3}},
        {"gpusPerWorker": 2},
        {"workers": 4},
        cache,
    ):
        with pytest.raises(Refused) as refused:
            kube.call("PATCH", jobs(namespace, "over"), {"spec": change}, kind=MERGE)
        words = str(refused.value)
        assert f"so {next(iter(change))} cannot change" in words and "checkpoint.onExisting: Resume" in words
        assert "set suspend to true first" not in words, "it would do nothing"
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
