"""Pods that are bound and do not start, against a real API server; the test posts the kubelet's Events."""

from __future__ import annotations

import pytest
from localcluster.apiserver import ApiServer

from tests.api.kube import Json, Kube, wait_for
from tests.api.scene import OperatorProcess, Scene, _now

NOT_FOUND = 'MountVolume.SetUp failed for volume "data" : configmap "data" not found'


def bind(scene: Scene, pod: Json) -> None:
    """The scheduler's part alone."""
    meta = {"name": pod["metadata"]["name"]}
    target = {"kind": "Node", "name": scene.add_node()}
    scene.kube.call("POST", f"{scene.path(pod)}/binding", {"metadata": meta, "target": target})


def post_event(scene: Scene, pod: Json, reason: str, message: str) -> None:
    meta = pod["metadata"]
    body = {
        "metadata": {"generateName": "e-", "namespace": meta["namespace"]},
        "involvedObject": {
            "kind": "Pod",
            "uid": meta["uid"],
            "name": meta["name"],
            "namespace": meta["namespace"],
        },
        "type": "Warning",
        "reason": reason,
        "message": message,
        "firstTimestamp": _now(),
        "lastTimestamp": _now(),
    }
    scene.kube.call("POST", f"/api/v1/namespaces/{meta['namespace']}/events", body)


def warnings(scene: Scene, reason: str) -> list[Json]:
    events = scene.kube.events(scene.namespace, scene.job)
    return [e for e in events if e["reason"] == reason and e["type"] == "Warning"]


def test_a_volume_that_only_events_speak_of_is_told_and_a_killed_operator_does_not_begin_to_count_again(
    kube: Kube, server: ApiServer, namespace: str
) -> None:
    scene = Scene(kube=kube, namespace=namespace, job="unmounted")
    operator = OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace)
    with operator:
        scene.create(failurePolicy={"startTimeoutSeconds": 30})
        pod = scene.wait_attempt(1)
        bind(scene, pod)
        post_event(scene, pod, "FailedMount", NOT_FOUND)
        told = scene.wait_condition("Running", "False", "FailedMount")
        assert NOT_FOUND in told["message"]
        assert (
            NOT_FOUND in wait_for("an Event of the job", lambda: warnings(scene, "FailedMount"))[0]["message"]
        )
        since = scene.status()["attempts"][0]["startErrorTime"]
        operator.kill()
        operator.start(ahead=31)
        wait_for("its deletion", lambda: "deletionTimestamp" in (scene.pod(1) or {})["metadata"])
        scene.end(pod, 137)
        failed = scene.wait_condition("Failed", "True")
        assert failed["reason"] == "FailedMount" and NOT_FOUND in failed["message"]
        assert scene.status()["attempts"][0]["startErrorTime"] == since
        assert scene.counters()[0] == 1


@pytest.mark.parametrize("reason", ["ErrImagePull", "CreateContainerConfigError"])
def test_an_error_of_a_container_is_a_condition_and_one_event(scene: Scene, reason: str) -> None:
    scene.create()
    pod = scene.wait_attempt(1)
    bind(scene, pod)
    scene.report_waiting(pod, reason, "the kubelet's words")
    assert "the kubelet's words" in scene.wait_condition("Running", "False", reason)["message"]
    wait_for("an Event", lambda: warnings(scene, reason))
    scene.report_running(pod)
    scene.wait_condition("Running", "True")
    wait_for("the clock to stop", lambda: "startErrorTime" not in scene.status()["attempts"][0])
    assert len(warnings(scene, reason)) == 1
