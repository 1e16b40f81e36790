"""Pools: which one an attempt gets, when spot is left and returned to, and what is found from nodes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client
from spottrain.contract import Outcome
from spottrain_operator.api.node_pools import (
    NOTHING,
    CapacityType,
    Found,
    Pool,
    chosen,
    of_node,
    of_node_pool,
)
from spottrain_operator.api.observed import Observed, PodView
from spottrain_operator.api.training_job import AttemptRecord, Status
from spottrain_operator.api.validation import pools_of
from spottrain_operator.api.views import node_view
from spottrain_operator.control.actions import Create, Plan
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.plan import plan
from spottrain_operator.control.resync import discover_node_pools
from spottrain_operator.errors import ApiError, InvalidSpec
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.names import Cause, Condition, Platform, Reason
from spottrain_operator.policies import capacity

from tests.builders import (
    NOW,
    after,
    condition,
    deleted,
    make_job,
    make_node,
    make_observed,
    make_pod,
    manifests,
    notice,
    raw_spec,
    started,
    status_of,
    told,
)
from tests.support.loopback import on_loopback
from tests.unit.controller.fake_cluster import FakeCluster
from tests.unit.controller.stories import Story, follows

Json = dict[str, Any]
SPOT_A = {"name": "a", "platform": "AWS"}
SPOT_B = {"name": "b", "platform": "AWS"}
ON_DEMAND = {"name": "od", "platform": "AWS", "type": "OnDemand"}
SPOT_FIRST: Json = {"type": "SpotFirst", "pools": [SPOT_A, SPOT_B, ON_DEMAND]}


def past(*endings: tuple[str, Cause, float]) -> Status:
    """Attempts that have ended, by (pool, cause, minutes ago)."""
    records = tuple(
        AttemptRecord(
            number=number,
            pool=pool,
            capacity_type="OnDemand" if pool == "od" else "Spot",
            cause=cause,
            started=after(-60 * ago - 600),
            ended=after(-60 * ago),
            node="node-a",
        )
        for number, (pool, cause, ago) in enumerate(endings, 1)
    )
    return Status(attempt=len(records), attempts=records, interruptions=len(records))


def observed(status: Status, spec: Json, **more: Any) -> Observed:
    return make_observed(job=make_job(raw_spec(capacity=spec), status=status), **more)


def choice(status: Status, spec: Json = SPOT_FIRST) -> str:
    return capacity.choose(observed(status, spec), status).name


RECLAIMED = Cause.SPOT_NOTICE
DRY = Cause.SCHEDULING_TIMEOUT
SPOT_C = {"name": "c", "platform": "AWS"}


@pytest.mark.parametrize(
    ("capacity_type", "history", "pool"),
    [
        ("SpotFirst", [("a", DRY, 1)], "b"),
        ("SpotFirst", [("a", DRY, 13), ("b", DRY, 1)], "c"),
        ("SpotFirst", [("a", DRY, 25), ("b", DRY, 13), ("c", DRY, 1)], "od"),
        ("Spot", [("a", DRY, 13), ("b", DRY, 1)], "c"),
        ("Spot", [("a", DRY, 25), ("b", DRY, 13), ("c", DRY, 1)], "a"),
        ("Spot", [("a", DRY, 25), ("b", DRY, 13), ("c", RECLAIMED, 1)], "a"),
    ],
)
def test_each_pool_is_asked_before_one_is_asked_again_however_long_the_waits(
    capacity_type: str, history: list[tuple[str, Cause, float]], pool: str
) -> None:
    pools = [SPOT_A, SPOT_B, SPOT_C] + [ON_DEMAND] * (capacity_type == "SpotFirst")
    spec = {"type": capacity_type, "pools": pools, "spotFirst": {"returnAfterSeconds": 1200}}
    assert choice(past(*history), spec) == pool


def test_a_pool_whose_nodes_give_more_time_than_usual_says_so() -> None:
    usual = {"name": "a", "platform": "GKE"}
    for pools, seconds in (([usual], 15), ([usual | {"noticeSeconds": 105}], 105)):
        job = make_job(raw_spec(capacity={"pools": pools}))
        (pod,) = manifests(plan(make_observed(job=job)))
        assert pod["spec"]["terminationGracePeriodSeconds"] == seconds
        assert status_of(plan(make_observed(job=job))).attempts[0].notice_seconds == seconds


@pytest.mark.parametrize(("waited", "gives_up"), [(1799, False), (1800, True)])
def test_pending_seconds_above_the_pending_timeout_are_waited_for(waited: int, gives_up: bool) -> None:
    spec = SPOT_FIRST | {"spotFirst": {"pendingSeconds": 1800}, "pendingTimeoutSeconds": 900}
    status = Status(attempt=1, attempts=(AttemptRecord(number=1, pool="a", capacity_type="Spot"),))
    waits = make_pod(node="", phase="Pending", unschedulable="no nodes", created=after(-waited))
    found = capacity.gives_up_waiting(replace(observed(status, spec), pods=(waits,)))
    assert bool(found) == gives_up and ("spotFirst.pendingSeconds (1800 s)" in found) == gives_up


@pytest.mark.parametrize(("waited", "gives_up"), [(899, False), (900, True)])
def test_on_demand_nodes_are_waited_for_until_the_pending_timeout(waited: int, gives_up: bool) -> None:
    spec = SPOT_FIRST | {"spotFirst": {"pendingSeconds": 1800}, "pendingTimeoutSeconds": 900}
    status = Status(attempt=1, attempts=(AttemptRecord(number=1, pool="od", capacity_type="OnDemand"),))
    waits = make_pod(node="", phase="Pending", unschedulable="no nodes", created=after(-waited))
    found = capacity.gives_up_waiting(replace(observed(status, spec), pods=(waits,)))
    assert bool(found) == gives_up and ("pendingTimeoutSeconds (900 s)" in found) == gives_up


@pytest.mark.parametrize(
    ("history", "pool"),
    [
        ([], "a"),
        ([("a", RECLAIMED, 1)], "b"),
        ([("a", RECLAIMED, 11)], "a"),
        ([("a", RECLAIMED, 5), ("b", RECLAIMED, 1)], "a"),
        ([("a", Cause.FAILED, 1)], "a"),
        ([("a", Cause.SCHEDULING_TIMEOUT, 1)], "b"),
    ],
    ids=["first", "the other", "cooled", "the least recent", "a failure is not the pool's", "dry"],
)
def test_a_pool_that_has_just_interrupted_comes_after_the_others(
    history: list[tuple[str, Cause, float]], pool: str
) -> None:
    assert choice(past(*history)) == pool


@pytest.mark.parametrize(
    ("history", "pool"),
    [
        ([("a", RECLAIMED, 50), ("b", RECLAIMED, 30), ("a", RECLAIMED, 1)], "od"),
        ([("a", RECLAIMED, 70), ("b", RECLAIMED, 30), ("a", RECLAIMED, 1)], "b"),
        ([("a", Cause.SCHEDULING_TIMEOUT, 12), ("b", Cause.SCHEDULING_TIMEOUT, 1)], "od"),
        ([("a", Cause.SCHEDULING_TIMEOUT, 80), ("b", Cause.SCHEDULING_TIMEOUT, 1)], "a"),
        ([("a", RECLAIMED, 9), ("b", RECLAIMED, 8), ("a", RECLAIMED, 7), ("od", Cause.MOVED, 1)], "b"),
        ([("a", RECLAIMED, 9), ("b", RECLAIMED, 8), ("a", RECLAIMED, 7), ("od", Cause.NODE_LOST, 1)], "od"),
    ],
    ids=[
        "three in an hour",
        "two in it",
        "all dry",
        "dry long ago",
        "after going back",
        "on demand it stays",
    ],
)
def test_spot_first_falls_back_and_comes_back(history: list[tuple[str, Cause, float]], pool: str) -> None:
    assert choice(past(*history)) == pool


def test_the_choice_is_in_the_record_before_a_pod_is_made() -> None:
    made = follows("pool=a on=Spot", observed(Status(), SPOT_FIRST))
    assert made.status is not None
    follows("unwritten creates=0", observed(made.status, SPOT_FIRST))


def on_demand_attempt(**more: Any) -> Status:
    record = AttemptRecord(
        number=1,
        pod="p",
        pool="od",
        capacity_type="OnDemand",
        started=after(-7200),
        node="node-a",
        durable_step=50,
        created_workers=1,
    )
    return Status(attempt=1, attempts=(replace(record, **more),), known_durable_step=50)


def first_in(status: Status, **more: Any) -> Story:
    return Story(status, capacity=SPOT_FIRST, **more)


def runs_for(minutes: float) -> PodView:
    return make_pod(running_since=NOW - timedelta(minutes=minutes))


def test_it_goes_back_to_spot_after_its_time_once_it_has_saved() -> None:
    first_in(on_demand_attempt()).look("!deletes", runs_for(59))
    first_in(on_demand_attempt(durable_step=None)).look("!deletes", runs_for(600))  # it has not saved yet
    first_in(on_demand_attempt()).look("attempt=1 pool=a on=Spot creates=0 !deletes", runs_for(61))


def on_spot() -> Status:
    record = replace(on_demand_attempt().attempts[0], pool="a", capacity_type="Spot", node="")
    return Status(attempt=1, attempts=(record,))


def test_a_pool_without_nodes_is_left_for_the_next_one() -> None:
    waiting = make_pod(node="", phase="Pending", unschedulable="no nodes", created=after(-601))
    job = first_in(on_spot())
    job.look("stopping1=SchedulingTimeout", waiting)
    job.look("cause1=SchedulingTimeout interruptions=0", make_pod(node="", phase="Pending", **deleted()))
    assert job.status.attempts[1].pool == "b"


def test_pods_that_their_queue_has_not_admitted_have_no_time_to_lose() -> None:
    waiting = make_pod(node="", phase="Pending", queued=True, unschedulable="gated", created=after(-9999))
    first_in(on_spot()).look("attempt=1 Scheduled=False/WaitingForQueue phase=Waiting", waiting)


# --- what a pool is -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("platform", "kind", "label", "window"),
    [
        (Platform.EKS, "Spot", {"eks.amazonaws.com/capacityType": "SPOT"}, 110),
        (Platform.EKS, "OnDemand", {"eks.amazonaws.com/capacityType": "ON_DEMAND"}, 110),
        (Platform.KARPENTER, "Spot", {"karpenter.sh/capacity-type": "spot"}, 15),
        (Platform.KARPENTER, "Reserved", {"karpenter.sh/capacity-type": "reserved"}, 110),
        (Platform.GKE, "Spot", {"cloud.google.com/gke-spot": "true"}, 15),
        (Platform.GKE, "OnDemand", {}, 110),
        (Platform.AKS, "Spot", {"kubernetes.azure.com/scalesetpriority": "spot"}, 25),
    ],
)
def test_a_platform_knows_labels_and_window(platform: Platform, kind: str, label: Json, window: int) -> None:
    pool = Pool(name="p", platform=platform, type=CapacityType(kind), node_selector={"x": "y"})
    assert pool.selector == label | {"x": "y"} and chosen(pool, NOTHING).window == window


def test_spot_nodes_of_gke_and_aks_are_tolerated_and_theirs_alone() -> None:
    for platform, key in (
        (Platform.GKE, "cloud.google.com/gke-spot"),
        (Platform.AKS, "kubernetes.azure.com/scalesetpriority"),
    ):
        spot, demand = (Pool(name="p", platform=platform, type=t) for t in ("Spot", "OnDemand"))  # type: ignore[arg-type]
        assert key in {t["key"] for t in spot.tolerated} and key not in {t["key"] for t in demand.tolerated}


def test_a_pool_that_the_platform_team_has_named_needs_no_more_than_its_name() -> None:
    named = {"gpus": Pool(name="gpus", platform=Platform.GKE, node_selector={"team": "ml"})}
    o = replace(observed(Status(), {"pools": [{"name": "gpus"}]}), pools=named)
    pod = next(a.manifest for a in plan(o).after if isinstance(a, Create))
    assert pod["spec"]["nodeSelector"] == {"team": "ml", "cloud.google.com/gke-spot": "true"}
    assert pod["spec"]["terminationGracePeriodSeconds"] == 15


def test_a_selector_that_says_which_nodes_takes_the_place_of_the_platforms_labels() -> None:
    own = {"cloud.google.com/gke-preemptible": "true"}
    assert Pool(name="p", platform=Platform.GKE, node_selector=own).selector == own


@pytest.mark.parametrize(
    "spec",
    [
        {"pools": [{"name": "gpus"}]},
        {"type": "SpotFirst", "pools": [SPOT_A]},
        {"type": "SpotFirst", "pools": [ON_DEMAND]},
        {"pools": [SPOT_A, {"name": "b", "platform": "AWS", "type": "Reserved"}]},
        {"pools": [SPOT_A, ON_DEMAND]},
    ],
)
def test_pools_that_cannot_be_are_refused(spec: Json) -> None:
    follows("Accepted=False/InvalidSpec phase=Invalid !creates", observed(Status(), spec))


def test_a_label_of_the_job_s_type_is_no_other_than_its_pool_s() -> None:
    capacity = {"type": "OnDemand", "pools": [{"name": "a", "platform": "Karpenter"}]}
    job = make_job(raw_spec(capacity=capacity))
    assert job.spec is not None
    template = {"spec": job.spec.template["spec"] | {"nodeSelector": {KARPENTER: "on-demand"}}}
    (pool,) = pools_of(replace(job.spec, template=template), AUTO, {})
    assert pool.selector == {KARPENTER: "on-demand"}
    with pytest.raises(InvalidSpec, match=r"nodeSelector has .* and pool a has"):
        template["spec"]["nodeSelector"][KARPENTER] = "spot"
        pools_of(replace(job.spec, template=template), AUTO, {})


# --- a pool that is not to be understood any more ---------------------------------------------------------
UNKNOWN: Json = {"pools": [{"name": "renamed"}]}


def test_what_runs_in_it_runs_on_and_is_told_of_its_end() -> None:
    job = Story(capacity=UNKNOWN)
    job.look("annotates=0 !deletes", make_pod(), nodes=(make_node(notice=notice(60)),))
    job.look("phase=Succeeded", told(Outcome.DONE, step=9))


def test_no_attempt_is_made_for_it_until_it_is_put_right() -> None:
    job = Story()
    job.look("", make_pod())
    job.spec["capacity"] = UNKNOWN
    ended = told(Outcome.INTERRUPTED, step=9, durableStep=9, pod=deleted())
    job.look("attempt=1 cause1 phase=Invalid Running=False", ended)
    job.spec.clear()
    job.look("attempt=2")


def test_a_pending_pod_of_it_is_no_error_of_ours() -> None:
    waiting = make_pod(node="", phase="Pending", unschedulable="x", created=after(-9999))
    Story(capacity=UNKNOWN).look("Accepted=False", waiting)


# --- labels and clouds that are found from nodes --------------------------------------------------------
AUTO = Pool(name="default", platform=Platform.AUTO)
KARPENTER = "karpenter.sh/capacity-type"
EKS = "eks.amazonaws.com/capacityType"
GKE_SPOT = "cloud.google.com/gke-spot"
AKS = "kubernetes.azure.com/scalesetpriority"
MIXED = of_node({EKS: "SPOT"}, "aws:///a/i-1") | of_node({KARPENTER: "spot"}, "aws:///a/i-2")


def seeing(found: Found, *, status: Status | None = None, pool: Pool = AUTO, **spec: Any) -> Observed:
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
    made = plan(seeing(found))
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
    (pod,) = pods_of(plan(seeing(MIXED, template={"spec": body})))
    found = [one_of(EKS, "SPOT"), one_of(KARPENTER, "spot")]
    assert terms(pod) == [[first, rule] for first in (own, one_of("zone", "a")) for rule in found]


def test_the_choice_stands_for_the_attempt_whatever_the_cluster_shows_later() -> None:
    first = status_of(plan(seeing(MIXED, workers=2)))
    later = of_node({AKS: "spot"}, "azure:///s")
    made = plan(seeing(later, status=first, workers=2))
    assert len(pods_of(made)) == 2
    for pod in pods_of(made):
        assert terms(pod)[0][0] == one_of(EKS, "SPOT") and pod["terminationGracePeriodSeconds"] == 110


def test_a_group_at_zero_keeps_the_labels_of_the_attempt_before() -> None:
    status = status_of(plan(seeing(MIXED)))
    ended = replace(status.attempts[-1], cause="SpotNotice")
    again = status_of(plan(seeing(of_node({}, "aws:///"), status=replace(status, attempts=(ended,)))))
    assert again.attempt == 2
    assert again.attempts[-1].node_labels == (f"{EKS}=SPOT", f"{KARPENTER}=spot")


def test_where_nothing_is_known_the_job_runs_with_the_shortest_grace_and_says_what_to_set() -> None:
    made = follows("Accepted=True warns=CapacityUnknown", seeing(NOTHING))
    (pod,) = pods_of(made)
    assert terms(pod) == [] and pod["terminationGracePeriodSeconds"] == 15
    (event,) = [e for e in made.events if e.reason == Reason.CAPACITY_UNKNOWN]
    assert event.message in condition(made, Condition.ACCEPTED).message


def test_the_taints_of_spot_nodes_are_tolerated_before_there_is_one() -> None:
    (pod,) = pods_of(plan(seeing(NOTHING)))
    keys = {t["key"] for t in pod["tolerations"]}
    assert {GKE_SPOT, AKS, "nvidia.com/gpu"} <= keys
    (pod,) = pods_of(plan(seeing(NOTHING, capacity={"type": "OnDemand"})))
    assert not {GKE_SPOT, AKS} & {t["key"] for t in pod["tolerations"]}


def test_on_demand_is_kept_off_every_node_that_is_labelled_as_spot_or_reserved() -> None:
    made = plan(seeing(MIXED, capacity={"type": "OnDemand"}))
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
    (pod,) = pods_of(plan(seeing(found, capacity={"type": "Reserved"})))
    assert terms(pod) == [[one_of(EKS, "CAPACITY_BLOCK")]]
    made = plan(seeing(MIXED, capacity={"type": "Reserved"}))
    assert [e for e in made.events if e.reason == Reason.CAPACITY_UNKNOWN]


@pytest.mark.parametrize(
    "pool",
    [
        Pool(name="default", platform=Platform.AWS),
        Pool(name="default", platform=Platform.AUTO, node_selector={KARPENTER: "spot"}),
        Pool(name="default", platform=Platform.AUTO, node_selector={EKS: "SPOT"}),
    ],
)
def test_what_is_set_is_not_looked_for(pool: Pool) -> None:
    made = plan(seeing(MIXED, pool=pool))
    (pod,) = pods_of(made)
    assert terms(pod) == [] and pod["terminationGracePeriodSeconds"] == 110
    assert not [e for e in made.events if e.reason == Reason.CAPACITY_UNKNOWN]


def test_karpenter_is_not_taken_for_aws() -> None:
    pools = [{"name": "a", "platform": "Karpenter"}]
    (pod,) = pods_of(plan(seeing(of_node({}, "azure:///s"), capacity={"pools": pools})))
    assert pod["terminationGracePeriodSeconds"] == 25


def test_an_unschedulable_pod_is_said_to_wait_for_the_labels_that_were_found() -> None:
    status = status_of(plan(seeing(MIXED)))
    waits = make_pod(node="", phase="Pending", unschedulable="0/3 nodes are available")
    o = replace(seeing(MIXED, status=status), pods=(waits,))
    after = status_of(plan(o))
    scheduled = after.condition(Condition.SCHEDULED)
    assert scheduled is not None
    assert (
        scheduled.message
        == f"0/3 nodes are available (capacity Spot: nodes with {EKS}=SPOT or {KARPENTER}=spot)"
    )


def test_spot_first_needs_no_pools_where_labels_are_found() -> None:
    made = follows("pool=default on=Spot", seeing(MIXED, capacity={"type": "SpotFirst"}))
    (pod,), status = pods_of(made), status_of(made)
    assert terms(pod) == [[one_of(EKS, "SPOT")], [one_of(KARPENTER, "spot")]]
    dry = replace(status.attempts[-1], cause="SchedulingTimeout", ended=NOW)
    again = seeing(MIXED, status=replace(status, attempts=(dry,)), capacity={"type": "SpotFirst"})
    follows("attempt=2 pool=default-on-demand on=OnDemand", again)


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


NO_NODE = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector"


def test_a_pod_without_a_node_says_what_the_scheduler_says_or_which_one_it_waits_for() -> None:
    waits = make_pod(node="", phase="Pending", unschedulable=NO_NODE)
    made = plan(make_observed(waits, job=make_job(status=started())))
    assert condition(made, Condition.SCHEDULED).message == NO_NODE
    assert condition(made, Condition.RUNNING).reason == "WaitingForNode"
    pod = {"containers": [{"name": "trainer", "image": "x"}], "schedulerName": "kai"}
    job = make_job(raw_spec(template={"spec": pod}), status=started())
    made = plan(make_observed(replace(waits, unschedulable=""), job=job))
    assert "waits for the scheduler kai" in condition(made, Condition.SCHEDULED).message


async def test_node_pools_that_may_not_be_read_are_said(caplog: pytest.LogCaptureFixture) -> None:
    class Forbidden(FakeCluster):
        async def pages(self, kind: str, namespace: str) -> Any:
            raise ApiError(403, "nodepools is forbidden")
            yield

    await discover_node_pools(Forbidden(), Memory())
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
        cluster = Cluster(client.ApiClient(client.Configuration(host=url)))
        try:
            await discover_node_pools(cluster, Memory())
            assert not caplog.records
            with pytest.raises(ApiError, match="GET /apis/x: JSONDecodeError") as refused:
                await cluster.served("x")
            assert refused.value.status == 0
        finally:
            await cluster.close()


TOLD = (
    seeing(NOTHING),
    seeing(MIXED, capacity={"type": "Reserved"}),
    *(
        seeing(NOTHING, capacity={"pools": [SPOT_A, {"name": "b", "platform": "AWS", "type": kind}]})
        for kind in ("OnDemand", "Reserved")
    ),
    seeing(NOTHING, capacity=UNKNOWN),
    seeing(NOTHING, capacity={"type": "SpotFirst", "pools": [SPOT_A]}),
    seeing(NOTHING, capacity={"type": "SpotFirst", "pools": [ON_DEMAND]}),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
