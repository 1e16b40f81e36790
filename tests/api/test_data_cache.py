"""The data cache's claim on a real API server: one for a job, made before its first pod, and its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster.apiserver import ApiServer
from spottrain.contract import Outcome
from spottrain_operator.names import CLAIMS

from tests.api.killer import KillerProxy, Write
from tests.api.kube import Json, Kube, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.api.test_sigkill import posted, through
from tests.builders import word

SIZE = {"dataCache": {"size": "1Gi", "storageClassName": "shared"}}


def _path(scene: Scene) -> str:
    return f"/api/v1/namespaces/{scene.namespace}/{CLAIMS}"


def _claims(scene: Scene) -> list[Json]:
    """The job's own."""
    uid = scene.raw()["metadata"]["uid"]
    found: list[Json] = scene.kube.call("GET", _path(scene))["items"]
    return [c for c in found if uid in {o["uid"] for o in c["metadata"].get("ownerReferences", ())}]


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


def test_one_claim_is_made_for_both_attempts_and_belongs_to_the_job(scene: Scene) -> None:
    job = scene.create(**SIZE)
    first = scene.wait_attempt(1)
    (claim,) = _claims(scene)
    owner = claim["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["controller"]) == (job["metadata"]["uid"], True)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "1Gi"}
    node = scene.bind(first)
    scene.wait_condition("Running", "True")
    scene.kube.call("DELETE", f"/api/v1/nodes/{node}")
    second = scene.wait_attempt(2)
    assert _mounted(first) == _mounted(second) == claim["metadata"]["name"]
    assert [c["metadata"]["uid"] for c in _claims(scene)] == [claim["metadata"]["uid"]]


def test_a_full_quota_of_claims_is_waiting_and_nothing_is_charged(scene: Scene) -> None:
    quotas = f"/api/v1/namespaces/{scene.namespace}/resourcequotas"
    hard = {"hard": {"persistentvolumeclaims": "0"}}
    scene.kube.call("POST", quotas, {"metadata": {"name": "claims"}, "spec": hard})
    scene.kube.call(
        "PATCH",
        f"{quotas}/claims/status",
        {"status": hard | {"used": {"persistentvolumeclaims": "0"}}},
        kind="application/merge-patch+json",
    )
    scene.create(**SIZE)
    found = scene.wait_condition("Scheduled", "False", "QuotaExceeded")
    assert "exceeded quota" in found["message"] and not scene.pods()
    assert scene.counters() == (1, 0, 0)
    scene.kube.call("DELETE", f"{quotas}/claims")
    scene.change(failurePolicy={"maxFailures": 9})  # else it is tried again within 20 seconds
    scene.wait_attempt(1)
    assert len(_claims(scene)) == 1


def test_a_claim_that_does_not_exist_is_named_until_it_does(scene: Scene) -> None:
    scene.create(dataCache={"claimRef": {"name": f"late-{scene.job}"}})
    found = scene.wait_condition("Scheduled", "False", "WaitingForClaim")
    assert f"there is no PersistentVolumeClaim late-{scene.job}" in found["message"] and not scene.pods()
    _make_claim(scene, f"late-{scene.job}")
    scene.change(failurePolicy={"maxFailures": 9})  # else it is looked for again within 10 seconds
    assert _mounted(scene.wait_attempt(1)) == f"late-{scene.job}" and not _claims(scene)
    assert scene.counters() == (1, 0, 0)


def test_a_claim_that_goes_while_the_pod_waits_for_a_node_is_made_again(scene: Scene) -> None:
    scene.create(**SIZE)
    pod = scene.wait_attempt(1)
    (claim,) = _claims(scene)
    name = claim["metadata"]["name"]
    no_finalizer = {"metadata": {"finalizers": None}}
    kind = "application/merge-patch+json"
    scene.kube.call("DELETE", f"{_path(scene)}/{name}")
    if _claims(scene):  # it is protected, by a controller that does not run here
        scene.kube.call("PATCH", f"{_path(scene)}/{name}", no_finalizer, kind=kind)
    waits = {
        "type": "PodScheduled",
        "status": "False",
        "message": f'persistentvolumeclaim "{name}" not found',
    }
    path = f"/api/v1/namespaces/{scene.namespace}/pods/{pod['metadata']['name']}/status"
    scene.kube.call("PATCH", path, {"status": {"conditions": [waits]}}, kind=kind)
    (again,) = wait_for("the claim, made again", lambda: _claims(scene), seconds=45)
    assert again["metadata"]["uid"] != claim["metadata"]["uid"] and again["metadata"]["name"] == name
    assert scene.counters() == (1, 0, 0) and len(scene.pods()) == 1


@pytest.mark.parametrize("source", ["datasets", 5])
def test_a_volume_that_is_no_volume_is_refused_in_the_api_servers_words(scene: Scene, source: object) -> None:
    container = {"name": "trainer", "image": "example.com/train:1"}
    volumes = [{"name": "d", "persistentVolumeClaim": source}]
    scene.create(template={"spec": {"containers": [container], "volumes": volumes}}, **SIZE)
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
    scene.create(template=template, **SIZE)
    found = scene.wait_condition("Accepted", "False", "InvalidSpec")
    assert "volumeMounts must not have /var/cache/spottrain" in found["message"]
    assert not scene.pods() and not _claims(scene)


# --- killed between two writes ------------------------------------------------------------------------
@pytest.fixture
def proxy(kube: Kube) -> Iterator[KillerProxy]:
    with KillerProxy(kube) as proxy:
        yield proxy


WRITES = [
    Write(name="the status has the attempt", method="PATCH", resource="/status", body='"attempt": 1'),
    Write(name="the claim is made", method="POST", resource=f"/{CLAIMS}"),
    Write(name="the pod is made", method="POST", resource="/pods"),
]


@pytest.mark.parametrize("write", WRITES, ids=[w.name for w in WRITES])
def test_an_operator_that_is_killed_goes_on_with_the_claim_that_is_there(
    write: Write, server: ApiServer, kube: Kube, namespace: str, proxy: KillerProxy, tmp_path: Path
) -> None:
    scene = Scene(kube=kube, namespace=namespace, job="job")
    with OperatorProcess(kubeconfig=through(proxy, tmp_path), namespace=namespace) as operator:
        proxy.arm(write, operator.kill)
        scene.create(**SIZE)
        wait_for(f"the kill after: {write.name}", proxy.fired.is_set)
        operator.start()
        pod = scene.wait_attempt(1)
        scene.bind(pod)
        scene.wait_condition("Running", "True")
    (claim,) = _claims(scene)
    assert _mounted(pod) == claim["metadata"]["name"] and scene.counters() == (1, 0, 0)
    assert set(posted(server, namespace).values()) == {1}
