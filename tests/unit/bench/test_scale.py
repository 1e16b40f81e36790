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

from bench.scale import audit, options
from bench.scale.burst import Round, Shape, figures, renamed
from bench.scale.cloud import Places
from bench.scale.metrics import labels_of, p99_ms, quantile, value
from bench.scale.soak import Sample, memory
from bench.scale.storm import duplicates, first_notices, miscounted, times, truth, unrecovered


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
    found = figures(Shape(jobs=1, workers=1024), [ours], [theirs])
    assert (found["ratio"], found["delete_ratio"], found["status_writes_per_job"]) == (2.0, 2.0, 2.0)


def test_a_sample_is_posted_again_under_another_name_and_uid() -> None:
    pod: dict[str, Any] = {
        "metadata": {"name": "sample-1-0", "labels": {"job": "sample", "uid": "abc"}},
        "spec": {"hostname": "sample-1-0"},
    }
    made = renamed(pod, {"sample": "other", "abc": "def"})
    assert made["metadata"] == {"name": "other-1-0", "labels": {"job": "other", "uid": "def"}}
    assert made["spec"] == {"hostname": "other-1-0"}
    assert pod["metadata"]["name"] == "sample-1-0"


def test_stages_of_pods_are_documents_that_kwok_reads() -> None:
    stages: list[dict[str, Any]] = list(yaml.safe_load_all(pod_stages(epoch=7, stop_seconds=1.5)))
    assert [s["metadata"]["name"] for s in stages] == ["pod-runs", "pod-is-done", "pod-stops", "pod-goes"]
    assert stages[2]["spec"]["delay"] == {"durationMilliseconds": 1500}
    runs, done, stops = (stage["spec"]["next"]["statusTemplate"] for stage in stages[:3])
    assert "phase: Running" in runs and "PodIPWith" in runs and "terminated" not in runs
    assert "exitCode: 0" in done and "phase: Succeeded" in done and '"outcome" "done"' in done
    assert "exitCode: 75" in stops and "phase: Failed" in stops and "unixEpoch | int64 ) 7" in stops


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
    def said(name: str, workers: int = 1, **status: int) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"workers": workers}, "status": status}

    jobs = [
        said("right", attempt=2, interruptions=1),
        said("spared", attempt=1),
        said("charged", attempt=2, failures=1),
        said("twice", attempt=3, interruptions=1),
        said("behind", attempt=1, interruptions=1),
        said("replaced-gang", workers=2, attempt=3, interruptions=1),
        said("charged-gang", workers=2, attempt=2),
    ]
    hit = dict.fromkeys(("right", "charged", "twice", "behind", "replaced-gang", "charged-gang"), 1)
    assert miscounted(jobs, hit) == ["charged", "twice", "behind", "charged-gang"]


def test_the_notice_that_ends_a_gang_is_the_first_of_its_nodes() -> None:
    on = {"a-1f-1-0": "n1", "a-1f-1-1": "n2", "a-1f-2-0": "n3", "b-1f-1-0": "spared"}
    found = first_notices({"n1": 30.0, "n2": 10.0, "n3": 40.0}, on)
    assert {(rank.job, rank.attempt, rank.rank): at for rank, at in found.items()} == {
        ("a", 1, 1): 10.0,
        ("a", 2, 0): 40.0,
    }


def job(name: str, attempt: int, *, ready: str = "1/1", running: str = "True", workers: int = 1) -> Any:
    conditions = [{"type": "Running", "status": running}]
    status = {"attempt": attempt, "ready": ready, "conditions": conditions, "phase": "Running"}
    return {"metadata": {"name": name}, "spec": {"workers": workers}, "status": status}


def test_a_job_has_recovered_when_status_and_pods_are_at_the_attempt_after_its_interruptions() -> None:
    on = {"a-1f-1-0": "n1", "a-1f-2-0": "n2", "b-1f-1-0": "n3"}
    there = Places(nodes=on, running={"a-1f-2-0", "b-1f-1-0"})
    assert unrecovered([job("a", 2), job("b", 1)], there, {"n1"}) == []
    assert unrecovered([job("a", 1)], there, {"n1"}) == ["a"], "its status is behind"
    assert unrecovered([job("a", 3)], there, {"n1"}) == ["a"], "no pod of this attempt runs"
    assert unrecovered([job("a", 2, ready="0/1")], there, {"n1"}) == ["a"]
    assert unrecovered([job("a", 2, running="False")], there, {"n1"}) == ["a"]
    assert unrecovered([job("a", 2)], Places(nodes=on), {"n1"}) == ["a"], "its pod does not run"
    assert unrecovered([job("a", 3)], there, {"n1", "n2"}) == ["a"], "its pod is on a node that goes"


