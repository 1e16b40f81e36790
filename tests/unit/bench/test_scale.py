"""What the scale benchmarks read from an audit log, and what they tell kwok."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from localcluster.fakepods import pod_stages

from bench.scale import audit
from bench.scale.burst import SHAPES, Round, figures, renamed
from bench.scale.capacity import quantile
from bench.scale.storm import duplicates, miscounted, times, truth


def line(
    verb: str, resource: str, *, code: int = 200, agent: str = "spottrain-operator/1", **ref: str
) -> bytes:
    at = ref.pop("at", "2026-11-23T10:00:00.500000Z")
    event = {
        "stage": "ResponseComplete",
        "verb": verb,
        "userAgent": agent,
        "requestURI": "/x" + ("?dryRun=All" if ref.pop("dry", "") else ""),
        "objectRef": {"resource": resource, "namespace": "bench", "name": "a"} | ref,
        "responseStatus": {"code": code},
        "requestReceivedTimestamp": at,
        "stageTimestamp": at.replace(".5", ".75"),
    }
    return json.dumps(event).encode()


def test_writes_are_told_apart_by_agent_subresource_and_dry_run() -> None:
    lines = [
        line("patch", "trainingjobs", subresource="status"),
        line("create", "pods", dry="yes"),
        line("create", "pods", agent="kube-controller-manager/v1"),
        b"",
    ]
    status, dry, other = audit.parse(lines)
    assert (status.resource, dry.resource) == ("trainingjobs/status", "pods (dry run)")
    assert [w.operators for w in (status, dry, other)] == [True, True, False]
    assert status.answered - status.at == 0.25


def test_a_refused_write_is_counted_apart() -> None:
    writes = audit.parse([line("create", "pods"), line("create", "pods", code=409), line("create", "pods")])
    assert audit.by_verb(writes, jobs=2) == {"create pods": 1.0, "create pods 409": 0.5}


def test_an_audit_log_is_read_from_where_it_was_opened_across_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(line("create", "pods", name="before") + b"\n")
    whole, cut = line("create", "pods", name="whole"), line("create", "pods", name="cut")
    with closing(audit.Log(path)) as log:
        with path.open("ab") as out:
            out.write(whole + b"\n" + cut[:20])
        assert [w.name for w in log.writes()] == ["whole"]
        with path.open("ab") as out:
            out.write(cut[20:] + b"\n")
        path.rename(tmp_path / "audit-1.log")
        path.write_bytes(line("create", "pods", name="new") + b"\n")
        assert [w.name for w in log.writes()] == ["cut", "new"]


def test_only_status_writes_that_took_effect_are_counted() -> None:
    written = (line("patch", "trainingjobs", subresource="status", code=code) for code in (200, 200, 409))
    writes = tuple(audit.parse(written))
    ours = Round(running=2.0, said=3.0, deleted=4.0, cpu={"operator": 1.0}, writes=writes)
    theirs = Round(running=1.5, said=2.0, deleted=2.0, cpu={}, writes=())
    found = figures(SHAPES[2], [ours], [theirs])
    assert (found["ratio"], found["delete_ratio"], found["status_writes_per_job"]) == (2.0, 2.0, 2.0)


def test_a_sample_is_posted_again_under_another_name() -> None:
    pod: dict[str, Any] = {
        "metadata": {"name": "sample-1-0", "labels": {"job": "sample"}},
        "spec": {"hostname": "sample-1-0"},
    }
    made = renamed(pod, "sample", "other")
    assert made["metadata"] == {"name": "other-1-0", "labels": {"job": "other"}}
    assert pod["metadata"]["name"] == "sample-1-0"


def test_stages_of_pods_are_documents_that_kwok_reads() -> None:
    stages: list[dict[str, Any]] = list(yaml.safe_load_all(pod_stages(epoch=7, stop_seconds=1.5)))
    assert [s["metadata"]["name"] for s in stages] == ["pod-runs", "pod-is-done", "pod-stops", "pod-goes"]
    assert stages[2]["spec"]["delay"] == {"durationMilliseconds": 1500}
    assert "exitCode: 75" in stages[2]["spec"]["next"]["statusTemplate"]


def test_times_are_from_the_notice_on_the_node_to_what_the_operator_did() -> None:
    lines = [
        line("patch", "nodes", name="n1", agent="kwok/1", at="2026-11-23T10:00:00.500000Z"),
        line("patch", "nodes", name="n1", agent="bench", at="2026-11-23T10:00:01.500000Z"),
        line("delete", "pods", name="a-1f-1-0", at="2026-11-23T10:00:03.500000Z"),
        line("create", "pods", name="a-1f-2-0", at="2026-11-23T10:00:04.500000Z"),
        line("delete", "pods", name="b-1f-1-0", at="2026-11-23T10:00:09.500000Z"),
    ]
    found = times(audit.parse(lines), {"a-1f-1-0": "n1", "a-1f-2-0": "n2", "b-1f-1-0": "n2"})
    assert (found.deleted, found.replaced) == ((1.75,), (3.0,))


def test_an_attempt_on_nodes_with_a_notice_is_one_interruption() -> None:
    on = {"a-1f-1-0": "n1", "a-1f-1-1": "n2", "a-1f-2-0": "n3", "b-1f-1-0": "n3"}
    assert truth(on, ["n1", "n2"]) == {"a": 1}
    assert truth(on, ["n2", "n3"]) == {"a": 2, "b": 1}


def test_a_job_that_counts_another_number_is_named() -> None:
    jobs = [
        {"metadata": {"name": "right"}, "status": {"attempt": 2, "interruptions": 1}},
        {"metadata": {"name": "spared"}, "status": {"attempt": 1}},
        {"metadata": {"name": "charged"}, "status": {"attempt": 2, "failures": 1}},
        {"metadata": {"name": "twice"}, "status": {"attempt": 3, "interruptions": 1}},
    ]
    assert miscounted(jobs, {"right": 1, "charged": 1, "twice": 1}) == ["charged", "twice"]


def test_a_pod_that_is_made_twice_is_a_duplicate_and_a_refused_one_is_not() -> None:
    lines = [
        line("create", "pods", name=name, code=code) for name, code in (("a", 201), ("a", 409), ("b", 201))
    ]
    assert duplicates(audit.parse(lines)) == 0
    assert duplicates(audit.parse([*lines, line("create", "pods", name="b", code=201)])) == 1


def test_a_quantile_is_linear_within_its_bucket_and_of_the_time_in_between() -> None:
    before, after = {0.1: 100.0, 0.2: 100.0, math.inf: 100.0}, {0.1: 150.0, 0.2: 200.0, math.inf: 200.0}
    assert quantile(before, after, 0.75) == pytest.approx(0.15)
    assert quantile({}, {0.1: 1.0, math.inf: 2.0}, 0.99) == 0.1
    assert quantile(after, after, 0.99) is None
