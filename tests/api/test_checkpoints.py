"""spec.checkpoint on a real API server: certificates in a restricted namespace, folders, foreign images."""

from __future__ import annotations

import pytest
from spottrain.contract import Outcome

from tests.api.kube import MERGE, Json, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.builders import word


@pytest.fixture(autouse=True)
def restricted(scene: Scene, operator: OperatorProcess) -> None:
    """Pods that break the restricted Pod Security Standard are refused."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    scene.kube.call("PATCH", f"/api/v1/namespaces/{operator.namespace}", label, kind=MERGE)


def _template(**volume: Json) -> Json:
    mounts = [{"name": "data", "mountPath": "/data"}]
    trainer = {"name": "trainer", "image": "example.com/train:1", "volumeMounts": mounts}
    context = {"securityContext": {"runAsNonRoot": True}}
    return {"spec": {"containers": [trainer], "volumes": [{"name": "data"} | volume]} | context}


def test_a_pod_with_a_ca_bundle_is_restricted_all_the_same(scene: Scene) -> None:
    authority = {"configMapKeyRef": {"name": "authority"}}
    scene.create(checkpoint={"uri": "s3://bucket/run", "caBundle": authority})
    pod = scene.wait_attempt(1)
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "spottrain-ca")
    assert volume["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    env = {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0]["env"]}
    assert env["AWS_CA_BUNDLE"] == "/etc/spottrain-ca/ca.crt"


def test_a_folder_on_a_claim_is_accepted_for_spot_and_one_on_the_node_is_not(scene: Scene) -> None:
    scene.create(checkpoint={"uri": "file:///data/run"}, template=_template(emptyDir={}))
    refused = scene.wait_condition("Accepted", "False", "InvalidSpec")
    assert "is on volume data (emptyDir), which ends with its node" in refused["message"]
    assert scene.pods() == [] and scene.status()["phase"] == "Invalid"
    on_claim = Scene(kube=scene.kube, namespace=scene.namespace, job=f"{scene.job}-claim")
    claim = {"claimName": "data"}
    on_claim.create(checkpoint={"uri": "file:///data/run"}, template=_template(persistentVolumeClaim=claim))
    on_claim.wait_attempt(1)
    on_claim.wait_condition("Accepted", "True")


def test_an_image_of_ones_own_is_followed_without_a_word_of_ours(scene: Scene) -> None:
    scene.create(checkpoint={"mode": "Self"})
    first = scene.wait_attempt(1)
    node = scene.bind(first)
    running = scene.wait_condition("Running", "True")
    assert "its progress is unknown" in running["message"]
    assert scene.status()["progress"]["state"] == "Unknown"
    scene.give_notice(node, 60)
    wait_for("its pod to be told to end", lambda: "deletionTimestamp" in scene.pods()[0]["metadata"])
    assert scene.counters() == (1, 0, 0), "no replacement before it has ended"
    scene.end(first, 143)
    second = scene.wait_attempt(2)
    assert scene.counters() == (2, 0, 1)
    scene.bind(second)
    scene.end(second, 137)
    third = scene.wait_attempt(3)
    assert scene.counters() == (3, 1, 1)
    scene.bind(third)
    scene.end(third, 0)
    scene.wait_condition("Succeeded", "True", "Completed")
    assert [a["cause"] for a in scene.status()["attempts"]] == ["SpotNotice", "Failed", "Done"]


def test_a_grace_that_is_too_short_is_in_the_status_and_an_event(scene: Scene) -> None:
    pod = scene.run()
    words = "a save takes 105 s of the 110 s of grace"
    told = word(Outcome.INTERRUPTED, warning=words, emergencySeconds=105.0, graceSeconds=110.0)
    scene.end(pod, 75, told)
    wait_for("the warning", lambda: scene.status().get("progress", {}).get("warning") == words)
    path = f"/api/v1/namespaces/{scene.namespace}/events?fieldSelector=involvedObject.name={scene.job}"

    def warned() -> list[Json]:
        events: list[Json] = scene.kube.call("GET", path)["items"]
        return [e for e in events if e["reason"] == "CheckpointMayNotFit"]

    (event,) = wait_for("the event", warned)
    assert (event["type"], event["message"]) == ("Warning", words)
    assert scene.status()["progress"]["emergencySeconds"] == "105"
