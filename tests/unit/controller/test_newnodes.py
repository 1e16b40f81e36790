"""Where Karpenter makes the nodes, a pod that needs a new one gets none if a hard rule names hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from spottrain_operator.api.observed import Observed, Plan
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.views import node_view
from spottrain_operator.control.plan import plan
from spottrain_operator.names import AVOIDS_ANNOTATION, PINNED_ANNOTATION

from tests.builders import (
    deleted,
    make_job,
    make_node,
    make_observed,
    make_pod,
    manifests,
    notice,
    raw_spec,
    status_of,
)
from tests.unit.controller.test_gangs import NODES, SIZE, begun, created, member, observed, over

Json = dict[str, Any]
HOST = "kubernetes.io/hostname"
DOOMED = (NODES[0], replace(NODES[1], notice=notice(60)), NODES[2])
KARPENTER = {"pools": [{"name": "default", "preset": "Karpenter"}]}


def rules(pod: Json) -> tuple[list[Json], list[Json]]:
    """By host name: hard ones, and wishes."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    hard = [rule for term in required.get("nodeSelectorTerms", ()) for rule in term["matchExpressions"]]
    wished = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    soft = [rule for wish in wished for rule in wish["preference"]["matchExpressions"]]
    return [r for r in hard if r["key"] == HOST], [r for r in soft if r["key"] == HOST]


def after_a_reclaim(**more: Any) -> Observed:
    """Rank 1's node is doomed, and all have ended."""
    ends = (over(0, 75), over(1, 75, **deleted()), over(2, 75))
    return replace(observed(*ends, nodes=DOOMED, spec=more.pop("spec", {})), **more)


def second_look(o: Observed, *bound: int, status: Status) -> Plan:
    """At attempt 2, whose pinned pods are there; of these ranks they have nodes."""
    pods = [
        member(rank, 2, node=f"node-{rank}" if rank in bound else "", phase="Pending", pinned=f"node-{rank}")
        for rank in (0, 2)
    ]
    return plan(replace(o, pods=tuple(pods), job=replace(o.job, status=status)))


@pytest.mark.parametrize(
    ("more", "soft"),
    [
        ({}, False),
        ({"karpenter": True}, True),
        ({"spec": {"capacity": KARPENTER}}, True),
        (
            {"spec": {"template": {"spec": {"nodeSelector": {"karpenter.k8s.aws/instance-family": "p4d"}}}}},
            True,
        ),
    ],
)
def test_a_lone_replacement_is_kept_off_the_doomed_node_by_a_wish_where_a_rule_would_leave_it_without_one(
    more: Json, soft: bool
) -> None:
    spec = raw_spec()
    for key, value in more.get("spec", {}).items():
        spec[key] = value if key != "template" else {"spec": spec["template"]["spec"] | value["spec"]}
    nodes = (make_node(notice=notice(60)),)
    o = make_observed(make_pod(**deleted()), job=make_job(spec, status=begun()), nodes=nodes)
    (pod,) = manifests(plan(replace(o, karpenter=more.get("karpenter", False))))
    hard, wished = rules(pod)
    rule = {"key": HOST, "operator": "NotIn", "values": ["node-a"]}
    assert (hard, wished) == (([], [rule]) if soft else ([rule], []))
    assert (AVOIDS_ANNOTATION in pod["metadata"]["annotations"]) == (not soft), "a wish is never in vain"


def test_ranks_that_need_new_nodes_are_made_when_the_others_have_theirs_back() -> None:
    o = after_a_reclaim(karpenter=True)
    first = plan(o)
    pins = [pod["metadata"]["annotations"].get(PINNED_ANNOTATION) for pod in manifests(first)]
    assert pins == ["node-0", "node-2"]
    status = status_of(first)
    assert not created(second_look(o, 0, status=status)), "rank 1 could take node-2"
    (pod,) = manifests(second_look(o, 0, 2, status=status))
    assert pod["metadata"]["labels"]["spottrain.io/rank"] == "1"
    hard, wished = rules(pod)
    assert not hard and [rule["values"] for rule in wished] == [["node-1"]], "node-0 may have room for two"


def test_a_queue_that_admits_all_or_none_sees_all_at_once() -> None:
    pods = manifests(plan(after_a_reclaim(karpenter=True, spec={"queueName": "q"})))
    assert len(pods) == SIZE
    hard, wished = rules(pods[1])
    assert not hard and [rule["values"] for rule in wished] == [["node-0", "node-1", "node-2"]]


def test_without_karpenter_all_are_made_at_once_by_hard_rules() -> None:
    pods = manifests(plan(after_a_reclaim()))
    assert len(pods) == SIZE and rules(pods[1]) == (
        [{"key": HOST, "operator": "NotIn", "values": ["node-0", "node-1", "node-2"]}],
        [],
    )


def test_karpenters_nodes_are_known_by_its_label() -> None:
    raw = {"metadata": {"name": "n", "resourceVersion": "1", "labels": {"karpenter.sh/nodepool": "p"}}}
    assert node_view(raw).karpenter
    assert not node_view({"metadata": {"name": "n", "resourceVersion": "1"}}).karpenter
