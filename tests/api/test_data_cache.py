"""The data cache's claim on a real API server: pods wait for it, and are where it can be mounted."""

from __future__ import annotations

import pytest
from spottrain.contract import Outcome
from spottrain_operator.names import CLAIMS

from tests.api.kube import Json, wait_for
from tests.api.scene import Scene
from tests.builders import word


def _path(scene: Scene) -> str:
    return f"/api/v1/namespaces/{scene.namespace}/{CLAIMS}"


def _mounted(pod: Json) -> str:
    """Name of the claim that is mounted where the trainer is told."""
    trainer = pod["spec"]["containers"][0]
    told = next(e["value"] for e in trainer["env"] if e["name"] == "SPOTTRAIN_DATA_CACHE")
    name = next(m["name"] for m in trainer["volumeMounts"] if m["mountPath"] == told)
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == name)
    return str(volume["persistentVolumeClaim"]["claimName"])


def _make_claim(scene: Scene, name: str, mode: str = "ReadWriteMany") -> None:
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    scene.kube.call("POST", _path(scene), {"metadata": {"name": name}, "spec": spec})


def test_the_claim_is_mounted_where_the_trainer_is_told(scene: Scene) -> None:
    scene.create(dataCache={"claimRef": {"name": "datasets"}})
    assert _mounted(scene.wait_attempt(1)) == "datasets"


@pytest.mark.parametrize("source", ["datasets", 5])
def test_a_volume_that_is_no_volume_is_refused_in_the_api_servers_words(scene: Scene, source: object) -> None:
    container = {"name": "trainer", "image": "example.com/train:1"}
    volumes = [{"name": "d", "persistentVolumeClaim": source}]
    scene.create(template={"spec": {"containers": [container], "volumes": volumes}})
    found = scene.wait_condition("Accepted", "False", "InvalidTemplate")
    assert "spec.template" in found["message"] and not scene.pods()


@pytest.mark.parametrize(("mode", "early"), [("ReadWriteOnce", False), ("ReadWriteMany", True)])
def test_during_a_notice_the_next_pod_waits_where_one_node_has_the_volume(
    scene: Scene, mode: str, early: bool
) -> None:
    _make_claim(scene, f"of-{scene.job}", mode)
    scene.create(dataCache={"claimRef": {"name": f"of-{scene.job}"}})
    old = scene.wait_attempt(1)
    node = scene.bind(old)
    scene.wait_condition("Running", "True")
    scene.see_runtime()
    scene.give_notice(node, 60)
    wait_for("the old pod's deletion", lambda: "deletionTimestamp" in (scene.pod(1) or {})["metadata"])
    if early:
        scene.wait_attempt(2)
    else:
        assert scene.pod(2) is None and scene.status()["attempt"] == 1
    scene.end(old, 75, word(Outcome.INTERRUPTED, step=9, durableStep=9))
    scene.wait_attempt(2)
    assert scene.counters() == (2, 0, 1)


def test_a_template_that_mounts_on_the_caches_path_is_told_so(scene: Scene) -> None:
    mounts = [{"name": "own", "mountPath": "/var/cache/spottrain"}]
    container = {"name": "trainer", "image": "example.com/train:1", "volumeMounts": mounts}
    template = {"spec": {"containers": [container], "volumes": [{"name": "own", "emptyDir": {}}]}}
    scene.create(template=template, dataCache={"claimRef": {"name": "datasets"}})
    found = scene.wait_condition("Accepted", "False", "InvalidTemplate")
    assert "/var/cache/spottrain" in found["message"] and "must be unique" in found["message"]
    assert not scene.pods()
