"""What kstatus (Flux, `helm --wait`) takes a TrainingJob for on a real API server."""

from __future__ import annotations

from tests.api.kube import Json, Kube, jobs, wait_for
from tests.api.scene import Scene, job_body
from tests.support.kstatus import kstatus


def wait_shown(scene: Scene, expected: str) -> Json:
    def look() -> Json | None:
        raw = scene.raw()
        return raw if kstatus(raw) == expected else None

    raw: Json = wait_for(f"kstatus to say {expected} of {scene.job}", look)
    return raw


def test_a_job_that_no_operator_has_seen_is_in_progress(kube: Kube, namespace: str) -> None:
    kube.create_job(namespace, job_body("unseen"))
    raw = kube.get(jobs(namespace, "unseen"))
    assert raw is not None and raw["status"]["observedGeneration"] == -1 and "phase" not in raw["status"]
    assert kstatus(raw) == "InProgress"


def test_a_refused_job_has_failed_for_kstatus_until_it_can_start(scene: Scene) -> None:
    account = "missing-until-now"
    containers = [{"name": "trainer", "image": "x"}]
    scene.create(template={"spec": {"serviceAccountName": account, "containers": containers}})
    words = scene.wait_condition("Stalled", "True")["message"]
    assert kstatus(scene.raw()) == "Failed" and account in words
    made = {"metadata": {"name": account}}
    scene.kube.call("POST", f"/api/v1/namespaces/{scene.namespace}/serviceaccounts", made)
    scene.change(failurePolicy={"maxFailures": 9})  # brings the next try forward
    wait_shown(scene, "Current")
    assert scene.condition("Stalled") == {} and scene.condition("Accepted")["status"] == "True"


def test_a_job_that_has_failed_is_stalled(scene: Scene) -> None:
    pod = scene.run(failurePolicy={"maxFailures": 0})
    wait_shown(scene, "Current")
    scene.end(pod, 1)
    scene.wait_condition("Failed", "True")
    assert kstatus(scene.raw()) == "Failed"
