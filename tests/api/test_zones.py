"""Gangs in zones with the real kube-scheduler: who has its node first must not decide whether all have one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from localcluster.apiserver import api_server
from localcluster.fakenodes import fake_nodes
from spottrain.contract import Outcome
from spottrain_operator.names import PINNED_ANNOTATION

from tests.api.conftest import CRD
from tests.api.kube import Json, Kube, wait_for
from tests.builders import word
from tests.native.stage import Stage

SAVED = word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0)


@pytest.fixture
def stage() -> Iterator[Stage]:
    """With an API server of its own: a scheduler would bind the pods of other tests."""
    with api_server() as server, fake_nodes(server):
        kube = Kube.from_kubeconfig(server.kubeconfig)
        kube.install(CRD)
        kube.make_namespace("zones")
        with Stage(kube=kube, namespace="zones", job="job", kubeconfig=server.kubeconfig) as made:
            made.operate()
            yield made


def test_a_rank_that_is_scheduled_before_the_pinned_one_follows_it_into_its_zone(stage: Stage) -> None:
    nodes = [stage.add_gpu_node("a") for _ in range(2)]
    pods = stage.start()
    assert sorted(ranks := stage.wait_bound(2)) == sorted(nodes)
    for pod in pods:
        stage.report_running(pod)
    stage.wait_condition("Running", "True")
    spare = stage.add_gpu_node("a")
    stage.add_gpu_node("b", cpu="800")  # the scheduler likes it best
    stage.give_notice(ranks[0])  # rank 0's pod is created and scheduled before that of rank 1
    wait_for("the doomed rank to be deleted", lambda: is_deleted(stage, pods[0]))
    for pod in pods:
        stage.end(pod, 75, SAVED)
    again = stage.wait_gang(2, 2)
    assert [p["metadata"]["annotations"].get(PINNED_ANNOTATION, "") for p in again] == ["", ranks[1]]
    assert stage.wait_bound(2, 2) == [spare, ranks[1]]


def is_deleted(stage: Stage, pod: Json) -> bool:
    live = stage.kube.get(stage.path(pod))
    return live is None or "deletionTimestamp" in live["metadata"]
