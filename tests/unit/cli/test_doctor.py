"""What the doctor finds in what it has read, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from spottrain.errors import StoreDenied, StoreUnsuitable
from spottrain_cli.doctor import findings, reading
from spottrain_cli.doctor.findings import Finding, Level
from spottrain_cli.doctor.judging import NOTICE, SPOT, judge
from spottrain_cli.doctor.seen import Json, Seen, Store
from spottrain_cli.errors import NotFound, Unreachable

from tests.support.sentences import Told


def part(kind: str, component: str, status: Json, **env: Any) -> Json:
    variables = [
        {
            "name": f"SPOTTRAIN_OPERATOR_{name}",
            "value": value if isinstance(value, str) else json.dumps(value),
        }
        for name, value in env.items()
    ]
    return {
        "kind": kind,
        "metadata": {
            "namespace": "spottrain-system",
            "name": f"spottrain-{component}",
            "labels": {"app.kubernetes.io/component": component, "app.kubernetes.io/version": "0.3.0"},
        },
        "spec": {"replicas": 2, "template": {"spec": {"containers": [{"env": variables}]}}},
        "status": status,
    }


def parts(*, ready: int = 2, agents: int = 2, **env: Any) -> Json:
    of_agent = {"desiredNumberScheduled": 2, "numberReady": agents}
    return {
        "items": [
            part("Deployment", "operator", {"availableReplicas": ready}, **env),
            part("DaemonSet", "agent", of_agent),
        ]
    }


def node(name: str, gpus: str = "0", **labels: str) -> Json:
    return {
        "metadata": {
            "name": name,
            "labels": {key.replace("__", "/"): value for key, value in labels.items()},
        },
        "status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": gpus}},
    }


SPOT_NODE = {"karpenter.sh__capacity-type": "spot"}
NODES = {"items": [node("a", "4", **SPOT_NODE), node("b", "4", **SPOT_NODE), node("c")]}
YES: Json = {"status": {"allowed": True}}
BUCKET = {"checkpointPrefix": "s3://team/x", "credentialsSecret": "s3"}
WELL = Seen(
    namespace="ml",
    version={"gitVersion": "v1.34.1"},
    api={"kind": "APIResourceList"},
    rights=dict.fromkeys(reading.RIGHTS, YES),
    parts=parts(
        JOB_DEFAULTS=BUCKET, NAMESPACES="ml,vision", DEFAULT_POOL={"name": "default", "platform": "EKS"}
    ),
    nodes=NODES,
    objects={("secret", "s3"): {}},
    store=Store(uri="s3://team/x/ml"),
    release="0.3.0",
)
POD = {
    "metadata": {"name": "bert-1-0"},
    "status": {
        "containerStatuses": [
            {
                "image": "me/bert:9",
                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
            }
        ]
    },
}


def a_job(status: Json | None = None, **spec: Any) -> Json:
    return {"metadata": {"name": "bert", "namespace": "ml"}, "spec": spec, "status": status or {}}


def bad(seen: Seen) -> list[Finding]:
    return [each for each in judge(seen) if each.level is not Level.OK]


def test_where_all_is_well_every_subject_says_so() -> None:
    found = judge(WELL)
    assert not bad(WELL) and not findings.failed(found)
    assert [each.subject for each in found] == [
        "cluster", "definition", "rights", "operator", "agents", "GPUs", "credentials", "store",
    ]  # fmt: skip
    assert findings.lines(found, width=0)[-1] == "All is well."


CASES = {
    "no cluster": (
        replace(WELL, version=Unreachable("the cluster refuses connections: does it run?")),
        "cluster",
    ),
    "old": (replace(WELL, version={"gitVersion": "v1.28.3-eks"}), "cluster"),
    "not installed": (replace(WELL, api=NotFound("the server could not find it")), "definition"),
    "may not create": (
        replace(WELL, rights={**WELL.rights, "create trainingjobs": {"status": {}}}),
        "rights",
    ),
    "may not read logs": (replace(WELL, rights={**WELL.rights, "get pods/log": {"status": {}}}), "rights"),
    "hidden operator": (
        replace(WELL, parts=Unreachable("the cluster refuses it: deployments.apps")),
        "operator",
    ),
    "no operator": (replace(WELL, parts={"items": parts()["items"][1:]}, objects={}), "operator"),
    "operator down": (replace(WELL, parts=parts(ready=0, JOB_DEFAULTS=BUCKET)), "operator"),
    "other namespace": (replace(WELL, namespace="other"), "operator"),
    "other version": (replace(WELL, release="0.4.0"), "version"),
    "agents not ready": (replace(WELL, parts=parts(agents=1, JOB_DEFAULTS=BUCKET)), "agents"),
    "spot without agent": (
        replace(WELL, nodes={"items": [node(name, "1", **SPOT_NODE) for name in "abc"]}),
        "agents",
    ),
    "no device plugin": (
        replace(WELL, nodes={"items": [node("a", **{"nvidia.com__gpu.present": "true"})]}),
        "GPUs",
    ),
    "no GPU": (replace(WELL, nodes={"items": [node("a")]}), "GPUs"),
    "unknown pool": (
        replace(WELL, job=a_job(capacity={"pools": [{"name": "fast"}]}), file="j.yaml"),
        "pools",
    ),
    "empty pool": (
        replace(
            WELL,
            file="j.yaml",
            job=a_job(capacity={"pools": [{"name": "a", "platform": "AWS", "nodeSelector": {"pool": "a"}}]}),
        ),
        "pools",
    ),
    "long notice": (
        replace(
            WELL,
            file="j.yaml",
            job=a_job(capacity={"pools": [{"name": "g", "platform": "GKE", "noticeSeconds": 105}]}),
        ),
        "notice",
    ),
    "no secret": (replace(WELL, objects={("secret", "s3"): NotFound("secrets s3 not found")}), "credentials"),
    "no If-Match": (
        replace(
            WELL, store=Store(uri="s3://team/x", error=StoreUnsuitable("s3://team/x ignores If-Match on PUT"))
        ),
        "store",
    ),
    "denied from here": (
        replace(WELL, store=Store(uri="s3://team/x", error=StoreDenied("s3://team/x: access denied"))),
        "store",
    ),
    "no bucket": (replace(WELL, store=None), "store"),
    "bad manifest": (
        replace(WELL, file="j.yaml", job=a_job(), dry_run=Unreachable("spec.workers must be at least 1")),
        "manifest",
    ),
    "failed job": (
        replace(
            WELL,
            job=a_job(
                {"phase": "Failed", "conditions": [{"type": "Failed", "message": "the script raised"}]}
            ),
        ),
        "job",
    ),
    "unseen job": (replace(WELL, job=a_job()), "job"),
    "waiting job": (
        replace(
            WELL,
            job=a_job(
                {
                    "phase": "Pending",
                    "conditions": [
                        {
                            "type": "Scheduled",
                            "status": "False",
                            "reason": "Unschedulable",
                            "message": "0/3 nodes",
                        }
                    ],
                }
            ),
        ),
        "job",
    ),
    "slow save": (
        replace(
            WELL,
            job=a_job({"phase": "Running", "progress": {"emergencySeconds": "31.5", "graceSeconds": "25"}}),
        ),
        "notice",
    ),
    "no image": (replace(WELL, pods={"items": [POD, POD]}), "images"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_one_finding_with_its_fix(name: str, told: Told) -> None:
    seen, subject = CASES[name]
    (found,) = bad(seen)
    assert found.subject == subject and (found.fix or name == "no cluster")
    told(f"{found.level}: {found.text} | {found.fix}")


def test_findings_are_wrapped_below_their_subject_and_are_facts_for_programs() -> None:
    found = [findings.ok("cluster", "Kubernetes v1.34.1"), findings.fail("GPUs", "word " * 12, "mend it")]
    assert findings.lines(found, width=60) == [
        "ok    cluster  Kubernetes v1.34.1",
        "fail  GPUs     word word word word word word word word word",
        "               word word word",
        "               Fix: mend it",
        "",
        "2 checks: 1 failed.",
    ]
    assert findings.facts(found)["ok"] is False
    assert findings.facts(found)["findings"][0] == {
        "level": "ok", "subject": "cluster", "text": "Kubernetes v1.34.1", "fix": "",
    }  # fmt: skip


# --- which place and which objects are meant --------------------------------------------------------------
@pytest.mark.parametrize(
    ("near", "job", "uri", "needs"),
    [
        ({}, None, "s3://team/x/ml", [("secret", "s3")]),
        ({}, a_job(), "s3://team/x/ml/bert", [("secret", "s3")]),
        ({"checkpointPrefix": "gs://own"}, a_job(), "gs://own/ml/bert", []),
        ({"credentialsSecret": "own"}, None, "s3://team/x/ml", [("secret", "own")]),
        ({}, a_job(checkpoint={"uri": "s3://mine/y"}), "s3://mine/y", []),
        ({}, a_job({"defaults": {"checkpoint": {"uri": "s3://old/z"}}}), "s3://old/z", [("secret", "s3")]),
        (
            {"serviceAccountName": "trainer"},
            a_job(checkpoint={"uri": "s3://mine/y", "credentialsSecretRef": {"name": "my"}}),
            "s3://mine/y",
            [("secret", "my"), ("serviceaccount", "trainer")],
        ),
    ],
)
def test_defaults_of_the_namespace_come_before_those_of_the_chart(
    near: Json, job: Json | None, uri: str, needs: list[tuple[str, str]]
) -> None:
    seen = replace(WELL, defaults={"data": near}, job=job)
    assert reading.place(seen)["uri"] == uri and reading.needed(seen) == needs


def test_notice_and_labels_are_those_of_the_operator() -> None:
    from spottrain_operator.api.node_pools import CAPACITY_LABELS, CapacityType
    from spottrain_operator.names import NOTICE_WINDOW

    assert CAPACITY_LABELS[CapacityType.SPOT] == SPOT
    assert {name: NOTICE[name] for name in NOTICE_WINDOW} == NOTICE_WINDOW
    assert (NOTICE["EKS"], NOTICE["AKS"]) == (NOTICE["AWS"], NOTICE["Azure"])
