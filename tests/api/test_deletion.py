"""deletionPolicy Delete on a real API server: of jobs that never ran, and where cleaning is not possible."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.kube import MERGE, Json, jobs, wait_for
from tests.api.scene import Scene

RESTRICTED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
REFUSED = {"template": {"spec": {"containers": [{"name": "trainer", "image": "example.com/train:1"}]}}}


def delete(scene: Scene) -> None:
    scene.kube.call("DELETE", jobs(scene.namespace, scene.job))


def gone(scene: Scene) -> None:
    wait_for("the job to be gone", lambda: scene.kube.get(jobs(scene.namespace, scene.job)) is None)


def events(scene: Scene) -> list[Json]:
    path = f"/api/v1/namespaces/{scene.namespace}/events?fieldSelector=involvedObject.name={scene.job}"
    found: list[Json] = scene.kube.call("GET", path)["items"]
    return found


def cleaner(scene: Scene) -> Json | None:
    path = f"/api/v1/namespaces/{scene.namespace}/pods?labelSelector=spottrain.io/role=cleanup"
    pods: list[Json] = scene.kube.call("GET", path)["items"]
    return next((p for p in pods if p["metadata"]["labels"]["spottrain.io/job"] == scene.job), None)


@pytest.mark.parametrize(
    ("spec", "refused"), [({"suspend": True}, False), (REFUSED, True)], ids=["suspended", "refused"]
)
def test_a_job_that_was_never_started_is_gone_at_once(
    scene: Scene, spec: dict[str, Any], refused: bool
) -> None:
    scene.kube.call("PATCH", f"/api/v1/namespaces/{scene.namespace}", RESTRICTED, kind=MERGE)
    scene.create(deletionPolicy="Delete", **spec)
    if refused:  # by its dry run, before it has a finalizer
        scene.wait_condition("Accepted", "False")
    else:
        wait_for("its finalizer", lambda: scene.raw()["metadata"].get("finalizers"))
    delete(scene)
    gone(scene)
    assert cleaner(scene) is None and not [e for e in events(scene) if "Checkpoints" in e["reason"]]


def test_a_job_whose_container_never_ran_is_gone_when_its_pod_is(scene: Scene) -> None:
    scene.create(deletionPolicy="Delete")
    pod = scene.wait_attempt(1)
    node = scene.add_node()
    meta, target = {"name": pod["metadata"]["name"]}, {"kind": "Node", "name": node}
    scene.kube.call("POST", f"{scene.path(pod)}/binding", {"metadata": meta, "target": target})
    scene.report_waiting(pod, "ImagePullBackOff", "no such image")
    scene.wait_condition("Running", "False", "ImagePullBackOff")
    delete(scene)
    scene.wait_condition("Running", "False", "BeingDeleted")
    assert scene.status()["phase"] == "Stopping"
    scene.delete(pod, 0)  # the kubelet's part, which has no container to wait for
    gone(scene)
    assert cleaner(scene) is None and not [e for e in events(scene) if "Checkpoints" in e["reason"]]


def test_what_cannot_be_deleted_is_said_and_retain_lets_the_job_go(scene: Scene) -> None:
    pod = scene.run(deletionPolicy="Delete")
    delete(scene)
    wait_for("its trainer to be told", lambda: "deletionTimestamp" in scene.pods()[0]["metadata"])
    scene.end(pod, 75)
    cleaning: Json = wait_for("the pod that cleans", lambda: cleaner(scene))
    assert cleaning["spec"]["containers"][0]["image"].startswith("spottrain-sync")
    scene.report_waiting(cleaning, "CreateContainerConfigError", 'secret "s3" not found')
    said = scene.wait_condition("Running", "False", "CannotDeleteCheckpoints")
    assert 'secret "s3" not found' in said["message"] and "deletionPolicy Retain: at once" in said["message"]
    wait_for("the Event", lambda: [e for e in events(scene) if e["reason"] == "CannotDeleteCheckpoints"])
    scene.change(deletionPolicy="Retain")
    gone(scene)
