"""Kubernetes' own gang scheduling: used where the cluster serves a version of it, and missed nowhere."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from spottrain_operator.api.native_gangs import API_VERSION
from spottrain_operator.api.views import pod_view
from spottrain_operator.control.actions import Create, Plan, Provide
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.plan import plan
from spottrain_operator.control.resync import discover
from spottrain_operator.errors import ApiError
from spottrain_operator.names import Condition, pod_name
from spottrain_operator.settings import Settings

from tests.builders import (
    KEY,
    condition,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    manifests,
    notice,
    preferred_node,
    raw_spec,
    started,
)
from tests.support.environment import read
from tests.unit.controller.fake_cluster import FakeCluster, World

SIZE = 2
Json = dict[str, Any]


def first_plan(*, served: bool = True, **spec: Any) -> Plan:
    o = make_observed(job=make_job(raw_spec(**({"workers": SIZE} | spec))), nodes=())
    return plan(replace(o, has_gangs=served))


def template(metadata: Json | None = None, **spec: Any) -> Json:
    body = {"containers": [{"name": "trainer", "image": "x"}]} | spec
    return {"template": {"spec": body} | ({"metadata": metadata} if metadata else {})}


def groups(made: Plan) -> list[Provide]:
    return [a for a in made.after if isinstance(a, Provide) and a.kind != "services"]


def referring(pod: Json) -> Json:
    return {k: v for k, v in pod["spec"].items() if k == "schedulingGroup"}


def served(*names: str) -> dict[str, Json]:
    return {API_VERSION: {"resources": [{"name": name} for name in names]}}


# --- what is made ---------------------------------------------------------------------------------------
def test_an_attempt_has_a_group_that_wants_all_of_its_pods_is_made_before_them_and_goes_with_the_job() -> (
    None
):
    made = first_plan()
    (group,) = groups(made)
    name = group.manifest["metadata"]["name"]
    assert group.manifest["spec"]["schedulingPolicy"] == {"gang": {"minCount": 2}}
    assert group.kind == "scheduling.k8s.io/v1beta1/podgroups"
    assert [referring(p) for p in manifests(made)] == [{"schedulingGroup": {"podGroupName": name}}] * 2
    kinds = [type(a) for a in made.after if isinstance(a, Provide | Create)]
    assert kinds == [Provide, Provide, Create, Create]
    (owner,) = group.manifest["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("TrainingJob", KEY.uid)


def test_each_attempt_has_a_group_of_its_own_for_it_cannot_be_changed_and_ranks_return_in_it() -> None:
    ends = (ended_pod(1, 75, rank=0, node="node-0"), ended_pod(1, 75, rank=1, node="node-1", **deleted()))
    record = replace(started().attempts[0], workers=SIZE, created_workers=SIZE)
    status = replace(started(), attempts=(record,))
    nodes = (make_node("node-0"), replace(make_node("node-1"), notice=notice(60)))
    o = make_observed(*ends, job=make_job(raw_spec(workers=SIZE), status=status), nodes=nodes)
    made = plan(replace(o, has_gangs=True))
    name = groups(made)[0].manifest["metadata"]["name"]
    assert name == pod_name(KEY.name, KEY.uid, 2).removesuffix("-0")
    assert name != groups(first_plan())[0].manifest["metadata"]["name"]
    assert list(map(preferred_node, manifests(made))) == ["node-0", ""]
    assert all("podAffinity" in p["spec"]["affinity"] and referring(p) for p in manifests(made)), "one zone"


def test_a_group_has_its_pods_priority_for_the_scheduler_compares_them() -> None:
    (group,) = groups(first_plan(**template(priorityClassName="high")))
    assert group.manifest["spec"]["priorityClassName"] == "high"


@pytest.mark.parametrize(("zoned", "same"), [(True, True), (True, False), (False, True)])
def test_a_group_is_kept_in_one_zone_like_its_pods(zoned: bool, same: bool) -> None:
    job = make_job(raw_spec(workers=SIZE, capacity={"sameZone": same}))
    o = replace(make_observed(job=job, nodes=()), has_gangs=True, zoned=zoned)
    (group,) = groups(plan(o))
    wanted = {"topology": [{"key": "topology.kubernetes.io/zone"}]} if zoned and same else None
    assert group.manifest["spec"].get("schedulingConstraints") == wanted


# --- who goes without -----------------------------------------------------------------------------------
WITHOUT: list[Json] = [
    {"workers": 1},
    template(schedulerName="my-scheduler"),
    template(schedulingGroup={"podGroupName": "theirs"}),
    template(workloadRef={"name": "theirs", "podGroup": "p"}),
    template(evictionResponders=[{"name": "x.example.com/y"}]),
]


@pytest.mark.parametrize("spec", WITHOUT, ids=str)
def test_lone_workers_other_schedulers_and_groups_of_others_are_left_alone(spec: Json) -> None:
    ours = first_plan(**spec)
    assert ours.after == first_plan(served=False, **spec).after


@pytest.mark.parametrize("name", ["", "default-scheduler"])
def test_the_default_scheduler_may_be_named(name: str) -> None:
    assert groups(first_plan(**template(schedulerName=name)))


def test_where_nothing_is_served_a_gang_starts_as_it_did() -> None:
    made = first_plan(served=False)
    assert not groups(made) and [referring(p) for p in manifests(made)] == [{}] * SIZE


@pytest.mark.parametrize("grouped", [True, False])
def test_the_rest_of_an_attempt_is_made_like_its_first_pods(grouped: bool) -> None:
    status = started()
    status = replace(
        status, attempts=(replace(status.attempts[0], workers=SIZE, created_workers=0, started=None),)
    )
    job = make_job(raw_spec(workers=SIZE), status=status)
    made = plan(replace(make_observed(make_pod(grouped=grouped), job=job), has_gangs=True))
    assert [bool(referring(p)) for p in manifests(made)] == [grouped]


async def test_a_pod_of_ours_is_seen_to_be_in_its_group() -> None:
    w = World({"workers": SIZE})
    w.memory.has_gangs = True
    for _ in range(5):
        await w.look()
    views = [view for raw in w.cluster.pods.values() if (view := pod_view(raw))]
    assert [view.grouped for view in views] == [True] * SIZE


# --- what the cluster serves ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("serves", "found"), [({}, False), (served("podgroups"), True), (served("priorityclasses"), False)]
)
async def test_groups_are_used_where_the_beta_api_has_them(serves: dict[str, Json], found: bool) -> None:
    cluster, memory = FakeCluster(), Memory()
    memory.has_gangs = not found  # the cluster was changed
    cluster.serves = serves
    await discover(cluster, memory)
    assert memory.has_gangs is found


async def test_no_answer_is_told_and_what_was_known_stands(caplog: pytest.LogCaptureFixture) -> None:
    w, memory = World(), Memory()
    memory.has_gangs = True
    w.refuse("served", ApiError(503, "the server is currently unable to handle the request"))
    with caplog.at_level(logging.WARNING):
        await discover(w.cluster, memory)
    assert memory.has_gangs and len(caplog.records) == 1


@pytest.mark.parametrize("no", [ApiError(404, "not found"), ApiError(403, "podgroups is forbidden")], ids=str)
async def test_where_the_group_cannot_be_made_its_pods_are_made_without(no: ApiError) -> None:
    w = World({"workers": SIZE})
    w.memory.has_gangs = True
    w.refuse("create_object", no, "podgroups")
    for _ in range(6):
        await w.look()
    assert [referring(pod) for pod in w.cluster.pods.values()] == [{}] * SIZE
    memory = w.memory
    assert memory.has_gangs and memory.of(KEY).ungrouped, "other jobs have theirs"
    w.cluster.serves = served("podgroups")
    await discover(w.cluster, memory)
    assert not memory.of(KEY).ungrouped, "it is tried again"


async def test_a_group_that_the_server_calls_invalid_is_said_of_the_template() -> None:
    w = World({"workers": SIZE})
    w.memory.has_gangs = True
    w.refuse("create_object", ApiError(422, "spec.schedulingPolicy: Invalid value"), "podgroups")
    await w.settle()
    found = condition(w.status, Condition.ACCEPTED)
    assert found.message == "spec.template: spec.schedulingPolicy: Invalid value" and not w.cluster.pods


def test_it_can_be_switched_off() -> None:
    assert read(Settings, {}).native_gangs
    assert not read(Settings, {"SPOTTRAIN_OPERATOR_NATIVE_GANGS": "false"}).native_gangs
    with pytest.raises(ValueError, match="NATIVE_GANGS=perhaps: "):
        read(Settings, {"SPOTTRAIN_OPERATOR_NATIVE_GANGS": "perhaps"})