def test_a_gang_has_recovered_when_all_its_ranks_run() -> None:
    on = {f"g-1f-{attempt}-{rank}": f"n{attempt}{rank}" for attempt in (1, 2) for rank in (0, 1)}
    gang, new = job("g", 2, ready="2/2", workers=2), {"g-1f-2-0", "g-1f-2-1"}
    assert unrecovered([gang], Places(nodes=on, running=new), {"n10"}) == []
    assert unrecovered([gang], Places(nodes=on, running={"g-1f-2-0", "g-1f-1-1"}), {"n10"}) == ["g"]


def test_a_rank_that_is_made_twice_is_a_duplicate_and_a_refused_one_is_not() -> None:
    lines = [
        line("create", "pods", name=name, code=code)
        for name, code in (("a-1f-1-0", 201), ("a-1f-1-0", 409), ("a-1f-1-1", 201), ("a-1f-2-0", 201))
    ]
    assert duplicates(audit.parse(lines)) == 0
    assert duplicates(audit.parse([*lines, line("create", "pods", name="a-2f-1-1", code=201)])) == 1
    by_others = line("create", "pods", name="coredns-5d", agent="kube-controller-manager/v1")
    assert duplicates(audit.parse([by_others, by_others])) == 0


def test_a_quantile_is_linear_within_its_bucket_and_of_the_time_in_between() -> None:
    before, after = {0.1: 100.0, 0.2: 100.0, math.inf: 100.0}, {0.1: 150.0, 0.2: 200.0, math.inf: 200.0}
    assert quantile(before, after, 0.75) == pytest.approx(0.15)
    assert quantile({}, {0.1: 1.0, math.inf: 2.0}, 0.99) == 0.1
    assert quantile(after, after, 0.99) is None


METRICS = """# TYPE wait histogram
wait_bucket{lane="due",le="0.2"} 100
wait_bucket{lane="due",le="0.25"} 100
wait_bucket{lane="due",le="+Inf"} 100
wait_count{lane="due"} 100
wait_sum{lane="due"} 1
wait_bucket{lane="event",le="0.2"} 0
wait_bucket{lane="event",le="0.25"} 100
wait_bucket{lane="event",le="+Inf"} 100
wait_count{lane="event"} 100
wait_sum{lane="event"} 22
"""


def test_a_percentile_is_of_all_lanes_or_of_one() -> None:
    assert labels_of(METRICS, "wait_count", "lane") == ["due", "event"]
    assert value(METRICS, "wait_count") == 200
    assert p99_ms("", METRICS, "wait") == 249.0
    assert p99_ms("", METRICS, "wait", lane="due") == pytest.approx(198.0)
    assert p99_ms(METRICS, METRICS, "wait") is None


def test_memory_is_judged_after_the_warm_up() -> None:
    warm_up = [Sample(0, 10.0), Sample(10, 50.0)]
    grows = [Sample(over, 100 + over / 100) for over in range(100, 900, 100)]
    found = memory([*warm_up, *grows])
    assert (found["begin_mib"], found["end_mib"], found["greatest_mib"]) == (101.0, 108.0, 108.0)
    assert found["mib_per_1000_jobs"] == pytest.approx(10.0)
    assert memory([Sample(0, 10.0)])["mib_per_1000_jobs"] is None


def test_shared_arguments_have_the_defaults_of_each_benchmark() -> None:
    parser = options.parser("about", jobs=7, gpus=4, profile=None)
    options.add(parser, "leader_every", float, 20.0, "seconds")
    given = parser.parse_args(["--jobs", "3", "--leader-every", "5"])
    assert (given.jobs, given.gpus, given.profile, given.leader_every) == (3, 4, None, 5.0)
    size = options.size(given)
    assert (size.gpus, size.nodes) == (4, 200)
