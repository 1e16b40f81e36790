"""Gangs, suspension and deletion against a real API server, the test being scheduler and kubelet."""

from __future__ import annotations

from typing import Any

from spottrain.contract import Outcome
from spottrain_operator.names import object_name

from tests.api.kube import Json, jobs, wait_for
from tests.api.scene import Scene
from tests.builders import preferred_node, word

SAVED = word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0)


def deleted(scene: Scene, pod: Json) -> bool:
    live = scene.kube.get(scene.path(pod))
    return live is None or "deletionTimestamp" in live["metadata"]


def begun(scene: Scene, size: int = 3, **spec: Any) -> list[Json]:
    scene.create(workers=size, capacity={"sameZone": False}, **spec)
    pods = scene.wait_gang(1, size)
    for pod in pods:
        scene.bind(pod)
    scene.wait_condition("Running", "True")
    return scene.wait_gang(1, size)


def test_a_reclaimed_gang_starts_again_whole_and_its_survivors_keep_their_nodes(scene: Scene) -> None:
    pods = begun(scene)
    uid = scene.raw()["metadata"]["uid"]
    service = scene.kube.get(
        f"/api/v1/namespaces/{scene.namespace}/services/{object_name(scene.job, uid, prefix='gang-')}"
    )
    assert service is not None and service["spec"]["clusterIP"] == "None"
    assert scene.status()["readyWorkers"] == 3
    nodes = [pod["spec"]["nodeName"] for pod in pods]
    scene.give_notice(nodes[1])
    wait_for("the doomed rank to be deleted", lambda: deleted(scene, pods[1]))
    assert not deleted(scene, pods[0]) and not deleted(scene, pods[2]), "they stop with it by themselves"
    for pod in (pods[1], pods[0], pods[2]):
        assert not [p for p in scene.pods() if p["metadata"]["labels"]["spottrain.io/attempt"] == "2"]
        scene.end(pod, 75, SAVED)
    again = scene.wait_gang(2, 3)
    assert list(map(preferred_node, again)) == [nodes[0], "", nodes[2]]
    for pod, node in zip(again, (nodes[0], "", nodes[2]), strict=True):
        scene.bind(pod, node)
    scene.end(again[0], 0, word(Outcome.DONE, step=20, durableStep=20, startStep=9))
    scene.wait_condition("Succeeded", "True")
    assert scene.counters() == (2, 0, 1)
    assert scene.status()["attempts"][0]["cause"] == "SpotNotice"
    wait_for("the other ranks to be stopped", lambda: all(deleted(scene, pod) for pod in again[1:]))


def test_one_ranks_crash_stops_the_others_and_is_charged_once(scene: Scene) -> None:
    pods = begun(scene)
    scene.end(pods[2], 1, "RuntimeError: boom")
    wait_for("the others to be stopped", lambda: deleted(scene, pods[0]) and deleted(scene, pods[1]))
    assert scene.status()["phase"] == "Stopping" and scene.counters() == (1, 0, 0)
    scene.end(pods[0], 75, SAVED)
    scene.end(pods[1], 143)
    scene.wait_gang(2, 3)
    assert scene.counters() == (2, 1, 0)
    record = scene.status()["attempts"][0]
    assert record["cause"] == "Failed" and record["evidence"].startswith("rank 2: exit code 1")
    assert record["exitCode"] == 75 and [r["exitCode"] for r in record["ranks"]] == [143, 1]


def test_a_gang_that_is_changed_goes_on_as_it_is_until_it_was_suspended(scene: Scene) -> None:
    pods = begun(scene, 2)
    scene.change(workers=3)
    said = scene.wait_condition("Accepted", "False", "InvalidSpec")
    assert "set suspend to true" in said["message"] and len(scene.pods()) == 2
    scene.change(suspend=True)
    wait_for("both to be stopped", lambda: all(deleted(scene, pod) for pod in pods))
    for pod in pods:
        scene.end(pod, 75, SAVED)
    scene.wait_condition("Suspended", "True")
    assert scene.status()["phase"] == "Suspended" and not [p for p in scene.pods() if not deleted(scene, p)]
    scene.change(suspend=False)
    again = scene.wait_gang(2, 3)
    env = {e["name"]: e.get("value") for e in again[0]["spec"]["containers"][0]["env"]}
    assert env["SPOTTRAIN_WORKERS"] == "3" and env["SPOTTRAIN_KNOWN_DURABLE_STEP"] == "9"
    assert scene.counters() == (2, 0, 0)


def test_a_deleted_job_is_gone_when_its_checkpoints_are(scene: Scene) -> None:
    pod = scene.run(deletionPolicy="Delete")
    raw = scene.raw()
    assert raw["metadata"]["finalizers"] == ["spottrain.io/checkpoints"]
    path = jobs(scene.namespace, scene.job)
    scene.kube.call("DELETE", path, {"propagationPolicy": "Background"})
    wait_for("the trainer to be stopped", lambda: deleted(scene, pod))
    name = object_name(scene.job, raw["metadata"]["uid"], suffix="-cleanup")
    cleanup = f"/api/v1/namespaces/{scene.namespace}/pods/{name}"
    assert scene.kube.get(cleanup) is None, "it still saves"
    scene.end(pod, 75, SAVED)
    made = wait_for("the cleanup pod", lambda: scene.kube.get(cleanup))
    assert made["spec"]["containers"][0]["command"][2] == "delete"
    assert scene.kube.get(path) is not None
    scene.end(made, 0)
    wait_for("the job to be gone", lambda: scene.kube.get(path) is None)


def test_a_finished_job_is_deleted_after_its_time_to_live(scene: Scene) -> None:
    pod = scene.run(ttlSecondsAfterFinished=1)
    scene.end(pod, 0, word(Outcome.DONE, step=3))
    wait_for("the job to be gone", lambda: scene.kube.get(jobs(scene.namespace, scene.job)) is None)


def test_past_its_deadline_a_job_saves_and_has_failed(scene: Scene) -> None:
    pod = scene.run(activeDeadlineSeconds=2)
    wait_for("the trainer to be stopped", lambda: deleted(scene, pod))
    scene.end(pod, 75, SAVED)
    assert "activeDeadlineSeconds" in scene.wait_condition("Failed", "True", "DeadlineExceeded")["message"]
    assert scene.counters() == (1, 0, 0)
