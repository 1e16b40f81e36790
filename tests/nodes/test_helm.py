"""What a person does with helm: test, and uninstall while a job trains."""

from __future__ import annotations

import dataclasses

import pytest
from demo.kubectl import Kubectl
from demo.target import ROOT, SYSTEM_NAMESPACE
from localcluster.api import Cluster

from tests.nodes.conftest import install_chart
from tests.support.lab import Lab, fresh_nodes

RELEASE = ("spottrain", "--namespace", SYSTEM_NAMESPACE)


def test_helm_test_trains_a_step(cluster: Cluster, installed: Kubectl) -> None:
    fresh_nodes(cluster, installed)  # a test before this one may have taken one
    said = installed.helm("test", *RELEASE, "--logs", "--timeout", "300s", timeout=320)
    assert "TrainingJob spottrain-system/spottrain-test has Succeeded" in said


@pytest.mark.heavy
def test_where_the_job_cannot_start_the_test_says_why(cluster: Cluster, installed: Kubectl) -> None:
    values = (
        "--reuse-values",
        "--set",
        "image.runtime.repository=missing,image.runtime.pullPolicy=Never,test.timeoutSeconds=10",
    )
    system = dataclasses.replace(installed, namespace=SYSTEM_NAMESPACE)
    try:
        installed.helm(
            "upgrade", RELEASE[0], str(ROOT / "charts" / "spottrain"), *RELEASE[1:], *values, "--wait"
        )
        with pytest.raises(RuntimeError, match="spottrain-test"):
            installed.helm("test", *RELEASE, "--timeout", "120s")
        said = system.run("logs", "spottrain-test")
    finally:
        install_chart(cluster)
        system.run("delete", "trainingjob", "spottrain-test", "--ignore-not-found")
    assert "has not Succeeded" in said and "Running=False ErrImageNeverPull" in said


def test_an_uninstall_frees_the_pods_and_keeps_the_jobs_and_an_install_takes_them_up_again(lab: Lab) -> None:
    lab.apply(lab.slow_job())
    lab.wait_for_step(12, seconds=240)
    pod = lab.pods()[0]["metadata"]["name"]
    try:
        lab.kubectl.helm("uninstall", *RELEASE, "--wait")
        assert not lab.pods()[0]["metadata"].get("finalizers"), "it can be deleted without an operator"
        lab.kubectl.run("delete", "pod", pod, "--timeout=60s")
        assert lab.kubectl.get("trainingjob", "job"), "the definition and its objects are kept"
    finally:
        install_chart(lab.cluster)
    status = lab.wait_for_phase("Succeeded", seconds=240)
    assert (status["attempt"], status.get("failures", 0)) == (2, 0)
    assert status["attempts"][1]["startStep"] >= 12, "the trainer saved when its pod was deleted"
