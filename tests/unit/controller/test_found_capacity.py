"""Where nothing is configured, cloud and spot labels are found from nodes and NodePools, or it is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client
from spottrain_operator.api.node_pools import NOTHING, Found, Pool, of_node, of_node_pool
from spottrain_operator.api.observed import Observed, Plan
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.views import node_view
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.plan import plan
from spottrain_operator.control.resync import discover_node_pools
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import KubeCluster
from spottrain_operator.names import Condition, Platform, Reason

from tests.builders import NOW, condition, make_job, make_node, make_observed, make_pod, manifests, raw_spec
from tests.support.loopback import on_loopback
from tests.unit.controller.fake_cluster import FakeCluster

Json = dict[str, Any]
AUTO = Pool(name="default", platform=Platform.AUTO)
KARPENTER = "karpenter.sh/capacity-type"
EKS = "eks.amazonaws.com/capacityType"
GKE_SPOT = "cloud.google.com/gke-spot"
AKS = "kubernetes.azure.com/scalesetpriority"
MIXED = of_node({EKS: "SPOT"}, "aws:///a/i-1") | of_node({KARPENTER: "spot"}, "aws:///a/i-2")


def observed(found: Found, *, status: Status | None = None, pool: Pool = AUTO, **spec: Any) -> Observed:
    job = make_job(raw_spec(**spec), status=status)
    return replace(make_observed(job=job, nodes=()), default_pool=pool, found=found)


def pods_of(made: Plan) -> list[Json]:
    return [pod["spec"] for pod in manifests(made)]


def terms(pod: Json) -> list[list[Json]]:
    """Expressions of the required node affinity: alternatives of rules that all hold."""
    node = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    required = node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return [term["matchExpressions"] for term in required.get("nodeSelectorTerms", [])]


def one_of(key: str, *values: str) -> Json:
    return {"key": key, "operator": "In", "values": list(values)}


NODES: list[tuple[Json, str, Platform, str]] = [
    ({KARPENTER: "spot"}, "aws:///us-east-1a/i-0", Platform.AWS, f"{KARPENTER}=spot"),
    ({EKS: "SPOT"}, "aws:///us-east-1a/i-0", Platform.AWS, f"{EKS}=SPOT"),
    (
        {GKE_SPOT: "true", "cloud.google.com/gke-nodepool": "p"},
        "gce://p/z/n",
        Platform.GKE,
        f"{GKE_SPOT}=true",
    ),
    ({AKS: "spot"}, "azure:///subscriptions/s", Platform.AZURE, f"{AKS}=spot"),
    (
        {"node-role.kubernetes.io/spot-worker": "true"},
        "gce://p/z/n",
        Platform.GCP,
        "node-role.kubernetes.io/spot-worker=true",
    ),
]
WINDOWS = {Platform.AWS: 110, Platform.GKE: 15, Platform.AZURE: 25, Platform.GCP: 25}


@pytest.mark.parametrize(("labels", "provider", "cloud", "label"), NODES, ids=[row[3] for row in NODES])
def test_a_spot_job_goes_to_nodes_that_are_labelled_as_spot_with_their_clouds_notice(
    labels: Json, provider: str, cloud: Platform, label: str
) -> None:
    found = of_node(labels, provider) | of_node({}, provider if cloud is not Platform.GKE else "")
    made = plan(observed(found))
    assert made.status is not None
    record, (pod,) = made.status.attempts[-1], pods_of(made)
    key, _, value = label.partition("=")
    assert terms(pod) == [[one_of(key, value)]]
    assert pod["terminationGracePeriodSeconds"] == WINDOWS[cloud]
    assert (record.platform, record.notice_seconds, record.node_labels) == (cloud, WINDOWS[cloud], (label,))
    accepted = condition(made, Condition.ACCEPTED)
    assert "no node" not in accepted.message


def test_several_labels_are_alternatives_and_each_keeps_the_templates_own_rules() -> None:
    own = {"key": "gpu", "operator": "Exists"}
    required = {
        "nodeSelectorTerms": [{"matchExpressions": [own]}, {"matchExpressions": [one_of("zone", "a")]}]
    }
    node = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    body = {"containers": [{"name": "trainer", "image": "x"}], "affinity": {"nodeAffinity": node}}
    (pod,) = pods_of(plan(observed(MIXED, template={"spec": body})))
    found = [one_of(EKS, "SPOT"), one_of(KARPENTER, "spot")]
    assert terms(pod) == [[first, rule] for first in (own, one_of("zone", "a")) for rule in found]


def test_the_choice_stands_for_the_attempt_whatever_the_cluster_shows_later() -> None:
    first = plan(observed(MIXED, workers=2)).status
    assert first is not None
    later = of_node({AKS: "spot"}, "azure:///s")
    made = plan(observed(later, status=first, workers=2))
    assert len(pods_of(made)) == 2
    for pod in pods_of(made):
        assert terms(pod)[0][0] == one_of(EKS, "SPOT") and pod["terminationGracePeriodSeconds"] == 110


def test_a_group_at_zero_keeps_the_labels_of_the_attempt_before() -> None:
    status = plan(observed(MIXED)).status
    assert status is not None
    ended = replace(status.attempts[-1], cause="SpotNotice")
    again = plan(observed(of_node({}, "aws:///"), status=replace(status, attempts=(ended,)))).status
    assert again is not None and again.attempt == 2
    assert again.attempts[-1].node_labels == (f"{EKS}=SPOT", f"{KARPENTER}=spot")


def test_where_nothing_is_known_the_job_runs_with_the_shortest_grace_and_says_what_to_set() -> None:
    made = plan(observed(NOTHING))
    assert made.status is not None
    (pod,), accepted = pods_of(made), made.status.condition(Condition.ACCEPTED)
    assert terms(pod) == [] and pod["terminationGracePeriodSeconds"] == 15
    assert accepted is not None and accepted.status == "True"
    for words in (
        "no node is labelled as Spot",
        "the grace is 15 s",
        "set platform, preset or nodeSelector in spec.capacity.pools or in the chart's defaultPool",
    ):
        assert words in accepted.message
    (event,) = [e for e in made.events if e.reason == Reason.CAPACITY_UNKNOWN]
    assert event.warning and event.message in accepted.message


def test_the_taints_of_spot_nodes_are_tolerated_before_there_is_one() -> None:
    (pod,) = pods_of(plan(observed(NOTHING)))
    keys = {t["key"] for t in pod["tolerations"]}
    assert {GKE_SPOT, AKS, "nvidia.com/gpu"} <= keys
    (pod,) = pods_of(plan(observed(NOTHING, capacity={"type": "OnDemand"})))
    assert not {GKE_SPOT, AKS} & {t["key"] for t in pod["tolerations"]}


def test_on_demand_is_kept_off_every_node_that_is_labelled_as_spot_or_reserved() -> None:
    made = plan(observed(MIXED, capacity={"type": "OnDemand"}))
    (pod,) = pods_of(made)
    (rules,) = terms(pod)
    assert {rule["operator"] for rule in rules} == {"NotIn"}
    kept_off = {(rule["key"], value) for rule in rules for value in rule["values"]}
    assert {
        (EKS, "SPOT"),
        (KARPENTER, "spot"),
        (KARPENTER, "reserved"),
        (GKE_SPOT, "true"),
        (AKS, "spot"),
    } <= kept_off
    assert (KARPENTER, "on-demand") not in kept_off
    assert made.status is not None and not [e for e in made.events if e.reason == Reason.CAPACITY_UNKNOWN]


def test_reserved_goes_where_nodes_are_labelled_as_reserved_and_says_where_none_is() -> None:
    found = of_node({EKS: "CAPACITY_BLOCK"}, "aws:///")
    (pod,) = pods_of(plan(observed(found, capacity={"type": "Reserved"})))
    assert terms(pod) == [[one_of(EKS, "CAPACITY_BLOCK")]]
    made = plan(observed(MIXED, capacity={"type": "Reserved"}))
    (event,) = [e for e in made.events if e.reason == Reason.CAPACITY_UNKNOWN]
    assert "no node is labelled as Reserved" in event.message


@pytest.mark.parametrize(
    "pool",
    [
        Pool(name="default", platform=Platform.AWS),
        Pool(name="default", platform=Platform.AUTO, node_selector={KARPENTER: "spot"}),
        Pool(name="default", platform=Platform.AUTO, node_selector={EKS: "SPOT"}),
    ],
)
def test_what_is_set_is_not_looked_for(pool: Pool) -> None:
    made = plan(observed(MIXED, pool=pool))
    (pod,) = pods_of(made)
    assert terms(pod) == [] and pod["terminationGracePeriodSeconds"] == 110
    assert not [e for e in made.events if e.reason == Reason.CAPACITY_UNKNOWN]


def test_karpenter_is_not_taken_for_aws() -> None:
    pools = [{"name": "a", "preset": "Karpenter"}]
    (pod,) = pods_of(plan(observed(of_node({}, "azure:///s"), capacity={"pools": pools})))
    assert pod["terminationGracePeriodSeconds"] == 25


def test_an_unschedulable_pod_is_said_to_wait_for_the_labels_that_were_found() -> None:
    status = plan(observed(MIXED)).status
    assert status is not None
    waits = make_pod(node="", phase="Pending", unschedulable="0/3 nodes are available")
    o = replace(observed(MIXED, status=status), pods=(waits,))
    after = plan(o).status
    assert after is not None
    scheduled = after.condition(Condition.SCHEDULED)
    assert scheduled is not None
    assert (
        scheduled.message
        == f"0/3 nodes are available (capacity Spot: nodes with {EKS}=SPOT or {KARPENTER}=spot)"
    )


@pytest.mark.parametrize(("kind", "refused"), [("Spot", True), ("SpotFirst", True), ("OnDemand", False)])
def test_a_template_for_nodes_of_another_type_is_refused_by_name(kind: str, refused: bool) -> None:
    body = {"containers": [{"name": "trainer"}], "nodeSelector": {KARPENTER: "on-demand"}}
    job = make_job(raw_spec(template={"spec": body}, capacity={"type": kind}))
    assert (job.spec is None) is refused
    if refused:
        assert job.invalid == (
            f"spec.template.spec.nodeSelector has {KARPENTER}=on-demand, and spec.capacity.type is {kind}: "
            "leave the label out, or set capacity.type to OnDemand"
        )


@pytest.mark.parametrize("kind", ["OnDemand", "Reserved"])
def test_a_pool_of_another_type_is_refused_by_name(kind: str) -> None:
    pools = [{"name": "a", "platform": "AWS"}, {"name": "b", "platform": "AWS", "type": kind}]
    made = plan(observed(NOTHING, capacity={"pools": pools}))
    accepted = made.status.condition(Condition.ACCEPTED) if made.status is not None else None
    assert accepted is not None and accepted.status == "False"
    assert f"b is of type {kind}, and spec.capacity.type is Spot" in accepted.message


def test_spot_first_needs_no_pools_where_labels_are_found() -> None:
    made = plan(observed(MIXED, capacity={"type": "SpotFirst"}))
    assert made.status is not None
    (pod,), record = pods_of(made), made.status.attempts[-1]
    assert terms(pod) == [[one_of(EKS, "SPOT")], [one_of(KARPENTER, "spot")]]
    assert (record.pool, record.capacity_type) == ("default", "Spot")
    dry = replace(record, cause="SchedulingTimeout", ended=NOW)
    again = plan(
        observed(MIXED, status=replace(made.status, attempts=(dry,)), capacity={"type": "SpotFirst"})
    )
    assert again.status is not None
    later = again.status.attempts[-1]
    assert (later.number, later.pool, later.capacity_type) == (2, "default-on-demand", "OnDemand")


# --- where it is found -----------------------------------------------------------------------------------
def node_pool(*rules: tuple[str, str], group: str = "karpenter.k8s.aws") -> Json:
    requirements = [{"key": KARPENTER, "operator": op, "values": values.split()} for op, values in rules]
    template = {"spec": {"requirements": requirements, "nodeClassRef": {"group": group}}}
    return {"metadata": {"name": "p"}, "spec": {"template": template}}


@pytest.mark.parametrize(
    ("rules", "offered"),
    [
        ([("In", "spot on-demand")], "spot on-demand"),
        ([("In", "on-demand")], "on-demand"),
        ([("NotIn", "spot")], "on-demand reserved"),
        ([("Exists", "")], "spot on-demand reserved"),
        ([], "spot on-demand reserved"),
    ],
)
def test_a_node_pool_offers_what_its_requirements_admit(rules: list[tuple[str, str]], offered: str) -> None:
    found = of_node_pool(node_pool(*rules))
    assert found.labels == {(KARPENTER, value) for value in offered.split()}
    assert found.platforms == {Platform.AWS}


def test_a_cloud_is_told_by_the_provider_id_or_by_labels() -> None:
    assert of_node({}, "kind://docker/kind/node") == NOTHING and of_node({}, "") == NOTHING
    assert of_node({"eks.amazonaws.com/nodegroup": "g"}, "").platforms == {Platform.AWS}
    assert of_node({"cloud.google.com/gke-nodepool": "g"}, "gce://p/z/n").platforms == {Platform.GKE}
    assert of_node({"cloud.google.com/machine-family": "n1"}, "gce://p/z/n").platforms == {Platform.GCP}


def test_what_nodes_have_told_stays_when_they_are_gone() -> None:
    caches = Caches()
    meta = {"name": "n", "resourceVersion": "1", "labels": {EKS: "SPOT"}}
    caches.nodes.put(node := node_view({"metadata": meta, "spec": {"providerID": "aws:///a/i-1"}}))
    caches.nodes.drop(node)
    caches.nodes.put(make_node())
    assert caches.nodes.found == of_node({EKS: "SPOT"}, "aws:///a/i-1")


async def test_node_pools_are_asked_for_and_their_absence_is_normal(caplog: pytest.LogCaptureFixture) -> None:
    cluster, memory = FakeCluster(), Memory()
    await discover_node_pools(cluster, memory)
    assert memory.node_pools == NOTHING and not caplog.records
    cluster.node_pools = [node_pool(("In", "spot"))]
    await discover_node_pools(cluster, memory)
    expected = memory.node_pools
    assert expected == Found(labels=frozenset({(KARPENTER, "spot")}), platforms=frozenset({Platform.AWS}))
    cluster.node_pools = None
    await discover_node_pools(cluster, memory)
    assert memory.node_pools == expected


async def test_node_pools_that_may_not_be_read_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Forbidden(FakeCluster):
        async def every(self, kind: str, namespaces: tuple[str, ...]) -> Any:
            raise ApiError(403, "nodepools is forbidden")
            yield

    memory = Memory()
    for _ in range(2):
        await discover_node_pools(Forbidden(), memory)
    assert [r.getMessage() for r in caplog.records] == [
        "Karpenter's NodePools cannot be read, so capacity is detected from nodes only: "
        "nodepools is forbidden"
    ]


async def test_the_api_servers_plain_404_is_no_error_and_a_load_balancers_page_is_no_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = [(404, "404 page not found\n"), (502, "<html>Bad Gateway</html>")]

    async def answer(_: web.Request) -> web.Response:
        status, text = answers.pop(0)
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with on_loopback(app) as url:
        cluster = KubeCluster(client.ApiClient(client.Configuration(host=url)))
        try:
            await discover_node_pools(cluster, Memory())
            assert not caplog.records
            with pytest.raises(ApiError, match="GET /apis/x: JSONDecodeError") as refused:
                await cluster.served("x")
            assert refused.value.status == 0
        finally:
            await cluster.close()
