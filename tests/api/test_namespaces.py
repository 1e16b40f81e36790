"""Several watched namespaces, of which the operator may not read one, or one is deleted: the others go on."""

from __future__ import annotations

from pathlib import Path

from localcluster.apiserver import ApiServer
from spottrain.contract import Outcome

from tests.api import chart
from tests.api.kube import Kube, jobs, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.builders import word

RELEASE = "spottrain-two"
ACCOUNT = f"{RELEASE}-operator"
KEPT, GONE, DELETED = "kept", "gone", "deleted"


def test_a_namespace_that_is_refused_does_not_stop_the_others_and_is_followed_when_it_can_be_read_again(
    server: ApiServer, kube: Kube, tmp_path: Path
) -> None:
    """With a namespace its Role and RoleBinding are deleted; there is no controller here that would do it."""
    for name in (KEPT, GONE):
        kube.make_namespace(name)
    settings = (f'watchNamespaces=["{KEPT}","{GONE}"]',)
    chart.install(kube, "operator", *settings, release=RELEASE)
    kube.call("DELETE", f"{chart.RBAC}/namespaces/{GONE}/rolebindings/{ACCOUNT}")
    config = chart.kubeconfig(kube, server.kubeconfig, ACCOUNT, tmp_path)
    kept, gone = (Scene(kube=kube, namespace=name, job="job") for name in (KEPT, GONE))
    with OperatorProcess(kubeconfig=config, namespace=f"{KEPT},{GONE}") as operator:
        operator.wait_ready()
        kept.create()
        kept.wait_attempt(1)
        gone.create()
        refused = f"namespaces/{GONE}/trainingjobs"
        wait_for("kopf to be refused again", lambda: operator.log.read_text().count(refused) > 1)
        assert gone.pods() == []
        chart.install(kube, "operator", *settings, release=RELEASE)
        gone.wait_attempt(1)
        assert operator.running
        assert (
            operator.log.read_text().count(f"the trainingjobs of {GONE} cannot be listed; all others go on")
            == 1
        )


def test_a_job_does_not_hold_up_the_end_of_its_namespace_whose_role_binding_goes_first(
    server: ApiServer, kube: Kube, tmp_path: Path
) -> None:
    kube.make_namespace(DELETED)
    chart.install(kube, "operator", f'watchNamespaces=["{DELETED}"]', release=RELEASE)
    config = chart.kubeconfig(kube, server.kubeconfig, ACCOUNT, tmp_path)
    scene = Scene(kube=kube, namespace=DELETED, job="job")
    path = jobs(DELETED, "job")
    with OperatorProcess(kubeconfig=config, namespace=DELETED) as operator:
        operator.wait_ready()
        pod = scene.run(deletionPolicy="Delete")
        scene.end(pod, 0, word(Outcome.DONE, step=3, durableStep=3))
        scene.wait_condition("Succeeded", "True")
        wait_for("the pod to be let go", lambda: not scene.pods() or "finalizers" not in scene.pods()[0])
        kube.call("DELETE", f"/api/v1/namespaces/{DELETED}")
        kube.call("DELETE", f"{chart.RBAC}/namespaces/{DELETED}/rolebindings/{ACCOUNT}")
        kube.call("DELETE", path)
        wait_for("the job to be gone", lambda: kube.get(path) is None)
        by_hand = "delete them with spottrain checkpoints delete s3://bucket/run"
        wait_for("it to be logged", lambda: by_hand in operator.log.read_text(), seconds=10)
