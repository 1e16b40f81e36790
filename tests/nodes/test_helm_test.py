"""helm test on real kubelets: a job of one step, and what is said where it cannot succeed."""

from __future__ import annotations

import dataclasses

import pytest
from demo.kubectl import Kubectl
from demo.target import ROOT, SYSTEM_NAMESPACE
from localcluster.api import Cluster
from processcluster import install

RELEASE = ("spottrain", "--namespace", SYSTEM_NAMESPACE)


def test_helm_test_trains_a_step(installed: Kubectl) -> None:
    said = installed.helm("test", *RELEASE, "--logs", "--timeout", "300s", timeout=320)
    assert "TrainingJob spottrain-system/spottrain-test has Succeeded" in said


def test_where_the_job_cannot_start_the_test_says_why(cluster: Cluster, installed: Kubectl) -> None:
    values = ("--reuse-values", "--set", "image.runtime.tag=missing,test.timeoutSeconds=20")
    system = dataclasses.replace(installed, namespace=SYSTEM_NAMESPACE)
    try:
        installed.helm("upgrade", RELEASE[0], str(ROOT / "charts" / "spottrain"), *RELEASE[1:], *values)
        with pytest.raises(RuntimeError, match="spottrain-test"):
            installed.helm("test", *RELEASE, "--timeout", "120s")
        said = system.run("logs", "spottrain-test")
    finally:
        install.install(cluster)
        system.run("delete", "trainingjob", "spottrain-test", "--ignore-not-found")
    assert "has not Succeeded" in said and "Running=False ErrImageNeverPull" in said
