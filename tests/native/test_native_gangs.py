"""Kubernetes' own gang scheduling with its real scheduler: all pods of a gang have a node, or none has."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from spottrain.contract import Outcome

from tests.api.kube import Json, wait_for
from tests.api.scene import Scene
from tests.builders import preferred_node, word
from tests.native.stage import Stage

SETTLED = 4.0
"""Seconds in which a scheduler that would bind a pod has done so many times over."""
SAVED = word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0)


def referring(pod: Json) -> bool:
    return "schedulingGroup" in pod["spec"]


def still_unbound(stage: Stage, attempt: int = 1) -> bool:
    time.sleep(SETTLED)
    return stage.bound(attempt) == ["", ""]


@pytest.fixture
def gangs(served: str) -> None:
    if served == "neither":
        pytest.skip("of a cluster that serves gangs")


@pytest.mark.usefixtures("gangs")
def test_with_room_for_one_of_two_none_is_bound_and_with_room_for_both_both_are(stage: Stage) -> None:
    stage.operate()
    stage.add_gpu_node()
    assert all(referring(pod) for pod in stage.start()), "the API server has kept the reference"
    assert still_unbound(stage)
    stage.add_gpu_node()
    assert sorted(stage.wait_bound(2)) == sorted(stage.nodes)


@pytest.mark.usefixtures("gangs")
def test_switched_off_half_a_gang_takes_the_only_node(stage: Stage) -> None:
    stage.operate(native_gangs="false")
    stage.add_gpu_node()
    assert not any(referring(pod) for pod in stage.start())
    assert sorted(stage.wait_bound(1)) == ["", *stage.nodes]


@pytest.mark.usefixtures("gangs")
def test_of_two_gangs_with_room_for_one_one_is_whole_and_the_other_holds_nothing(stage: Stage) -> None:
    stage.operate()
    other = replace(stage, job="other")
    stage.start()
    other.start()
    stage.add_gpu_node()
    stage.add_gpu_node()
    wait_for("one gang to be bound", lambda: all(stage.bound()) or all(other.bound()))
    time.sleep(SETTLED)
    assert sorted(sorted(job.bound()) for job in (stage, other)) == [["", ""], sorted(stage.nodes)]


@pytest.mark.usefixtures("gangs")
def test_a_gang_of_a_priority_class_is_scheduled(stage: Stage) -> None:
    meta = {"name": f"{stage.namespace}-high"}
    stage.kube.call("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": meta, "value": 1000})
    stage.operate()
    stage.add_gpu_node()
    stage.add_gpu_node()
    (pod, _) = stage.start(priorityClassName=meta["name"])
    assert pod["spec"]["priority"] == 1000
    stage.wait_bound(2)


@pytest.mark.usefixtures("gangs")
def test_the_next_attempt_is_a_gang_again_and_its_survivor_keeps_its_node(stage: Stage) -> None:
    stage.operate()
    stage.add_gpu_node()
    stage.add_gpu_node()
    pods = stage.start()
    nodes = stage.wait_bound(2)
    for pod in pods:
        stage.report_running(pod)
    wait_for("the operator to know the nodes", lambda: stage.status().get("readyWorkers") == 2)
    stage.give_notice(nodes[1])
    wait_for("the doomed rank's end", lambda: "deletionTimestamp" in live(stage, pods[1])["metadata"])
    stage.end(pods[1], 75, SAVED)
    stage.end(pods[0], 75, SAVED)
    again = stage.wait_gang(2, 2)
    assert list(map(preferred_node, again)) == [nodes[0], ""] and all(referring(p) for p in again)
    assert still_unbound(stage, 2), "the survivor waits for the other, though its node is free"
    third = stage.add_gpu_node()
    assert sorted(stage.wait_bound(2, 2)) == sorted([nodes[0], third])


@pytest.mark.usefixtures("gangs")
def test_a_zone_with_room_for_one_is_a_trap_unless_the_scheduler_knows_zones_of_groups(
    stage: Stage, served: str
) -> None:
    stage.operate()
    stage.add_gpu_node("too-small", cpu="800")  # the scheduler likes it best
    wanted = [stage.add_gpu_node("right"), stage.add_gpu_node("right")]
    stage.start()
    if served == "gangs":
        assert still_unbound(stage), "a known limit (docs/cluster/nodes.md)"
    else:
        assert sorted(stage.wait_bound(2)) == wanted


def test_where_gangs_are_not_served_pods_are_scheduled_one_by_one(stage: Stage, served: str) -> None:
    if served != "neither":
        pytest.skip("of a cluster that does not serve gangs")
    stage.operate()
    stage.add_gpu_node()
    assert not any(referring(pod) for pod in stage.start())
    assert sorted(stage.wait_bound(1)) == ["", *stage.nodes]


def live(stage: Scene, pod: Json) -> Json:
    found = stage.kube.get(stage.path(pod))
    assert found is not None
    return found
