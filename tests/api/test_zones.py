"""The real kube-scheduler: gangs in zones, whichever rank is scheduled first, and the operator's replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import fakenodes
from localcluster.apiserver import ApiServer, running
from spottrain.contract import Outcome
from spottrain_operator.names import GPU_RESOURCE

from tests.api.kube import MERGE, Json, Kube, wait_for
from tests.builders import preferred_node, word
from tests.native.stage import POOL_LABEL, Stage
from tests.support.helm import find, render

SAVED = word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0)


@pytest.fixture(scope="module", autouse=True)
def scheduler(kube: Kube, server: ApiServer, programs: Path) -> Iterator[None]:
    """For these tests alone. Pods that earlier ones have left without a node must not take room here."""
    for pod in kube.call("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3D")["items"]:
        meta = pod["metadata"]
        kube.call("DELETE", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}")
    with running(fakenodes.scheduler(programs, server), server.logs / "kube-scheduler.log"):
        yield


@pytest.fixture
def stage(server: ApiServer, kube: Kube, namespace: str) -> Iterator[Stage]:
    with Stage(kube=kube, namespace=namespace, job="job", kubeconfig=server.kubeconfig) as made:
        made.operate()
        yield made


def test_a_lost_rank_that_is_scheduled_first_stays_in_the_zone_of_the_others(stage: Stage) -> None:
    nodes = [stage.add_gpu_node("a") for _ in range(2)]
    pods = begun(stage)
    bound = stage.bound()
    assert sorted(bound) == sorted(nodes)
    spare = stage.add_gpu_node("a")
    stage.add_gpu_node("b", cpu="800")  # the scheduler likes it best
    reclaim_first(stage, pods)  # rank 0's next pod is created before that of rank 1
    again = stage.wait_gang(2, 2)
    assert list(map(preferred_node, again)) == ["", bound[1]]
    assert sorted(stage.wait_bound(2, 2)) == sorted([spare, bound[1]])


def test_the_last_node_of_the_zone_takes_both_ranks_where_it_has_room(stage: Stage) -> None:
    for _ in range(2):
        stage.add_gpu_node("a")
    pods = begun(stage)
    doomed, last = stage.bound()
    assert doomed != last
    room = {"status": {"capacity": {GPU_RESOURCE: "2"}, "allocatable": {GPU_RESOURCE: "2"}}}
    stage.kube.call("PATCH", f"/api/v1/nodes/{last}/status", room, kind=MERGE)
    stage.add_gpu_node("b", cpu="800")
    reclaim_first(stage, pods)
    assert stage.wait_bound(2, 2) == [last, last]


def test_the_operators_replicas_share_a_node_only_where_no_other_can_take_them(stage: Stage) -> None:
    """Also in a rollout: of the old ones one was on each node, so that both new ones had the same room."""
    first, second = (stage.add_gpu_node("a") for _ in range(2))
    tainted = stage.add_gpu_node("a")
    taints = {"spec": {"taints": [{"key": "nvidia.com/gpu", "value": "x", "effect": "NoSchedule"}]}}
    stage.kube.call("PATCH", f"/api/v1/nodes/{tainted}", taints, kind=MERGE)
    old = [replica(stage, "old", number) for number in range(2)]
    assert sorted(old) == [first, second]
    assert sorted(replica(stage, "new", number) for number in range(2)) == [first, second]
    cordon = [
        {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    ]  # the node controller's part
    cordoned = {"spec": {"unschedulable": True, "taints": cordon}}
    stage.kube.call("PATCH", f"/api/v1/nodes/{first}", cordoned, kind=MERGE)
    assert [replica(stage, "next", number) for number in range(2)] == [second, second]


def replica(stage: Stage, version: str, number: int) -> str:
    """Creates a pod of the operator, as its Deployment does; the node to which it comes."""
    deployment = find(render(), "Deployment", "spottrain-operator")
    template: Json = deployment["spec"]["template"]
    labels = template["metadata"]["labels"] | {"pod-template-hash": version}
    name, spec = f"operator-{version}-{number}", template["spec"] | {"serviceAccountName": "default"}
    spec |= {"nodeSelector": {POOL_LABEL: stage.namespace}}
    pods = f"/api/v1/namespaces/{stage.namespace}/pods"
    stage.kube.call("POST", pods, {"metadata": {"name": name, "labels": labels}, "spec": spec})

    def bound() -> str:
        pod = stage.kube.get(f"{pods}/{name}")
        return str((pod or {"spec": {}})["spec"].get("nodeName", ""))

    return str(wait_for(f"{name} to have a node", bound))


def begun(stage: Stage) -> list[Json]:
    pods = stage.start()
    stage.wait_bound(2)
    for pod in pods:
        stage.report_running(pod)
    stage.wait_condition("Running", "True")
    return pods


def reclaim_first(stage: Stage, pods: list[Json]) -> None:
    stage.give_notice(stage.bound()[0])
    wait_for("the doomed rank to be deleted", lambda: is_deleted(stage, pods[0]))
    for pod in pods:
        stage.end(pod, 75, SAVED)


def is_deleted(stage: Stage, pod: Json) -> bool:
    live = stage.kube.get(stage.path(pod))
    return live is None or "deletionTimestamp" in live["metadata"]
