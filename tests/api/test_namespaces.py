"""Several watched namespaces, of which the operator may not read one: the others go on."""

from __future__ import annotations

from pathlib import Path

from localcluster.apiserver import ApiServer

from tests.api import chart
from tests.api.kube import Kube, wait_for
from tests.api.scene import OperatorProcess, Scene

RELEASE = "spottrain-two"
ACCOUNT = f"{RELEASE}-operator"
KEPT, GONE = "kept", "gone"


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
